"""The load pipeline: metadata, plan, read, verify, place."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch
from isal.isal_zlib import crc32, crc32_combine

from aiockpt.errors import CorruptCheckpointError, LoadError, MissingKeysError, ShapeMismatchError
from aiockpt.format.manifest import MANIFEST_NAME, Manifest, decode_manifest
from aiockpt.format.metadata import METADATA_NAME, Index, ItemPlace, ObjectEntry, TensorEntry, decode_metadata
from aiockpt.format.objects import decode_object
from aiockpt.format.torchzip import (
    HEAD_BYTES,
    TAIL_BYTES,
    FramingError,
    ItemParser,
    TensorItem,
    parse_tensor_item,
)
from aiockpt.planning.planner import is_dense
from aiockpt.planning.tree import StructureError, flatten, replace_leaves, unflatten
from aiockpt.staging.pool import Mapping as MappedMemory

if TYPE_CHECKING:
    from aiockpt.storage.base import Source, Storage
    from aiockpt.threads import Workers

MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | torch.device | str | dict[str, str]

LARGE_BYTES = 1 << 20
"""Items of this size and more are read on their own, straight to where they belong."""
RANGE_BYTES = 32 << 20
"""The most that one thread reads at a time."""
_BATCH_BYTES = 8 << 20
_MAX_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `aiockpt.AsyncCheckpointer.load`."""

    map_location: MapLocation | None = None
    strict: bool = True
    verify: bool = True
    safe_globals: Sequence[Any] = ()
    trust: bool = False


@dataclass(eq=False)
class _Item:
    """One item to read: an object, or one stored chunk of a tensor.

    Attributes:
        name: the key it belongs to.
        place: where its bytes are.
        chunk: for tensors, offsets and sizes of the chunk in the whole tensor.
        target: for tensors, what it goes to; made when its strides are known if None.
        entry: for tensors, the whole tensor.
        value: for objects, what was read; for tensors without a target, the tensor that was made.
    """

    name: str
    place: ItemPlace
    entry: TensorEntry | None = None
    chunk: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    target: torch.Tensor | None = None
    value: Any = None


@dataclass(eq=False)
class _LargeRead:
    """A large tensor item whose framing is known: its payload is read in ranges."""

    item: _Item
    parsed: TensorItem
    memory: memoryview
    scratch: bool
    crcs: list[int] = field(default_factory=list)

    def ranges(self) -> list[tuple[int, int]]:
        return [(a, min(a + RANGE_BYTES, self.parsed.nbytes)) for a in range(0, self.parsed.nbytes, RANGE_BYTES)]


async def load_checkpoint(
    storage: Storage, path: str, state_dict: Mapping[Any, Any] | None, options: LoadOptions, workers: Workers
) -> Any:
    """Load a checkpoint; see `aiockpt.AsyncCheckpointer.load`."""
    source = await storage.open(path, workers=workers)
    try:
        index, manifest = await workers.run(read_index, source, path)
        load = _Load(source, path, index, options, workers)
        if state_dict is None:
            return await load.whole(manifest)
        return await load.into(state_dict)
    finally:
        with anyio.CancelScope(shield=True):
            await workers.run(source.close)


def read_index(source: Source, path: str) -> tuple[Index, Manifest | None]:
    """Read and check what describes a checkpoint. Blocks.

    Raises:
        CorruptCheckpointError: naming the file that is missing, cut short or damaged.
    """
    manifest = None
    if MANIFEST_NAME in source.files:
        manifest = _with_path(path, decode_manifest, _read_file(source, MANIFEST_NAME))
        for name, facts in manifest.files.items():
            size = source.files.get(name)
            if size is None:
                raise CorruptCheckpointError(f"{path} lacks its file {name}; use an older checkpoint")
            if size != facts.nbytes:
                raise CorruptCheckpointError(
                    f"{path}/{name} has {size} bytes but was written with {facts.nbytes}: it was truncated or "
                    "changed. Use an older checkpoint."
                )
    metadata = _read_file(source, METADATA_NAME)
    facts_of = {} if manifest is None else manifest.files
    if METADATA_NAME in facts_of and crc32(metadata) != facts_of[METADATA_NAME].crc:
        raise CorruptCheckpointError(f"{path}/{METADATA_NAME} does not match its CRC; use an older checkpoint")
    index = _with_path(path, decode_metadata, metadata)
    for name, entry in index.entries.items():
        places = [entry.place] if isinstance(entry, ObjectEntry) else [c.place for c in entry.chunks]
        for place in places:
            _check_place(path, name, place, source.files)
        if isinstance(entry, TensorEntry):
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != math.prod(entry.shape) or entry.nbytes > sum(place.length for place in places):
                raise CorruptCheckpointError(f"{path} does not hold all of {name}; its metadata is damaged")
    return index, manifest


