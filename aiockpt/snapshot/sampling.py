"""Finds writes that no version counter shows, by samples of tensors' bytes: at the call, and again after staging.

Sample points have a regular distance, and a random start that differs from save to save. The sampled bytes themselves
are kept, not a hash: they are a thousandth of the state, and a difference is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.extent import freed_message, is_freed, plain_memory, reach_bytes, strided_parts
from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import SaveError, StageError
from aiockpt.staging.base import RAW_DTYPES
from aiockpt.staging.pool import copy_small
from aiockpt.staging.runtime import by_address, is_host, reading_behind, ready_event, to_host, use_in

if TYPE_CHECKING:
    from aiockpt.planning.snapshot import Snapshot

LINE_BYTES = 64
"""Sampled at each point: a cache line, since fewer bytes would take as long to read."""
DISTANCE_BYTES = 64 << 10
"""Maximum distance between the points of a tensor ..."""
LEAST_POINTS = 8
"""... and their minimum number, if the tensor is large enough."""

_Kind = tuple[torch.device, torch.dtype, int]
"""Device, dtype and row length of sample points, which are read together if they agree."""


@dataclass(slots=True, eq=False)
class _Finding:
    """The result of comparing points."""

    points: list[SamplePoint]
    differ: torch.Tensor
    ready: torch.Event | None  # when the device has the result; None: it is in host memory

    def leaves(self) -> Iterator[int]:
        """Return the leaves that differ. Blocks until the device has the result."""
        device = self.differ.device
        with nullcontext() if self.ready is None else reading_behind(device, self.ready):
            differ = to_host(self.differ)
        if differ.any():
            parts = torch.split(differ, [point.number for point in self.points])
            for point, rows in zip(self.points, parts, strict=True):
                if rows.any():
                    yield point.leaf


class Samples:
    """Samples of tensors' bytes at `save()`, to be compared with later ones.

    Of each tensor, 64 bytes are sampled in every 64 KiB, and at 8 points at least; on devices by a kernel on the
    caller's current stream. So a write to a whole tensor is always found, as is a contiguous write of 64 KiB. A
    contiguous write of ``n`` bytes is found with a probability of about ``n / 65536``. A change that was undone is not
    found. Tensors at the positions ``besides`` are left out.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor | None], besides: Container[int] = ()
    ) -> None:
        self._names = names
        self._findings: list[_Finding] = []
        self._moved: list[int] = []
        random = Random()  # of its own: the program's must not be advanced
        groups: dict[_Kind, list[SamplePoint]] = {}
        with torch.no_grad(), gc_pause():
            try:
                for leaf, tensor in enumerate(tensors):
                    if tensor is None or leaf in besides:
                        continue
                    for part in sampled_parts(tensor):
                        point = sample_point_of(names[leaf], leaf, tensor, part, random.random())
                        groups.setdefault((part.device, point.view.dtype, point.length), []).append(point)
                # Of the points of one device, dtype and row length, which are read together.
                self._samples = {kind: _rows(points) for kind, points in groups.items()}
            except torch.OutOfMemoryError as exc:
                raise SaveError(
                    "the device has no memory to spare for validate='hash', which takes a thousandth of the state"
                ) from exc
        # The points of each leaf that are not compared yet, with their first row in these samples.
        self._left: dict[int, list[tuple[_Kind, int, SamplePoint]]] = {}
        for kind, points in groups.items():
            starts = accumulate((point.number for point in points), initial=0)
            for start, point in zip(starts, points, strict=False):
                self._left.setdefault(point.leaf, []).append((kind, start, point))

    def compare(
        self,
        leaves: Iterable[int] | None = None,
        readable: Callable[[torch.device], AbstractContextManager[object]] | None = None,
    ) -> None:
        """Compare these leaves (None: all) with their samples, and no leaf twice.

        ``readable`` is a context in which a device's copies are made, and their result awaited. None: use the current
        streams, behind the caller's work in them, and block only for host memory.
        """
        by_kind: dict[_Kind, list[tuple[int, SamplePoint]]] = {}
        for leaf in sorted(self._left if leaves is None else self._left.keys() & set(leaves)):
            for kind, start, point in self._left.pop(leaf):
                by_kind.setdefault(kind, []).append((start, point))
        with torch.no_grad():
            for kind, points in by_kind.items():
                with nullcontext() if readable is None else readable(kind[0]):
                    self._compare(self._samples[kind], points, wait=readable is not None)

    def _compare(self, samples: torch.Tensor, points: list[tuple[int, SamplePoint]], *, wait: bool) -> None:
        stayed = []
        for start, point in points:
            if not wait:  # the program may go on in another stream, and free there what is read here
                use_in(None, point.view)
            view = by_address(point.view)
            if view is None or point.has_moved():
                self._moved.append(point.leaf)
            else:
                stayed.append((start, point._replace(view=view)))
        if not stayed:
            return
        if not wait:
            for tensor in (samples, *(point.indices for _, point in stayed if point.indices is not None)):
                use_in(None, tensor)
        try:
            # Here, not when the points were chosen: there, this kernel would run in another stream than the next ones.
            before = torch.cat([samples.narrow(0, start, point.number) for start, point in stayed])
            now = _rows([point for _, point in stayed]).view(torch.uint8)
            differ = (now != before.view(torch.uint8)).any(1)
        except torch.OutOfMemoryError as exc:
            raise StageError("the device has no memory to look for changes, as validate='hash' asks") from exc
        device = differ.device
        ready = None if wait or is_host(device) else ready_event(device)
        if ready is None:
            differ = to_host(differ)
        self._findings.append(_Finding([point for _, point in stayed], differ, ready))

    def changed(self) -> list[str]:
        """Return the names of the tensors that differ. Blocks until devices have finished comparing."""
        leaves = set(self._moved)
        for finding in self._findings:
            leaves.update(finding.leaves())
        return [self._names[leaf] for leaf in sorted(leaves)]


