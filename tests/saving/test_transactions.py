"""Transactions: several checkpoints and files in one directory, which appear at once or not at all."""

from __future__ import annotations

import errno
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import aiockpt
from aiockpt import AsyncCheckpointer, SyncCheckpointer
from aiockpt.errors import (
    CheckpointerBusyError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    SaveCancelledError,
    SaveError,
    SaveSkippedError,
    WriteError,
)
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.commands import invoke
from tests.format.transforms.encryption import ChaCha20
from tests.states import assert_same

Writer = Literal["thread", "process"]
MODEL = {"b": torch.arange(7), "w": torch.arange(300_000.0)}
OPTIMIZER = {"m": torch.arange(300_000.0).flip(0), "step": 3}


def _everything(directory: Path) -> dict[str, bytes]:
    return {str(at.relative_to(directory)): at.read_bytes() for at in sorted(directory.rglob("*")) if at.is_file()}


@pytest.mark.asyncio
@pytest.mark.parametrize("writer", ["thread", "process"])
async def test_parts_and_files_appear_at_once(writer: Writer, tmp_path: Path) -> None:
    path, source = tmp_path / "c", tmp_path / "source.json"
    source.write_bytes(b'{"from": "a path"}')
    async with AsyncCheckpointer(writer=writer) as ckpt:
        async with ckpt.transaction(path) as tx:
            tx.save(MODEL, format="safetensors", metadata={"note": "größe"})
            tx.save({"optim": OPTIMIZER}, "optimizer", compress="zstd")
            tx.save(OPTIMIZER, "scheduler.pt")
            tx.save(MODEL, "ema.safetensors")
            tx.add("config.json", b'{"layers": 2}')
            tx.add("tokenizer.json", source)
            Path(tx.directory, "notes.txt").write_text("by hand")
            Path(tx.directory, "deep", "er").mkdir(parents=True)
            Path(tx.directory, "deep", "er", "still.bin").write_bytes(bytes(range(256)))
            assert not path.exists()
        await tx.staged
        result = await tx.written
        assert set(result.files) | {".aiockpt.json"} == set(_everything(path))
        assert (result.path, result.tensors, result.objects) == (str(path), 2 + 1 + 1 + 2, 1 + 1)
        assert_same(MODEL, await ckpt.load(path))
        assert_same(MODEL, load_file(path / "model.safetensors"))
        assert_same({"optim": OPTIMIZER}, await ckpt.load(path / "optimizer"))
        assert_same(OPTIMIZER, torch.load(path / "scheduler.pt", weights_only=True))
        assert_same(MODEL, load_file(path / "ema.safetensors"))
        async with ckpt.open(path) as reader:
            assert set(reader) == set(MODEL)
            assert reader.metadata["note"] == "größe"
        assert (path / "tokenizer.json").read_bytes() == source.read_bytes()
        assert (path / "deep" / "er" / "still.bin").read_bytes() == bytes(range(256))
        assert (await ckpt.verify(path)).ok
    assert sorted(os.listdir(tmp_path)) == ["c", "source.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer/.metadata", "optimizer/.aiockpt.json", "config.json", "deep/file"]
)
@pytest.mark.parametrize("how", ["changed", "shorter", "gone"])
def test_verify_covers_every_file(name: str, how: str, tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "c") as tx:
            tx.save(MODEL, format="safetensors")
            tx.save(OPTIMIZER, "optimizer")
            tx.add("config.json", b'{"layers": 2}')
            Path(tx.directory, "deep").mkdir()
            Path(tx.directory, "deep", "file").write_bytes(b"abcdefgh")
        tx.written.result(60)
        file = tmp_path / "c" / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink() if how == "gone" else file.write_bytes(data if how == "changed" else data[:-1])
        if how == "gone" and name == "model.safetensors":
            with pytest.raises(aiockpt.LoadError):
                ckpt.verify(tmp_path / "c").raise_if_bad()
        else:
            problems = ckpt.verify(tmp_path / "c").problems
            assert any(name in f"{each.file} {each.message}" for each in problems), problems


