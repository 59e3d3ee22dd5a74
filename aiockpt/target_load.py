"""Loading into the tensors of a state dict."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiockpt.errors import LoadError, MissingKeysError
from aiockpt.format.garbage import few_collections
from aiockpt.format.index import TensorEntry
from aiockpt.planning.selection import matching
from aiockpt.planning.tree import StructureError, flatten, replace_leaves
from aiockpt.reads import TensorRead, reads_of, say_what_was_placed
from aiockpt.steps import count_change
from aiockpt.targets import target_of
from aiockpt.whole_load import WholeLoad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from aiockpt.format.index import Entry, ObjPath

_SHARED_BYTES = 16 << 20
"""Below this, how something is read makes no difference."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to come into a target.

    Attributes:
        reads: what fills its tensors.
        filled: the tensors whose version counters tell of that.
        fresh: the entries of what takes the place of other leaves.
        paths: where those leaves are.
    """

    reads: list[TensorRead] = field(default_factory=list)
    filled: list[torch.Tensor] = field(default_factory=list)
    fresh: dict[str, Entry] = field(default_factory=dict)
    paths: dict[str, ObjPath] = field(default_factory=dict)


class TargetLoad(WholeLoad):
    """A load into the tensors of a state dict."""

    _prepared: _Plan
    _values: dict[str, Any]

    async def prepare(self, state_dict: Mapping[Any, Any]) -> None:
        """Look at all that can be known without reading the tensors; nothing is changed.

        Raises:
            LoadError: it can't be loaded.
        """
        plan = await self._tools.workers.run(self._plan, state_dict)
        self._values = await self.values(plan.fresh)
        await self._reader.prepare(plan.reads)
        self._prepared = plan

    @property
    def names(self) -> tuple[str, ...]:
        """The keys whose tensors are filled."""
        return tuple(dict.fromkeys(read.name for read in self._prepared.reads))

    def number(self) -> int:
        """Give a number for the bytes that are to be read, another for other bytes; 0 if there are few."""
        reads = self._prepared.reads
        if sum(read.target.nbytes for read in reads if read.target is not None) < _SHARED_BYTES:
            return 0
        parts = (
            f"{read.name} {read.chunk.offsets} {[(s.start, s.count, s.step) for s in read.selections or ()]}"
            for read in reads
        )
        return 1 + zlib.crc32("\n".join(parts).encode("utf-8", "surrogatepass"))

    async def fill(self, state_dict: Mapping[Any, Any]) -> Any:
        """Load what was prepared; give ``state_dict``.

        Raises:
            LoadError: bytes are damaged or can't be read; it says what was placed.
        """
        plan, values = self._prepared, self._values
        # Written behind autograd's back: let it notice, and a save that is copying them, however this ends.
        count_change(plan.filled)
        try:
            await self._reader.read(plan.reads)
        except LoadError as exc:
            say_what_was_placed(exc, plan.reads)
            raise
        finally:
            count_change(plan.filled)
        if plan.fresh:
            replace_leaves(state_dict, {path: values[name] for name, path in plan.paths.items()})
        return state_dict

    def _plan(self, state_dict: Mapping[Any, Any]) -> _Plan:
        """Compare the target with what is stored."""
        with few_collections():
            entries = dict(self._index.entries.items())
            objects = {name for name, entry in entries.items() if not isinstance(entry, TensorEntry)}
            try:
                flat = flatten(state_dict, whole=objects)
            except StructureError as exc:
                raise LoadError(f"can't load into this state dict: {exc}") from None
            wanted = set(flat.names)
            if self._options.keys is not None:
                wanted, unmatched = matching(wanted, self._options.keys)
                self._check_missing(unmatched)
            self._check_missing([name for name in flat.names if name in wanted and name not in entries])
            plan = _Plan()
            for name, path, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
                if name in entries and name in wanted:
                    self._add(plan, name, path, leaf, entries[name])
        if plan.fresh:
            try:
                replace_leaves(state_dict, dict.fromkeys(plan.paths.values()), check=True)
            except StructureError as exc:
                raise LoadError(f"can't load into this state dict: {exc}; nothing was changed") from None
        return plan

    def _add(self, plan: _Plan, name: str, path: ObjPath, leaf: Any, entry: Entry) -> None:
        target = target_of(self._path, name, entry, leaf, self._options.dtype)
        if target is None or not isinstance(entry, TensorEntry):
            plan.fresh[name] = entry
            plan.paths[name] = path
            return
        for tensor, wanted in target.fillings:
            plan.reads.extend(reads_of(name, entry, tensor, wanted, fills=True))
        plan.filled.extend(target.counted)

    def _check_missing(self, missing: Sequence[str]) -> None:
        if missing and self._options.strict:
            shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise MissingKeysError(
                f"{self._path} lacks {len(missing)} of the keys asked for: {shown}. Pass strict=False to leave "
                "them as they are.",
                tuple(missing),
            )
