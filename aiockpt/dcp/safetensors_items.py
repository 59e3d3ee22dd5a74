"""A rank's items in safetensors files, for ``FileSystemWriter(serialization_format=SAFETENSORS)``.

Source of the metadata in the headers: ``torch/distributed/checkpoint/_hf_utils.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from aiockpt.dcp.adapter import write_errors
from aiockpt.errors import SaveError
from aiockpt.format.index import ItemRange
from aiockpt.format.safetensors.writer import Stored, describe_tensors, encode_header, file_order, has_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.planner import WriteItem

    Resolve = Callable[[WriteItem], torch.Tensor | bytes]
    _Numbered = tuple[int, WriteItem]


def write_safetensors(
    items: Sequence[WriteItem], resolve: Resolve, directory: str, prefix: str, *, one_file: bool, fsync: bool
) -> list[ItemRange]:
    """Write items to new files; return the place of each: of a tensor, that of its payload. Blocks.

    Tensors are resolved one at a time. A file can't hold two chunks of one tensor: further ones go to further files.
    Objects are in a file of their own, as they are pickled.
    """
    places: dict[int, ItemRange] = {}
    for number, group in enumerate(_files(items, one_file=one_file)):
        name = f"{prefix}{number}.distcp"
        path = os.path.join(directory, name)
        task = f"write {path}"
        is_object = group[0][1].type == WriteItemType.BYTE_IO
        parts = _objects(group, resolve) if is_object else _tensors(group, resolve)
        with contextlib.ExitStack() as stack:
            with write_errors(task):  # a planner's own errors pass
                file = stack.enter_context(open(path, "xb"))
            for at, part in parts:
                with write_errors(task):
                    if at is not None:
                        places[at] = ItemRange(name, file.tell(), len(part))
                    file.write(part)
            with write_errors(task):
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
    return [places[number] for number in range(len(items))]


def _files(items: Sequence[WriteItem], *, one_file: bool) -> list[list[_Numbered]]:
    """Return the items of each file, with their numbers."""
    if not one_file:
        return [[each] for each in enumerate(items)]
    files: dict[int, list[_Numbered]] = {}
    seen: Counter[str] = Counter()
    for number, item in enumerate(items):
        is_object = item.type == WriteItemType.BYTE_IO
        files.setdefault(-1 if is_object else seen[item.index.fqn], []).append((number, item))
        seen[item.index.fqn] += 1
    return list(files.values())


def _objects(group: Sequence[_Numbered], resolve: Resolve) -> Iterator[tuple[int | None, bytes | memoryview]]:
    for number, item in group:
        value = resolve(item)
        if isinstance(value, bytes):
            yield number, value


def _tensors(group: Sequence[_Numbered], resolve: Resolve) -> Iterator[tuple[int | None, bytes | memoryview]]:
    """Yield the parts of a file: the header (None), then the payload of each item."""
    described = sorted(((_stored(item), number, item) for number, item in group), key=lambda each: file_order(each[0]))
    ends = accumulate(math.prod(stored.shape) * stored.dtype.itemsize for stored, _, _ in described)
    offsets = {item.index.fqn: {"saved_offsets": _offsets(item)} for _, item in group}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    yield None, encode_header(metadata, describe_tensors((stored for stored, _, _ in described), ends))
    for stored, number, item in described:
        value = resolve(item)
        if not isinstance(value, torch.Tensor) or (value.dtype, tuple(value.shape)) != stored[1:]:
            raise SaveError(
                f"{stored.name}: the plan says {stored.dtype} of {stored.shape}, but the planner gave "
                f"{getattr(value, 'dtype', type(value))} of {tuple(getattr(value, 'shape', ()))}; use the format of "
                "torch.save, or cast before the save"
            )
        flat = value.resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
        yield number, flat.view(torch.uint8).numpy().data


def _offsets(item: WriteItem) -> list[int]:
    return [] if item.tensor_data is None else list(item.tensor_data.chunk.offsets)


def _stored(item: WriteItem) -> Stored:
    """Return what the plan says of a tensor; raise SaveError if the format has no name for it."""
    if item.tensor_data is None:
        raise SaveError(f"{item.index.fqn}: the plan does not describe this tensor")
    stored = Stored(item.index.fqn, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
    if not has_name(stored.dtype, len(stored.shape)):
        raise SaveError(f"{stored.name} is a tensor of {stored.dtype}, which safetensors has no name for; convert it")
    return stored