def test_without_a_checkpoint_at_the_top(tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        for number in range(2):
            with ckpt.transaction(tmp_path / "c", overwrite=bool(number)) as tx:
                tx.save({**MODEL, "number": number}, "model")
                tx.save(OPTIMIZER, "optimizer")
                tx.add("state.json", b"%d" % number)
            tx.written.result(60)
            assert ckpt.load(tmp_path / "c" / "model")["number"] == number
            assert (tmp_path / "c" / "state.json").read_bytes() == b"%d" % number
            assert ckpt.verify(tmp_path / "c").ok
        with pytest.raises(CheckpointNotFoundError, match="model, optimizer"):
            ckpt.load(tmp_path / "c")
        (tmp_path / "c" / "state.json").write_bytes(b"2")
        assert not ckpt.verify(tmp_path / "c").ok
        ckpt.delete(tmp_path / "c")
    assert not os.listdir(tmp_path)


def test_transforms_apply_to_every_part(tmp_path: Path) -> None:
    with SyncCheckpointer(transforms=[ChaCha20(bytes(range(32)))]) as ckpt:
        with ckpt.transaction(tmp_path / "c") as tx:
            tx.save(MODEL)
            tx.save(OPTIMIZER, "optimizer")
        tx.written.result(60)
        assert_same(MODEL, ckpt.load(tmp_path / "c"))
        assert_same(OPTIMIZER, ckpt.load(tmp_path / "c" / "optimizer"))
        assert ckpt.verify(tmp_path / "c").ok


# --- what leaves nothing ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_leaving_by_an_exception_removes_everything(tmp_path: Path) -> None:
    async with AsyncCheckpointer() as ckpt:
        with pytest.raises(ZeroDivisionError):
            async with ckpt.transaction(tmp_path / "a" / "c") as tx:
                tx.save(MODEL)
                Path(tx.directory, "file").touch()
                raise ZeroDivisionError
        assert not os.listdir(tmp_path / "a")
        with pytest.raises(SaveCancelledError, match="left by ZeroDivisionError"):
            await tx.written
        assert ckpt.statistics().cancelled == 1


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_part_that_fails_fails_all(overwrite: bool, writer: Writer, tmp_path: Path) -> None:
    with SyncCheckpointer(writer=writer) as ckpt:
        if overwrite:
            ckpt.save({"old": 1}, tmp_path / "c")
        before = _everything(tmp_path)
        with pytest.raises(SaveError, match="part"), ckpt.transaction(tmp_path / "c", overwrite=overwrite) as tx:
            tx.save(MODEL)
            tx.save({"f": lambda: 0}, "part")
        with pytest.raises(SaveError):
            tx.written.result(60)
        assert _everything(tmp_path) == before
        ckpt.save(OPTIMIZER, tmp_path / "next")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "nth"),
    [("begin", 1), *((step, nth) for step in ("join", "create", "write", "finish", "commit") for nth in (1, 2))],
)
def test_a_disk_that_fails_leaves_nothing(step: str, nth: int, tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), step, OSError(errno.ENOSPC, "No space left on device"), nth=nth)
    with SyncCheckpointer(storage=storage) as ckpt:
        with pytest.raises((WriteError, CommitError)):
            with ckpt.transaction(tmp_path / "c") as tx:
                tx.save(MODEL)
                tx.save(OPTIMIZER, "optimizer")
                tx.add("a", b"a")
            tx.written.result(60)
        assert not os.listdir(tmp_path)
        with ckpt.transaction(tmp_path / "d") as tx:
            tx.save(MODEL)
        tx.written.result(60)
    assert os.listdir(tmp_path) == ["d"]


