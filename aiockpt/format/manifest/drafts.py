"""The documents of a checkpoint, before its items are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiockpt.core.dataclasses import dataclass, field

if TYPE_CHECKING:
    from aiockpt.format.manifest.index_writer import IndexDraft
    from aiockpt.format.transforms.item_transforms import TransformedDraft


@dataclass(frozen=True, slots=True)
class Drafts:
    """The documents of a checkpoint, as far as they are known before its items are written; without the manifest."""

    documents: Mapping[str, bytes | bytearray] = field(repr=False)
    index: IndexDraft | None = None  # of the manifest; None: the format has an index of its own, or there is no place
    transformed: TransformedDraft | None = None  # None: items are stored as they are
