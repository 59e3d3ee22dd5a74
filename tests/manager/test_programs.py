"""Preempted and killed programs: real processes, and signals from another process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.manager.runs import names

TIMEOUT_S = 240


class Program:
    """One process of a program. Each of its steps lasts until `go_on` is called."""

    def __init__(
        self, kind: str, rank: int, size: int, folder: Path, grace: str, python: Sequence[str], store: str
    ) -> None:
        self.lines: list[list[str]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [
                *python,
                "-m",
                "tests.manager.program",
                kind,
                str(rank),
                str(size),
                store,
                str(folder),
                grace,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RES_OPTIONS": "attempts:0"},
        )
        self._watchdog = threading.Timer(TIMEOUT_S, self.process.kill)
        self._watchdog.start()

    def run_to(self, step: int) -> None:
        """Run the program until the step has begun."""
        while self._read() != ["step", str(step)]:
            if self.lines[-1][0] == "step":
                self.go_on()

    def _read(self) -> list[str] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.lines.append(line.split())
        return self.lines[-1]

    def go_on(self, steps: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n" * steps)
        self.process.stdin.flush()

    def wait(self, *, code: int = 0) -> str:
        """Wait for the process; return its standard error."""
        while self._read() is not None:
            pass
        found = self.process.wait()
        self._errors.seek(0)
        errors = self._errors.read()
        assert found == code, errors
        return errors

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._watchdog.cancel()
        self._watchdog.join()
        self._errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def programs(
    kind: str, size: int, folder: Path, grace: str = "", python: Sequence[str] = (sys.executable,)
) -> Iterator[list[Program]]:
    made: list[Program] = []
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as ends:
        for rank in range(size):
            made.append(Program(kind, rank, size, folder, grace, python, f"{own}/store"))
            ends.callback(made[-1].close)
        yield made


def steps_saved(lines: list[list[str]]) -> list[int]:
    return [int(line[1]) for line in lines if line[0] == "saved"]


def restored(folder: Path) -> tuple[aiockpt.Restored | None, dict[str, Any]]:
    state = {"weights": torch.zeros(50_000)}
    with aiockpt.SyncCheckpointManager(folder, read_only=True, process_group=None) as run:
        return run.restore(state, strict=True), state


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("blocking", 0),
        ("awaiting", 1),
        ("awaiting", "alone"),
        pytest.param("blocking", 1, marks=pytest.mark.full),
        pytest.param("awaiting", 0, marks=pytest.mark.full),
        pytest.param("blocking", "alone", marks=pytest.mark.full),
    ],
)
def test_signal_during_a_long_step_leads_to_a_last_save(
    anywhere: Path, python: list[str], kind: str, asked: Any
) -> None:
    """One process gets the signal, and all ranks save the same last step. The random streams are not disturbed."""
    folder = anywhere / "run"
    size, asked = (1, 0) if asked == "alone" else (2, asked)
    with programs(kind, size, folder, "60", python) as ranks:
        for each in ranks:
            each.run_to(1)
        for each in ranks:
            each.go_on()
        for step in (2, 3):
            for each in ranks:
                each.run_to(step)
                if step < 3:
                    each.go_on()
        ranks[asked].process.send_signal(signal.SIGTERM)
        for each in ranks:  # resume both before waiting for either
            each.go_on(1000)
        assert all("Traceback" not in each.wait() for each in ranks)
        ended = [each.lines for each in ranks]
    last = steps_saved(ended[0])[-1]
    assert all(steps_saved(lines)[-1] == last for lines in ended)
    assert all([line for line in lines if line[0] == "step"][-1] == ["step", str(last)] for lines in ended)
    start, state = restored(folder)
    assert start is not None
    assert start.step == last
    assert torch.equal(state["weights"], torch.full((50_000,), float(last)))
    for rank, lines in enumerate(ended):
        source = random.Random(rank)
        own = torch.zeros(())
        for _ in range(last):
            own += source.random()
        assert float(lines[-1][1]) == own.item()
    assert not any(name.startswith(".aiockpt") for name in names(folder))


@pytest.mark.parametrize("size", [1, 2])
def test_last_save_that_exceeds_the_grace_period_is_not_begun(anywhere: Path, python: list[str], size: int) -> None:
    folder = anywhere / "run"
    with programs("blocking", size, folder, "1e-9", python) as ranks:
        for step in (1, 2, 3):
            for each in ranks:
                each.run_to(step)
                if step < 3:
                    each.go_on()
        ranks[-1].process.send_signal(signal.SIGTERM)
        for each in ranks:
            each.go_on(1000)
        assert all("Traceback" not in each.wait() for each in ranks)
        ended = [each.lines for each in ranks]
    saved = steps_saved(ended[0])
    start, state = restored(folder)
    assert start is not None
    assert start.step == max(saved, default=2) == int(state["weights"][0])
    assert start.step % 2 == 0, "only steps that the policy chose were saved"
    assert not any(name.startswith(".aiockpt") for name in names(folder))


@pytest.mark.slow
def test_second_program_is_refused_until_the_first_has_died(anywhere: Path) -> None:
    folder = anywhere / "run"
    host = socket.gethostname()
    with programs("awaiting", 1, folder) as (first,):
        first.run_to(4)
        with pytest.raises(aiockpt.RunLockedError) as caught:
            aiockpt.SyncCheckpointManager(folder).__enter__()
        assert f"is being written by process {first.process.pid} on host {host}, since 20" in str(caught.value)
        assert (caught.value.host, caught.value.pid) == (host, first.process.pid)
        with programs("blocking", 1, folder) as (second,):
            errors = second.wait(code=1)
            assert f"process {first.process.pid} on host {host}" in errors.splitlines()[-1]
        start, state = restored(folder)  # readers are welcome
        assert start is None or start.step == int(state["weights"][0]) == 2, "the save of step 2 is over, or it is not"
        first.process.kill()
        first.process.wait()
        with programs("blocking", 1, folder) as (third,):
            there = restored(folder)[0]
            assert start is None or there.step == 2
            last = there.step + 1 if there else 1
            third.run_to(last)
            third.process.send_signal(signal.SIGTERM)
            third.go_on()
            third.wait()
        assert steps_saved(third.lines)[-1] == last
    assert not any(name.startswith(".aiockpt") for name in names(folder))
