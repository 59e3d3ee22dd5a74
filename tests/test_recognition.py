"""Every command and every call takes a path for the same thing."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import StorageMeta

import aiockpt
from aiockpt.format.belonging import describes, proven_files
from aiockpt.manager.scan import scan
from aiockpt.storage.local.entries import LocalListing
from tests import commands
from tests.kinds import KINDS, MANIFEST, METADATA, body_of, files, made, sealed

WHOLE = [name for name, kind in KINDS.items() if kind.keys]
DAMAGED = [name for name, kind in KINDS.items() if kind.is_damaged]
SEVERAL = [name for name, kind in KINDS.items() if kind.holds]
OTHERS = [name for name, kind in KINDS.items() if not (kind.keys or kind.is_damaged or kind.holds)]


def invoke(*arguments: object) -> tuple[int, str]:
    done = commands.invoke(*arguments)
    return done.exit_code, done.output


def row_of(path: Path) -> dict[str, object] | None:
    """Return what ``ls`` of the parent says of a path."""
    listed = json.loads(invoke("ls", path.parent, "--json")[1])["checkpoints"]
    return next((row for row in listed if row["path"] == str(path)), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_checkpoints_are_whole_everywhere(name: str, ckpt, tmp_path: Path) -> None:
    path = made(name, tmp_path / "in" / "c")
    assert tuple(sorted(ckpt.load(path))) == KINDS[name].keys
    with ckpt.open(path) as reader:
        assert tuple(sorted(reader)) == KINDS[name].keys
    assert ckpt.verify(path).ok
    row = row_of(path)
    assert row is not None
    assert row["state"] == "complete"
    assert invoke("verify", path)[0] == 0
    assert invoke("inspect", path)[0] == 0
    assert invoke("convert", path, tmp_path / "converted")[0] == 0
    assert tuple(sorted(ckpt.load(tmp_path / "converted"))) == KINDS[name].keys


@pytest.mark.parametrize("name", WHOLE)
def test_all_agree_on_the_files(name: str, ckpt, tmp_path: Path) -> None:
    """What is verified is what may be deleted, and what is copied; nothing else is needed to load."""
    path = made(name, tmp_path / "run" / "step-00000001")
    if not path.is_dir():
        pytest.skip("it is a file")
    with LocalListing(path) as listing:
        listing.list_below()
        own = proven_files(listing.files, listing.fetch)
    report = ckpt.verify(path)
    assert own.isdisjoint(problem.file for problem in report.problems)
    data = {each for each in own if not describes(each)}
    for each in data:  # all of it is needed
        (path / each).rename(tmp_path / "away")
        row = row_of(path) or {}
        assert (row.get("state"), row.get("format")) != ("complete", report.format)
        (tmp_path / "away").rename(path / each)
    if MANIFEST in own:
        assert invoke("mirror", path.parent, tmp_path / "mirror")[0] == 0
        assert {each.name for each in (tmp_path / "mirror" / path.name).iterdir()} == own
    if not own:  # files of torch.save alone name nothing
        assert KINDS[name].keys
        return
    assert report.files == len(own)
    for each in path.iterdir():
        if each.name not in own:
            each.rename(tmp_path / f"other-{each.name}")
    assert tuple(sorted(ckpt.load(path))) == KINDS[name].keys
    ckpt.delete(path)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_are_damaged_everywhere(name: str, ckpt, tmp_path: Path) -> None:
    path = made(name, tmp_path / "in" / "c")
    says = KINDS[name].says
    with pytest.raises(aiockpt.CorruptCheckpointError, match=says):
        ckpt.load(path)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=says), ckpt.open(path):
        pass
    report = ckpt.verify(path)
    assert not report.ok
    assert re.search(says, str(report))
    row = row_of(path)
    assert row is not None
    assert row["state"] in ("damaged", "unfinished")
    assert re.search(says, str(row["problem"]))
    assert invoke("verify", path)[0] == 1
    assert invoke("inspect", path)[0] == 3
    assert invoke("convert", path, tmp_path / "converted")[0] == 3
    assert not (tmp_path / "converted").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_directories_of_several_are_walked_or_refused(name: str, ckpt, tmp_path: Path) -> None:
    path, holds = made(name, tmp_path / "in" / "c"), KINDS[name].holds
    for attempt in (ckpt.load, ckpt.verify, lambda path: ckpt.open(path).__enter__()):
        with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"add (one of these|this)") as caught:
            attempt(path)
        assert all(each in str(caught.value) for each in holds)
    assert row_of(path) is None
    parent = json.loads(invoke("ls", path.parent, "--json")[1])
    assert parent["below"] == {path.name: len(holds)}
    assert {row["name"] for row in json.loads(invoke("ls", path, "--json")[1])["checkpoints"]} == set(holds)
    code, output = invoke("verify", path, "--json")
    assert (code, {Path(record["path"]).name for record in json.loads(output)}) == (0, set(holds))
    assert invoke("inspect", path)[0] == 3
    assert invoke("convert", path, tmp_path / "converted")[0] == 3
    assert invoke("rm", "--yes", path)[0] == 3
    assert all((path / each).exists() for each in holds)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_paths_are_no_checkpoints_anywhere(name: str, ckpt, tmp_path: Path) -> None:
    path, says = made(name, tmp_path / "in" / "c"), KINDS[name].says
    before = sorted(tmp_path.rglob("*"))
    for attempt in (ckpt.load, ckpt.verify, lambda path: ckpt.open(path).__enter__()):
        with pytest.raises(aiockpt.CheckpointNotFoundError, match=says):
            attempt(path)
    assert row_of(path) is None
    code, output = invoke("verify", path)
    assert code == 3
    assert re.search(says, " ".join(output.split()))
    assert invoke("inspect", path)[0] == 3
    assert invoke("rm", "--yes", path)[0] == 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_scan_agrees(name: str, ckpt, tmp_path: Path) -> None:
    """A step of a run is complete if it can be loaded."""
    path = made(name, tmp_path / "in" / "c")
    if not path.is_dir():
        pytest.skip("a step is a directory")
    path.rename(tmp_path / "step-00000007")
    (info,) = scan(tmp_path)
    assert (info.state == "complete") == (KINDS[name].keys is not None)
    assert bool(info.problem) == (info.state != "complete")


def test_corrupt_step_is_found_beside_a_loose_file(ckpt, tmp_path: Path) -> None:
    path = made("run beside a safetensors", tmp_path / "in" / "run")
    data = path / "step-00000002" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, output = invoke("verify", path, "--json")
    assert code == 1
    assert {Path(each["path"]).name: each["ok"] for each in json.loads(output)} == {
        "export.safetensors": True,
        "step-00000001": True,
        "step-00000002": False,
    }


def test_an_index_is_named_where_a_directory_has_two(ckpt, tmp_path: Path) -> None:
    path = made("index of safetensors", tmp_path / "in" / "c")
    (path / "other.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"t0": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"model\.safetensors\.index\.json"):
        ckpt.load(path)
    assert sorted(ckpt.load(path / "model.safetensors.index.json")) == ["t0", "t1"]
    assert sorted(ckpt.load(path / "other.safetensors.index.json")) == ["t0"]


def test_what_deepspeed_has_stored_is_no_choice(ckpt, tmp_path: Path) -> None:
    path = files(tmp_path, "a.pt", "mp_rank_00_model_states.pt", "run/step5/layer_00-model_states.pt")
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"holds one: a\.pt; add this"):
        ckpt.load(path)
    assert sorted(ckpt.load(path / "a.pt")) == ["t0"]


LARGE = 257 << 20


def _large_manifest(path: Path) -> None:
    manifest = path / MANIFEST
    body = body_of(manifest.read_bytes())
    manifest.write_bytes(sealed(body[:1] + b" " * LARGE + body[1:]))


def _large_metadata(path: Path) -> None:
    metadata = pickle.loads((path / METADATA).read_bytes())
    metadata.storage_meta = StorageMeta(save_id="x" * LARGE)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def _large_index(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes()[:-1] + b" " * LARGE + b"}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "enlarge"),
    [("ours", _large_manifest), ("stock", _large_metadata), ("index of safetensors", _large_index)],
)
def test_a_document_may_be_large_for_all(name: str, enlarge, ckpt, tmp_path: Path) -> None:
    """One limit for loading, listing and deleting: what one can open, none takes for damaged."""
    path = made(name, tmp_path / "run" / "step-00000001")
    enlarge(path)
    assert tuple(sorted(ckpt.load(path))) == KINDS[name].keys
    assert ckpt.verify(path).ok
    with aiockpt.SyncCheckpointManager(path.parent, read_only=True) as run:
        assert run.latest().step == 1
    row = row_of(path)
    assert row is not None
    assert row["state"] == "complete"
    assert invoke("inspect", path)[0] == 0
    assert invoke("convert", path, tmp_path / "converted")[0] == 0
    assert tuple(sorted(ckpt.load(tmp_path / "converted"))) == KINDS[name].keys
    ckpt.delete(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["model_best.pth.tar", "w.th", "w.pkl", "W.PTH"])
def test_names_that_other_programs_give_files_of_torch_are_files(name: str, ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(2)}, tmp_path / name)
    assert (tmp_path / name).is_file()
    assert torch.equal(ckpt.load(tmp_path / name)["w"], torch.load(tmp_path / name)["w"])


@pytest.mark.parametrize(
    "name",
    [
        "optim.pt",
        "OPTIM.pt",
        "Optimizer.PT",
        "lr_scheduler.pt",
        "grad_scaler.pt",
        "optim.safetensors",
        "Optimizer.safetensors",
    ],
)
def test_companions_have_short_names_and_capitals_too(name: str, ckpt, tmp_path: Path) -> None:
    if name.endswith(".safetensors"):
        save_file({"state": torch.ones(2)}, tmp_path / name)
    else:
        torch.save({"state": torch.ones(2)}, tmp_path / name)
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="stored beside a model, but no model"):
        ckpt.load(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(ckpt.load(tmp_path)) == ["w"]
    assert ckpt.verify(tmp_path).ok
    assert {each.name for each in tmp_path.iterdir()} == {name, "model.safetensors"}


def test_names_that_only_begin_like_a_companion_s_are_models(ckpt, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "optimus.pt")
    assert list(ckpt.load(tmp_path)) == ["w"]


def test_an_empty_file_beside_a_model_is_no_choice(ckpt, tmp_path: Path) -> None:
    (tmp_path / "other.pt").touch()
    with pytest.raises(aiockpt.LoadError):
        ckpt.load(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert list(ckpt.load(tmp_path)) == ["w"]
    assert ckpt.verify(tmp_path).ok
    with pytest.raises(aiockpt.DeleteError):  # it is not proven to be the model's
        ckpt.delete(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors-00001-of-00002",),
        ("model.pt-1-of-2", "README.md"),
        ("weights",),
        ("model.safetensors.tmp",),
        ("sub/model.safetensors-00001-of-00002",),
    ],
    ids=" ".join,
)
def test_files_that_no_name_makes_checkpoints_are_none_for_verify(names: tuple[str, ...], ckpt, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    for attempt in (ckpt.load, ckpt.verify):
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            attempt(tmp_path)
    for command in (["verify"], ["inspect"], ["rm", "--yes"]):
        assert invoke(*command, tmp_path)[0] == 3
    assert sorted(tmp_path.rglob("*")) == before


def test_the_number_of_a_part_behind_the_ending_is_named(ckpt, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors-00001-of-00002")
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="is one of several parts by its name"):
        ckpt.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_torch"), [("model.bin", False), ("model.pkl", False), ("model.safetensors", True), ("MODEL.pt", False)]
)
def test_bytes_decide_how_a_file_is_read(name: str, is_torch: bool, ckpt, tmp_path: Path) -> None:
    path = tmp_path / "in" / "c"
    path.mkdir(parents=True)
    (path / "five.ckpt").write_bytes(b"\x80\x04K\x01.")  # a pickle, shorter than what is looked at
    write = torch.save if is_torch else save_file
    write({"w": torch.ones(2)}, path / name)
    assert list(ckpt.load(path)) == ["w"]
    assert ckpt.verify(path).ok
    assert (row_of(path) or {})["state"] == "complete"
    assert [invoke(command, path)[0] for command in ("verify", "inspect")] == [0, 0]
    assert invoke("rm", "--yes", path)[0] == 3  # the other file is not proven to be the model's
