"""Encoding of the index in the manifest; `aiockpt.format.manifest.reader` documents its columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest.columnar_index import ItemForm

_STEP = 8192  # rows of a column encoded at a time, so that no C function holds the GIL for long


class ItemRanges(NamedTuple):
    """The places of the items, leaf by leaf."""

    form_of: list[int]  # positions in the list of forms; -1 for objects
    file_of: list[int]  # positions in the list of files
    offset_of: list[int]  # in the file, in bytes; zero for objects


@dataclass(frozen=True, slots=True)
class IndexDraft:
    """The index of a manifest without the CRCs."""

    head: str = field(repr=False)  # the same for every save with one layout
    leaves: int  # how many there are
    slot_leaves: Sequence[int] = field(repr=False)  # leaf of each slot, file by file
    tied: Mapping[int, int] = field(repr=False)  # leaves that are stored as another one, and that one
    objects: Sequence[tuple[int, int, int]] = field(repr=False)  # leaf, offset and length of each, in bytes

    def finish(self, crcs: Sequence[Sequence[int]]) -> str:
        """Return the JSON text, with the CRC-32 of each slot's payload, file by file."""
        column = [0] * self.leaves
        for leaf, crc in zip(self.slot_leaves, chain.from_iterable(crcs), strict=True):
            column[leaf] = crc
        for leaf, first in self.tied.items():
            column[leaf] = column[first]
        columns = f'"crc32": {encode_column(column)},\n    "objects": {encode_column(self.objects)}'
        return f"{{{self.head},\n    {columns}\n  }}"


def encode_index(
    names: Sequence[str], paths: Sequence[ObjPath], files: Sequence[str], forms: Iterable[ItemForm], places: ItemRanges
) -> str | None:
    """Return the beginning of the JSON text, which is the same for every save with one layout.

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
        "form": encode_column(places.form_of),
        "file": encode_column(places.file_of),
        "offset": encode_column(places.offset_of),
    }
    return ",".join(f'\n    "{key}": {text}' for key, text in columns.items())


def encode_column(values: Sequence[Any]) -> str:
    """Encode a long JSON array."""
    parts = (json.dumps(values[at : at + _STEP], separators=(",", ":"))[1:-1] for at in range(0, len(values), _STEP))
    return f"[{','.join(parts)}]"


def head_of(parent: Sequence[str | int]) -> str:
    """Return the beginning of the names of the leaves with this parent."""
    return "".join(f"{part}." for part in parent)
