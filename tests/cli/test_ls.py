import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage import LookBudget
from tests import commands
from tests.cli.checkpoints import FORMATS, make
from tests.places import storage_of
from tests.polling import until

NAMES = {"torch": ".pt", "safetensors": ".safetensors"}
SHOWN_AS = {"ranks": "dcp", "sharded": "safetensors"}


def invoke(*arguments):
    result = commands.invoke("ls", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*arguments):
    return {each["name"]: each for each in json.loads(invoke(*arguments, "--json"))["checkpoints"]}


def save_step(run, step, keep=(), **metrics):
    """Save a checkpoint with the metadata that a manager writes."""
    facts = {"step": step, "metrics": metrics, "time": 1.7e9 + step, "keep": list(keep)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.full((4,), float(step))}, run / f"step-{step:08d}", metadata={"run": facts, "mine": step})


def test_every_format_is_found(anywhere):
    paths = {form: make(form, anywhere / form) for form in FORMATS}
    if isinstance(anywhere, Path):  # a server has nothing but checkpoints
        (anywhere / "notes.txt").write_text("{no checkpoint}" * 20)
        (anywhere / "folder").mkdir()
    found = rows(anywhere)
    assert {name: (each["format"], each["state"], each["path"]) for name, each in found.items()} == {
        path.name: (SHOWN_AS.get(form, form), "complete", str(path)) for form, path in paths.items()
    }
    for form, path in paths.items():
        files = [path] if path.is_file() else path.iterdir()
        assert found[path.name]["bytes"] == sum(file.stat().st_size for file in files)
        assert rows(path) == {path.name: found[path.name]}, form
    assert found["aiockpt"]["metadata"] == {"loss": 0.25, "note": "größe"}
    text = invoke(anywhere)
    assert "notes" not in text
    assert text.splitlines()[-1].startswith("6 complete; ")


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if form not in ("dcp", "ranks")]
)  # DCP metadata records no file sizes
def test_truncated_checkpoints_are_damaged(form, tmp_path):
    path = make(form, tmp_path / "c")
    files = [path] if path.is_file() else sorted(path.glob("[!.]*.*"))
    os.truncate(files[0], files[0].stat().st_size - 1)
    if form == "sharded":
        files[0].unlink()
    (row,) = rows(tmp_path).values()
    assert row["state"] == "damaged"
    assert row["problem"]
    assert f"{path.name}: {row['problem']}" in invoke(tmp_path)


def test_missing_shard_is_found_without_a_manifest(tmp_path):
    path = make("sharded", tmp_path / "c")
    (path / ".aiockpt.json").unlink()
    shard = min(path.glob("*.safetensors"))
    assert rows(tmp_path)["c"]["state"] == "complete"
    shard.unlink()
    assert rows(tmp_path)["c"]["problem"] == f"it lacks its file {shard.name}"


def test_dcp_directory_without_metadata_is_unfinished(tmp_path):
    path = make("dcp", tmp_path / "c")
    (path / ".metadata").unlink()
    row = rows(tmp_path)["c"]
    assert (row["state"], row["format"]) == ("unfinished", "dcp")


def test_numbered_checkpoints_are_not_taken_for_parts_of_one(tmp_path):
    path = make("dcp", tmp_path / "run" / "0")
    shutil.copytree(path, tmp_path / "run" / "1")
    assert rows(tmp_path) == {}
    assert json.loads(invoke(tmp_path, "--json"))["below"] == {"run": 2}
    assert list(rows(tmp_path / "run")) == ["0", "1"]


def test_step_that_was_set_aside_is_damaged(anywhere):
    save_step(anywhere, 36)
    storage_of(anywhere).set_aside(str(anywhere / "step-00000036"), ["step-00000036.damaged"])
    assert rows(anywhere)["step-00000036.damaged"]["state"] == "damaged"


def test_unreadable_entries_do_not_hide_the_others(tmp_path):
    make("dcp", tmp_path / "c")
    for name in ("loop", "step-00000007"):
        (tmp_path / name).symlink_to(name)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    found = {name: (row["state"], row["problem"]) for name, row in rows(tmp_path).items()}
    assert found == {
        "c": ("complete", ""),
        "step-00000007": ("damaged", f"it can't be read: {os.strerror(errno.ELOOP)}"),
        "w.safetensors": ("damaged", "its header is damaged"),
    }
    assert "2 not" in invoke(tmp_path)


def test_names_are_sorted_by_number(anywhere):
    for name in ("step-9", "step-100", "step-20", "final"):
        make("dcp", anywhere / name)
    assert list(rows(anywhere)) == ["final", "step-9", "step-20", "step-100"]


# --- runs -------------------------------------------------------------------------------------------------


def test_steps_are_listed_with_metrics(anywhere):
    for step, loss in ((100, 0.5), (200, 0.125), (300, 0.75), (400, 0.25)):
        save_step(anywhere, step, loss=loss)
    found = rows(anywhere)
    assert {each["step"]: each["metrics"]["loss"] for each in found.values()} == {
        100: 0.5,
        200: 0.125,
        300: 0.75,
        400: 0.25,
    }
    assert found["step-00000200"]["metadata"] == {"mine": 200}
    assert found["step-00000200"]["saved"] == "2023-11-14T22:16:40+00:00"
    lines = [line.split() for line in invoke(anywhere).splitlines()]
    assert lines[0] == ["name", "state", "size", "saved", "metrics"]
    assert lines[2][-2:] == ["loss", "0.125"]