def _with_path(path: str, decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except LoadError as exc:
        raise type(exc)(f"{path}: {exc}") from exc


def _check_place(path: str, name: str, place: ItemPlace, files: Mapping[str, int]) -> None:
    size = files.get(place.file)
    if size is None:
        if place.file.startswith(("/", "..")) or ".." in place.file.split("/"):
            return  # refused where files are opened, as unsafe
        raise CorruptCheckpointError(f"{path} lacks the file {place.file}, which holds {name}; use an older checkpoint")
    if place.offset + place.length > size:
        raise CorruptCheckpointError(
            f"{path}/{place.file} ends at byte {size}, but {name} is at bytes {place.offset} to "
            f"{place.offset + place.length}: it was truncated. Use an older checkpoint."
        )


def _read_file(source: Source, name: str) -> bytes:
    data = bytearray(source.files[name])
    source.read(name, 0, memoryview(data))
    return bytes(data)


class _Load:
    def __init__(self, source: Source, path: str, index: Index, options: LoadOptions, workers: Workers) -> None:
        self._source = source
        self._path = path
        self._index = index
        self._options = options
        self._workers = workers
        self._parser = ItemParser()

    async def whole(self, manifest: Manifest | None) -> Any:
        """Load everything into a new state dict."""
        # Tied tensors have the same place in the files: they are read once, and share memory again.
        stored: dict[object, tuple[torch.Tensor | None, list[_Item]]] = {}
        keys: dict[str, object] = {}
        for name, entry in self._index.entries.items():
            if isinstance(entry, ObjectEntry):
                keys[name], parts = name, [_Item(name, entry.place)]
                stored[name] = (None, parts)
                continue
            key: object = tuple(chunk.place for chunk in entry.chunks) if entry.nbytes else name
            keys[name] = key
            if key not in stored:
                stored[key] = self._tensor_items(name, entry)
        await self._read([item for _, parts in stored.values() for item in parts])
        read = {key: self._relocated(_value_of(target, parts)) for key, (target, parts) in stored.items()}
        values = {name: read[key] for name, key in keys.items()}
        given: set[object] = set()
        for name, key in keys.items():
            if key in given:
                values[name] = values[name].detach()
            given.add(key)
        paths = self._index.paths
        try:
            return unflatten(
                [paths[name] for name in paths],
                [values[name] for name in paths],
                manifest.containers if manifest is not None else (),
            )
        except (StructureError, KeyError, TypeError, ValueError) as exc:
            raise CorruptCheckpointError(f"{self._path}: the structure of the state dict is damaged: {exc}") from exc

    async def into(self, state_dict: Mapping[Any, Any]) -> Any:
        """Load into the tensors of a state dict."""
        objects = {name for name, entry in self._index.entries.items() if isinstance(entry, ObjectEntry)}
        try:
            flat = flatten(state_dict, whole=objects)
        except StructureError as exc:
            raise LoadError(f"can't load into this state dict: {exc}") from None
        self._check_missing(flat.names)
        items: list[_Item] = []
        fresh: list[tuple[Any, Callable[[], Any]]] = []
        placed: list[torch.Tensor] = []
        for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
            entry = self._index.entries.get(name)
            if entry is None:
                continue
            self._check_target(name, entry, leaf)
            if isinstance(entry, ObjectEntry):
                item = _Item(name, entry.place)
                items.append(item)
                fresh.append((path, functools.partial(getattr, item, "value")))
            elif isinstance(leaf, torch.Tensor):
                items += self._tensor_items(name, entry, leaf.detach())[1]
                placed.append(leaf)
            else:
                target, parts = self._tensor_items(name, entry)
                items += parts
                fresh.append((path, functools.partial(_value_of, target, parts)))
        await self._read(items)
        for tensor in placed:
            if not tensor.is_inference():
                # Written behind autograd's back: let it notice.
                torch.autograd.graph.increment_version(tensor)
        if fresh:
            replace_leaves(state_dict, {path: self._relocated(make()) for path, make in fresh})
        return state_dict

    def _check_missing(self, names: Sequence[str]) -> None:
        missing = tuple(name for name in names if name not in self._index.entries)
        if missing and self._options.strict:
            shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise MissingKeysError(
                f"{self._path} lacks {len(missing)} of the keys asked for: {shown}. Pass strict=False to leave "
                "them as they are.",
                missing,
            )

    def _check_target(self, name: str, entry: TensorEntry | ObjectEntry, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            return
        if isinstance(entry, ObjectEntry):
            if (
                type(leaf) in (torch.Tensor, torch.nn.Parameter)
                and leaf.layout is torch.strided
                and not leaf.is_quantized
            ):
                raise ShapeMismatchError(f"{name} is a tensor in the target but an object in {self._path}")
            return
        if type(leaf).__module__.startswith("torch.distributed"):
            raise ShapeMismatchError(
                f"{name} is a {type(leaf).__name__} in the target; this version loads into the state of one process"
            )
        if leaf.layout is not torch.strided:
            raise ShapeMismatchError(
                f"{name} has the layout {leaf.layout} in the target but is strided in {self._path}"
            )
        if leaf.is_meta:
            raise ShapeMismatchError(f"{name} is on the meta device in the target; give it memory first (to_empty)")
        if tuple(leaf.shape) != entry.shape:
            raise ShapeMismatchError(
                f"{name} has the shape {tuple(leaf.shape)} in the target but {entry.shape} in {self._path}"
            )
        if leaf.dtype != entry.dtype:
            raise ShapeMismatchError(f"{name} is {leaf.dtype} in the target but {entry.dtype} in {self._path}")

    def _tensor_items(
        self, name: str, entry: TensorEntry, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[_Item]]:
        if target is None and len(entry.chunks) != 1:
            target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        return target, [_Item(name, chunk.place, entry, (chunk.offsets, chunk.sizes), target) for chunk in entry.chunks]

    # --- reading ----------------------------------------------------------------------------------

    async def _read(self, items: list[_Item]) -> None:
        """Read all items, in a few threads."""
        small = [item for item in items if item.place.length < LARGE_BYTES or item.entry is None]
        large = [item for item in items if not (item.place.length < LARGE_BYTES or item.entry is None)]
        jobs: list[Callable[[], None]] = [functools.partial(self._read_batch, batch) for batch in _batches(small)]
        reads: list[_LargeRead] = []
        jobs += [functools.partial(self._prepare, item, reads) for item in large]
        await self._run(jobs)
        jobs = []
        for read in reads:
            read.crcs = [0] * len(read.ranges())
            jobs += [functools.partial(self._read_range, read, n) for n in range(len(read.crcs))]
        await self._run(jobs)
        await self._run([functools.partial(self._complete, read) for read in reads])

    async def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run blocking jobs in all threads, each taking the next."""
        pending = iter(jobs)

        async def work() -> None:
            for job in pending:
                await self._workers.run(job)

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._workers.count, len(jobs))):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, LoadError) or not isinstance(error, Exception):
                raise error from error.__cause__
            raise LoadError(f"loading {self._path} failed: {type(error).__name__}: {error}") from error

    def _read_batch(self, batch: list[_Item]) -> None:
        """Read neighbouring small items at once, and place them."""
        begin = batch[0].place.offset
        end = max(item.place.offset + item.place.length for item in batch)
        buffer = memoryview(bytearray(end - begin))
        self._source.read(batch[0].place.file, begin, buffer)
        for item in batch:
            at = item.place.offset - begin
            view = buffer[at : at + item.place.length]
            if item.entry is None:
                item.value = self._decode(item, bytes(view))
                continue
            parsed = self._parsed(item, self._parser.parse, view)
            payload = view[parsed.payload_offset : parsed.payload_offset + parsed.nbytes]
            if self._options.verify and parsed.crc is not None:
                self._check_crc(item, parsed, crc32(payload))
            self._place(item, parsed, payload)

    def _decode(self, item: _Item, blob: bytes) -> Any:
        options = self._options
        try:
            return decode_object(
                item.name,
                blob,
                safe_globals=options.safe_globals,
                trust=options.trust,
                map_location=options.map_location,
            )
        except LoadError as exc:
            raise type(exc)(f"{self._path}/{item.place.file}: {exc}") from exc

    def _prepare(self, item: _Item, reads: list[_LargeRead]) -> None:
        """Read the framing of a large item, and decide where its payload goes."""
        place = item.place
        head = self._bytes(place, 0, min(HEAD_BYTES, place.length))
        tail_at = max(0, place.length - TAIL_BYTES)
        tail = self._bytes(place, tail_at, place.length - tail_at)

        def fetch(offset: int, size: int) -> bytes:
            if offset + size <= len(head):
                return head[offset : offset + size]
            if offset >= tail_at:
                return tail[offset - tail_at :][:size]
            return self._bytes(place, offset, max(0, min(size, place.length - offset, 1 << 20)))

        parsed = self._parsed(item, parse_tensor_item, place.length, fetch)
        target = item.target
        if target is None:
            memory = MappedMemory(parsed.nbytes)
            item.value = _seen_as(memory.tensor, parsed)
            reads.append(_LargeRead(item, parsed, memory.view, scratch=False))
        elif _is_image(target, item, parsed):
            reads.append(_LargeRead(item, parsed, _memory_of(target), scratch=False))
        else:
            reads.append(_LargeRead(item, parsed, MappedMemory(parsed.nbytes).view, scratch=True))

    def _read_range(self, read: _LargeRead, number: int) -> None:
        start, stop = read.ranges()[number]
        view = read.memory[start:stop]
        place = read.item.place
        self._source.read(place.file, place.offset + read.parsed.payload_offset + start, view)
        if self._options.verify and read.parsed.crc is not None:
            read.crcs[number] = crc32(view)

    def _complete(self, read: _LargeRead) -> None:
        if self._options.verify and read.parsed.crc is not None:
            crc = 0
            for part, (start, stop) in zip(read.crcs, read.ranges(), strict=True):
                crc = crc32_combine(crc, part, stop - start)
            self._check_crc(read.item, read.parsed, crc)
        if read.scratch:
            self._place(read.item, read.parsed, read.memory)
        elif read.item.target is None:
            _resolve(read.item.value, read.parsed)

    def _bytes(self, place: ItemPlace, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._source.read(place.file, place.offset + offset, memoryview(data))
        return bytes(data)

    def _parsed(self, item: _Item, parse: Callable[..., TensorItem], *args: Any) -> TensorItem:
        try:
            parsed = parse(*args)
        except FramingError as exc:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: the item of {item.name} is damaged: {exc}"
            ) from exc
        dtype, sizes = item.entry.dtype if item.entry is not None else None, _chunk_of(item)[1]
        if parsed.dtype != dtype or parsed.shape != sizes:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: {item.name} is {parsed.dtype} {parsed.shape} in its item but "
                f"{dtype} {sizes} in {METADATA_NAME}"
            )
        return parsed

    def _check_crc(self, item: _Item, parsed: TensorItem, crc: int) -> None:
        if crc != parsed.crc:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: the bytes of {item.name} (at offset "
                f"{item.place.offset + parsed.payload_offset}, {parsed.nbytes} bytes) do not match their CRC: "
                "they changed since they were written. Use an older checkpoint."
            )

    def _place(self, item: _Item, parsed: TensorItem, payload: memoryview) -> None:
        """Put a payload where the item belongs."""
        target = item.target
        if target is None and _is_dense_item(parsed):
            target = item.value = torch.empty_strided(parsed.shape, parsed.stride, dtype=parsed.dtype, device="cpu")
        if target is not None and _is_image(target, item, parsed):
            if parsed.nbytes:
                ctypes.memmove(target.data_ptr(), _address_of(payload), parsed.nbytes)
            if target is item.value:
                _resolve(target, parsed)
            return
        if 0 in parsed.shape:
            stored = torch.empty_strided(parsed.shape, parsed.stride, dtype=parsed.dtype, device="cpu")
        else:
            stored = _seen_as(torch.frombuffer(payload, dtype=torch.uint8), parsed).clone()
        _resolve(stored, parsed)
        if target is None:
            item.value = stored
            return
        region = target
        for dim, (offset, size) in enumerate(zip(*_chunk_of(item), strict=True)):
            region = region.narrow(dim, offset, size)
        with torch.no_grad():
            region.copy_(stored)

    def _relocated(self, value: Any) -> Any:
        """Move a tensor as ``torch.load`` does for its map_location."""
        where = self._options.map_location
        if where is None or type(value) is not torch.Tensor:
            return value
        if isinstance(where, dict):
            where = where.get("cpu", "cpu")
        if isinstance(where, str | torch.device):
            return value.to(where)
        storage = where(value.untyped_storage(), "cpu")
        if storage is None:
            return value
        fresh = torch.empty(0, dtype=value.dtype, device=storage.device)
        return fresh.set_(storage, value.storage_offset(), value.shape, value.stride())


def _value_of(target: torch.Tensor | None, parts: Sequence[_Item]) -> Any:
    return parts[0].value if target is None else target


def _chunk_of(item: _Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return item.chunk if item.chunk is not None else ((), ())


def _batches(items: Sequence[_Item]) -> list[list[_Item]]:
    """Group items that lie close together in a file, so that each group is one read."""
    batches: list[list[_Item]] = []
    end = begin = 0
    for item in sorted(items, key=lambda item: (item.place.file, item.place.offset)):
        place = item.place
        if (
            not batches
            or batches[-1][0].place.file != place.file
            or place.offset > end + _MAX_GAP_BYTES
            or place.offset + place.length > begin + _BATCH_BYTES
        ):
            batches.append([])
            begin = place.offset
            end = 0
        batches[-1].append(item)
        end = max(end, place.offset + place.length)
    return batches


def _is_dense_item(parsed: TensorItem) -> bool:
    """Tell whether the payload is exactly the memory of the tensor."""
    return (
        parsed.storage_offset == 0
        and parsed.nbytes == math.prod(parsed.shape) * parsed.dtype.itemsize
        and is_dense(parsed.shape, parsed.stride)
    )


def _is_image(target: torch.Tensor, item: _Item, parsed: TensorItem) -> bool:
    """Tell whether the payload, byte for byte, is what the memory of the target should be."""
    return (
        target.device.type == "cpu"
        and tuple(target.shape) == parsed.shape == _chunk_of(item)[1]
        and _is_dense_item(parsed)
        and all(a == b for a, b, n in zip(target.stride(), parsed.stride, parsed.shape, strict=True) if n > 1)
        and (target is item.value or not (parsed.conj or parsed.neg))
        and not (target.is_conj() or target.is_neg())
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory of a dense host tensor."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _seen_as(payload: torch.Tensor, parsed: TensorItem) -> torch.Tensor:
    """See bytes as the tensor that they store."""
    whole = len(payload) // parsed.dtype.itemsize * parsed.dtype.itemsize
    return payload[:whole].view(parsed.dtype).as_strided(parsed.shape, parsed.stride, parsed.storage_offset)


def _resolve(tensor: torch.Tensor, parsed: TensorItem) -> None:
    """Apply what the item says of its values: stored conjugated, or negated."""
    if parsed.conj:
        tensor.conj_physical_()
    if parsed.neg:
        tensor.neg_()
