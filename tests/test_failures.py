"""Bad input is refused at the call, by an error that names the key; failures leave nothing behind."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.states import assert_same, large_state


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("I stay here")


class Subclass(torch.Tensor):
    pass


def _cycle() -> dict:
    state: dict = {"a": {}}
    state["a"]["b"] = state
    return state


class Stubborn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_args, **_options):
        raise NotImplementedError("not this")


class Unruly(dict):
    def items(self):
        raise ValueError("no items")


def _deep() -> tuple:
    value: tuple = ()
    for _ in range(100_000):
        value = (value,)
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"w": torch.empty(3, device="meta")}}, r"model\.w is on the meta device.*Materialise"),
        ({"a": {"lock": threading.Lock()}}, r"a\.lock is a .*lock that can't be pickled.*Leave it out"),
        ({"a": [torch.ones(1), Unpicklable()]}, r"a\.1 is a .*Unpicklable that can't be pickled: I stay here"),
        ({"a": lambda: None}, r"a is a builtins\.function that can't be pickled"),
        ({"a": {b"x": 1}}, r"a has the key b'x' of type bytes; keys must be str, int, float, bool"),
        ({2**5000: 1}, r"the state dict has the key .* of type int; keys must be .* shorter than 4096 bits"),
        ({("a", 2j): 1}, r"has the key \('a', 2j\) of type tuple"),
        ({"a": {1.0: {}, "1.0": {}}}, r"a has the keys 1\.0 and '1\.0', which .* one name"),
        ({"a": {"b": 1}, "a.b": 2}, r"both called 'a\.b'"),
        ({"a": {1: {}, "1": {}}}, r"a has the keys 1 and '1', which .* one name"),
        ({"b": 1, "a": torch.ones(3).as_subclass(Stubborn)}, "a can't be saved: NotImplementedError: not this"),
        ({"b": 1, "a": Unruly(x=1)}, "can't be taken apart, behind b: ValueError: no items"),
        ({"a": {"x": _deep()}}, "nested too deeply"),
        (_cycle(), "nested too deeply, or holds itself"),
        ([torch.ones(1)], "must be a dict of names to values, not a list"),
        (object(), "must be a dict of names to values, not an object"),
        (torch.ones(1), "not a Tensor; wrap it"),
        ({"a": torch.empty(2, device="meta").as_subclass(Subclass)}, "a is on the meta device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "state",  # a repr may hold an address
)
def test_bad_state_is_refused_at_the_call(state, message: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=message):
            ckpt.submit(state, tmp_path / "c")
        assert list(tmp_path.iterdir()) == []
        ckpt.save({"fine": torch.ones(1)}, tmp_path / "c")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"loss": torch.zeros(1).numel}, r"metadata\['loss'\] is a builtin.*\.item\(\)"),
        ({"a": {"b": [1, {2}]}}, r"a\.b\[1\]'\] is a set"),
        ({1: 2}, "JSON keys are strings"),
        ({"x": 10**5000}, "more than 4096 bits"),
        ({"x": {"$float": "nan"}}, "stands for nan and inf"),
        ({"x": torch.ones(2)}, "a Tensor of 1 dimensions"),
        ({"x": torch.empty((), device="meta")}, "without a value"),
        ({"x": 2j}, "which JSON can't hold"),
        ([1], "must be a dict"),
    ],
)
def test_bad_metadata_is_refused_at_the_call(metadata, message: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=message):
        ckpt.submit({"x": torch.ones(1)}, tmp_path / "c", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_path_is_refused(tmp_path: Path) -> None:
    state = {"x": torch.arange(10)}
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        for name in ("c", "file", "folder", "link"):
            with pytest.raises(aiockpt.CheckpointExistsError, match="exists already; save under another name"):
                ckpt.submit({"x": torch.zeros(1)}, tmp_path / name)
        for name in ("file", "folder"):
            with pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True"):
                ckpt.submit({"x": torch.zeros(1)}, tmp_path / name, overwrite=True)
        ckpt.save(state, tmp_path / "link", overwrite=True)  # the link itself is replaced, even if it is dangling
        assert_same(state, ckpt.load(tmp_path / "link"))
        assert_same(state, ckpt.load(tmp_path / "c"))
    assert not (tmp_path / "link").is_symlink()
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "mine"
    assert isinstance(aiockpt.CheckpointExistsError("x"), FileExistsError)


def test_overwrite_replaces_a_whole_checkpoint(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.arange(5), **large_state(40)}, tmp_path / "c")
        ckpt.save({"y": torch.arange(7)}, tmp_path / "c", overwrite=True)
        assert_same({"y": torch.arange(7)}, ckpt.load(tmp_path / "c"))
        (tmp_path / "empty").mkdir()
        ckpt.save({"z": 1}, tmp_path / "empty", overwrite=True)
        assert ckpt.load(tmp_path / "empty") == {"z": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "empty"]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [".aiockpt.json", ".metadata", "__0_0.distcp"]


def test_two_saves_to_one_path_at_once(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        first = ckpt.submit(large_state(), tmp_path / "c", storage=storage)
        with pytest.raises(aiockpt.CheckpointExistsError, match="is in flight"):
            ckpt.submit(large_state(), f"{tmp_path}/./c")
        storage.reached["commit"].result(timeout=60)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "precious").write_text("mine")
        storage.open("commit")
        with pytest.raises(aiockpt.CheckpointExistsError, match="has appeared during the save"):
            first.written.result()
        assert (tmp_path / "c" / "precious").read_text() == "mine"


def test_a_directory_that_can_not_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.WriteError, match=r"can't make the directory for .*file/c"):
            ckpt.save({"x": torch.ones(1)}, tmp_path / "file" / "c")
        assert not [each for each in caplog.records if each.levelname == "WARNING"]  # the error says it
        with pytest.raises(aiockpt.WriteError, match="/proc/nowhere/c"):
            ckpt.save({"x": torch.ones(1)}, "/proc/nowhere/c")


def test_a_url_that_went_through_pathlib_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with aiockpt.SyncCheckpointer() as ckpt:
        for call in (lambda path: ckpt.save({"x": 1}, path), ckpt.load, ckpt.verify):
            with pytest.raises(aiockpt.AiockptError, match="write it as text, s3://bucket/c"):
                call(Path("s3://bucket/c"))
        ckpt.save({"x": 1}, "./s3:/bucket/c")
        ckpt.save({"x": 1}, Path("nowhere:/bucket/c"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nowhere:", "s3:"]


def test_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.AiockptError, match="nowhere://bucket/c: no storage is registered for nowhere://"):
            ckpt.submit({"x": torch.ones(1)}, "nowhere://bucket/c")
        with pytest.raises(aiockpt.AiockptError, match="no storage is registered"):
            ckpt.load("nowhere://bucket/c")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def mesh():
    """Return a mesh of one rank; its process group keeps file descriptors open until the process ends."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_distributed_tensor_in_a_world_of_one_is_saved_as_a_tensor(mesh, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.randn(4)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"layer": {"w": DTensor.from_local(local, mesh, [Shard(0)])}}, tmp_path / "c")
        assert torch.equal(ckpt.load(tmp_path / "c")["layer"]["w"], local)
        target = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        ckpt.load(tmp_path / "c", {"layer": {"w": target}})
    assert torch.equal(target.to_local(), local)


