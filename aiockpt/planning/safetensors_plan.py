"""Plans in the safetensors format: one file, or a directory with a file or a set of files and its index."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from aiockpt.errors import SaveError
from aiockpt.format.item.ziparchive import Framing
from aiockpt.format.names import INDEX_NAME
from aiockpt.format.safetensors.writer import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    Stored,
    describe_tensors,
    encode_header,
    encode_shard_index,
    file_order,
    has_name,
    shard_name,
)
from aiockpt.planning.layout import lay_out, split_in_order
from aiockpt.planning.planner import FileFormat, Layout, SavePlan, StateSummary
from aiockpt.planning.specs import TensorSpec, describe_contiguous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.snapshot import Snapshot

SHARD_BYTES = 5_000_000_000  # of tensors in a file by default, as the ecosystem's own writers choose

_FRAMEWORK = {"format": "pt"}


@dataclass
class SafetensorsLayout(Layout):
    """The layout of safetensors files."""

    shard_bytes: int | None  # limit of the tensors in a file; None for a single file
    described: Sequence[str]  # for each file the description of its tensors in the header
    aliases: Sequence[Mapping[str, str]]  # for each file the names tied to one of its tensors, with that one's name

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """Index of a set of files."""
        if len(self.images) == 1:
            return {}
        names = self.structure.names
        shards = {image.name: [names[slot.leaf] for slot in image.slots] for image in self.images}
        return {INDEX_NAME: encode_shard_index(shards, self.tensor_bytes)}


@dataclass(frozen=True)
class SafetensorsPlan(SavePlan):
    """A layout together with the headers of one save."""

    layout: SafetensorsLayout

    @property
    def is_single_file(self) -> bool:
        """Whether the checkpoint is one file, with nothing beside it."""
        return self.layout.shard_bytes is None

    def documents(self) -> dict[str, bytes]:
        """Encode the index of a set of files."""
        return self.layout.documents


class SafetensorsFormat(FileFormat):
    """The safetensors format: a single file, or a directory with files of ``shard_bytes`` (None: `SHARD_BYTES`).

    The user's ``metadata`` goes into the headers; values other than text are written as JSON.
    """

    name = "safetensors"

    def __init__(self, metadata: Mapping[str, JsonValue], *, single_file: bool, shard_bytes: int | None) -> None:
        if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
            raise ValueError(f"shard_bytes is {shard_bytes!r}; it must be a positive number of bytes, or None")
        if single_file and shard_bytes is not None:
            raise ValueError("shard_bytes is for a directory of files, but the path names one safetensors file")
        self._shard_bytes = None if single_file else shard_bytes or SHARD_BYTES
        self._facts = {key: value if isinstance(value, str) else _as_json(value) for key, value in metadata.items()}
        if self._facts.get("format", "pt") != "pt":
            raise SaveError(
                "metadata['format'] names the framework in a safetensors file, which readers check: it must be "
                "'pt'; use another key"
            )
        for key, value in self._facts.items():
            _check_text(f"metadata[{key!r}]", key + value)

    def validate(self, snapshot: Snapshot) -> None:
        """Refuse what the format can't hold; drop the containers, of which it keeps only dotted names."""
        names = snapshot.structure.names
        if snapshot.structure.objects:
            name = names[min(snapshot.structure.objects)]
            raise SaveError(
                f"{name} is not a plain tensor, and a safetensors file holds nothing else: leave it out and give it "
                "as metadata=, or save with format='dcp'"
            )
        forms = {(t.dtype, t.layout, t.dim() > 0) for t in snapshot.tensors if t is not None}
        unfit = {form for form in forms if form[1] is not torch.strided or not has_name(form[0], form[2])}
        if unfit or METADATA_KEY in names:
            self._refuse(snapshot, unfit)
        snapshot.containers = []

    @staticmethod
    def _refuse(snapshot: Snapshot, unfit: set[tuple[torch.dtype, torch.layout, bool]]) -> None:
        for name, tensor in zip(snapshot.structure.names, snapshot.tensors, strict=True):
            if name == METADATA_KEY:
                raise SaveError(f"{name} is reserved in a safetensors file; rename the tensor")
            if tensor is not None and (tensor.dtype, tensor.layout, tensor.dim() > 0) in unfit:
                kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
                raise SaveError(
                    f"{name} is a tensor of {tensor.dim()} dimensions and of {kind}, which safetensors has no name "
                    "for; convert it, or save with format='dcp'"
                )

    def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Describe a tensor; it is stored row by row."""
        return describe_contiguous(tensor)

    def lay_out(self, summary: StateSummary, snapshot: Snapshot) -> SafetensorsPlan:
        """Fill one file after the other, in the order of the state dict."""
        names = summary.structure.names
        tensors = {
            leaf: Stored(names[leaf], spec.dtype, tuple(spec.shape))
            for leaf, spec in enumerate(summary.specs)
            if spec is not None and leaf not in summary.tied
        }
        sizes = {leaf: math.prod(shape) * dtype.itemsize for leaf, (_, dtype, shape) in tensors.items()}
        shards = split_in_order(sizes, self._shard_bytes)
        described: list[str] = []
        aliases: list[dict[str, str]] = [{} for _ in shards]
        home: dict[int, dict[str, str]] = {}
        for shard, alias in zip(shards, aliases, strict=True):
            shard.sort(key=lambda leaf: file_order(tensors[leaf]))
            ends = accumulate(sizes[leaf] for leaf in shard)
            described.append(describe_tensors([tensors[leaf] for leaf in shard], ends))
            home |= dict.fromkeys(shard, alias)
        for leaf, first in summary.tied.items():
            home[first][names[leaf]] = names[first]
        heads = self._heads(described, aliases, [0] * len(shards))
        images = [
            lay_out(
                shard_name(number, len(shards)),
                len(head),
                [(leaf, _framing(sizes[leaf])) for leaf in shard],
                aligned=False,
            )
            for number, (shard, head) in enumerate(zip(shards, heads, strict=True))
        ]
        return SafetensorsPlan(SafetensorsLayout(summary, images, self._shard_bytes, described, aliases), heads)

    def fill(self, layout: Layout, snapshot: Snapshot) -> SafetensorsPlan | None:
        """Put this save's metadata into the headers of a layout; None if they don't fit."""
        if not isinstance(layout, SafetensorsLayout) or layout.shard_bytes != self._shard_bytes:
            return None
        rooms = [image.head_bytes for image in layout.images]
        heads = self._heads(layout.described, layout.aliases, rooms)
        fits = all(len(head) == room for head, room in zip(heads, rooms, strict=True))
        return SafetensorsPlan(layout, heads) if fits else None

    def _heads(
        self, described: Sequence[str], aliases: Sequence[Mapping[str, str]], rooms: Sequence[int]
    ) -> list[bytes]:
        heads = []
        for text, tied, room in zip(described, aliases, rooms, strict=True):
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


def _as_json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise SaveError(f"{what} is no text that a safetensors file can hold: {exc}") from exc


@lru_cache(maxsize=16_384)
def _framing(nbytes: int) -> Framing:
    return Framing(b"", b"", (), nbytes)
