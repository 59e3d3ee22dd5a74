"""Loads in new processes, as on resume: no memory can be reused, and no engine has started.

``python -m benchmarks.measured.new_process LOADER DIRECTORY KIND`` imports the loader's packages, allocates its
target, prints "ready", waits for a line on stdin, loads, and prints the figures with checksums of the loaded tensors.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.measure import Runs, Sample, interleave, timed
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, checksums, size_of, transformer_state
from benchmarks.limits import machine, raw
from benchmarks.peers import loaders
from benchmarks.peers.checkpoints import make
from benchmarks.peers.loaders import Loader
from benchmarks.peers.streamers import fastsafetensors_load, runai_load
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, shortest
from benchmarks.report.report import Report, Table, most_mib, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 3

NEW, UNCHECKED, TARGET = "aiockpt, new tensors", "aiockpt, new tensors, no CRC", "aiockpt, into a target"
_SPEC = "spec.json"
# What a package imports at its first load is imported before, too.
_IMPORTS = {
    "aiockpt": "aiockpt.engine.loader",
    "safetensors": "safetensors.torch",
    "Run:ai": "runai_model_streamer",
    "fastsafetensors": "fastsafetensors",
}
_ORDINARY = ("torch.load", "safetensors")


class FreshRead(Loader):
    """The limit: the bytes read into fresh memory."""

    def __init__(self, path: Path, *, direct: bool, huge: bool, crc: bool = False) -> None:
        super().__init__(path)
        self._direct, self._huge, self._crc = direct, huge, crc

    async def load(self) -> None:
        file = self.path / raw.FIRST_FILE
        arena = raw.Arena(file.stat().st_size, touched=False, huge=self._huge)
        raw.read_into(file, arena, 2, direct=self._direct, crc=self._crc)


def contenders(directory: Path, *, cold: bool) -> dict[str, Callable[[State], Loader]]:
    """Return for each loader's name a function that creates the loader for a target."""
    tensors, own = directory / "state.safetensors", directory / "aiockpt"
    plain = directory / "raw"
    return {
        "raw, fresh memory in small pages, 2 threads": lambda _: FreshRead(plain, direct=cold, huge=False),
        "raw, fresh memory in huge pages, 2 threads": lambda _: FreshRead(plain, direct=cold, huge=True),
        "CRC, fresh memory in huge pages, 2 threads": lambda _: FreshRead(plain, direct=cold, huge=True, crc=True),
        NEW: lambda _: loaders.Aiockpt(own, name=NEW),
        UNCHECKED: lambda _: loaders.Aiockpt(own, name=UNCHECKED, note="checks no bytes", verify=False),
        TARGET: lambda target: loaders.Aiockpt(own, target, name=TARGET),
        "dcp.load, into a target": lambda target: loaders.dcp_load(directory / "dcp", target),
        "torch.load": lambda _: loaders.torch_load(directory / "state.pt"),
        "torch.load mmap, written": lambda _: loaders.torch_map(directory / "state.pt")[1],
        "safetensors mmap, written": lambda _: loaders.safetensors_load(tensors)[1],
        "safetensors pread": lambda _: loaders.safetensors_load(tensors)[2],
        "Run:ai streamer": lambda _: runai_load(tensors),
        "fastsafetensors": lambda _: fastsafetensors_load(tensors, direct=cold),
    }