def test_cancelling_removes_all_parts(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "c", storage=storage) as tx:
            tx.save(MODEL)
            tx.save(OPTIMIZER, "optimizer")
        storage.reached["write"].result(60)
        assert tx.handle.cancel().result(60)
        with pytest.raises(SaveCancelledError):
            tx.written.result(60)
        assert not os.listdir(tmp_path)
        ckpt.save(MODEL, tmp_path / "next")


def test_an_open_transaction_ends_with_the_checkpointer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = SyncCheckpointer()
    tx = ckpt.transaction(tmp_path / "c")
    tx.__enter__()
    tx.save(MODEL)
    ckpt.close()
    assert not os.listdir(tmp_path)
    assert "was open when the checkpointer was closed" in caplog.text
    with pytest.raises(aiockpt.AiockptError, match="closed"):
        tx.__exit__(None, None, None)


# --- paths and names ------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_as_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with SyncCheckpointer() as ckpt:
        ckpt.save(MODEL, path)
        with pytest.raises(CheckpointExistsError), ckpt.transaction(path):
            pass
        with ckpt.transaction(path, overwrite=True) as tx:
            tx.save(OPTIMIZER, "optimizer")
            tx.save(MODEL, format="safetensors")
            tx.add("any.name", b"x")
        tx.written.result(60)
        (path / "foreign.txt").touch()
        with pytest.raises(CheckpointExistsError, match=r"foreign\.txt"), ckpt.transaction(path, overwrite=True):
            pass
        (path / "foreign.txt").unlink()
        (path / "optimizer" / "foreign.txt").touch()
        with pytest.raises(CheckpointExistsError, match=r"optimizer/foreign\.txt"):
            ckpt.save(OPTIMIZER, path, overwrite=True)
        (path / "optimizer" / "foreign.txt").unlink()
        ckpt.save(OPTIMIZER, path, overwrite=True)
        assert_same(OPTIMIZER, ckpt.load(path))
        assert "optimizer" not in os.listdir(path)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("name", ["a/b", ".hidden", "nul\0", 3])
