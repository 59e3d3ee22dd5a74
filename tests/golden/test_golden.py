"""Checkpoints of earlier versions load bit for bit, pass verification, and fail cleanly when damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from tests.format.transforms.encryption import ChaCha20
from tests.golden import stock
from tests.golden.make import KEY, METADATA
from tests.golden.states import plain_values, ranks, tensors, training, values
from tests.states import assert_same
from tests.stock import ALONE

DATA = Path(__file__).parent / "data"
TRANSFORMS = [ChaCha20(KEY)]
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "training": lambda: training(large=True),
    "compressed": lambda: training(large=True),
    "encrypted": lambda: training(large=True),
    "hinted": lambda: tensors(large=True),
    "delta": lambda: tensors(large=True),
    "ranks-central": ranks,
    "ranks-decentralized": ranks,
    "safetensors": tensors,
    "safetensors-shards": tensors,
    "file.safetensors": tensors,
    **{path.name: stock.flattened for path in DATA.glob("stock-[0-9]*")},
    **{path.name: ranks for path in DATA.glob("stock-ranks-*")},
    **{path.name: training for path in DATA.glob("torch-save-[0-9]*.pt")},
}
LEGACY = sorted(path.name for path in DATA.glob("torch-save-legacy-*.pt"))
ALL = pytest.mark.parametrize("name", sorted(STATES))
DIRECTORIES = sorted(name for name in STATES if (DATA / name).is_dir())


def load(path: Path, target: Any = None, **options: Any) -> Any:
    with aiockpt.SyncCheckpointer(transforms=TRANSFORMS if "encrypted" in path.name else ()) as ckpt:
        return ckpt.load(path, target, **options)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves by name, sorted by name."""
    if not isinstance(value, dict | list | tuple):
        return {prefix: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, each in pairs:
        found |= flat(each, f"{prefix}.{key}" if prefix else str(key))
    return dict(sorted(found.items()))


def assert_loaded(name: str, loaded: Any) -> None:
    """Assert that a golden checkpoint loaded; formats of other libraries keep neither container types nor order."""
    state = STATES[name]()
    if name.startswith("stock") or "safetensors" in name:
        state, loaded = flat(state), flat(loaded)
    assert_same(state, loaded)


def blank(value: Any) -> Any:
    """Return a target: ones for every tensor, None for every other value."""
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value)
    if isinstance(value, dict):
        return type(value)((key, blank(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    return None


def test_all_golden_checkpoints_are_here() -> None:
    found = {path.name for path in DATA.iterdir()}
    assert found == STATES.keys() | {*LEGACY, "plain-values", "unfinished", "interrupted"}
    for kind in ("stock-", "stock-ranks-", "torch-save-", "torch-save-legacy-"):
        assert any(name.startswith(f"{kind}2.") for name in found), kind
    size = sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file())
    assert size < 1_000_000


@ALL
def test_a_golden_checkpoint_loads(name: str) -> None:
    assert_loaded(name, load(DATA / name))


@ALL
def test_a_golden_checkpoint_loads_into_a_target(name: str) -> None:
    state = STATES[name]()
    target = blank(state)
    load(DATA / name, target)
    assert_same(state, target)


@pytest.mark.parametrize("name", [name for name in DIRECTORIES if STATES[name] is not tensors])
def test_a_part_of_a_golden_checkpoint_loads(name: str) -> None:
    path = DATA / name
    key, index, whole = {
        ranks: ("rows", slice(2, 7), values(torch.float32, 10, 6, seed=1)),
    }.get(STATES[name], ("model.embed.weight", slice(5, 30, 3), values(torch.bfloat16, 33, 8)))
    if name in ("hinted", "delta"):
        key, index, whole = "large", (slice(3, 60), slice(250, 256)), values(torch.float32, 70, 257, seed=3)
    with aiockpt.SyncCheckpointer(transforms=TRANSFORMS if "encrypted" in name else ()) as ckpt:
        with ckpt.open(path) as reader:
            assert_same(whole[index], reader.read(key, index))
            assert key in reader
        assert_same({key: whole}, flat(ckpt.load(path, keys=[key])))


@ALL
def test_a_golden_checkpoint_is_sound(name: str) -> None:
    with aiockpt.SyncCheckpointer(transforms=TRANSFORMS if "encrypted" in name else ()) as ckpt:
        report = ckpt.verify(DATA / name)
    assert (report.ok, report.problems) == (True, ())


def test_plain_values_need_no_permission() -> None:
    state, loaded = plain_values(), load(DATA / "plain-values")
    assert list(loaded) == list(state)
    for key, value in state.items():
        assert type(loaded[key]) is type(value), key
        if isinstance(value, np.ndarray):
            assert (loaded[key].dtype, loaded[key].tolist()) == (value.dtype, value.tolist()), key
        elif key == "file":
            assert loaded[key].getvalue() == value.getvalue()
        elif key == "numpy_rng":
            assert loaded[key][1].tolist() == value[1].tolist()
        else:
            assert repr(loaded[key]) == repr(value), key


@pytest.mark.parametrize("name", ["training", "compressed", "ranks-central", "ranks-decentralized", "encrypted"])
def test_metadata_is_read(name: str) -> None:
    transforms = TRANSFORMS if name == "encrypted" else ()
    with aiockpt.SyncCheckpointer(transforms=transforms) as ckpt, ckpt.open(DATA / name) as reader:
        assert repr(dict(reader.metadata or {})) == repr({} if name == "encrypted" else METADATA)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["training", "hinted", "delta", "ranks-central", "ranks-decentralized"])
def test_stock_dcp_loads_golden_checkpoints(name: str) -> None:
    state = STATES[name]()
    target = blank(state)
    if name == "training":  # stock DCP needs a target for each key
        state = {"model": state["model"]}
        target = {"model": target["model"]}
    else:
        state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        target = {key: target[key] for key in state}
    dcp.load(target, checkpoint_id=DATA / name, **ALONE)
    assert_same(state, target)


# --- incomplete checkpoints ---------------------------------------------------------------------------


def test_an_unfinished_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.CheckpointNotFoundError):
        load(DATA / "unfinished" / "step-1")
    with pytest.raises(aiockpt.LoadError):
        load(DATA / "unfinished")
    shutil.copytree(DATA / "unfinished", tmp_path / "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 1
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.clean(tmp_path / "runs", older_than_s=0)
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_interrupted_overwrite_shows_the_new_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(DATA / "interrupted", tmp_path / "runs")
    assert_same({"x": torch.ones(9)}, load(tmp_path / "runs" / "step-1"))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.clean(tmp_path / "runs", older_than_s=0)
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["step-1"]
        assert_same({"x": torch.ones(9)}, ckpt.load(tmp_path / "runs" / "step-1"))


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _load_fails_or_is_right(path: Path, name: str) -> bool:
    """Return whether the load raised LoadError; assert that its values are right if it did not."""
    try:
        loaded = load(path)
    except aiockpt.LoadError:
        return True
    assert_loaded(name, loaded)
    return False


@pytest.mark.filterwarnings("ignore::UserWarning")
@ALL
def test_a_truncated_file_is_detected(name: str, tmp_path: Path) -> None:
    for file in _files(DATA / name):
        path = tmp_path / name
        shutil.copytree(DATA / name, path) if path.suffix not in (".pt", ".safetensors") else shutil.copy(file, path)
        cut = path / file.relative_to(DATA / name) if path.is_dir() else path
        os.truncate(cut, file.stat().st_size * 2 // 3)
        assert _load_fails_or_is_right(path, name), file
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in sorted(STATES) if "safetensors" not in name])  # these have no CRC
def test_a_changed_byte_never_gives_another_value(name: str, tmp_path: Path) -> None:
    found = 0
    for file in _files(DATA / name):
        if name.startswith("stock") and file.name == ".metadata":  # it has no CRC
            continue
        path = tmp_path / name
        shutil.copytree(DATA / name, path) if path.suffix not in (".pt", ".safetensors") else shutil.copy(file, path)
        changed = path / file.relative_to(DATA / name) if path.is_dir() else path
        whole = file.read_bytes()
        for at in range(len(whole) // 20, len(whole), len(whole) // 10 + 1):
            changed.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            found += _load_fails_or_is_right(path, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert found


def test_stock_checkpoints_of_this_torch_load(tmp_path: Path) -> None:
    """The script that wrote the kept stock checkpoints still works, for use with another torch."""
    stock.main(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        if "legacy" not in path.name:
            state = stock.flattened() if path.is_dir() else training()
            assert_same(flat(state), flat(load(path)))


@pytest.mark.parametrize("name", LEGACY)
def test_the_format_before_torch_1_6_is_read(name: str) -> None:
    assert_same(torch.load(DATA / name, weights_only=True), load(DATA / name))
