"""Shared by the readers and the writers: a checkpointer to work with, finished futures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.futures import Future

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.sync_checkpointer import SyncCheckpointer

AnyCheckpointer = SyncCheckpointer | AsyncCheckpointer
T = TypeVar("T")


@contextmanager
def borrowed(checkpointer: AnyCheckpointer | None, **settings: Any) -> Iterator[AnyCheckpointer]:
    """Yield the caller's checkpointer, or if there is none, a new one that is closed afterwards."""
    if checkpointer is not None:
        yield checkpointer
        return
    with SyncCheckpointer(process_group=None, **settings) as own:
        yield own


def finished(value: T) -> Future[T]:
    """Return a future that is done: the methods of readers and writers block, but torch waits on their results."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
