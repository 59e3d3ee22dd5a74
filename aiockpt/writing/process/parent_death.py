"""Noticing that the trainer has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LOOK_S = 0.5


@contextlib.asynccontextmanager
async def death_of(pid: int) -> AsyncIterator[anyio.Event]:
    """Give an event that is set when the process, this one's parent, has ended.

    The end of the socket between them is no sure sign: what the trainer has forked may hold it open.
    """
    dead = anyio.Event()
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone already, or not to be had in this container
        fd = -1
    if os.getppid() != pid:
        dead.set()

    def died() -> None:
        loop.remove_reader(fd)  # it would be found readable for ever
        dead.set()

    if fd >= 0:
        loop.add_reader(fd, died)
    try:
        async with anyio.create_task_group() as tasks:
            if fd < 0:
                tasks.start_soon(_look, pid, dead)
            try:
                yield dead
            finally:
                tasks.cancel_scope.cancel()
    finally:
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)


async def _look(pid: int, dead: anyio.Event) -> None:
    while os.getppid() == pid:  # noqa: ASYNC110 - nobody can set an event for this
        await anyio.sleep(_LOOK_S)
    dead.set()
