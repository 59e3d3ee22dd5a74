"""Plans in the safetensors format: one file, or a directory with a file or a set of files and its index."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.lazy import lazy_property
from aiockpt.errors import SaveError
from aiockpt.format.item.ziparchive import Framing
from aiockpt.format.manifest.index_writer import Drafts
from aiockpt.format.names import INDEX_NAME
from aiockpt.format.safetensors.writer import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    SINGLE_NAME,
    VERSIONS_KEY,
    Stored,
    describe_tensors,
    encode_header,
    encode_shard_index,
    file_order,
    has_name,
    shard_name,
)
from aiockpt.planning.flatten import joined
from aiockpt.planning.layout import FileImage, lay_out, split_in_order
from aiockpt.planning.parts import PartItem, lay_out_part, stream_in_file
from aiockpt.planning.planner import FileFormat, Layout, RankLeaves, SavePlan, StateSummary
from aiockpt.planning.specs import TensorSpec, describe

if TYPE_CHECKING:
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.snapshot import Snapshot

SHARD_BYTES = 5_000_000_000  # of tensors in a file by default, as the ecosystem's own writers choose

_FRAMEWORK = {"format": "pt"}


class PlannedFile(NamedTuple):
    """A file, without the metadata in its header."""

    name: str
    tensors: Sequence[Stored]  # in the order of the file
    ends: Sequence[int]  # of each tensor, in bytes after the header
    described: str  # the description of the tensors in the header
    aliases: Mapping[str, str]  # the names tied to one of the tensors, with that one's name


@dataclass
class SafetensorsLayout(Layout):
    """The layout of safetensors files, or of one rank's part of them."""

    is_single_file: bool
    # For each image what its header describes: the tensors, and the names tied to one of them. None: another rank
    # writes the headers.
    heads: Sequence[tuple[str, Mapping[str, str]]] | None

    @lazy_property
    def documents(self) -> dict[str, bytes]:
        """Index of a set of files."""
        names = self.structure.names
        shards = {image.name: [names[slot.leaf] for slot in image.slots] for image in self.images}
        return index_documents(shards, self.tensor_bytes)


def index_documents(shards: Mapping[str, Sequence[str]], tensor_bytes: int) -> dict[str, bytes]:
    """Return the index of the names in each file; a single file of the standard name needs none."""
    return {} if list(shards) == [SINGLE_NAME] else {INDEX_NAME: encode_shard_index(shards, tensor_bytes)}


@dataclass(frozen=True)
class SafetensorsPlan(SavePlan):
    """A layout together with the headers of one save."""

    layout: SafetensorsLayout

    @property
    def is_single_file(self) -> bool:
        return self.layout.is_single_file

    def drafts(self, *, is_transformed: bool = False) -> Drafts:
        return Drafts(self.layout.documents)


