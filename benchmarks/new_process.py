"""A load in a new process: no memory is there to be used again, and nothing has started.

``python -m benchmarks.new_process PATH`` says that it is ready, waits for a line, loads, and prints the figures.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiockpt
from benchmarks.loaders import Loader
from benchmarks.measure import Sample, timed
from benchmarks.states import State, checksums


class NewProcess(Loader):
    """This package in a process of its own, which has imported it and done nothing with it."""

    name = "aiockpt, new process"
    note = "fresh memory, engine started; CRC verified"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._process: asyncio.subprocess.Process | None = None
        self._checksums: dict[str, int] = {}

    async def prepare(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            str(self.path.resolve()),
            cwd=Path(__file__).parents[1],  # where this package is found
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 << 20,
        )
        await self._said()

    async def load(self) -> None:
        raise NotImplementedError("it is measured where it happens")

    async def measured(self) -> tuple[None, Sample]:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("prepare() comes first")
        self._process.stdin.write(b"load\n")
        said = await self._said()
        await self.close()
        self._checksums = said["checksums"]
        return None, said["sample"]

    def matches(self, loaded: State | None, state: State) -> bool:
        return self._checksums == checksums(state)

    async def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()  # it ends when nothing more can come
            await self._process.wait()
            self._process = None

    async def _said(self) -> Any:
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the new process ended with {await self._process.wait()}; its error is above")
        return json.loads(line)


async def load_and_tell(path: Path) -> None:
    """Load when told to, measure it, and print that with what shows that it was right."""

    checkpointer = aiockpt.AsyncCheckpointer()

    async def load() -> Any:
        return await checkpointer.load(path)

    print(json.dumps("ready"), flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        return
    loaded, sample = await timed(load, "loaded_s")
    await checkpointer.aclose()
    print(json.dumps({"sample": sample, "checksums": checksums(loaded)}), flush=True)


if __name__ == "__main__":
    asyncio.run(load_and_tell(Path(sys.argv[1])))
