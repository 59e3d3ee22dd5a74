"""One product for one process and for many: what a save can do, it can do in every world, and its files read alike."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from tests.format.transforms.encryption import ChaCha20
from tests.places import storage_of
from tests.ranks.layouts import distributed, full_tensors
from tests.ranks.world import World
from tests.stock import ALONE

TRANSFORMS = [ChaCha20(bytes(range(32)))]
SAFETENSORS = ["even", "uneven", "row", "scalar", "empty", "large"]


@pytest.fixture(scope="module", params=[0, 1, 2, 4], ids=lambda ranks: f"{ranks} ranks" if ranks else "alone")
def world(request: pytest.FixtureRequest) -> Iterator[World | None]:
    """A world of so many ranks; None: this process, without a process group."""
    if not request.param:
        yield None
        return
    with World(request.param) as made:
        yield made


def make_state(rank: int, world_size: int, step: int, *, plain: bool) -> dict[str, Any]:
    """Return the state of a rank, or of a process without others if ``world_size`` is 0; ``plain``: tensors."""
    tensors = distributed("grid", world_size, seed=step) if world_size else full_tensors(seed=step)
    if plain:
        return {name: tensors[name] for name in SAFETENSORS}
    state: dict[str, Any] = {"model": tensors, "step": step, "list": [torch.arange(9) * step, {"text": f"step {step}"}]}
    state["tied"] = state["model"]["even"]
    state["of ranks"] = {str(rank): {"rng": torch.full((rank + 3,), step), "rank": rank}}
    return state


def save_steps(rank: int, world_size: int, path: Path, options: dict[str, Any], given: dict[str, Any]) -> list[int]:
    """Save two steps, the second by the cached plan; return the bytes that the results report."""
    plain = given.get("format") == "safetensors"
    with aiockpt.SyncCheckpointer(io_threads=2, **options) as ckpt:
        return [
            ckpt.save(make_state(rank, world_size, step, plain=plain), path / f"{step}", **given).nbytes
            for step in (1, 2)
        ]


def save_in(world: World | None, path: Path, form: str, writer: str, **given: Any) -> list[int]:
    options: dict[str, Any] = {"writer": writer} | ({"transforms": TRANSFORMS} if form == "encrypted" else {})
    given |= {"compress": "zstd"} if form == "zstd" else {}
    if world is None:
        return save_steps(0, 0, path, options, given)
    return world.results(save_steps, path, options, given)[0]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("form", ["plain", "zstd", "encrypted"])
def test_dcp_checkpoints(world: World | None, form: str, writer: str, anywhere: Path) -> None:
    sizes = save_in(world, anywhere, form, writer)
    ranks = 1 if world is None else world.size
    for step, nbytes in zip((1, 2), sizes, strict=True):
        path = anywhere / f"{step}"
        expected = make_state(0, 0, step, plain=False)
        for rank in range(1, ranks):
            expected["of ranks"] |= make_state(rank, 0, step, plain=False)["of ranks"]
        assert nbytes == sum(file.stat().st_size for file in path.glob("*.distcp"))
        with aiockpt.SyncCheckpointer(transforms=TRANSFORMS) as ckpt:
            report = ckpt.verify(path)
            assert (report.ok, report.unverifiable) == (True, 0)
            assert same(ckpt.load(path), expected)
            large = expected["model"]["large"]
            with ckpt.open(path) as reader:
                assert torch.equal(reader.read("model.large", slice(40, 250)), large[40:250])
                assert torch.equal(reader.read("model.large", (slice(None), 7)), large[:, 7])
                assert same(dict(reader.stream(["model"])), {f"model.{n}": t for n, t in expected["model"].items()})
            assert {file.name.split("_")[2] for file in path.glob("*.distcp")} == {str(rank) for rank in range(ranks)}
        manifest = json.loads((path / ".aiockpt.json").read_text())
        assert ("index" in manifest) == (form == "plain" and ranks == 1)
        assert ("divisions" in manifest.get("divided_index", ())) == (form == "plain" and ranks > 1)
        assert manifest["totals"].get("ranks", 1) == ranks
        if form == "plain" and isinstance(path, Path):
            target = {"model": {name: torch.zeros_like(each) for name, each in expected["model"].items()}, "step": 0}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that there is one process
                dcp.load(target, checkpoint_id=path, **ALONE)
            assert same(target, {"model": expected["model"], "step": step})


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_safetensors(world: World | None, writer: str, anywhere: Path) -> None:
    if world is not None and world.size > 1 and not storage_of(anywhere).traits.shared_files:
        for outcome in world.run(save_steps, anywhere, {"writer": writer}, {"format": "safetensors"}):
            assert outcome.kind == "SaveError"
            assert "can't let several ranks write one file, as format='safetensors' does" in outcome.text
        assert not list(anywhere.iterdir())
        return
    save_in(world, anywhere, "plain", writer, format="safetensors")
    for step in (1, 2):
        with aiockpt.SyncCheckpointer() as ckpt:
            assert ckpt.verify(anywhere / f"{step}").ok
            expected = {name: tensor for name, tensor in full_tensors(step).items() if name in SAFETENSORS}
            assert same(ckpt.load(anywhere / f"{step}"), expected)


def refused(rank: int, world_size: int, path: Path) -> list[str]:
    """Return the errors of what a format can't do, and of what only one process can."""
    told = []
    for options, given in (
        ({}, {"compress": "zstd", "format": "safetensors"}),
        ({"transforms": TRANSFORMS}, {"format": "safetensors"}),
        ({}, {"format": "torch"}),
    ):
        with aiockpt.SyncCheckpointer(**options) as ckpt, pytest.raises((ValueError, aiockpt.SaveError)) as caught:
            ckpt.save({"w": torch.ones(3)}, path, **given)
        told.append(str(caught.value))
    return told


def test_what_can_not_be_is_refused(world2: World, anywhere: Path) -> None:
    wanted = ["compress is for format='dcp'", "transforms is for format='dcp'"]
    if not isinstance(anywhere, Path):  # refused earlier there: whatever the options, ranks can't write one object
        wanted = ["can't let several ranks write one file"] * 2
    for compress, transforms, one_file in world2.results(refused, anywhere / "c"):
        assert wanted[0] in compress
        assert wanted[1] in transforms
        assert "a torch.save file is written by one process. Save with format='dcp'" in one_file
    assert not list(anywhere.iterdir())


def save_unlike(rank: int, world_size: int, path: Path) -> str:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError) as caught:
        ckpt.save({"w": torch.ones(3)}, path, compress="zstd" if rank else None)
    return str(caught.value)


def test_all_ranks_must_compress_or_none(world2: World, anywhere: Path) -> None:
    for told in world2.results(save_unlike, anywhere / "c"):
        assert "the use of compress or transforms is False on rank 0 but True on rank 1" in told
    assert not list(anywhere.iterdir())


def save_with_files(rank: int, world_size: int, path: Path, given: dict[str, Any]) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(3)}, path, files={"config.json": f"of rank {rank}".encode()}, **given)


@pytest.mark.parametrize(
    ("anywhere", "given"),
    [("local", {}), ("server", {}), ("local", {"format": "safetensors"})],
    indirect=["anywhere"],
    ids=str,
)
def test_several_ranks_add_the_files_of_rank_0(world2: World, anywhere: Path, given: dict[str, Any]) -> None:
    world2.results(save_with_files, anywhere / "c", given)
    assert (anywhere / "c" / "config.json").read_text() == "of rank 0"
    assert aiockpt.verify(anywhere / "c").ok
