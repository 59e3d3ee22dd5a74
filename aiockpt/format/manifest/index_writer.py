"""Encoding of the index in the manifest; `aiockpt.format.manifest.reader` documents its columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.hashes import ALGORITHM

if TYPE_CHECKING:
    from aiockpt.format.index import Division, ObjPath
    from aiockpt.format.manifest.columnar_index import ItemForm
    from aiockpt.format.transforms.base import TransformedDraft

_STEP = 8192  # rows of a column encoded at a time, so that no C function holds the GIL for long


class ItemRows(NamedTuple):
    """The places of the items: a row for each stored part of a tensor, and one for each object, leaf by leaf."""

    form_of: Sequence[int]  # positions in the list of forms; -1 for objects
    file_of: Sequence[int]  # positions in the list of files
    offset_of: Sequence[int]  # in the file, in bytes; zero for objects
    divisions: Sequence[Division] = ()  # of the tensors that are not stored whole
    division_of: Sequence[int] = ()  # by leaf, not by row: positions in ``divisions``; -1 for what has one row


@dataclass(frozen=True, slots=True)
class IndexDraft:
    """The index of a manifest without the CRCs."""

    head: str = field(repr=False)  # the same for every save by one plan
    slot_of: Sequence[int] = field(repr=False)  # by row: its position among the tensor items of all files; else -1
    objects: Sequence[tuple[int, int, int]] = field(repr=False)  # row, offset and length of each, in bytes
    is_divided: bool = False  # some tensors are stored in parts

    def finish(self, crcs: Sequence[int], hashes: Sequence[str | None] | None = None) -> str:
        """Return the JSON text, with the CRC-32 of the payload of each tensor item, file by file, and the hash."""
        column = [crcs[slot] if slot >= 0 else 0 for slot in self.slot_of]
        columns = f'"crc32": {encode_column(column)},\n    "objects": {encode_column(self.objects)}'
        if hashes is not None:
            hashed = [hashes[slot] if slot >= 0 else None for slot in self.slot_of]
            columns += f',\n    "{ALGORITHM}": {encode_column(hashed)}'
        return f"{{{self.head},\n    {columns}\n  }}"


def encode_index(
    names: Sequence[str], paths: Sequence[ObjPath], files: Sequence[str], forms: Iterable[ItemForm], rows: ItemRows
) -> str | None:
    """Return the beginning of the JSON text, which is the same for every save by one plan.

    Returns None if a path can't be reconstructed from its name.
    """
    parents: dict[ObjPath, int] = {}
    parent_of = [parents.setdefault(path[:-1], len(parents)) for path in paths]
    heads = [head_of(parent) for parent in parents]
    if any(heads[parent] + str(path[-1]) != name for name, path, parent in zip(names, paths, parent_of, strict=True)):
        return None
    sequences = {parent for path, parent in zip(paths, parent_of, strict=True) if type(path[-1]) is int}
    if any(type(path[-1]) is not int and parent in sequences for path, parent in zip(paths, parent_of, strict=True)):
        return None
    columns = {
        "files": json.dumps(files),
        "forms": encode_column([(str(form.dtype).removeprefix("torch."), *form[1:]) for form in forms]),
        "names": encode_column(names),
        "parents": encode_column(list(parents)),
        "sequences": json.dumps(sorted(sequences)),
        "parent": encode_column(parent_of),
        "form": encode_column(rows.form_of),
        "file": encode_column(rows.file_of),
        "offset": encode_column(rows.offset_of),
    }
    if rows.divisions:
        columns |= {"divisions": encode_column(rows.divisions), "division": encode_column(rows.division_of)}
    return ",".join(f'\n    "{key}": {text}' for key, text in columns.items())


def encode_column(values: Sequence[Any]) -> str:
    """Encode a long JSON array."""
    parts = (json.dumps(values[at : at + _STEP], separators=(",", ":"))[1:-1] for at in range(0, len(values), _STEP))
    return f"[{','.join(parts)}]"


def head_of(parent: Sequence[str | int]) -> str:
    """Return the beginning of the names of the leaves with this parent."""
    return "".join(f"{part}." for part in parent)


# --- the documents before the items -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drafts:
    """The documents of a checkpoint, as far as they are known before its items are written; without the manifest."""

    documents: Mapping[str, bytes | bytearray] = field(repr=False)
    index: IndexDraft | None = None  # of the manifest; None: the format has an index of its own, or there is no place
    transformed: TransformedDraft | None = None  # None: items are stored as they are
