"""Writing of safetensors: the headers of files, and the index of a set of them.

A file is the header's length as 8 bytes, the header as JSON padded with spaces, and the bytes of the tensors without
gaps. They are sorted by the alignment of their dtypes, the largest first, so that each one is aligned.

Source of the layout: the README of https://github.com/huggingface/safetensors; for the order of dtypes and the
padding its ``tensor.rs``; for the index ``huggingface_hub/serialization``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from aiockpt.format.names import SUFFIX

SINGLE_NAME = "model.safetensors"
METADATA_KEY = "__metadata__"
VERSIONS_KEY = "aiockpt.module_versions"
"""Entry of ``__metadata__`` with the versions of modules, by the name of the state dict, as JSON."""
ALIGNMENT = 8  # headers end at multiples of this, which is the size of the largest dtype
MAX_HEADER_BYTES = 100_000_000  # the longest header that readers accept

LENGTH = struct.Struct("<Q")
_as_text = json.JSONEncoder(ensure_ascii=False).encode
PAIRED_DTYPE = "F4"  # 4-bit values, which torch holds in pairs
# By the alignment in a file, the last first.
DTYPE_NAMES = {
    "BOOL": "bool",
    PAIRED_DTYPE: "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_DTYPES: dict[torch.dtype, tuple[int, str]] = {
    getattr(torch, ours): (rank, theirs)
    for rank, (theirs, ours) in enumerate(DTYPE_NAMES.items())
    if hasattr(torch, ours)
}


class Stored(NamedTuple):
    """A tensor to store: its name, dtype and sizes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def has_name(dtype: torch.dtype, dim: int) -> bool:
    """Return whether the format has a name for tensors of this dtype and number of dimensions."""
    return dtype in _DTYPES and (dim > 0 or _DTYPES[dtype][1] != PAIRED_DTYPE)


def file_order(tensor: Stored) -> tuple[int, str]:
    """Return the sort key of a tensor within its file."""
    return -_DTYPES[tensor.dtype][0], tensor.name


def describe_tensors(tensors: Iterable[Stored], ends: Iterable[int]) -> str:
    """Encode the tensors of a file, in order, for its header, without the braces around them.

    ``ends`` are in bytes after the header; each tensor begins where the one before ends.
    """
    parts = []
    begin = 0
    for (name, dtype, shape), end in zip(tensors, ends, strict=True):
        theirs = _DTYPES[dtype][1]
        sizes = [*shape[:-1], 2 * shape[-1]] if theirs == PAIRED_DTYPE else shape  # each element holds two of theirs
        parts.append(
            f'{_as_text(name)}:{{"dtype":"{theirs}","shape":[{",".join(map(str, sizes))}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    return ",".join(parts)


def encode_header(metadata: Mapping[str, str], tensors: str, nbytes: int = 0) -> bytes:
    """Encode the beginning of a file, up to the first tensor, in at least ``nbytes`` bytes.

    ``tensors`` is the result of `describe_tensors`; ``nbytes`` is a multiple of `ALIGNMENT`.
    """
    facts = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
    text = f'{{"{METADATA_KEY}":{facts}{"," if tensors else ""}{tensors}}}'.encode()
    room = max(-(-len(text) // ALIGNMENT) * ALIGNMENT, nbytes - LENGTH.size)
    return LENGTH.pack(room) + text.ljust(room)


def shard_name(number: int, count: int) -> str:
    """Return the name of a file: the only one, or one of a set, counted from 0."""
    return SINGLE_NAME if count == 1 else f"model-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def encode_shard_index(shards: Mapping[str, Sequence[str]], tensor_bytes: int) -> bytes:
    """Encode the index of a set of files, from the names of the tensors in each."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    document = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
