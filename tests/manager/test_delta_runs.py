"""Runs whose steps share files with the step before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.cli.ls import ls
from aiockpt.cli.removing import prune
from aiockpt.manager.scan import StepNames
from aiockpt.planning import layout
from aiockpt.storage import LocalStorage
from aiockpt.storage.copying import same_files
from tests.saving.deltas import BUCKET_BYTES, OPTIONS, State, check, copied

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_BUCKET_BYTES", BUCKET_BYTES)


def state_of(step: int) -> State:
    state = {f"w{number:02}": torch.arange(5_000, dtype=torch.int32) * (number + 1) for number in range(20)}
    state["w03"] += step
    return state


def run_of(folder: Path, base: aiockpt.Base | str = "auto", **options: object) -> aiockpt.SyncCheckpointManager:
    return aiockpt.SyncCheckpointManager(folder, base=base, **{**OPTIONS, **options})  # type: ignore[arg-type]


def test_retention_deletes_the_base_while_later_steps_live_on(tmp_path: Path) -> None:
    with run_of(tmp_path / "run", keep=[aiockpt.KeepLatest(2), aiockpt.KeepEvery(4)]) as run:
        results = [run.save(step, state_of(step)) for step in range(1, 11)]
    with run_of(tmp_path / "run", read_only=True) as run:
        assert run.steps() == [4, 8, 9, 10]
        for info in run.infos():
            check(Path(info.path), state_of(info.step), run.checkpointer)
            assert run.checkpointer.verify(info.path).ok
    assert all(result.bytes_reused > 0.9 * result.nbytes for result in results[1:])


def test_a_restarted_run_shares_files_with_the_step_that_it_restores(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as run:
        run.save(1, state_of(1))
    with run_of(tmp_path / "run") as run:
        state = copied(state_of(0))
        assert run.restore(state) is not None
        assert run.save(2, state_of(2)).bytes_reused > 0
        assert run.save(3, state_of(3), base=aiockpt.Base(full_every=1)).bytes_reused == 0
        check(Path(run.path_of(2)), state_of(2), run.checkpointer)


@pytest.mark.parametrize("keep", [1, 9], ids=["base deleted here", "all kept"])
def test_what_steps_share_is_sent_to_a_mirror_once(tmp_path: Path, anywhere: Any, keep: int) -> None:
    there = anywhere / "mirror"
    with run_of(
        tmp_path / "run", mirror=aiockpt.Mirror(there, keep=aiockpt.KeepLatest(9)), keep=aiockpt.KeepLatest(keep)
    ) as run:
        results = [run.submit(step, state_of(step)).mirrored.result(60) for step in (1, 2, 3)]
    assert results[0].sent_bytes == results[0].nbytes
    assert all(result.sent_bytes < 0.2 * result.nbytes for result in results[1:])
    if there == tmp_path / "mirror":  # as the command line shows it there
        for result in results:
            with LocalStorage().look(result.path) as listing:
                assert listing.shared_bytes > 0.8 * result.nbytes
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        for step in (1, 2, 3):  # none needs an earlier one
            path = results[step - 1].path
            assert all(torch.equal(ckpt.load(path)[name], tensor) for name, tensor in state_of(step).items())
            assert ckpt.verify(path).ok
            ckpt.delete(path)


def test_a_crc_alone_is_no_proof_that_a_mirror_has_a_file(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        for name in "abcd":
            ckpt.save(state_of(0), tmp_path / name, hashes=name in "cd")
    a, b, c, d = ((tmp_path / name / ".aiockpt.json").read_bytes() for name in "abcd")
    files = {each.name for each in (tmp_path / "c").glob("*.distcp")}
    assert same_files(c, d) == {name: name for name in files}
    assert not same_files(a, b)
    assert not same_files(c, a)
    assert not same_files(a, c)


def test_several_hosts_disks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="base and own_disks=True"):
        run_of(tmp_path / "run", own_disks=True)


def test_the_command_line_shows_what_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_of(tmp_path / "run") as run:
        sizes = [run.save(step, state_of(step)).nbytes for step in (1, 2)]
    names = StepNames("step-{:08d}")
    ls(str(tmp_path / "run"), names=names, as_json=True)
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["shared_bytes"] for each in found] == [sizes[0], sizes[0]]
    ls(str(tmp_path / "run"), names=names)
    assert "shared" in capsys.readouterr().out
    prune(str(tmp_path / "run"), [aiockpt.KeepLatest(1)], names=names)
    assert "shared" in capsys.readouterr().out
    ls(str(tmp_path / "run"), names=names)
    assert "shared" not in capsys.readouterr().out
