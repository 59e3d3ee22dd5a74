"""The load pipeline: metadata, plan, read, verify, place."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.capture import count_change
from aiockpt.errors import CorruptCheckpointError, LoadError, MissingKeysError, ShapeMismatchError
from aiockpt.format.index import Index, ObjectEntry, TensorEntry
from aiockpt.index_reader import read_index
from aiockpt.item_reader import ItemReader, LoadOptions, ReadItem
from aiockpt.planning.tree import StructureError, flatten, replace_leaves, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.format.manifest import Manifest
    from aiockpt.storage.base import Source, Storage
    from aiockpt.threads import Workers


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


class _Load:
    def __init__(self, source: Source, path: str, index: Index, options: LoadOptions, workers: Workers) -> None:
        self._path = path
        self._index = index
        self._options = options
        self._reader = ItemReader(source, path, options, workers)

    async def whole(self, manifest: Manifest | None) -> Any:
        """Load everything into a new state dict."""
        # Tied tensors have the same place in the files: they are read once, and share memory again.
        stored: dict[object, tuple[torch.Tensor | None, list[ReadItem]]] = {}
        keys: dict[str, object] = {}
        for name, entry in self._index.entries.items():
            if isinstance(entry, ObjectEntry):
                keys[name], parts = name, [ReadItem(name, entry.place)]
                stored[name] = (None, parts)
                continue
            places = tuple(chunk.place for chunk in entry.chunks)
            key: object = (places, entry.dtype, entry.shape) if entry.nbytes else name
            keys[name] = key
            if key not in stored:
                stored[key] = self._tensor_items(name, entry)
        await self._reader.read([item for _, parts in stored.values() for item in parts])
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
        items: list[ReadItem] = []
        fresh: list[tuple[Any, Callable[[], Any]]] = []
        placed: list[torch.Tensor] = []
        for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
            entry = self._index.entries.get(name)
            if entry is None:
                continue
            self._check_target(name, entry, leaf)
            if isinstance(entry, ObjectEntry):
                item = ReadItem(name, entry.place)
                items.append(item)
                fresh.append((path, functools.partial(getattr, item, "value")))
            elif isinstance(leaf, torch.Tensor):
                items += self._tensor_items(name, entry, leaf.detach())[1]
                placed.append(leaf)
            else:
                target, parts = self._tensor_items(name, entry)
                items += parts
                fresh.append((path, functools.partial(_value_of, target, parts)))
        # Written behind autograd's back: let it notice, and a save that is copying them, however this ends.
        count_change(placed)
        try:
            await self._reader.read(items)
        finally:
            count_change(placed)
        if fresh:
            try:
                replace_leaves(state_dict, {path: self._relocated(make()) for path, make in fresh})
            except StructureError as exc:
                raise LoadError(f"the tensors were loaded, but {exc}") from None
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
        if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise ShapeMismatchError(f"{name} is an expanded tensor in the target: its elements share memory; clone it")
        if tuple(leaf.shape) != entry.shape:
            raise ShapeMismatchError(
                f"{name} has the shape {tuple(leaf.shape)} in the target but {entry.shape} in {self._path}"
            )
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.untyped_storage().nbytes() < _extent_bytes(leaf):
            raise ShapeMismatchError(f"the memory of {name} in the target was freed; materialise it first")
        if leaf.dtype != entry.dtype:
            raise ShapeMismatchError(f"{name} is {leaf.dtype} in the target but {entry.dtype} in {self._path}")

    def _tensor_items(
        self, name: str, entry: TensorEntry, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[ReadItem]]:
        if target is None and len(entry.chunks) != 1:
            target = torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
        return target, [
            ReadItem(name, chunk.place, entry, (chunk.offsets, chunk.sizes), target) for chunk in entry.chunks
        ]

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


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Give how much of its storage a tensor reaches into."""
    if not tensor.numel():
        return 0
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.itemsize


def _value_of(target: torch.Tensor | None, parts: Sequence[ReadItem]) -> Any:
    return parts[0].value if target is None else target
