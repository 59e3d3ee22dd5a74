"""The steps that a scan finds in the directory of a run."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt import StepInfo
from aiockpt.manager.scan import DEFAULT_NAMES, StepScanner, scan, step_of
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Listing, LookBudget, Storage
from aiockpt.storage.local import entries
from tests.manager.runs import path_of
from tests.places import remove, storage_of

FILLED = {"a": torch.arange(12.0), "b": {"c": torch.ones(3, 2)}}


def write(folder: Path, step: int, **metadata) -> Path:
    path = folder / DEFAULT_NAMES.name_of(step)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(FILLED, path, metadata=metadata)
    return path


def test_step_names() -> None:
    assert DEFAULT_NAMES.name_of(100) == "step-00000100"
    assert step_of("step-00000100") == 100
    assert step_of("step-123456789") == 123456789
    wrong = ["step-100", "step-000000100", "step-00000100.damaged", "step-0000010x", "final", "step-", "step-+0000001"]
    assert [step_of(name) for name in wrong] == [None] * len(wrong)


def test_facts_come_from_the_manifest(anywhere: Path) -> None:
    run = {"step": 7, "time": 1234.5, "metrics": {"loss": 0.25, "bad": math.nan}, "keep": []}
    path = write(anywhere, 7, run=run, note="mine")
    (found,) = scan(anywhere)
    assert (found.step, found.path, found.state, found.time, found.problem) == (7, str(path), "complete", 1234.5, "")
    assert found.metrics["loss"] == 0.25
    assert math.isnan(found.metrics["bad"])
    assert found.metadata == {"note": "mine"}
    assert found.nbytes == sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["mine", {"name": "mine"}, {"time": 1.7e18}, {"time": -1}, {"time": math.nan}, {"step": 1, "time": True}]
)
def test_run_metadata_may_be_anything_without_a_manager(run: object, anywhere: Path) -> None:
    before = time.time()
    write(anywhere, 7, run=run)
    (found,) = scan(anywhere)
    assert found.state == "complete"
    assert before - 1 < found.time < time.time() + 1
    assert found.metadata == ({} if {"time", "step"} & set(run) else {"run": run})  # type: ignore[call-overload]


def test_steps_are_sorted_and_other_names_ignored(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        write(tmp_path, step)
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-20")
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "final")
    (tmp_path / "step-00000005").write_text("a file")
    assert [(found.step, found.state, dict(found.metrics)) for found in scan(tmp_path)] == [
        (3, "complete", {}),
        (20, "complete", {}),
        (100, "complete", {}),
    ]
    assert scan(tmp_path / "nothing") == ()


def test_time_of_a_step_saved_without_a_manager_comes_from_its_manifest(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    os.utime(path, (5, 5))
    (found,) = scan(tmp_path)
    assert found.time > 1.7e9


def cut(file: Path, nbytes: int = 1) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - nbytes)


def data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "state", "words"),
    [
        (lambda path: cut(data_file(path)), "damaged", "bytes, but was written with"),
        (lambda path: data_file(path).unlink(), "damaged", "lacks its file"),
        (lambda path: (path / ".metadata").unlink(), "damaged", "lacks its file .metadata"),
        (lambda path: cut(path / ".aiockpt.json", 30), "damaged", ".aiockpt.json is damaged"),
        (lambda path: (path / ".aiockpt.json").write_bytes(b""), "damaged", ".aiockpt.json is damaged"),
        (lambda path: (path / ".aiockpt.json").unlink(), "complete", ""),
        (lambda path: [(path / n).unlink() for n in (".aiockpt.json", ".metadata")], "unfinished", "never finished"),
        (lambda path: [file.unlink() for file in path.iterdir()], "unfinished", "neither"),
    ],
)
def test_state_of_a_damaged_step(tmp_path: Path, harm, state: str, words: str) -> None:
    write(tmp_path, 1)
    harm(write(tmp_path, 2, run={"metrics": {"loss": 1.0}}))
    one, two = scan(tmp_path)
    assert (one.state, two.state) == ("complete", state)
    assert words in two.problem


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:Detected an existing:UserWarning"
)
def test_checkpoint_that_torch_replaced_in_place_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path, 2, run={"metrics": {"loss": 1.0}})
    dcp.save({"other": torch.ones(5)}, checkpoint_id=str(path), no_dist=True)
    (found,) = scan(tmp_path)
    assert (found.state, dict(found.metrics)) == ("complete", {})


def test_manifest_with_invalid_fields_is_damaged(tmp_path: Path) -> None:
    from isal.isal_zlib import crc32

    path = write(tmp_path, 2)
    for wrong in ({"files": 3}, {"files": {"x": {}}}, {"metadata": [], "files": {}}):
        head = {"writer": "w", "created": "2026-01-01T00:00:00+00:00", "metadata": {}, "files": {}} | wrong
        body = json.dumps(head, indent=2).removesuffix("\n}")
        (path / ".aiockpt.json").write_text(f'{body},\n  "manifest_crc32": "{crc32(body.encode()):08x}"\n}}\n')
        assert scan(tmp_path)[0].state == "damaged"


def test_manifest_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    path = write(tmp_path, 2, run={"metrics": {"loss": 1.0}})
    scanner = StepScanner(LocalStorage(), str(tmp_path))
    first = scanner.scan()
    manifest = path / ".aiockpt.json"
    manifest.chmod(0)
    try:
        if os.geteuid():
            assert scanner.scan() == first
    finally:
        manifest.chmod(0o644)


class LookingStorage(WrapperStorage):
    """Counts the looks at directories, and the documents that are read of them."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.looks: Counter[str] = Counter()
        self.reads = 0

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        self.looks[path] += 1
        listing = super().look(path, budget)
        fetch = listing.fetch

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reads += 1
            return fetch(*args, **kwargs)

        listing.fetch = counted  # type: ignore[method-assign]
        return listing