class NewProcess:
    """A contender in a process of its own, which has only imported the packages it needs.

    Args:
        name: the name of the contender, which the process creates itself.
        directory: the directory of the checkpoints.
        kind: "cold" or "cached".
        expected: the checksums of the saved tensors.
        module: the module that the process runs.
        note: its note in tables.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        kind: str,
        expected: Mapping[str, int],
        *,
        module: str = "benchmarks.measured.new_process",
        note: str = "",
    ) -> None:
        self.name, self.note = name, note
        self._arguments = (module, name, str(directory.resolve()), kind)
        self._expected = expected

    async def measure(self, before: Callable[[], None]) -> Sample:
        """Start the process, let it load, and compare its checksums with the expected ones.

        Args:
            before: called when the process is ready, before it loads.

        Raises:
            ValueError: if the loaded tensors differ from the saved ones.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *self._arguments,
            cwd=Path(__file__).parents[2],  # so that the process can import this package
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 << 20,
        )
        assert process.stdin is not None
        try:
            await self._answer(process)
            before()
            process.stdin.write(b"go\n")
            said = await self._answer(process)
        finally:
            process.stdin.close()  # the process ends when its stdin is closed
            await process.wait()
        if said["checksums"] is not None and said["checksums"] != self._expected:
            raise ValueError("what was loaded differs from what was saved")
        return said["sample"]

    @staticmethod
    async def _answer(process: asyncio.subprocess.Process) -> Any:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the new process ended with {await process.wait()}; its error is above")
        said: Any = json.loads(line)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    nbytes, rounds, expected = size_of(state), options.rounds or ROUNDS, checksums(state)
    for name in ("raw", "aiockpt", "dcp", "state.pt", "state.safetensors"):
        make(state, directory / name)
    _write_spec(directory, state)
    del state
    tables, bars, means = [], [], ""
    for kind in ("cold", "cached"):

        def prepare(paths: Sequence[Path], kind: str = kind) -> None:
            nonlocal means
            means = machine.drop_from_cache(paths)
            if kind == "cached":
                machine.bring_into_cache(paths)

        candidates = contenders(directory, cold=kind == "cold")
        loaders_by_name = {name: make_one({}) for name, make_one in candidates.items()}
        files = {name: machine.files_under(each.path) for name, each in loaders_by_name.items()}
        selected = chosen(
            [NewProcess(each, directory, kind, expected, note=loaders_by_name[each].note) for each in candidates],
            options.only,
        )

        async def once(
            each: NewProcess, _number: int, prepare: Any = prepare, files: Mapping[str, list[Path]] = files
        ) -> Sample:
            machine.settle()
            return await each.measure(lambda: prepare(files[each.name]))

        runs = await interleave(selected, rounds, once, warm_up=False)
        columns = {
            "loaded (min..max)": spread("loaded_s"),
            "GiB/s": speed("loaded_s", nbytes),
            "of limit": of_limit("loaded_s", shortest(runs, "raw", "loaded_s")),
            "extra memory, MiB": most_mib("extra_bytes"),
        }
        title = (
            f"new process, {kind}: {nbytes / 2**30:.2f} GiB in {options.tensors} tensors, medians of {rounds} rounds"
        )
        tables.append(Table(title, columns, runs, "loaded_s", "raw"))
        bars += _bars(kind, runs)
    return Report(
        "new-process",
        vars(options),
        machine.facts(directory),
        tables,
        bars,
        [
            f"cold: files taken out of the page cache by {means}",
            "targets and imports are made before; engines start within",
        ],
    )


def _bars(kind: str, runs: Sequence[Runs]) -> list[Bar]:
    own, target, what = by_prefix(runs, *_ORDINARY), by_prefix(runs, "dcp.load", *_ORDINARY), "loaded_s"
    return [
        compare(f"{kind}, new tensors : best of torch.load and safetensors, speed", own, by_name(runs, NEW), what, 1.5),
        compare(f"{kind}, into a target : best of them and dcp.load, speed", target, by_name(runs, TARGET), what, 1.5),
        compare(
            f"{kind}, new tensors : raw read into fresh memory, speed", by_prefix(runs, "raw"), by_name(runs, NEW), what
        ),
    ]


def _write_spec(directory: Path, state: State) -> None:
    spec = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in state.items()}
    (directory / _SPEC).write_text(json.dumps(spec))


# --- in the new process ----------------------------------------------------------------------------------


def _target(directory: Path) -> State:
    spec = json.loads((directory / _SPEC).read_text())
    return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in spec.items()}


async def _load(name: str, directory: Path, *, cold: bool) -> dict[str, Any]:
    into_target = "target" in name
    loader = contenders(directory, cold=cold)[name](_target(directory) if into_target else {})
    for prefix, module in _IMPORTS.items():
        if name.startswith(prefix):
            importlib.import_module(module)
    _say("ready")
    if not await asyncio.to_thread(sys.stdin.readline):
        return {}
    loaded, sample = await timed(loader.load, "loaded_s")
    await loader.close()
    return {"sample": sample, "checksums": None if loaded is None else checksums(loaded)}


def _say(said: object) -> None:
    print(json.dumps(said), flush=True)


def main(name: str, directory: Path, kind: str) -> None:
    """Load when a line arrives on stdin; print the figures and checksums, or the error."""
    try:
        _say(asyncio.run(_load(name, directory, cold=kind == "cold")))
    except Exception as exc:
        _say({"error": f"{type(exc).__name__}: {exc}"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