def _rows(points: Sequence[SamplePoint]) -> torch.Tensor:
    """Return the present values at these points as one tensor, with the rows of all points."""
    return torch.cat([point.rows() for point in points])


# --- replicas on other ranks ----------------------------------------------------------------------

_LINES = 4
"""Compared of each tensor: the first, the last, and two between, each of 64 bytes."""
_FACTORS = np.cumprod(np.full(_LINES * LINE_BYTES // 8, 0x5851F42D4C957F2D, np.uint64))  # odd: each bit has an effect


def digest_replicas(snapshot: Snapshot) -> bytes:
    """Return a digest of each leaf, by which ranks compare their copies; see `differing_replicas`.

    They are made of samples, always at the same places, of contiguous tensors in host memory and of those that were
    copied at the call, but not of parts of tensors. May block until devices have made these copies.
    """
    tensors, shards, eager = list(snapshot.tensors), snapshot.structure.shards, dict(snapshot.eager)
    lines = np.zeros((len(tensors), _LINES, LINE_BYTES), np.uint8)
    base, sampled = lines.ctypes.data, np.zeros(len(tensors), np.bool_)
    packed: dict[torch.device, list[int]] = {}
    for leaf, tensor in enumerate(tensors):
        if tensor is None or leaf in shards:
            continue
        if leaf in eager:
            packed.setdefault(tensor.device, []).append(leaf)
        elif tensor.is_cpu and _is_plain(tensor) and not is_freed(tensor):
            address, target, nbytes = tensor.data_ptr(), base + leaf * _LINES * LINE_BYTES, tensor.nbytes
            length, distance = min(nbytes, LINE_BYTES), max(0, nbytes - LINE_BYTES)
            for number in range(_LINES):
                copy_small(target + number * LINE_BYTES, address + number * distance // (_LINES - 1), length)
            sampled[leaf] = nbytes > 0
    for device, leaves in packed.items():
        with snapshot.readable(device):
            arena = snapshot.arenas[device].cpu().numpy()
        windows = sliding_window_view(np.concatenate([arena, np.zeros(LINE_BYTES, np.uint8)]), LINE_BYTES)
        begins, sizes = np.array([eager[leaf] for leaf in leaves])[:, :, None].transpose(1, 0, 2)
        starts = begins + np.arange(_LINES) * np.maximum(0, sizes - LINE_BYTES) // (_LINES - 1)
        lines[leaves] = windows[starts] * (np.arange(LINE_BYTES) < sizes[:, :, None])
        sampled[leaves] = True
    mixed = (lines.reshape(len(tensors), _LINES * LINE_BYTES).view(np.uint64) * _FACTORS).sum(1, np.uint64)
    digests = np.where(sampled, (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1), np.uint32(0))
    return digests.tobytes() if sampled.any() else b""


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()


# --- sample points --------------------------------------------------------------------------------


class SamplePoint(NamedTuple):
    """The points of a tensor at which it is sampled: rows of adjacent elements."""

    leaf: int
    tensor: torch.Tensor
    part: torch.Tensor  # the tensor, or one that holds some of its values
    view: torch.Tensor  # of its memory: the rows, or what ``indices`` is into
    indices: torch.Tensor | None  # of the rows in ``view``, if they can't be a view themselves
    number: int  # of rows
    length: int  # elements of a row
    distance: int  # from the part's memory to the view's, in bytes
    end_bytes: int  # the least size of the storage that covers the part

    def has_moved(self) -> bool:
        """Return whether the tensor's memory was replaced or freed."""
        # Asked before the memory is read: to read freed memory may end the process.
        if self.view.untyped_storage().nbytes() < self.end_bytes:
            return True
        return self.view.data_ptr() - self.part.data_ptr() != self.distance  # by `.data =` or set_()

    def rows(self) -> torch.Tensor:
        """Return the present values: a view of shape (number, length), or a copy."""
        return self.view if self.indices is None else torch.take(self.view, self.indices)


def sampled_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors to sample of a tensor of any layout: of a quantized one, all its memory."""
    if tensor.is_quantized:
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return [raw.set_(tensor.untyped_storage())]
    # The tensor itself, not a view: a view would not show that the tensor's memory was replaced.
    return [part if part is tensor else part.detach() for part in strided_parts(tensor)]


def sample_point_of(name: str, leaf: int, tensor: torch.Tensor, part: torch.Tensor, chance: float) -> SamplePoint:
    """Choose the sample points of a part of a tensor; ``chance``, from 0 to 1, is where they start."""
    if is_freed(part):
        raise SaveError(freed_message(name, part))
    numel, size = part.numel(), part.itemsize
    length = min(numel, max(1, LINE_BYTES // size))
    number = min(numel // length, max(LEAST_POINTS, -(-numel * size // DISTANCE_BYTES)))
    # Seldom a power of two, so that all columns of a matrix are met.
    step = (numel - length) // number
    begin = int(chance * (numel - length - (number - 1) * step + 1))
    plain = plain_memory(part)
    dense = plain
    if not plain.is_contiguous():  # its dimensions in their order in memory: contiguous, if it has no holes
        stride = plain.stride()
        dense = plain.permute(sorted(range(plain.dim()), key=lambda d: (-stride[d], d)))
    if dense.is_contiguous():
        indices = None
        dense = dense.as_strided((number, length), (step, 1), part.storage_offset() + begin)
    else:
        row = torch.arange(begin, begin + length, device=part.device)
        indices = torch.arange(number, device=part.device)[:, None] * step + row
    view = dense.view(RAW_DTYPES[size])  # autocast would cast floats, and refuses some mixtures of them
    return SamplePoint(
        leaf, tensor, part, view, indices, number, length, view.data_ptr() - part.data_ptr(), reach_bytes(part)
    )