def test_partial_sums_are_refused(mesh, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Partial

    state = {"layer": {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}}
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.SaveError, match=r"layer\.w is a DTensor of partial values.*redistribute"),
    ):
        ckpt.submit(state, tmp_path / "c")


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}, "add_"])
def test_steps_on_distributed_tensors_are_detected(mesh, tmp_path: Path, way: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    parameter = torch.nn.Parameter(DTensor.from_local(torch.randn(300_000), mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(torch.randn(300_000), mesh, [Shard(0)])
    optimizer = torch.optim.AdamW([parameter], **(way if isinstance(way, dict) else {}))
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(staging_bytes=1 << 19, chunk_bytes=1 << 18) as ckpt:
        save = ckpt.submit({"layer": {"w": parameter}}, tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        if way == "add_":
            with torch.no_grad():
                parameter.add_(1)
        else:
            optimizer.step()
        storage.open("create")
        with pytest.raises(aiockpt.TornSnapshotError, match=r"layer\.w changed between save"):
            save.written.result(60)
        assert not list(tmp_path.iterdir())
        ckpt.save({"layer": {"w": parameter}}, tmp_path / "c")
        assert torch.equal(ckpt.load(tmp_path / "c")["layer"]["w"], parameter.detach().to_local())


_EXIT = """
import sys, torch, aiockpt, asyncio
state = {{f"w{{i}}": torch.arange(i, i + 500_000) for i in range(8)}}
{body}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "ckpt = aiockpt.AsyncCheckpointer(); ckpt.save(state, sys.argv[1])",
        "aiockpt.SyncCheckpointer().submit(state, sys.argv[1]); sys.exit(0)",
        "async def main():\n    aiockpt.AsyncCheckpointer().save(state, sys.argv[1])\nasyncio.run(main())",
    ],
    ids=["async", "sync-sys-exit", "asyncio-run"],
)
def test_a_process_finishes_its_save_at_exit(body: str, python: list[str], tmp_path: Path) -> None:
    path = tmp_path / "c"
    done = subprocess.run(
        [*python, "-c", _EXIT.format(body=body), path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same({f"w{i}": torch.arange(i, i + 500_000) for i in range(8)}, ckpt.load(path))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_process_reports_a_failed_save_at_exit(python: list[str]) -> None:
    body = "aiockpt.AsyncCheckpointer().save(state, '/proc/nowhere/c')"
    done = subprocess.run(
        [*python, "-c", _EXIT.format(body=body)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "WriteError: can't make the directory for /proc/nowhere/c" in done.stderr


def test_a_forked_process_can_not_use_the_parents_checkpointer(python: list[str], tmp_path: Path) -> None:
    body = """
import os, warnings
warnings.simplefilter("ignore")
ckpt = aiockpt.SyncCheckpointer(); ckpt.save(state, sys.argv[1])
if os.fork() == 0:
    try:
        ckpt.save(state, sys.argv[1] + "-child")
    except aiockpt.CheckpointerClosedError as exc:
        assert "before a fork" in str(exc)
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
ckpt.close()
"""
    done = subprocess.run(
        [*python, "-c", _EXIT.format(body=body), tmp_path / "c"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
