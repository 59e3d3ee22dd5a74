"""Writer process: noticing that the trainer has died."""

from __future__ import annotations

import asyncio
import os

import pytest

from aiockpt.writing.process.child import watch_parent


@pytest.mark.asyncio
async def test_a_death_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a process that has ended stays readable: a loop that looked on would never sleep again."""
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    opened: list[int] = []
    pidfd_open = os.pidfd_open

    def open_and_note(pid: int) -> int:
        opened.append(pidfd_open(pid))
        return opened[-1]

    monkeypatch.setattr(os, "pidfd_open", open_and_note)
    async with watch_parent(child.pid) as dead:
        assert not dead.is_set()
        child.stdin.close()
        await dead.wait()
        assert not asyncio.get_running_loop().remove_reader(opened[0])  # there is none any more
    await child.wait()
