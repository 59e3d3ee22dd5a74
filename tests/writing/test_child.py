"""The writer process: the order of saves."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import anyio
import pytest

from aiockpt.core.threads import Workers
from aiockpt.format.item.ziparchive import Framing
from aiockpt.planning.layout import lay_out
from aiockpt.storage import LocalStorage
from aiockpt.writing.file_writer import WriterThreads
from aiockpt.writing.process import messages
from aiockpt.writing.process.child import ChildSave, SharedState


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_failed_save_ends_after_the_saves_before_it(tmp_path: Path) -> None:
    """The next save waits only for the failed one, and must not be published before the earlier ones."""
    image = lay_out("f", 0, [(0, Framing(b"", b"", (), 100))], aligned=False)
    threads = WriterThreads(Workers(1, "seal"), Workers(1, "io"))
    failed, ended = anyio.Event(), []

    def post(message: messages.Message) -> None:
        if isinstance(message, messages.Failed) and message.save == 2:
            failed.set()

    shared = SharedState(4096, memoryview(bytearray(4096)), threads, post)

    def save(number: int, previous: ChildSave | None) -> ChildSave:
        begin = messages.Begin(
            save=number,
            path=str(tmp_path / f"c{number}"),
            storage=pickle.dumps(LocalStorage(fsync=False)),
            overwrite=False,
            names=["f"],
            heads=[b""],
            codings=None,
        )
        return ChildSave(begin, [image], shared, previous)

    async def run(each: ChildSave) -> None:
        await each.run()
        ended.append(each.number)

    first = save(1, None)
    second = save(2, first)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, first)
        tasks.start_soon(run, second)
        second.handle(messages.Cancel(2))
        await failed.wait()
        await anyio.wait_all_tasks_blocked()
        assert ended == []
        first.handle(messages.Cancel(1))
    assert ended == [1, 2]
    assert not os.listdir(tmp_path)
    threads.seal_workers.close()
    threads.io_workers.close()