class SafetensorsFormat(FileFormat):
    """The safetensors format: a single file, or a directory with files of ``shard_bytes`` (None: `SHARD_BYTES`).

    ``file_of`` is the number of the file of each tensor, counted from 1, instead. The user's ``metadata`` goes into the
    headers; values other than text are written as JSON.
    """

    def __init__(
        self,
        metadata: Mapping[str, JsonValue],
        *,
        single_file: bool,
        shard_bytes: int | None,
        file_of: Mapping[str, int] | None = None,
    ) -> None:
        _check_division(shard_bytes, file_of, single_file=single_file)
        self.is_single_file = single_file
        self._shard_bytes = None if single_file else shard_bytes or SHARD_BYTES
        self._file_of = None if file_of is None else dict(file_of)
        # No hash(): ranks compare these names, and the hash of a text differs between processes.
        division = self._shard_bytes if file_of is None else zlib.crc32(repr(sorted(file_of.items())).encode())
        self.name = repr(("safetensors", "shard_bytes" if file_of is None else "fqn_to_index_mapping", division))
        self._facts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in metadata.items()
        }
        if self._facts.get("format", "pt") != "pt":
            raise SaveError(
                "metadata['format'] names the framework in a safetensors file, which readers check: it must be "
                "'pt'; use another key"
            )
        for key, value in self._facts.items():
            try:
                (key + value).encode()
            except UnicodeEncodeError as exc:
                raise SaveError(f"metadata[{key!r}] is no text that a safetensors file can hold: {exc}") from exc

    def validate(self, snapshot: Snapshot) -> None:
        """Refuse what the format can't hold; drop the containers, of which it keeps only dotted names."""
        names = snapshot.structure.names
        if snapshot.structure.objects:
            name = names[min(snapshot.structure.objects)]
            raise SaveError(
                f"{name} is not a plain tensor, and a safetensors file holds nothing else: leave it out and give it "
                "as metadata=, or save with format='dcp'"
            )
        # Many tensors have few forms; names are looked at only to say which tensor does not fit.
        forms = {(t.dtype, t.layout, t.dim() > 0) for t in snapshot.tensors if t is not None}
        unfit = any(layout is not torch.strided or not has_name(dtype, dim) for dtype, layout, dim in forms)
        if unfit or METADATA_KEY in names:
            for name, tensor in zip(names, snapshot.tensors, strict=True):
                if tensor is not None:
                    self._check_form(name, tensor.dtype, tensor.layout, tensor.dim())
        self._note_versions(snapshot)

    def _note_versions(self, snapshot: Snapshot) -> None:
        """Record the versions of modules in the header, and drop the containers that had them."""
        versions = {
            joined(cast("list[str | int]", each["path"])): each["module_metadata"]
            for each in snapshot.containers
            if each.get("module_metadata")
        }
        if versions:
            self._facts[VERSIONS_KEY] = json.dumps(versions, ensure_ascii=False)
        snapshot.containers = []

    def check(self, names: Sequence[str], specs: Sequence[TensorSpec | None]) -> None:
        for name, spec in zip(names, specs, strict=True):
            if spec is not None:
                self._check_form(name, spec.dtype, torch.strided, len(spec.shape))

    @staticmethod
    def _check_form(name: str, dtype: torch.dtype, layout: torch.layout, dims: int) -> None:
        if name == METADATA_KEY:
            raise SaveError(f"{name} is reserved in a safetensors file; rename the tensor")
        if layout is not torch.strided or not has_name(dtype, dims > 0):
            raise SaveError(
                f"{name} is a tensor of {dims} dimensions and of {dtype if layout is torch.strided else layout}, which "
                "safetensors has no name for; convert it, or save with format='dcp'"
            )

    def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Describe a tensor; it is stored row by row."""
        return describe(tensor, by_rows=True)

    def framing(self, name: str, spec: TensorSpec) -> Framing:
        """Return the framing of a tensor: nothing."""
        return _framing(math.prod(spec.shape) * spec.dtype.itemsize)

    def lay_out(self, summary: StateSummary, snapshot: Snapshot, written: RankLeaves | None = None) -> SafetensorsPlan:
        """Fill one file after the other, in the order of the state dict."""
        if snapshot.containers:
            self._note_versions(snapshot)
        if written is not None:
            return self._lay_out_part(summary, written)
        names = summary.structure.names
        leaves = {name: leaf for leaf, name in enumerate(names) if leaf not in summary.tied}
        tensors = [
            Stored(name, spec.dtype, tuple(spec.shape))
            for name, leaf in leaves.items()
            if (spec := summary.specs[leaf]) is not None
        ]
        files = self.plan_files(tensors, {names[leaf]: names[first] for leaf, first in summary.tied.items()})
        heads = self.encode_heads(files)
        images = [
            lay_out(
                file.name,
                len(head),
                [(leaves[tensor.name], _framing(_nbytes(tensor))) for tensor in file.tensors],
                aligned=False,
            )
            for file, head in zip(files, heads, strict=True)
        ]
        layout = SafetensorsLayout(summary, images, self.is_single_file, [file[-2:] for file in files])
        return SafetensorsPlan(layout, heads)

    def plan_files(self, tensors: Sequence[Stored], tied: Mapping[str, str]) -> list[PlannedFile]:
        """Divide tensors, in the order of the state dict, among files; ``tied`` are further names of some of them."""
        by_name = {tensor.name: tensor for tensor in tensors}
        if self._file_of is None:
            sizes = {name: _nbytes(tensor) for name, tensor in by_name.items()}
            divided = dict(enumerate(split_in_order(sizes, self._shard_bytes), 1))
            count = len(divided)
        else:
            divided, count = {}, max(self._file_of.values())
            for name in by_name:
                if name not in self._file_of:
                    raise SaveError(f"{name} is not in fqn_to_index_mapping, which must have every tensor's name")
                divided.setdefault(self._file_of[name], []).append(name)
            divided = dict(sorted(divided.items()))
        aliases: dict[int, dict[str, str]] = {number: {} for number in divided}
        home = {name: number for number, names in divided.items() for name in names}
        for name, first in tied.items():
            aliases[home[first]][name] = first
        files = []
        for number, names in divided.items():
            stored = sorted((by_name[name] for name in names), key=file_order)
            ends = list(accumulate(map(_nbytes, stored)))
            described = describe_tensors(stored, ends)
            files.append(PlannedFile(shard_name(number - 1, count), stored, ends, described, aliases[number]))
        return files

    def encode_heads(self, files: Sequence[PlannedFile]) -> list[bytes]:
        """Encode the header of each file."""
        return self._heads([file[-2:] for file in files], [0] * len(files))

    def _lay_out_part(self, summary: StateSummary, written: RankLeaves) -> SafetensorsPlan:
        """Lay out what one rank writes of the files of all ranks."""
        shared, structure = written.shared, summary.structure
        if shared is None:
            raise RuntimeError("rank 0 has not told a rank where its parts belong")
        items: list[list[PartItem]] = [[] for _ in shared.names]
        for leaf in written.leaves:
            spec = summary.specs[leaf]
            if spec is None:
                raise TypeError(f"{structure.names[leaf]} is no tensor")
            file, offset = shared.places[leaf]
            sizes, size = tuple(spec.shape), spec.dtype.itemsize
            whole, offsets = structure.shards.get(leaf, (sizes, (0,) * len(sizes)))
            stream = stream_in_file(offset, size, whole, sizes, offsets)
            items[file].append(PartItem(leaf, self.framing(structure.names[leaf], spec), stream))
        heads = self._heads(shared.heads, [0] * len(shared.heads)) or [b""] * len(shared.names)
        images: list[FileImage] = []
        kept: list[bytes] = []
        for name, nbytes, head, mine in zip(shared.names, shared.sizes, heads, items, strict=True):
            if head or mine:
                images.append(lay_out_part(name, len(head), nbytes, mine))
                kept.append(head)
        return SafetensorsPlan(SafetensorsLayout(summary, images, self.is_single_file, shared.heads or None), kept)

    def fill(self, layout: Layout, snapshot: Snapshot) -> SafetensorsPlan | None:
        """Put this save's metadata into the headers of a layout; None if they don't fit."""
        if not isinstance(layout, SafetensorsLayout):
            return None
        if layout.heads is None:
            return SafetensorsPlan(layout, [b""] * len(layout.images))
        rooms = [image.head_bytes for image in layout.images]
        heads = self._heads(layout.heads, rooms)
        # A shorter header is padded; a longer one would move the tensors.
        fits = all(len(head) == room for head, room in zip(heads, rooms, strict=True))
        return SafetensorsPlan(layout, heads) if fits else None

    def _heads(self, contents: Sequence[tuple[str, Mapping[str, str]]], rooms: Sequence[int]) -> list[bytes]:
        heads = []
        for (text, tied), room in zip(contents, rooms, strict=True):
            both = tied.keys() & (self._facts.keys() | _FRAMEWORK.keys())
            if both:
                raise SaveError(
                    f"{min(both)} is both a tied tensor, which a safetensors file records in its metadata, and a key "
                    "of metadata=; rename the latter"
                )
            try:
                head = encode_header({**_FRAMEWORK, **self._facts, **tied}, text, room)
            except UnicodeEncodeError as exc:
                raise SaveError(f"the name of a tensor is no text that a safetensors file can hold: {exc}") from exc
            if len(head) > MAX_HEADER_BYTES:
                raise SaveError(
                    f"a safetensors file would get a header of {len(head)} bytes, of which readers take "
                    f"{MAX_HEADER_BYTES}: save fewer tensors to a file (shard_bytes=) or with format='dcp'"
                )
            heads.append(head)
        return heads


def _check_division(shard_bytes: int | None, file_of: Mapping[str, int] | None, *, single_file: bool) -> None:
    """Raise ValueError if the division into files is not possible."""
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise ValueError(f"shard_bytes is {shard_bytes!r}; it must be a positive number of bytes, or None")
    for name, value in (("shard_bytes", shard_bytes), ("fqn_to_index_mapping", file_of)):
        if single_file and value is not None:
            raise ValueError(f"{name} is for a directory of files, but the path names one safetensors file")
    if file_of is None:
        return
    if shard_bytes is not None:
        raise ValueError("shard_bytes and fqn_to_index_mapping both divide the tensors among files; pass one of them")
    if not file_of:
        raise ValueError("fqn_to_index_mapping is empty; it must have every tensor's name")
    for name, number in file_of.items():
        if not isinstance(name, str) or type(number) is not int or number < 1:
            raise ValueError(
                f"fqn_to_index_mapping has {name!r}: {number!r}; it must map names to numbers of files, counted from 1"
            )


def _nbytes(tensor: Stored) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@lru_cache(maxsize=16_384)
def _framing(nbytes: int) -> Framing:
    return Framing(b"", b"", (), nbytes)