def test_wrong_names_are_refused(name: Any, tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        with pytest.raises(ValueError, match="name is"), ckpt.transaction(tmp_path / "c") as tx:
            tx.save(MODEL, name)
        with pytest.raises(ValueError, match="name"), ckpt.transaction(tmp_path / "c") as tx:
            tx.add(name, b"")
        with pytest.raises(SaveError, match="names one file"), ckpt.transaction(tmp_path / "c.safetensors"):
            pass
    assert not os.listdir(tmp_path)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        with pytest.raises(ValueError, match="already"), ckpt.transaction(tmp_path / "c") as tx:
            tx.save(MODEL, "a")
            tx.save(MODEL, "a")
        with pytest.raises(ValueError, match="already"), ckpt.transaction(tmp_path / "c") as tx:
            tx.add("a", b"")
            tx.save(MODEL, "a")
        with ckpt.transaction(tmp_path / "c") as tx:
            tx.save(MODEL)
            tx.add("a.txt", b"added")
            Path(tx.directory, "a.txt").write_bytes(b"written")
        with pytest.raises(SaveError, match=r"a\.txt"):
            tx.written.result(60)
    assert not os.listdir(tmp_path)


def test_it_is_used_within_its_block(tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        tx = ckpt.transaction(tmp_path / "c")
        for use in (lambda: tx.save(MODEL), lambda: tx.add("a", b""), lambda: tx.directory):
            with pytest.raises(SaveError, match="has not begun"):
                use()
        with tx:
            with pytest.raises(SaveError, match="leave the block"):
                _ = tx.written
            tx.save(MODEL)
        tx.written.result(60)
        with pytest.raises(SaveError, match="is over"):
            tx.save(MODEL)
        with pytest.raises(SaveError, match="once"):
            tx.__enter__()


# --- beside other saves ---------------------------------------------------------------------------------


def test_it_counts_as_one_save_and_keeps_its_place(tmp_path: Path) -> None:
    order: list[str] = []
    with SyncCheckpointer() as ckpt:
        first = ckpt.submit(MODEL, tmp_path / "1", post_commit=order.append)
        with ckpt.transaction(tmp_path / "2", post_commit=order.append) as tx:
            tx.save(MODEL, "a")
            tx.save(MODEL, "b")
        third = ckpt.submit(MODEL, tmp_path / "3", post_commit=order.append)
        assert ckpt.statistics().in_flight <= 3
        for save in (first, tx.handle, third):
            save.written.result(60)
        assert [Path(path).name for path in order] == ["1", "2", "3"]
        assert ckpt.statistics().written == 3


@pytest.mark.parametrize(("policy", "error"), [("skip", SaveSkippedError), ("error", CheckpointerBusyError)])
def test_a_busy_checkpointer_refuses_to_begin(policy: Any, error: type[Exception], tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with SyncCheckpointer(on_busy=policy) as ckpt:
        save = ckpt.submit(MODEL, tmp_path / "a", storage=storage)
        storage.reached["commit"].result(60)
        with pytest.raises(error), ckpt.transaction(tmp_path / "b"):
            pass
        storage.open("commit")
        save.written.result(60)
        with ckpt.transaction(tmp_path / "b") as tx:
            tx.save(MODEL, "one")
            tx.save(MODEL, "two")  # it is not busy with its own parts
        tx.written.result(60)


def test_a_failure_that_nobody_awaits_is_raised_by_the_next_save(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), "write", OSError(errno.EIO, "Input/output error"))
    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "c", storage=storage) as tx:
            tx.save(MODEL)
        tx.handle._job.cancelled.exception()
        with pytest.raises(WriteError, match="Input/output"):
            ckpt.save(MODEL, tmp_path / "d")
    assert not os.listdir(tmp_path)


def test_shapes_may_change_from_one_to_the_next(tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        for size in (100_000, 200_000, 50_000):
            with ckpt.transaction(tmp_path / "c", overwrite=True) as tx:
                tx.save({"w": torch.arange(size), "n": size})
                tx.save({"w": torch.arange(size).flip(0)}, "part")
            tx.written.result(60)
            assert_same({"w": torch.arange(size), "n": size}, ckpt.load(tmp_path / "c"))
            assert_same({"w": torch.arange(size).flip(0)}, ckpt.load(tmp_path / "c" / "part"))


def test_hooks_get_the_directory(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(path: str, directory: str) -> None:
        seen.append(sorted(name for name in os.listdir(directory) if not name.startswith(".")))
        assert not os.path.exists(path)

    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "c", pre_commit=look) as tx:
            tx.save(MODEL, "a")
        tx.written.result(60)
    assert seen == [["a"]]


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    tensor = torch.arange(2_000_000)
    held = weakref.ref(tensor)
    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "c") as tx:
            tx.save({"x": tensor})
        tx.written.result(60)
        del tensor
        gc.collect()
        assert held() is None
        assert not ckpt._engine.joints


def test_the_command_line_shows_one_checkpoint(tmp_path: Path) -> None:
    with SyncCheckpointer() as ckpt:
        with ckpt.transaction(tmp_path / "checkpoint-100") as tx:
            tx.save(MODEL, format="safetensors")
            tx.save(OPTIMIZER, "optimizer")
        nbytes = sum(map(len, _everything(tmp_path).values())) if tx.written.result(60) else 0
    listed = json.loads(invoke("ls", tmp_path, "--json").stdout)
    assert [(each["name"], each["state"]) for each in listed["checkpoints"]] == [("checkpoint-100", "complete")]
    assert listed["checkpoints"][0]["bytes"] == nbytes
    assert invoke("verify", tmp_path).exit_code == 0
    assert invoke("rm", "--yes", tmp_path / "checkpoint-100").exit_code == 0
    assert not os.listdir(tmp_path)
