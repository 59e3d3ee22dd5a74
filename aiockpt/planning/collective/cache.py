"""The global plan that rank 0 keeps between saves, with the encoded metadata, or the layout of shared files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import SaveError
from aiockpt.format.dcp.metadata_opcodes import MetadataHead, metadata_tail
from aiockpt.format.dcp.metadata_writer import RangeTable, ShardedEntry, encode_metadata
from aiockpt.format.index import Entry, ItemRange, ObjectEntry
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import METADATA_NAME
from aiockpt.format.safetensors.writer import Stored
from aiockpt.planning.collective.plan import GlobalPlan, plan_globally
from aiockpt.planning.parts import crc_of_parts
from aiockpt.planning.planner import FileFormat, SharedFiles, Summary
from aiockpt.planning.safetensors_plan import SafetensorsFormat, index_documents

if TYPE_CHECKING:
    from aiockpt.planning.collective.messages import ItemPlaces, RankInventory, Written


class _Yielding(pickle.Pickler):
    """A pickler that releases the GIL now and then; the plain one holds it from beginning to end."""

    def persistent_id(self, _obj: Any) -> None:
        """Pickle everything as usual; being a Python call, it lets other threads run."""


class GlobalPlanCache:
    """A global plan, and what was computed from it."""

    is_single_file = False

    apart: frozenset[str] = frozenset()  # the tensors that were found to differ between ranks

    def __init__(self, token: int, ranks: Sequence[RankInventory], plan: GlobalPlan) -> None:
        self.token = token
        self.ranks = list(ranks)
        self.plan = plan
        self.tensors = len(plan.tensors)
        self.objects = len(plan.objects)
        # Each stored tensor is counted once.
        self.tensor_bytes = sum(map(_payload_bytes, ranks, plan.assignments))
        self._object_leaves = [
            {leaf for leaf in assignment if inventory.form_of[leaf] < 0}
            for inventory, assignment in zip(ranks, plan.assignments, strict=True)
        ]
        self._places: list[ItemPlaces] | None = None
        self._document: bytearray | None = None
        self._head_bytes = self._remembered = 0
        self._pickled: tuple[bool, bytes] | None = None

    @property
    def knows_places(self) -> bool:
        """Whether the places of all ranks' items are known."""
        return self._places is not None

    def pickled(self) -> bytes:
        """Return it pickled, without what can be encoded again. Slow for many items, if it has changed since."""
        knows = self.knows_places
        if self._pickled is None or self._pickled[0] != knows:
            data = io.BytesIO()
            _Yielding(data, pickle.HIGHEST_PROTOCOL).dump(self)
            self._pickled = knows, data.getvalue()
        return self._pickled[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_document": None, "_pickled": None}

    def check(self, results: Sequence[Written]) -> None:
        """Check that every planned item was written once; keep the places. The first call takes long."""
        for rank, (written, assignment) in enumerate(zip(results, self.plan.assignments, strict=True)):
            _check_rank(rank, assignment, self._object_leaves[rank], written)
        if self._places is None:
            self._places = [written.places for written in results if written.places is not None]

    def documents(self, results: Sequence[Written]) -> bytes | bytearray:
        """Encode `.metadata` of checked results. The first call takes long for many items.

        The result is valid until the next call: it can be large, and only its end changes.
        """
        if self._document is None:
            head = self._encode()
            self._document, self._head_bytes, self._remembered = bytearray(head.data), len(head.data), head.remembered
        objects = [(name, results[rank].objects[leaf]) for name, (rank, leaf) in self.plan.objects.items()]
        tail = metadata_tail(self._remembered, objects)
        try:
            del self._document[self._head_bytes :]
        except BufferError:  # a view of the last one is still in use
            self._document = self._document[: self._head_bytes]
        self._document += tail
        return self._document

    def data_files(self, results: Sequence[Written]) -> Mapping[str, FileFacts]:
        """Return the facts of the files with tensors; raise `SaveError` if two ranks have written one file."""
        return files_of(results)

    def files_beside(self, results: Sequence[Written]) -> Mapping[str, bytes | bytearray]:
        """Return the encoded files beside the data files, except the manifest; see `documents`."""
        return {METADATA_NAME: self.documents(results)}

    def summaries(self, files: dict[str, int], item_bytes: int) -> list[Summary]:
        """Return the summary for each rank; only rank 0 gets the sizes of ``files``."""
        brief = Summary(None, item_bytes, self.tensor_bytes, self.tensors, self.objects)
        return [replace(brief, files=files), *[brief] * (len(self.ranks) - 1)]

    def _encode(self) -> MetadataHead:
        nowhere = ObjectEntry(ItemRange("", 0, 0))
        tensors = self.plan.tensors
        entries: list[tuple[str, Entry | ShardedEntry]] = [
            (name, ShardedEntry(*tensors[name]) if name in tensors else nowhere) for name in self.plan.paths
        ]
        with gc_pause():
            return encode_metadata(
                entries, self.plan.paths, _table([len(inventory.names) for inventory in self.ranks], self._places or ())
            )


def cache_of_written(token: int, results: Sequence[Written]) -> GlobalPlanCache:
    """Plan from what all ranks have already written; if several wrote the same part, one copy counts."""
    silent = next((rank for rank, written in enumerate(results) if written.inventory is None), None)
    if silent is not None:
        raise SaveError(f"rank {silent} sent no inventory of what it wrote; nothing was published")
    # A rank that decides alone writes all its leaves, tied ones too.
    ranks = [replace(written.inventory, tied={}) for written in results if written.inventory is not None]
    assignments = [list(range(len(inventory.names))) for inventory in ranks]
    lowest = frozenset().union(*{id(each.names): each.names for each in ranks}.values())
    return GlobalPlanCache(token, ranks, replace(plan_globally(ranks, lowest), assignments=assignments))


def _table(leaves: Sequence[int], places: Sequence[ItemPlaces]) -> RangeTable:
    """Return one table of the places of all ranks, with a row for every leaf."""
    begins = np.cumsum([0, *leaves])
    table = RangeTable([], begins[:-1], *(np.zeros(begins[-1], kind) for kind in (np.int32, np.int64, np.int64)))
    for begin, each in zip(begins, places, strict=False):
        rows = begin + np.array(each.leaves, np.int64)
        table.file_of[rows] = np.array(each.file_of, np.int32) + len(table.files)
        table.offsets[rows] = each.offsets
        table.lengths[rows] = each.lengths
        table.files.extend(each.files)
    return table


def _payload_bytes(inventory: RankInventory, assignment: Sequence[int]) -> int:
    """Return the bytes of the tensors assigned to a rank."""
    sizes = [form.payload_bytes for form in inventory.forms] + [0]  # for objects, whose form is -1
    return sum(sizes[inventory.form_of[leaf]] for leaf in assignment)


def _check_rank(rank: int, assignment: Sequence[int], objects: set[int], written: Written) -> None:
    """Check that a rank has written its assignment, each item once."""
    items = len(assignment) - len(objects)
    places = written.places
    if written.objects.keys() != objects or written.items != items:
        raise SaveError(
            f"rank {rank} was assigned {items} tensors and {len(objects)} objects but reports {written.items} and "
            f"{len(written.objects)}; nothing was published"
        )
    if places is not None:
        wrong = set(places.leaves) ^ (set(assignment) - objects)
        if wrong or len(places.leaves) != items:
            raise SaveError(f"rank {rank} reports other items than it was assigned: {sorted(wrong)[:5]}")
        missing = set(places.files) - written.files.keys()
        if missing:
            raise SaveError(f"rank {rank} reports items in files that it did not write: {sorted(missing)[:5]}")


def files_of(results: Sequence[Written]) -> Mapping[str, FileFacts]:
    """Return the files of all ranks; raise `SaveError` if two of them have one name."""
    files: dict[str, FileFacts] = {}
    for rank, written in enumerate(results):
        twice = files.keys() & written.files.keys()
        if twice:
            raise SaveError(f"{min(twice)} was written by rank {rank} and by another rank; nothing was published")
        files |= written.files
    return files


# --- files that all ranks write together ------------------------------------------------------------


class SharedPlanCache(GlobalPlanCache):
    """A global plan of files that all ranks write together."""

    knows_places = True  # they follow from the plan

    def __init__(
        self, token: int, ranks: Sequence[RankInventory], plan: GlobalPlan, file_format: SafetensorsFormat
    ) -> None:
        super().__init__(token, ranks, plan)
        tensors = plan.tensors.items()
        stored = [Stored(name, whole.dtype, whole.shape) for name, whole in tensors if name not in plan.aliases]
        files = file_format.plan_files(stored, plan.aliases)
        heads = file_format.encode_heads(files)
        self.is_single_file = file_format.is_single_file
        self.sizes = {
            file.name: len(head) + (file.ends[-1] if file.ends else 0) for file, head in zip(files, heads, strict=True)
        }
        self._heads = [file[-2:] for file in files]
        shards = {file.name: [tensor.name for tensor in file.tensors] for file in files}
        self._index = index_documents(shards, self.tensor_bytes)
        self._place_of: dict[str, tuple[int, int]] = {}
        for number, (file, head) in enumerate(zip(files, heads, strict=True)):
            begins = [0, *file.ends[:-1]]
            for tensor, begin in zip(file.tensors, begins, strict=False):
                self._place_of[tensor.name] = number, len(head) + begin

    def share_of(self, rank: int) -> SharedFiles:
        """Return what a rank has to know to write its parts."""
        names = self.ranks[rank].names
        places = {leaf: self._place_of[names[leaf]] for leaf in self.plan.assignments[rank]}
        return SharedFiles(list(self.sizes), list(self.sizes.values()), places, self._heads if rank == 0 else ())

    def data_files(self, results: Sequence[Written]) -> dict[str, FileFacts]:
        """Return the facts of the files, from those of their parts."""
        facts: dict[str, FileFacts] = {}
        for name, nbytes in self.sizes.items():
            shares = [written.files[name].crc for written in results if name in written.files]
            facts[name] = FileFacts(nbytes, crc_of_parts(shares, nbytes))
        return facts

    def files_beside(self, results: Sequence[Written]) -> Mapping[str, bytes | bytearray]:
        return self._index


def plan_cache_of(
    token: int, ranks: Sequence[RankInventory], file_format: FileFormat, apart: frozenset[str]
) -> GlobalPlanCache:
    """Plan for all ranks in a format; raise `SaveError` if they contradict each other."""
    plan = plan_globally(ranks, apart)
    cache = GlobalPlanCache(token, ranks, plan)
    if isinstance(file_format, SafetensorsFormat):
        cache = SharedPlanCache(token, ranks, plan, file_format)
    cache.apart = apart
    return cache
