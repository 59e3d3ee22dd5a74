"""`RngState`: each rank's random streams continue where they were saved."""

from __future__ import annotations

import random
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt import RngState
from tests.ranks.world import World


def draw() -> list[Any]:
    """Draw from every generator, also through functions that cache the second number of a pair."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(17).tolist(),
    ]


@pytest.fixture(autouse=True)
def generators():
    """Restore the generators after a test."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draw()  # so that Python and NumPy have cached the second number of a pair
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_every_stream_continues_exactly(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": torch.ones(3), "rng": RngState()}, tmp_path / "c")
        wanted = draw() + draw()
        state = {"rng": RngState()}
        ckpt.load(tmp_path / "c", state)
        assert draw() + draw() == wanted
        assert type(state["rng"]) is RngState
        state["rng"].load_state_dict(ckpt.load(tmp_path / "c")["rng"])  # from a load without a target
        assert draw() + draw() == wanted


def test_rng_state_may_be_the_whole_state(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(RngState(), tmp_path / "c")
        wanted = draw()
        ckpt.load(tmp_path / "c", RngState())
    assert draw() == wanted


@pytest.mark.parametrize("saves", ["aiockpt", "dcp"])
@pytest.mark.parametrize("loads", ["aiockpt", "dcp"])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_stock_dcp_saves_and_loads_rng_state(tmp_path: Path, saves: str, loads: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        if saves == "dcp":
            dcp.save({"rng": RngState()}, checkpoint_id=tmp_path / "c", no_dist=True)
        else:
            ckpt.save({"rng": RngState()}, tmp_path / "c")
        wanted = draw()
        if loads == "dcp":
            dcp.load({"rng": RngState()}, checkpoint_id=tmp_path / "c", no_dist=True)
        else:
            ckpt.load(tmp_path / "c", {"rng": RngState()})
    assert draw() == wanted


def test_rewind_returns_to_the_loaded_state() -> None:
    rng = RngState()
    rng.rewind()  # no effect: no state was loaded
    saved = rng.state_dict()
    wanted = draw()
    rng.load_state_dict(saved)
    draw()
    rng.rewind()
    assert draw() == wanted


def test_refused_load_changes_no_generator(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"rng": RngState()}, tmp_path / "c")
        draw()
        now = RngState().state_dict()["rank0"]
        with pytest.raises(aiockpt.MissingKeysError):
            ckpt.load(tmp_path / "c", {"rng": RngState(), "more": torch.ones(1)})
    same(RngState().state_dict()["rank0"], now)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


def test_saving_and_loading_draw_no_random_numbers(tmp_path: Path) -> None:
    """Also with samples of tensors and arrays, which are taken at random places."""
    before = RngState().state_dict()["rank0"]
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt:
        ckpt.save({"x": torch.arange(1 << 18), "a": np.arange(1 << 18)}, tmp_path / "c")
        ckpt.load(tmp_path / "c")
        ckpt.verify(tmp_path / "c")
        ckpt.delete(tmp_path / "c")
    same(RngState().state_dict()["rank0"], before)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"])
def test_bit_generators_of_numpy(tmp_path: Path, kind: str) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, kind)(7))
    try:
        draw()
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save({"rng": RngState()}, tmp_path / "c")
            wanted = draw()
            ckpt.load(tmp_path / "c", {"rng": RngState()})
        assert draw() == wanted
    finally:
        np.random.set_bit_generator(before)


def test_state_without_numpy() -> None:
    saved = RngState().state_dict()
    del saved["rank0"]["numpy"]
    wanted = torch.rand(3)
    np.random.rand(3)
    before = np.random.get_state()
    RngState().load_state_dict(saved)
    assert torch.equal(torch.rand(3), wanted)
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert np.random.get_state()[2] == before[2]


# --- devices ------------------------------------------------------------------------------------------------


