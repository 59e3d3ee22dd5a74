"""Mutants of the engine: defects of its code for CUDA that the tests must see. Each is patched in, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiockpt.snapshot import capture, consistency
from aiockpt.staging import cuda, runtime, scatter


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


async def _nothing_async(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _stagers_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """The staging stream does not wait for the event of `save()`."""
    enqueue = cuda.AcceleratorStager._enqueue

    def mutant(self: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._runtime, "wait_for", _nothing)
            return enqueue(self, *args)

    patch.setattr(cuda.AcceleratorStager, "_enqueue", mutant)


def _fences_order_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.AcceleratorStager, "fence", _nothing)


def _memory_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """`record_stream` is missing."""
    patch.setattr(runtime.Runtime, "use", _nothing)


class _Done:
    wait = _nothing_async


def _placers_copies_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    issue = scatter.AcceleratorPlacer.issue

    async def mutant(self: Any, *args: Any) -> Any:
        await issue(self, *args)
        return _Done()

    patch.setattr(scatter.AcceleratorPlacer, "issue", mutant)


def _chunks_are_lent_too_early(patch: pytest.MonkeyPatch) -> None:
    """The copies of all chunks but the last of a save are not waited for."""
    issue = cuda.AcceleratorStager.issue

    async def mutant(self: Any, *args: Any) -> Any:
        return [_Done()] * len(await issue(self, *args))

    patch.setattr(cuda.AcceleratorStager, "issue", mutant)


def _targets_are_filled_at_once(patch: pytest.MonkeyPatch) -> None:
    """A load does not wait for the work on its targets in the caller's stream."""
    patch.setattr(scatter.AcceleratorPlacer, "_begin", lambda self, ready: self._runtime.enter())


def _new_tensors_are_the_placers(patch: pytest.MonkeyPatch) -> None:
    """New tensors belong to the default stream, whatever the caller's is, and nothing orders the copies behind it."""
    new = scatter.AcceleratorPlacer._new
    patch.setattr(scatter.AcceleratorPlacer, "_new", lambda self, shapes, stream: new(self, shapes, None))
    patch.setattr(runtime.CudaRuntime, "record_current", runtime.CudaRuntime.record)


def _events_come_too_early(patch: pytest.MonkeyPatch) -> None:
    """The event of a group of copies is recorded before they are enqueued."""
    copy_all = cuda.ChunkFiller.copy_all
    record = runtime.CudaRuntime.record

    def mutant(self: Any) -> None:
        self._runtime.early = record(self._runtime)
        copy_all(self)

    patch.setattr(cuda.ChunkFiller, "copy_all", mutant)
    patch.setattr(runtime.CudaRuntime, "record", lambda self: self.__dict__.pop("early", None) or record(self))


def _counters_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consistency.Consistency, "_compare_versions", _nothing)


def _captures_are_not_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "is_capturing", lambda device: False)


def _memory_is_unlocked_too_early(patch: pytest.MonkeyPatch) -> None:
    """Staging memory is unlocked when the copies are enqueued."""
    enqueue = cuda.AcceleratorStager._enqueue

    def mutant(self: Any, *args: Any) -> Any:
        issued = enqueue(self, *args)
        self._unpin()
        return issued

    patch.setattr(cuda.AcceleratorStager, "_enqueue", mutant)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the staging stream does not wait for save()": _stagers_do_not_wait,
    "a fence orders nothing": _fences_order_nothing,
    "no record_stream": _memory_is_not_kept,
    "the placer's copies are not waited for": _placers_copies_are_not_awaited,
    "a chunk is lent again before its copy": _chunks_are_lent_too_early,
    "targets are filled at once": _targets_are_filled_at_once,
    "new tensors are the placer's": _new_tensors_are_the_placers,
    "events come before their copies": _events_come_too_early,
    "counters are not compared": _counters_are_not_compared,
    "captures are not refused": _captures_are_not_refused,
    "memory is unlocked too early": _memory_is_unlocked_too_early,
}
