"""Finding writes that no version counter shows: bytes of tensors, seen at the call and again when all is staged.

The places lie at a regular distance, from a random one on, which differs from save to save. What is seen is kept as it
is, not its hash: it is a thousandth of the state, and what differs is known for sure.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import compress
from random import Random
from typing import TYPE_CHECKING

import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import SaveError, StageError
from aiockpt.snapshot.sample_points import SamplePoint, place_of, seen_parts
from aiockpt.staging.runtime import reading_behind, ready_event

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from contextlib import AbstractContextManager


@dataclass(slots=True, eq=False)
class _Group:
    """Places whose bytes are taken at once: those of one device, dtype and length of rows."""

    places: list[SamplePoint]
    before: torch.Tensor

    def split(self, chosen: list[bool]) -> tuple[_Group, _Group]:
        """Give the places that are chosen, and the others."""
        rows = _split(self.before, self.places)
        others = [not each for each in chosen]
        mine, theirs = (
            _Group(list(compress(self.places, which)), torch.cat([self.before[:0], *compress(rows, which)]))
            for which in (chosen, others)
        )
        return mine, theirs


@dataclass(slots=True, eq=False)
class _Finding:
    """What has come out for a group; ``moment`` is when that is known on its device, None where it is known.

    The group is kept until then: its memory is still read.
    """

    group: _Group
    differ: torch.Tensor
    moment: torch.Event | None

    def leaves(self) -> Iterator[int]:
        """Give the tensors that differ. Blocks until it is known."""
        device = self.differ.device
        with nullcontext() if self.moment is None else reading_behind(device, self.moment):
            differ = self.differ.cpu()
        if differ.any():
            for place, rows in zip(self.group.places, _split(differ, self.group.places), strict=True):
                if rows.any():
                    yield place.leaf


class Samples:
    """Some bytes of tensors as they were at `save()`, to be compared with what is there later.

    Of each tensor 64 bytes are seen in every 64 KiB, and at 8 places at least; on devices by a kernel on the caller's
    current stream. So a write that changes a whole tensor is always found, as is one of 64 KiB in one piece; one of
    ``n`` bytes in one piece with a probability of about ``n / 65536``. What was changed back is not found.

    Args:
        names: of the tensors.
        tensors: of which some bytes are looked at.
        besides: the positions of those that need it not.

    Raises:
        SaveError: a device has no memory for it, or a tensor has none.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor | None], besides: Container[int] = ()
    ) -> None:
        self._names = names
        self._findings: list[_Finding] = []
        self._moved: list[int] = []
        random = Random()  # not the program's own, whose course is its business
        groups: dict[tuple[torch.device, torch.dtype, int], list[SamplePoint]] = {}
        with torch.no_grad(), gc_pause():
            for leaf, tensor in enumerate(tensors):
                if tensor is None or leaf in besides:
                    continue
                for part in seen_parts(tensor):
                    place = place_of(names[leaf], leaf, tensor, part, random.random())
                    groups.setdefault((part.device, place.seen.dtype, place.length), []).append(place)
            try:
                self._groups = [_Group(places, _rows(places)) for places in groups.values()]
            except torch.OutOfMemoryError as exc:
                raise SaveError(
                    "the device has no memory to spare for validate='hash', which takes a thousandth of the state"
                ) from exc

    def look(
        self,
        chosen: Callable[[torch.Tensor], bool] | None = None,
        readable: Callable[[torch.device], AbstractContextManager[object]] | None = None,
    ) -> None:
        """Look at the same places again; at each once, and at no tensor any more at which this was done.

        Args:
            chosen: which tensors to look at; None for all.
            readable: makes a stream current in which the copies are done, and blocks until it is known what differs.
                None: use the current streams, behind what the caller gave them to do, and block for host memory alone.

        Raises:
            StageError: a device has no memory for it.
        """
        groups, self._groups = self._groups, []
        with torch.no_grad():
            for group in groups:
                if chosen is not None:
                    group, rest = group.split([chosen(place.tensor) for place in group.places])
                    self._groups += [rest] if rest.places else []
                device = group.before.device
                with nullcontext() if readable is None else readable(device):
                    self._compare(group, wait=readable is not None)

    def _compare(self, group: _Group, *, wait: bool) -> None:
        stayed = [not place.has_moved() for place in group.places]
        if not all(stayed):
            group, moved = group.split(stayed)
            self._moved += [place.leaf for place in moved.places]
        if not group.places:
            return
        try:
            now = _rows(group.places).view(torch.uint8)
            differ = (now != group.before.view(torch.uint8)).any(1)
        except torch.OutOfMemoryError as exc:
            raise StageError("the device has no memory to look for changes, as validate='hash' asks") from exc
        device = differ.device
        finding = _Finding(group, differ, None if wait or device.type == "cpu" else ready_event(device))
        if finding.moment is None:
            finding.differ = differ.cpu()
        self._findings.append(finding)

    def changed(self) -> list[str]:
        """Give the names of what was found to differ. Blocks until devices have told."""
        leaves = set(self._moved)
        for finding in self._findings:
            leaves.update(finding.leaves())
        return [self._names[leaf] for leaf in sorted(leaves)]


def _rows(places: Sequence[SamplePoint]) -> torch.Tensor:
    """Take what is at these places now: all in one tensor, a row of elements for each place."""
    return torch.cat([place.rows() for place in places])


def _split(rows: torch.Tensor, places: Sequence[SamplePoint]) -> Sequence[torch.Tensor]:
    """Give those of each place, of rows that were taken together."""
    return torch.split(rows, [place.number for place in places])