def test_save_in_progress_names_its_process(tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.transaction(tmp_path / "c") as tx:
        tx.save({"w": torch.ones(3)})
        until(lambda: os.listdir(tmp_path))
        (row,) = rows(tmp_path).values()
        assert (row["state"], row["problem"]) == ("unfinished", f"process {os.getpid()} is saving")
        text = invoke(tmp_path)
        assert "0 complete, 1 not" in text
        assert "kept by" not in text


def test_orphan_of_a_dead_process_is_unfinished(orphan):
    run = orphan.parent
    (row,) = rows(run).values()
    assert (row["state"], row["bytes"]) == ("unfinished", sum(file.stat().st_size for file in orphan.iterdir()))
    assert "is dead; aiockpt clean removes it" in row["problem"]
    orphan.rename(f"{orphan}-swept")
    (row,) = rows(run).values()
    assert "which was removing it, is dead" in row["problem"]


def test_orphan_of_another_machine_needs_older_than(orphan):
    run = orphan.parent
    orphan.rename(run / f".aiockpt-{'b' * 30}.7.8.0123456789abcdef")
    (run / ".aiockpt-x.7.0123456789abcdef").mkdir()
    assert all("--older-than" in row["problem"] for row in rows(run).values())


def test_owner_of_a_run_is_shown(anywhere):
    with aiockpt.SyncCheckpointManager(anywhere / "run", keep=[aiockpt.KeepLatest(1)]) as run:
        run.save(3, {"w": torch.ones(3)}, metrics={"loss": 0.5})
        assert f": process {os.getpid()} on host " in invoke(anywhere / "run").splitlines()[0]
        document = json.loads(invoke(anywhere / "run", "--json"))
        assert document["owner"]["pid"] == os.getpid()
        (row,) = document["checkpoints"]
        assert (row["step"], row["metrics"]) == (3, {"loss": 0.5})
    assert "process" not in invoke(anywhere / "run")


def test_subdirectories_with_checkpoints_are_counted(anywhere):
    for name in ("b/step-1", "b/step-2", "a10/c", "a9/c", "here"):
        make("aiockpt", anywhere / name)
    if isinstance(anywhere, Path):
        (anywhere / "empty").mkdir()
    assert invoke(anywhere).splitlines()[-1] == "Directories with checkpoints: a9 (1), a10 (1), b (2)"
    assert json.loads(invoke(anywhere, "--json"))["below"] == {"a9": 1, "a10": 1, "b": 2}
    assert json.loads(invoke(anywhere / "here", "--json"))["below"] == {}


def test_directories_that_are_not_looked_into_are_named(anywhere):
    make("aiockpt", anywhere / "all" / "runs" / "a" / "step-1")
    text = f"There are no checkpoints in {anywhere / 'all'}.\nDirectories that may have some further below: runs\n"
    assert invoke(anywhere / "all") == text
    make("aiockpt", anywhere / "all" / "models" / "best")  # which does not hide the others
    lines = ["Directories with checkpoints: models (1)", "Directories that may have some further below: runs"]
    assert invoke(anywhere / "all").splitlines() == lines


def test_empty_directory(tmp_path):
    assert invoke(tmp_path) == f"There are no checkpoints in {tmp_path}.\n"
    assert json.loads(invoke(tmp_path, "--json")) == {
        "directory": str(tmp_path),
        "owner": None,
        "checkpoints": [],
        "below": {},
        "cut": False,
    }


def test_symlinks_are_followed_and_shown(tmp_path):
    make("dcp", tmp_path / "step-7")
    (tmp_path / "latest").symlink_to("step-7")
    (tmp_path / "broken").symlink_to("step-8")
    assert "latest -> step-7" in invoke(tmp_path)
    assert list(rows(tmp_path)) == ["latest", "step-7"]


# --- policies as text -------------------------------------------------------------------------------------


def test_times_are_in_the_local_zone(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        save_step(tmp_path, 100)
        assert " 2023-11-15 04:00" in invoke(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()


# --- bounds -----------------------------------------------------------------------------------------------


def scanned(call):
    """Return the directories that a call lists, each as often as it does."""
    found, is_on = [], True

    def note(event, arguments):
        if is_on and event == "os.scandir":
            at = arguments[0]
            found.append(os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else os.fspath(at))

    sys.addaudithook(note)  # it can't be removed
    call()
    is_on = False
    return found


def test_each_directory_is_listed_once_and_no_deeper_than_needed(tmp_path):
    save_step(tmp_path / "run", 1)
    for number in range(3):
        (tmp_path / f"data{number}" / "a" / "b" / "c").mkdir(parents=True)
    lists = scanned(lambda: invoke(tmp_path))
    below = {str(tmp_path / f"data{number}{inner}") for number in range(3) for inner in ("", "/a")}
    assert sorted(lists) == sorted({str(tmp_path), str(tmp_path / "run"), str(tmp_path / "run/step-00000001"), *below})


def test_what_looks_no_further_says_so(tmp_path, monkeypatch):
    for number in range(4):
        make("dcp", tmp_path / "runs" / f"c{number}")
    assert json.loads(invoke(tmp_path, "--json"))["cut"] is False
    monkeypatch.setattr(LookBudget.__init__, "__defaults__", (2,))
    assert json.loads(invoke(tmp_path, "--json"))["cut"] is True
    assert "more than is looked at" in commands.succeed("verify", tmp_path, code=3)
