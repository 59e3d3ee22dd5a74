"""Files that a save adds to its checkpoint: published with it, in its manifest, and verified."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import aiockpt

STATE = {"w": torch.arange(70_000.0), "b": torch.ones(3)}
CONFIG = json.dumps({"hidden_size": 3}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("given", [{}, {"compress": "zstd"}, {"format": "safetensors"}], ids=str)
def test_files_are_a_part_of_the_checkpoint(
    given: dict[str, Any], writer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"t" * 200_000)
    files = {"config.json": CONFIG, "tokenizer.json": tmp_path / "tokenizer.json", "rng_state.pth": bytearray(b"rng")}
    path = tmp_path / "c"
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:
        result = ckpt.save(STATE, path, files=files, **given)
        assert result.files["config.json"] == len(CONFIG)
        assert (path / "config.json").read_bytes() == CONFIG
        assert (path / "tokenizer.json").read_bytes() == b"t" * 200_000
        assert (path / "rng_state.pth").read_bytes() == b"rng"
        assert json.loads((path / ".aiockpt.json").read_text())["files"].keys() >= files.keys()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(ckpt.load(path)["w"], STATE["w"])
        assert "other parts of the state" not in caplog.text
        assert ckpt.verify(path).ok
        (path / "config.json").write_bytes(CONFIG.replace(b"3", b"4"))
        report = ckpt.verify(path)
        assert not report.ok
        assert "config.json" in str(report)
        ckpt.save(STATE, path, files={"config.json": b"new"}, overwrite=True, **given)
        assert (path / "config.json").read_bytes() == b"new"
        assert ckpt.verify(path).ok
        ckpt.delete(path)
    assert not path.exists()


def test_added_files_replace_those_of_a_model_repository(tmp_path: Path) -> None:
    path = tmp_path / "repository"
    path.mkdir()
    safetensors.torch.save_file({"old": torch.ones(2)}, path / "model.safetensors")
    for name in ("config.json", "README.md"):
        (path / name).write_text("theirs")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, path, format="safetensors", files={"config.json": CONFIG}, overwrite=True)
        assert ckpt.verify(path).ok
    assert (path / "config.json").read_bytes() == CONFIG
    assert (path / "README.md").read_text() == "theirs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".hidden", "no '.' at its beginning"),
        ("a/b", "a name has no '/'"),
        ("", "a name has no '/'"),
        (3, "the name 3"),
        ("model.safetensors", "take for a part of the state"),
        ("__0_0.distcp", "take for a part of the state"),
        ("common.pt", "take for a part of the state"),
        ("x.pt", "take for a part of the state"),
        ("model.bin", "take for a part of the state"),
        ("pytorch_model.bin.index.json", "take for a part of the state"),
    ],
)
def test_names_with_a_meaning_are_refused(name: Any, said: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(ValueError, match=said):
        ckpt.save(STATE, tmp_path / "c", files={name: b"x"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [3, None, ["x"]])
def test_files_are_bytes_or_paths(content: Any, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(TypeError, match=r"files\['a'\] must be bytes or the path"):
        ckpt.save(STATE, tmp_path / "c", files={"a": content})


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_one_file_takes_no_others(name: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(ValueError, match="the path names one file"):
        ckpt.save(STATE, tmp_path / name, files={"config.json": CONFIG})


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    said = pytest.raises(aiockpt.SaveError, match=r"files\['a'\] can't be read: .*gone")
    with aiockpt.SyncCheckpointer() as ckpt, said:
        ckpt.save(STATE, tmp_path / "c", files={"a": tmp_path / "gone"})
    assert not list(tmp_path.iterdir())
