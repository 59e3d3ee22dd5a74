"""The global plan that rank 0 keeps between saves, and the documents that follow from it: `.metadata` and the index.

A process that saves alone is a world of one rank, and its documents are made here too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiockpt.core.dataclasses import replace
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.lazy import lazy_property
from aiockpt.core.strides import row_strides
from aiockpt.errors import SaveError
from aiockpt.format.dcp.metadata_opcodes import MetadataDraft, MetadataHead, metadata_tail
from aiockpt.format.dcp.metadata_writer import RangeTable, ShardedEntry, encode_metadata
from aiockpt.format.index import Division
from aiockpt.format.manifest.index_writer import Drafts, IndexDraft, ItemRows, encode_index
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import METADATA_NAME
from aiockpt.format.safetensors.writer import Stored
from aiockpt.format.transforms.base import TransformedDraft
from aiockpt.planning.collective.plan import GlobalPlan, plan_globally
from aiockpt.planning.parts import crc_of_parts
from aiockpt.planning.planner import FileFormat, SharedFiles, Summary
from aiockpt.planning.safetensors_plan import SafetensorsFormat, index_documents

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import ItemKey
    from aiockpt.format.index import ItemRange
    from aiockpt.format.manifest.columnar_index import ItemForm
    from aiockpt.planning.collective.messages import ItemPlaces, RankInventory, RankLeaf, Written


class GlobalPlanCache:
    """A global plan, and what was computed from it; ``places`` of each rank's items, if they are known."""

    is_single_file = False
    sizes: Mapping[str, int] = {}  # of the files that all ranks write together
    apart: frozenset[str] = frozenset()  # the tensors that were found to differ between ranks

    def __init__(
        self, token: int, ranks: Sequence[RankInventory], plan: GlobalPlan, places: list[ItemPlaces] | None = None
    ) -> None:
        self.token = token
        self.ranks = list(ranks)
        self.plan = plan
        # Each stored tensor is counted once.
        self.tensor_bytes = 0
        for inventory, assignment in zip(ranks, plan.assignments, strict=True):
            sizes = [form.item.nbytes for form in inventory.forms] + [0]  # for objects, whose form is -1
            self.tensor_bytes += sum(sizes[inventory.form_of[leaf]] for leaf in assignment)
        self._object_leaves = [
            {leaf for leaf in assignment if inventory.form_of[leaf] < 0}
            for inventory, assignment in zip(ranks, plan.assignments, strict=True)
        ]
        self._places = places
        self._begins = np.cumsum([0, *(len(inventory.names) for inventory in ranks)])
        self._document: bytearray | None = None  # `.metadata` of the last save, of which a part is the same for all
        self._head_bytes = self._remembered = 0  # the length of that part, and of the memo behind it
        self._indexed: tuple[IndexDraft | None, list[int]] | None = None  # with the rows of the objects

    @property
    def knows_places(self) -> bool:
        """Whether the places of all ranks' items are known."""
        return self._places is not None

    def check(self, results: Sequence[Written]) -> None:
        """Check that every planned item was written once; keep the places. The first call takes long."""
        for rank, (written, assignment) in enumerate(zip(results, self.plan.assignments, strict=True)):
            _check_rank(rank, assignment, self._object_leaves[rank], written)
        if self._places is None:
            self._places = [written.places for written in results if written.places is not None]

    def share_of(self, rank: int) -> SharedFiles | None:
        """Return what a rank has to know to write its parts of files that all ranks write together."""
        return None

    def data_files(self, results: Sequence[Written]) -> Mapping[str, FileFacts]:
        """Return the facts of the files with tensors; raise `SaveError` if two ranks have written one file."""
        return files_of(results)

    def summaries(self, files: dict[str, int], item_bytes: int) -> list[Summary]:
        """Return the summary for each rank; only rank 0 gets the sizes of ``files``."""
        brief = Summary(None, item_bytes, self.tensor_bytes, len(self.plan.tensors), len(self.plan.objects))
        return [replace(brief, files=files), *[brief] * (len(self.ranks) - 1)]

    # --- documents ----------------------------------------------------------------------------------

    def drafts(self, objects: Sequence[Mapping[int, ItemRange]], *, is_transformed: bool = False) -> Drafts:
        """Encode the documents; ``objects`` are the places of each rank's objects. Places of tensors must be known.

        The first call takes long for many items. `.metadata` is valid until the next call: it can be large, and only
        its end changes.
        """
        if is_transformed:
            return Drafts({}, None, self._transformed(objects))
        return Drafts({METADATA_NAME: self._metadata(objects)}, self._index(objects))

    def _metadata(self, objects: Sequence[Mapping[int, ItemRange]]) -> bytes | bytearray:
        document = self._document
        if document is None:
            head = self._head(self._rows[0])
            document, self._head_bytes, self._remembered = bytearray(head.data), len(head.data), head.remembered
        places = [(name, objects[rank][leaf]) for name, (rank, leaf) in self.plan.objects.items()]
        try:
            del document[self._head_bytes :]
        except BufferError:  # a view of the last one is still in use
            document = document[: self._head_bytes]
        document += metadata_tail(self._remembered, places)
        self._document = document
        return document

    def _head(self, table: RangeTable | None) -> MetadataHead:
        tensors = self.plan.tensors
        entries = [(name, ShardedEntry(*tensors[name]) if name in tensors else None) for name in self.plan.paths]
        with gc_pause():
            return encode_metadata(entries, self.plan.paths, table)

    @lazy_property
    def _bare_head(self) -> MetadataHead:
        """That of `.metadata` without byte ranges."""
        return self._head(None)

    @lazy_property
    def _rows(self) -> tuple[RangeTable, np.ndarray[Any, Any]]:
        """The places of all ranks, with a row for every leaf, and its slot, see `IndexDraft`."""
        columns = (np.zeros(self._begins[-1], kind) for kind in (np.int32, np.int64, np.int64))
        table = RangeTable([], self._begins[:-1], *columns)
        slots, taken = np.full(self._begins[-1], -1), 0
        for begin, places in zip(self._begins, self._places or (), strict=False):
            mine = begin + np.array(places.leaves, np.int64)
            table.file_of[mine] = np.array(places.file_of, np.int32) + len(table.files)
            table.offsets[mine] = places.offsets
            table.lengths[mine] = places.lengths
            table.files.extend(places.files)
            slots[mine] = range(taken, taken + len(places.leaves))
            taken += len(places.leaves)
        return table, slots

    def _index(self, objects: Sequence[Mapping[int, ItemRange]]) -> IndexDraft | None:
        """Draft the index of the manifest; None if it has no place for the paths of the leaves."""
        if self._indexed is None:
            with gc_pause():
                self._indexed = self._index_without_objects(objects)
        draft, rows = self._indexed
        if draft is None:
            return None
        places = [objects[rank][leaf] for rank, leaf in self.plan.objects.values()]
        return replace(draft, objects=[(row, place[1], place[2]) for row, place in zip(rows, places, strict=True)])

    def _index_without_objects(self, objects: Sequence[Mapping[int, ItemRange]]) -> tuple[IndexDraft | None, list[int]]:
        plan, (table, slots) = self.plan, self._rows
        file_of, files = table.file_of.copy(), {name: number for number, name in enumerate(table.files)}
        for begin, mine in zip(self._begins, objects, strict=False):
            for leaf, place in mine.items():
                file_of[begin + leaf] = files[place.file]
        writers, leaves, object_rows = list[int](), list[int](), list[int]()  # a row for each part, and each object
        divisions, division_of = list[Division](), list[int]()
        known: dict[tuple[int, tuple[int, ...]], int] = {}  # by the identity of the parts, and the shape
        for name in plan.paths:
            tensor, division = plan.tensors.get(name), -1
            if tensor is None:
                object_rows.append(len(writers))
                writers.append(plan.objects[name][0])
                leaves.append(plan.objects[name][1])
            else:
                writers += tensor.ranks
                leaves += tensor.leaves
                if len(tensor.cut) > 1 or tensor.cut[0][1] != tensor.shape:
                    division = known.setdefault((id(tensor.cut), tensor.shape), len(divisions))
                    if division == len(divisions):
                        divisions.append(Division(tensor.shape, [offsets for offsets, _ in tensor.cut]))
            division_of.append(division)
        where = self._begins[np.array(writers, np.int64)] + np.array(leaves, np.int64)
        form_of, forms = self._forms()
        columns = [column[where].tolist() for column in (form_of, file_of, table.offsets)]
        places = ItemRows(columns[0], columns[1], columns[2], divisions, division_of)
        head = encode_index(list(plan.paths), list(plan.paths.values()), table.files, forms, places)
        draft = None if head is None else IndexDraft(head, slots[where].tolist(), (), bool(divisions))
        return draft, object_rows

    def _forms(self) -> tuple[np.ndarray[Any, Any], list[ItemForm]]:
        """Return the number of the form of each leaf of all ranks, and the forms."""
        forms: dict[ItemForm, int] = {}
        columns = [np.zeros(0, np.int64)]
        for rank in self.ranks:
            numbers = [*(forms.setdefault(form.item, len(forms)) for form in rank.forms), -1]  # of objects: the last
            columns.append(np.array(numbers)[np.array(rank.form_of, np.int64)])
        return np.concatenate(columns), list(forms)

    def _transformed(self, objects: Sequence[Mapping[int, ItemRange]]) -> TransformedDraft:
        """Describe items whose stored bytes are not those of the files as they were planned."""
        plan = self.plan
        keys_of: defaultdict[RankLeaf, list[ItemKey]] = defaultdict(list)
        for name in plan.paths:
            tensor = plan.tensors.get(name)
            if tensor is None:
                keys_of[plan.objects[name]].append((name, None))
                continue
            for number, ((offsets, _), *at) in enumerate(zip(tensor.cut, tensor.ranks, tensor.leaves, strict=True)):
                keys_of[at[0], at[1]].append((name, (number, offsets)))
        files: list[str] = []
        keys: list[list[list[ItemKey]]] = []
        facts: list[list[tuple[int, tuple[int, ...] | None]]] = []
        for rank, (inventory, mine, places) in enumerate(zip(self.ranks, objects, self._places or (), strict=True)):
            items: list[list[tuple[int, int]]] = [[] for _ in places.files]  # of each file: offset and leaf
            for leaf, place in mine.items():
                items[places.files.index(place.file)].append((place.offset, leaf))
            for leaf, file, offset in zip(*places[1:4], strict=True):
                items[file].append((offset, leaf))
            files += places.files
            for places_in_file in items:
                ordered = [leaf for _, leaf in sorted(places_in_file)]
                keys.append([keys_of[rank, leaf] for leaf in ordered])
                facts.append([_payload_facts(inventory, leaf) for leaf in ordered])
        return TransformedDraft(MetadataDraft(self._bare_head, files, keys), facts)


