"""What rank 0 keeps of a plan of all ranks: who has what, where it is written, and the encoded index of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiockpt.errors import SaveError
from aiockpt.format.index import ChunkEntry, Entry, ItemPlace, ObjectEntry, TensorEntry
from aiockpt.format.metadata_writer import MetadataHead, encode_metadata, finish_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.manifest import FileFacts
    from aiockpt.planning.world_plan import Holder, Holdings, WorldPlan
    from aiockpt.planning.world_planner import ItemPlaces


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written of its share.

    Attributes:
        files: its files.
        items: how many tensor items are in them.
        objects: for each leaf that is an object of the share, where it is.
        places: where the tensor items are; None where rank 0 knows it from an earlier save.
    """

    files: dict[str, FileFacts]
    items: int
    objects: dict[int, ItemPlace]
    places: ItemPlaces | None = field(repr=False)


class WorldBook:
    """A plan of all ranks, and what was made from it.

    Args:
        token: its number.
        ranks: what each rank has.
        plan: who writes what.

    Attributes:
        tensors: how many tensors there are.
        objects: how many objects there are.
        tensor_bytes: the bytes of all tensors, each stored one counted once.
    """

    def __init__(self, token: int, ranks: Sequence[Holdings], plan: WorldPlan) -> None:
        self.token = token
        self.ranks = list(ranks)
        self.plan = plan
        self.tensors = len(plan.tensors)
        self.objects = len(plan.objects)
        self.tensor_bytes = sum(_payload_bytes(ranks[rank], leaf) for rank, leaf in self._items())
        self._places: list[ItemPlaces] | None = None
        self._head: MetadataHead | None = None

    def _items(self) -> set[Holder]:
        return {part.writer for tensor in self.plan.tensors.values() for part in tensor.parts}

    @property
    def knows_places(self) -> bool:
        """Whether it is known where the items of all ranks are."""
        return self._places is not None

    def check(self, results: Sequence[Written]) -> None:
        """Check that every planned item was written once, and note where. Takes long the first time for many items.

        Raises:
            SaveError: naming the rank, and what is missing.
        """
        objects: list[set[int]] = [set() for _ in results]
        for rank, leaf in self.plan.objects.values():
            objects[rank].add(leaf)
        for rank, written in enumerate(results):
            _check_rank(rank, self.plan.shares[rank], objects[rank], written)
        if self._places is None:
            self._places = [written.places for written in results if written.places is not None]

    def documents(self, results: Sequence[Written]) -> bytes:
        """Encode `.metadata`, for results that were checked. Takes long the first time for many items."""
        if self._head is None:
            self._head = self._encode()
        objects = [(name, results[rank].objects[leaf]) for name, (rank, leaf) in self.plan.objects.items()]
        return finish_metadata(self._head, objects)

    def _encode(self) -> MetadataHead:
        place_of: list[dict[int, ItemPlace]] = [
            {
                leaf: ItemPlace(places.files[file], offset, length)
                for leaf, file, offset, length in zip(*places[1:], strict=True)
            }
            for places in self._places or ()
        ]
        nowhere = ObjectEntry(ItemPlace("", 0, 0))
        entries: list[tuple[str, Entry]] = []
        for name in self.plan.paths:
            tensor = self.plan.tensors.get(name)
            if tensor is None:
                entries.append((name, nowhere))
                continue
            chunks = tuple(
                ChunkEntry(part.offsets, part.sizes, place_of[part.writer[0]][part.writer[1]]) for part in tensor.parts
            )
            entries.append((name, TensorEntry(tensor.dtype, tensor.shape, chunks)))
        return encode_metadata(entries, self.plan.paths)


def _payload_bytes(held: Holdings, leaf: int) -> int:
    form = held.forms[held.form_of[leaf]]
    return form.payload_bytes


def _check_rank(rank: int, share: Sequence[int], objects: set[int], written: Written) -> None:
    """Check that a rank has written its share, each item once."""
    items = len(share) - len(objects)
    places = written.places
    if written.objects.keys() != objects or written.items != items:
        raise SaveError(
            f"rank {rank} was to write {items} tensors and {len(objects)} objects, and reports {written.items} and "
            f"{len(written.objects)}; nothing was published"
        )
    if places is not None:
        wrong = set(places.leaves) ^ (set(share) - objects)
        if wrong or len(places.leaves) != items:
            raise SaveError(f"rank {rank} reports other items than it was to write: {sorted(wrong)[:5]}")
        missing = set(places.files) - written.files.keys()
        if missing:
            raise SaveError(f"rank {rank} reports items in files that it has not written: {sorted(missing)[:5]}")


def files_of(results: Sequence[Written]) -> Mapping[str, FileFacts]:
    """Give the files of all ranks.

    Raises:
        SaveError: two ranks have written files of one name.
    """
    files: dict[str, FileFacts] = {}
    for rank, written in enumerate(results):
        twice = files.keys() & written.files.keys()
        if twice:
            raise SaveError(f"{min(twice)} was written by rank {rank} and by another one; nothing was published")
        files |= written.files
    return files
