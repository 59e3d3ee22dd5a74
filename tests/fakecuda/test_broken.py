"""A context that is broken for good, by an error of a kernel: what needs no device goes on."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.staging import runtime
from tests.fakecuda import device as fake

CHUNK = 64 << 10
OPTIONS: dict[str, Any] = {"chunk_bytes": CHUNK, "staging_bytes": 8 * CHUNK, "fsync": False}
WAIT_S = 60


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Save tensors on the device in the folder ``whole``; no tensor is dropped while the context is broken.

    Torch's allocator would end the process: see the guarantees.
    """
    state = {"w": torch.arange(60_000, device="cuda")}
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        ckpt.save(state, tmp_path / "whole")
    gc.collect()
    gc.disable()
    yield state
    fake.reset()
    gc.enable()


USES = {
    "load": lambda ckpt, path, state: ckpt.load(path, map_location="cuda"),
    "load in place": lambda ckpt, path, state: ckpt.load(path, state),
    "save": lambda ckpt, path, state: ckpt.save(state, path.with_name("lost")),
    "save what is small": lambda ckpt, path, state: ckpt.save({"w": state["w"][:9]}, path.with_name("lost")),
    "prewarm": lambda ckpt, path, state: ckpt.prewarm(state),
}


@pytest.mark.parametrize("used", [False, True], ids=["first use", "used before"])
@pytest.mark.parametrize("what", USES)
def test_a_broken_device_fails_what_uses_it(what: str, used: bool, saved, tmp_path: Path) -> None:
    """By an error of ours; what is in host memory is saved before, meanwhile and afterwards, and closing raises not."""
    host = {"h": torch.arange(300_000)}
    with aiockpt.SyncCheckpointer(on_failure="warn", **OPTIONS) as ckpt:
        if used:
            ckpt.save(saved, tmp_path / "used")
        pending = ckpt.submit(host, tmp_path / "pending")
        fake.break_context()
        if what == "prewarm":
            ckpt.prewarm(saved)  # what can't be prepared is not
        else:
            with pytest.raises((aiockpt.SaveError, aiockpt.LoadError), match="illegal memory access"):
                USES[what](ckpt, tmp_path / "whole", saved)
        pending.written.result(WAIT_S)
        ckpt.save(host, tmp_path / "later")
        last = ckpt.submit(host, tmp_path / "last")
    last.written.result(WAIT_S)
    for name in ("pending", "later", "last"):
        assert torch.equal(aiockpt.load(tmp_path / name)["h"], host["h"])
    assert not (tmp_path / "lost").exists()


CALLS = [
    *("cudaEventRecordWithFlags", "cudaStreamWaitEvent", "cudaEventSynchronize"),
    *("cuStreamCreate", "cuMemcpyBatchAsync", "cudaMemcpyAsync"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_context_breaks_at_a_call(call: str, after: int, saved, tmp_path: Path, monkeypatch) -> None:
    """At events, copies, or where a stream is made: the save fails or is whole, and one of host memory succeeds."""
    if call == "cuStreamCreate":
        monkeypatch.setattr(runtime, "_spare", defaultdict(list))  # else a stream is used again
    before = fake.refused()
    with aiockpt.SyncCheckpointer(on_failure="warn", **OPTIONS) as ckpt:
        expected = saved["w"].cpu()
        beside = ckpt.submit({"h": torch.arange(300_000)}, tmp_path / "beside")
        fake.refuse(call, fake.ILLEGAL_ADDRESS, after=after, breaks=True)
        try:
            error = ckpt.submit(saved, tmp_path / "c").written.exception(WAIT_S)
        except aiockpt.SaveError as exc:
            error = exc
        beside.written.result(WAIT_S)
    assert error is None or isinstance(error, aiockpt.SaveError)
    assert after or fake.refused() > before
    fake.reset()
    if error is None:
        assert torch.equal(aiockpt.load(tmp_path / "c")["w"], expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_context_breaks_in_a_copy_of_a_load(in_place: bool, saved, tmp_path: Path) -> None:
    """At each copy: the load raises, and the next one of host memory does not."""
    for at in itertools.count(1):
        with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
            before = fake.tasks("from_host")
            fake.fail_task("from_host", at)
            try:
                ckpt.load(tmp_path / "whole", saved if in_place else None, map_location="cuda")
                error = None
            except aiockpt.LoadError as exc:
                error = exc
            copies = fake.tasks("from_host") - before
            fake.fail_task("from_host", 0)
            assert torch.equal(ckpt.load(tmp_path / "whole")["w"], torch.arange(60_000))
        fake.reset()
        if error is None:
            break
        assert "illegal memory access" in str(error)
    assert at == copies + 1 > 1


DROPPED = """
import sys, tempfile, torch, aiockpt
from tests.fakecuda import device as fake
tensor = torch.arange(60_000, device="cuda")
if sys.argv[1] == "saved":
    aiockpt.save({"w": tensor}, tempfile.mkdtemp() + "/c")
elif sys.argv[1] == "recorded":
    tensor.record_stream(torch.cuda.Stream())
torch.cuda.synchronize()
fake.break_context()
del tensor
print("alive", flush=True)
"""


@pytest.mark.parametrize("what", ["saved", "recorded", "neither"])
def test_a_tensor_is_dropped_after_the_context_broke(what: str, tmp_path: Path) -> None:
    """As the guarantees say: torch ends the process, if it was in use by a further stream, ours or any other."""
    command = [sys.executable, "-c", DROPPED, what]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, check=False)
    assert ("alive" in done.stdout.decode()) == (what == "neither"), done.stderr
    assert what == "neither" or done.returncode == -signal.SIGABRT


def test_the_context_breaks_at_closing(saved, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        ckpt.save(saved, tmp_path / "c")
        last = ckpt.submit({"h": torch.arange(300_000)}, tmp_path / "host")
        fake.break_context()
    last.written.result(WAIT_S)


def test_a_wait_for_copies_does_without_the_device(saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that can't enter the device: else memory would be unlocked under its copies."""
    with aiockpt.SyncCheckpointer(on_failure="warn", **OPTIONS) as ckpt:
        ckpt.save(saved, tmp_path / "first")
        with fake.held("to_host"):
            save = ckpt.submit(saved, tmp_path / "c")
            save.fence(WAIT_S)
            fake.refuse("cudaSetDevice", fake.ILLEGAL_ADDRESS)
            assert not save.written.done()
        save.written.exception(WAIT_S)
    fake.refuse("cudaSetDevice", 0)


def test_samples_at_a_fence_keep_what_they_read(tmp_path: Path) -> None:
    """A fence in another stream than that of the tensors, which are freed before its kernels have run."""
    tensor = torch.arange(60_000, device="cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with aiockpt.SyncCheckpointer(validate="hash", **OPTIONS) as ckpt:
        ckpt.save({"w": tensor}, tmp_path / "first")
        with torch.cuda.stream(other):
            save = ckpt.submit({"w": tensor, "t": tensor.view(200, 300)[:, :7]}, tmp_path / "c")
            with fake.held(other):
                save.fence(WAIT_S)
                with torch.cuda.stream(torch.cuda.default_stream()):
                    tensor.untyped_storage().resize_(0)
                    torch.cuda.current_stream().synchronize()
        save.written.result(WAIT_S)
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], torch.arange(60_000))
