"""Saves through a writer process: the same checkpoints, and no leftovers when a process fails."""

from __future__ import annotations

import asyncio
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from aiockpt.writing.process.supervisor import WriterProcess
from tests.states import assert_same, large_state, training_state
from tests.writing.gates import BrokenStorage, Gate, KilledAfterCommit, ended, writers_of


def _writers() -> list[psutil.Process]:
    return writers_of(os.getpid())


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def kept() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer(writer="process", chunk_bytes=1 << 16, staging_bytes=1 << 20) as ckpt:
        yield ckpt


@pytest.mark.slow
def test_the_checkpoints_equal_those_of_threads(tmp_path: Path) -> None:
    state = {"train": training_state(), "large": large_state(5), "big": torch.arange(3_000_000).view(1000, 3000).t()}
    with (
        aiockpt.SyncCheckpointer(writer=aiockpt.ProcessWriter(nice=3, ionice="idle"), chunk_bytes=1 << 20) as ours,
        aiockpt.SyncCheckpointer(chunk_bytes=1 << 20) as threads,
    ):
        theirs = threads.save(state, tmp_path / "threads", metadata={"k": 1})
        for number in range(3):  # the layout is sent once
            state["train"]["step"] = number
            result = ours.save(state, tmp_path / str(number), metadata={"k": number})
            assert_same(state, threads.load(tmp_path / str(number)))
            assert threads.verify(tmp_path / str(number)).ok
            assert dict(result.files) == dict(theirs.files)
            assert (result.nbytes, result.tensors, result.objects) == (theirs.nbytes, theirs.tensors, theirs.objects)
        for name in theirs.files:
            if name != ".metadata":  # it records positions of objects
                assert (tmp_path / "2" / name).stat().st_size == (tmp_path / "threads" / name).stat().st_size
        host = ours._engine.tools.writer
        assert repr(host._connection).endswith(", 0 saves>")  # a long run must not accumulate finished saves
        (writer,) = _writers()
        assert writer.nice() == min(19, psutil.Process().nice() + 3)
        assert writer.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE


def test_other_formats_hooks_and_overwriting(kept: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    state, calls = large_state(3), []
    kept.save(state, tmp_path / "one.safetensors", format="safetensors")
    kept.save(state, tmp_path / "set", format="safetensors", shard_bytes=600_000)
    for name in ("one.safetensors", "set"):
        assert_same(state, kept.load(tmp_path / name))
    for seed in (1, 2):
        state = {"w": torch.full((200_000,), seed), "t": training_state(seed)}
        kept.save(
            state,
            tmp_path / "c",
            overwrite=True,
            pre_commit=lambda path: calls.append((path, os.path.exists(path))),
            post_commit=lambda path: calls.append((path, os.path.exists(path))),
        )
        assert_same(state, kept.load(tmp_path / "c"))
    path = str(tmp_path / "c")
    assert calls == [(path, False), (path, True), (path, True), (path, True)]
    with pytest.raises(aiockpt.SaveError, match="not this one"):
        kept.save(state, tmp_path / "d", pre_commit=_refuse)
    kept.save({}, tmp_path / "empty")
    assert kept.load(tmp_path / "empty") == {}
    assert {entry.name for entry in tmp_path.iterdir()} == {"one.safetensors", "set", "c", "empty"}


def _refuse(path: str) -> None:
    raise ValueError("not this one")


@pytest.mark.asyncio
async def test_many_queued_saves_and_one_cancelled(tmp_path: Path, gate: Gate) -> None:
    async with aiockpt.AsyncCheckpointer(writer="process", chunk_bytes=1 << 16, staging_bytes=1 << 19) as ckpt:
        saves = []
        for number in range(4):
            state = {k: v + number for k, v in large_state(3).items()}
            storage = gate.storage("write", nth=3) if number == 1 else None
            saves.append(ckpt.save(state, tmp_path / str(number), storage=storage))
        await asyncio.to_thread(gate.wait)
        cancelled = saves[1].cancel()
        gate.open()
        assert await cancelled
        with pytest.raises(aiockpt.SaveCancelledError):
            await saves[1]
        for number in (2, 3):
            await saves[number]
        assert {entry.name for entry in tmp_path.iterdir()} == {"gate", "0", "2", "3"}  # of 1, not even a hidden name
        for number in (0, 2, 3):
            events = [event async for event in saves[number].progress()]
            assert events[-1].phase == "committed"
            assert events[-1].done_bytes == events[-1].total_bytes == (await saves[number]).nbytes
            assert_same({k: v + number for k, v in large_state(3).items()}, await ckpt.load(tmp_path / str(number)))


def test_an_error_comes_back_with_its_cause(kept: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    for step in ("begin", "create", "write", "finish", "commit"):
        with pytest.raises(aiockpt.WriteError, match=rf"{step} of .* in process {_writers()[0].pid}: no space") as info:
            kept.save(large_state(2), tmp_path / "c", storage=BrokenStorage(step))
        assert isinstance(info.value.__cause__, OSError)
        assert info.value.__cause__.errno == 28
        assert list(tmp_path.iterdir()) == []
    kept.save(large_state(2), tmp_path / "c")
    assert_same(large_state(2), kept.load(tmp_path / "c"))


def test_a_storage_that_can_not_be_sent_is_refused_at_the_call(kept: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    with pytest.raises(aiockpt.SaveError, match=r"GatedStorage can't be sent to the writer process .* writer='thread'"):
        kept.submit(large_state(1), tmp_path / "c", storage=storage)
    for wrong in ("processes", None, 3):
        with pytest.raises(ValueError, match=r"must be 'thread', 'process' or an aiockpt\.ProcessWriter"):
            aiockpt.SyncCheckpointer(writer=wrong)
    for wrong in ({"nice": 20}, {"ionice": "lazy"}, {"ionice": ("best-effort", 8)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            aiockpt.ProcessWriter(**wrong)


@pytest.mark.slow
def test_the_writer_process_needs_few_resources(kept: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    """No torch, no main module, no descriptor for each tensor; one process for all saves."""
    kept.save(large_state(1), tmp_path / "few")
    (writer,) = _writers()
    mine, its = psutil.Process().num_fds(), writer.num_fds()
    kept.save({f"t{i}": torch.full((i % 50 + 1, 30), i) for i in range(1000)}, tmp_path / "many")
    assert (psutil.Process().num_fds(), writer.num_fds()) == (mine, its)
    assert _writers() == [writer]
    maps = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" not in maps
    assert "memfd:aiockpt-staging" in maps
    assert os.getsid(writer.pid) == writer.pid  # a signal for the trainer's group does not reach it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        writer.send_signal(number)
    kept.save(large_state(2), tmp_path / "after")
    assert _writers() == [writer]


@pytest.mark.asyncio
async def test_the_writer_process_starts_before_the_first_save_and_ends_with_the_checkpointer() -> None:
    async with aiockpt.AsyncCheckpointer(writer="process"):
        (writer,) = await asyncio.to_thread(_writers)
    assert not writer.is_running()


@pytest.mark.slow
def test_a_save_fails_when_the_writer_process_dies_and_the_next_starts_another(tmp_path: Path, gate: Gate) -> None:
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        ckpt.save(large_state(1), tmp_path / "before")
        save = ckpt.submit(large_state(3), tmp_path / "c", storage=gate.storage("write", nth=2))
        later = ckpt.submit(large_state(2), tmp_path / "d")
        gate.wait()
        (writer,) = _writers()
        writer.kill()
        with pytest.raises(aiockpt.WriteError, match=rf"process {writer.pid} has died \(exit code -9 \(SIGKILL\)"):
            save.written.result(60)
        error = later.written.exception(60)  # the process had begun it, or had not
        if error is None:
            assert_same(large_state(2), ckpt.load(tmp_path / "d"))
        else:
            assert isinstance(error, aiockpt.WriteError)
            assert "has died" in str(error)
            assert not (tmp_path / "d").exists()
        ckpt.save(large_state(4), tmp_path / "after")
        assert _writers() != [writer]
        assert_same(large_state(4), ckpt.load(tmp_path / "after"))
        assert not (tmp_path / "c").exists()
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_is_being_published_can_not_be_cancelled(overwrite: bool, tmp_path: Path, gate: Gate) -> None:
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        if overwrite:
            ckpt.save(large_state(1), tmp_path / "c")
        save = ckpt.submit(large_state(3), tmp_path / "c", overwrite=overwrite, storage=gate.storage("commit"))
        gate.wait()
        cancelled = save.cancel()
        gate.open()
        assert not cancelled.result(60)
        assert save.written.result(60).tensors == 3
        assert_same(large_state(3), ckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_succeeds_if_the_writer_process_dies_right_after_publishing(overwrite: bool, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        if overwrite:
            ckpt.save(large_state(1), tmp_path / "c")
        assert ckpt.save(large_state(3), tmp_path / "c", overwrite=overwrite, storage=KilledAfterCommit()).tensors == 3
        assert_same(large_state(3), ckpt.load(tmp_path / "c"))
        assert ckpt.verify(tmp_path / "c").ok


@pytest.mark.slow
def test_the_writer_process_may_die_between_saves_or_in_a_hook(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        for number in range(3):  # the same layout: it is sent to each process
            ckpt.save(large_state(2), tmp_path / str(number))
            (writer,) = _writers()
            writer.kill()
            writer.wait(60)
        with pytest.raises(aiockpt.WriteError, match="has died"):
            ckpt.save(large_state(2), tmp_path / "hook", pre_commit=lambda _: [w.kill() for w in _writers()])
        ckpt.save(large_state(2), tmp_path / "3")
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1", "2", "3"}


def test_a_save_right_after_its_writer_died_starts_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before the engine has noticed the death of the writer process."""
    real, noticed = WriterProcess.wait, threading.Event()

    def wait(self: WriterProcess) -> None:
        real(self)
        noticed.wait(60)

    monkeypatch.setattr(WriterProcess, "wait", wait)
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        try:
            ckpt.save(large_state(2), tmp_path / "0")
            (writer,) = _writers()
            writer.kill()
            writer.wait(60)
            assert_same(large_state(2), ckpt.load(ckpt.submit(large_state(2), tmp_path / "1").written.result(30).path))
        finally:
            noticed.set()
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1"}


def test_the_error_quotes_the_stderr_of_the_writer_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.writing.process.supervisor._PROGRAM", "raise SystemExit('no such luck')")
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        for _ in range(2):
            with pytest.raises(aiockpt.WriteError, match=r"exit code 1; its stderr: no such luck"):
                ckpt.save(large_state(1), tmp_path / "c")
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "/nowhere/python")
    with (
        aiockpt.SyncCheckpointer(writer="process") as ckpt,
        pytest.raises(aiockpt.WriteError, match=r"can't be started: .*/nowhere/python"),
    ):
        ckpt.save(large_state(1), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_a_program_that_is_no_python_is_not_started_as_one(frozen: bool, tmp_path: Path, monkeypatch) -> None:
    log, program = tmp_path / "log", tmp_path / ("python-app" if frozen else "app")
    program.write_text(f"#!/bin/sh\necho started >> {log}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", str(program))
    refused = pytest.raises(aiockpt.AiockptError, match="is a frozen program" if frozen else "is no Python by its name")
    with refused, aiockpt.SyncCheckpointer(writer="process") as ckpt:
        ckpt.save(large_state(1), tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == [program.name]


@pytest.mark.slow
def test_a_program_without_a_main_guard_works(tmp_path: Path) -> None:
    """The writer process does not import the main module; the exit of the program finishes saves in flight."""
    program = (
        "import torch, aiockpt, sys\n"
        "print('once', flush=True)\n"
        "ckpt = aiockpt.SyncCheckpointer(writer='process')\n"
        "ckpt.submit({'w': torch.arange(500_000)}, sys.argv[1])\n"
    )
    (tmp_path / "anyio.py").write_text("raise RuntimeError('not this one')\n")  # nor modules of the working directory
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-P", "program.py", str(tmp_path / "c")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")
    with aiockpt.SyncCheckpointer() as ckpt:
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], torch.arange(500_000))


@pytest.mark.slow
def test_a_stuck_writer_is_killed_in_the_end(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.engine.engine.CANCEL_GRACE_S", 1.5)
    ckpt = aiockpt.SyncCheckpointer(writer="process", drain_timeout=0.2)
    ckpt.submit(large_state(2), tmp_path / "c", storage=gate.storage("write"))
    gate.wait()
    (writer,) = _writers()
    with pytest.raises(aiockpt.SaveCancelledError, match="drain_timeout"):
        ckpt.close()
    assert ended(writer.pid)
    assert not (tmp_path / "c").exists()