def _payload_facts(inventory: RankInventory, leaf: int) -> tuple[int, tuple[int, ...] | None]:
    """Return the offset of a tensor's payload in its item, and its strides; None if it is stored row by row."""
    number = inventory.form_of[leaf]
    if number < 0:
        return 0, None
    item = inventory.forms[number].item
    return item.payload_offset, None if item.stride == row_strides(item.shape) else item.stride


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
        self._documents = index_documents(shards, self.tensor_bytes)
        self._place_of: dict[str, tuple[int, int]] = {}
        for number, (file, head) in enumerate(zip(files, heads, strict=True)):
            begins = [0, *file.ends[:-1]]
            for tensor, begin in zip(file.tensors, begins, strict=False):
                self._place_of[tensor.name] = number, len(head) + begin

    def share_of(self, rank: int) -> SharedFiles:
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

    def drafts(self, objects: Sequence[Mapping[int, ItemRange]], *, is_transformed: bool = False) -> Drafts:
        return Drafts(self._documents)


def plan_cache_of(
    token: int, ranks: Sequence[RankInventory], file_format: FileFormat, apart: frozenset[str]
) -> GlobalPlanCache:
    """Plan for all ranks in a format; raise `SaveError` if they contradict each other."""
    plan = plan_globally(ranks, apart)
    if isinstance(file_format, SafetensorsFormat):
        cache: GlobalPlanCache = SharedPlanCache(token, ranks, plan, file_format)
    else:
        cache = GlobalPlanCache(token, ranks, plan)
    cache.apart = apart
    return cache
