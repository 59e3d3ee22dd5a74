"""Keeps one writer process: starts it, and a new one when it has died."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import anyio

from aiockpt.core.threads import Workers
from aiockpt.errors import WriteError
from aiockpt.writing.process.connection import Link
from aiockpt.writing.process.launch import WriterProcess
from aiockpt.writing.process.messages import Hello, Image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from aiockpt.options import ProcessWriter
    from aiockpt.planning.planner import Layout


class SharedFile(Protocol):
    """Memory in a file that the process maps as well."""

    fd: int


class WriterHost:
    """Gives saves the process that writes them. For the engine's loop, but for `kill`.

    Args:
        options: how the process is to be run.
        chunk_bytes: the size of a chunk.
        io_threads: how many threads write.
        memory: the memory with the chunks.
    """

    def __init__(self, options: ProcessWriter, chunk_bytes: int, io_threads: int, memory: SharedFile) -> None:
        patience_s = options.agreement_timeout
        self._hello = Hello(chunk_bytes, io_threads, options.nice, options.ionice_numbers, patience_s)
        self._memory = memory
        self._worker = Workers(1, "aiockpt-writer")
        self._turn = anyio.Lock()
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        self._layout: Layout | None = None
        self._layout_number = 0
        self._images: Sequence[Image] = ()
        self._tasks: TaskGroup | None = None

    def start(self, tasks: TaskGroup) -> None:
        """Start the process ahead of the first save, in the background."""
        self._tasks = tasks
        tasks.start_soon(self._start_ahead)

    async def _start_ahead(self) -> None:
        try:
            await self.link()
        except WriteError:
            return  # the first save tries again, and tells

    async def link(self) -> Link:
        """Give the process that runs; start one if there is none.

        Raises:
            WriteError: it can't be started.
        """
        async with self._turn:
            if self._link is None or self._link.dead:
                if self._tasks is None:
                    raise WriteError("no writer process is started any more: the checkpointer is being closed")
                try:
                    process = await self._worker.run(WriterProcess, self._memory.fd)
                except Warning:  # an error only because the program makes errors of warnings
                    raise
                except Exception as exc:  # of the system, or of what is in sys.path
                    raise WriteError(f"the writer process can't be started: {exc}") from exc
                self._link = Link(process, self._hello)
                self._link.start(self._tasks)
            return self._link

    def number(self) -> int:
        """Give a number for a save."""
        return next(self._numbers)

    async def images_for(self, link: Link, layout: Layout) -> tuple[int, Sequence[Image] | None]:
        """Give the number of a layout, and its images if the process does not know them yet."""
        if layout is not self._layout:
            self._images = await self._worker.run(lambda: [Image.of(image) for image in layout.images])
            self._layout = layout
            self._layout_number += 1
        number, known = self._layout_number, link.layout
        link.layout = number
        return number, None if known == number else self._images

    def kill(self) -> None:
        """End the process at once: it is stuck. From any thread."""
        if self._link is not None:
            self._link.kill()

    async def aclose(self) -> None:
        """Let the process end, and wait until it has. Idempotent."""
        async with self._turn:  # one may just be starting
            link, self._link, self._tasks = self._link, None, None
        if link is not None:
            await link.aclose()
        self._worker.close()