def test_a_further_look_lists_each_step_at_most_once_and_reads_nothing(anywhere: Path) -> None:
    paths = [str(write(anywhere, step)) for step in range(1, 8)]
    storage = LookingStorage(storage_of(anywhere))
    with aiockpt.SyncCheckpointManager(anywhere, storage=storage, read_only=True) as run:
        assert list(run.steps()) == list(range(1, 8))
        assert storage.reads >= len(paths)
        for look, most in ((run.steps, len(paths)), (run.infos, len(paths)), (run.latest, 1)):
            storage.looks.clear()
            storage.reads = 0
            look()
            assert storage.reads == 0
            assert storage.looks.pop(str(anywhere)) == 1
            assert set(storage.looks.values()) <= {1}
            assert storage.looks.total() <= most
        storage.looks.clear()
    assert not storage.looks  # closing needs no look


def test_replaced_step_is_read_again(anywhere: Path) -> None:
    scanner = StepScanner(storage_of(anywhere), str(anywhere))
    for loss in (1.0, 3.0):
        path = write(anywhere, 2, run={"metrics": {"loss": loss}})
        assert scanner.scan()[0].metrics == {"loss": loss}
        remove(path)
        assert scanner.scan() == ()
    for loss in (5.0, 7.0):
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(FILLED, path, metadata={"run": {"metrics": {"loss": loss}}}, overwrite=True)
        assert scanner.scan()[0].metrics == {"loss": loss}


def changed_in_place(path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda path: None, "complete"),
        (changed_in_place, "damaged"),
        (lambda path: (path / ".metadata").unlink(), "damaged"),
        (lambda path: (path / ".metadata").rename(path / "x"), "damaged"),
        (lambda path: (path / "more").write_bytes(b"1234567"), "complete"),
    ],
)
def test_whole_step_is_looked_at_again_when_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, state: str
) -> None:
    path = write(tmp_path, 1)
    scanner = StepScanner(LocalStorage(), str(tmp_path))
    looks: list[str] = []
    real = entries.LocalListing._list_top
    monkeypatch.setattr(entries.LocalListing, "_list_top", lambda *args: (looks.append(args[0].path), real(*args))[1])
    (before,) = scanner.scan()
    change(path)
    looks.clear()
    (after,) = scanner.scan()
    assert after.state == state
    assert (str(path) in looks) == (after != before)
    assert after.nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_scan_does_not_import_torch(tmp_path: Path) -> None:
    write(tmp_path, 4)
    code = (
        "import sys; from aiockpt.manager.scan import scan\n"
        "from aiockpt.manager.policies import KeepLatest, to_delete\n"
        "infos = scan(sys.argv[1]); to_delete(KeepLatest(1), infos, 0.0); print(infos[0].step, infos[0].state)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 complete\n", "")


def looked(scanner: StepScanner) -> list[StepInfo | None]:
    return [scanner.latest()]


@pytest.mark.parametrize("look", [StepScanner.scan, looked])
def test_step_written_while_the_only_other_one_is_deleted_is_found(
    look: Any, anywhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(anywhere, 1)
    real = StepScanner._examined

    def replace_first(scanner: StepScanner, path: str, step: int, listed: str | None) -> StepInfo:
        if step == 1:
            write(anywhere, 2)
            remove(path_of(anywhere, 1))
        return real(scanner, path, step, listed)

    monkeypatch.setattr(StepScanner, "_examined", replace_first)
    found = look(StepScanner(storage_of(anywhere), str(anywhere)))
    assert [(info.step, info.state) for info in found] == [(2, "complete")]


def test_latest_is_the_newest_complete_one(anywhere: Path) -> None:
    scanner = StepScanner(storage_of(anywhere), str(anywhere))
    assert scanner.latest() is None
    for step in (1, 20, 300):
        write(anywhere, step)
    (path_of(anywhere, 300) / ".aiockpt.json").write_bytes(b"{}")
    assert scanner.latest() == scanner.scan()[1]


def test_broken_symlinks_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, 1)
    os.symlink("step-00000002", tmp_path / "step-00000002")
    os.symlink("nothing", tmp_path / "step-00000003")
    assert [found.step for found in scan(tmp_path)] == [1]


def test_step_whose_path_can_not_be_looked_at_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(3)}, path_of(tmp_path, 100))
    real, opened = os.stat, entries.open_regular

    def fail(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if path == str(path_of(tmp_path, 100)):
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path, *args, **options)

    def open_and_fail(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(os, "stat", fail)
        return opened(*args, **options)

    monkeypatch.setattr(entries, "open_regular", open_and_fail)
    with pytest.raises(OSError, match="Input/output error"):
        scan(tmp_path)


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_step_that_goes_while_it_is_read_is_gone(
    how: str, is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have other paths then, but no link leads out."""
    moment = "path_of_fd" if is_link else "open_regular"
    real, step = getattr(entries, moment), path_of(tmp_path, 100)

    def go(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if step.exists() and (moment == "open_regular" or args[1].startswith(str(step))):
            step.rename(tmp_path / "gone")
            if how == "removed":
                shutil.rmtree(tmp_path / "gone")
        return found

    with aiockpt.SyncCheckpointer() as ckpt:
        for number in (100, 200):
            ckpt.save({"x": torch.ones(3)}, path_of(tmp_path, number))
    if is_link:
        (step / ".aiockpt.json").rename(step / "manifest")
        (step / ".aiockpt.json").symlink_to("manifest")
        assert [info.state for info in scan(tmp_path)] == ["complete"] * 2
    monkeypatch.setattr(entries, moment, go)
    assert [info.step for info in scan(tmp_path)] == [200]