class Devices:
    """A stand-in for the module of an accelerator, such as torch.cuda."""

    def __init__(self, count: int, *, used: bool = True) -> None:
        self.states = [torch.full((16,), index + 1, dtype=torch.uint8) for index in range(count)]
        self.used = used

    def is_initialized(self) -> bool:
        return self.used

    def get_rng_state(self, index: int) -> torch.Tensor:
        assert self.used, "reading the state would initialise the device"
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(self.states))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch, "get_device_module", lambda _: self)


@pytest.mark.parametrize("later", [0, 1, 3, 4])
def test_number_of_devices_may_change(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    Devices(3).install(monkeypatch)
    saved = RngState().state_dict()
    assert set(saved["rank0"]) == {"python", "numpy", "cpu", "cuda:0", "cuda:1", "cuda:2"}
    wanted = draw()
    now = Devices(later)
    for state in now.states:
        state.fill_(99)
    now.install(monkeypatch)
    RngState().load_state_dict(saved)
    assert draw() == wanted
    assert [int(state[0]) for state in now.states] == [1, 2, 3, 99][:later]


def test_uninitialised_device_stays_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Devices(2, used=False)
    now.install(monkeypatch)
    assert set(RngState().state_dict()["rank0"]) == {"python", "numpy", "cpu"}
    saved = {"rank0": {"cuda:1": torch.full((16,), 7, dtype=torch.uint8)}}
    RngState().load_state_dict(saved)  # torch applies it when the device is initialised
    assert [int(state[0]) for state in now.states] == [1, 7]


# --- ranks --------------------------------------------------------------------------------------------------


def save_on_ranks(rank: int, world_size: int, path: Path) -> list[Any]:
    """Seed each rank differently and save; return the numbers drawn next."""
    random.seed(rank)
    np.random.seed(10 + rank)
    torch.manual_seed(20 + rank)
    draw()
    with aiockpt.SyncCheckpointer() as ckpt:
        for number in range(2):  # the second save uses the plan of the first
            ckpt.save({"rng": RngState(), "x": torch.ones(3)}, path / str(number))
            drawn = draw()
    return drawn


def load_on_ranks(rank: int, world_size: int, path: Path) -> tuple[list[Any], list[Any], list[str]]:
    """Return the numbers drawn without a load, those drawn after one, and the warnings."""
    random.seed(30 + rank)
    np.random.seed(30 + rank)
    torch.manual_seed(30 + rank)
    would = draw()
    random.seed(30 + rank)
    np.random.seed(30 + rank)
    torch.manual_seed(30 + rank)
    with aiockpt.SyncCheckpointer() as ckpt, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ckpt.load(path / "1", {"rng": RngState(), "x": torch.zeros(3)})
    return would, draw(), [str(each.message) for each in seen]


def test_each_rank_restores_its_own_streams(world2: World, world4: World, tmp_path: Path) -> None:
    drawn = world2.results(save_on_ranks, tmp_path)
    assert drawn[0] != drawn[1]
    assert [now for _, now, _ in world2.results(load_on_ranks, tmp_path)] == drawn
    more = world4.results(load_on_ranks, tmp_path)
    assert [now for _, now, _ in more[:2]] == drawn
    assert [now for _, now, _ in more[2:]] == [would for would, _, _ in more[2:]]
    assert [len(seen) for *_, seen in more] == [0, 0, 1, 1]
    assert "the random states of rank0, rank1 were saved, but none of rank3" in more[3][2][0]
    with aiockpt.SyncCheckpointer() as ckpt:  # a single process continues as rank 0
        ckpt.load(tmp_path / "1", {"rng": RngState()})
    assert draw() == drawn[0]


def test_import_does_not_load_the_engine(python_with_torch: list[str]) -> None:
    code = "import aiockpt, sys; aiockpt.RngState; assert 'aiockpt.engine.engine' not in sys.modules"
    subprocess.run([*python_with_torch, "-c", code], check=True, timeout=60)
