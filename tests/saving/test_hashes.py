"""The column of hashes in the index: what it holds, where it is refused, and who ignores it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import aiockpt
from aiockpt.errors import CorruptCheckpointError, SaveError
from tests.kinds import body_of, sealed
from tests.states import assert_same, raw_bytes, training_state

CHUNK = 64 << 10
ALGORITHM = "xxh3_128"


def column(path: Path) -> dict[str, str | None]:
    """Return the column of a checkpoint, by name."""
    index = json.loads((path / ".aiockpt.json").read_text())["index"]
    return dict(zip(index["names"], index[ALGORITHM], strict=True))


def mixed_state() -> dict[str, Any]:
    """Return tensors of all sizes: empty, within a chunk, over several chunks; strided, tied, and objects."""
    generator = torch.Generator().manual_seed(7)
    large = torch.randint(0, 255, (5 * CHUNK + 77,), dtype=torch.uint8, generator=generator)
    return {
        "empty": torch.empty(0, 3),
        "small": torch.arange(5),
        "medium": torch.rand(9_001, generator=generator),
        "large": large,
        "tied": large,
        "columns": torch.rand(300, 200, generator=generator).t(),
        "gaps": torch.rand(100, 200, generator=generator)[:, ::2],
        "step": 7,
    }


def test_the_column_has_the_hash_of_each_payload(tmp_path: Path) -> None:
    state = mixed_state()
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=4 * CHUNK) as ckpt:
        ckpt.save(state, tmp_path / "c", hashes=True)
        assert_same(state, ckpt.load(tmp_path / "c"))
        assert ckpt.verify(tmp_path / "c").ok
        ckpt.save(state, tmp_path / "plain")
    found = column(tmp_path / "c")
    assert found.pop("step") is None
    stored = {name: tensor.t() if name == "columns" else tensor for name, tensor in state.items() if name != "step"}
    assert found == {name: xxhash.xxh3_128(raw_bytes(tensor)).hexdigest() for name, tensor in stored.items()}
    assert ALGORITHM not in (tmp_path / "plain" / ".aiockpt.json").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_reads_a_checkpoint_with_the_column(tmp_path: Path) -> None:
    state = {name: value for name, value in mixed_state().items() if name != "step"}
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK) as ckpt:
        ckpt.save(state, tmp_path / "c", hashes=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, tensor in state.items():
        assert raw_bytes(target[name]) == raw_bytes(tensor), name


@pytest.mark.parametrize("damage", [lambda column: column[1:], lambda _: "x", lambda column: [7, *column[1:]]])
def test_a_damaged_column_is_a_damaged_manifest(tmp_path: Path, damage: Any) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(training_state(), tmp_path / "c", hashes=True)
    manifest = tmp_path / "c" / ".aiockpt.json"
    document = json.loads(body_of(manifest.read_bytes()) + b"\n}")
    manifest.write_bytes(sealed(json.dumps(document)[:-1].encode()))
    assert aiockpt.verify(tmp_path / "c").ok
    document["index"][ALGORITHM] = damage(document["index"][ALGORITHM])
    manifest.write_bytes(sealed(json.dumps(document)[:-1].encode()))
    with pytest.raises(CorruptCheckpointError, match=ALGORITHM):
        aiockpt.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "c.safetensors", "format='safetensors'"),
        ({}, "c.pt", "format='torch'"),
        ({"compress": "zstd"}, "c", "compress="),
    ],
)
def test_hashes_are_refused_where_there_are_none(tmp_path: Path, options: Any, name: str, message: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(SaveError, match=message):
        ckpt.save({"x": torch.ones(3)}, tmp_path / name, hashes=True, **options)
    assert not list(tmp_path.iterdir())


def test_hashes_are_refused_by_a_writer_process(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(writer="process") as ckpt, pytest.raises(SaveError, match="writer='process'"):
        ckpt.save({"x": torch.ones(3)}, tmp_path / "c", hashes=True)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.AiockptError, match=r"pip install 'aiockpt\[delta\]'"):
            ckpt.save({"x": torch.ones(3)}, tmp_path / "c", hashes=True)
        ckpt.save({"x": torch.ones(3)}, tmp_path / "c")
