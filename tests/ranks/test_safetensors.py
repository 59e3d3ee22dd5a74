"""Safetensors from several ranks: each writes its parts of the files, which equal those of one process."""

from __future__ import annotations

import errno
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage
from tests.golden.make_foreign import sharded
from tests.ranks.layouts import full_tensors
from tests.ranks.world import RankFailure, World, mesh_of
from tests.states import raw_bytes

INDEX = "model.safetensors.index.json"
CHUNK = 64 << 10
OPTIONS = ("writer", "chunk_bytes", "staging_bytes")  # of the checkpointer


@pytest.fixture(scope="module")
def worlds(world2: World, world4: World) -> dict[int, World]:
    return {2: world2, 4: world4}


def load_golden(rank: int, world_size: int, path: Path) -> list[dict[str, Any]]:
    found = []
    with aiockpt.SyncCheckpointer() as ckpt:
        for placement in (Shard(0), Shard(1), Replicate()):
            mesh, whole = mesh_of(world_size), {key: value for key, value in sharded().items() if value.dim() == 2}
            target = {key: distribute_tensor(torch.zeros_like(v), mesh, [placement]) for key, v in whole.items()}
            ckpt.load(path, target)
            found.append({key: value.full_tensor().float().numpy() for key, value in target.items()})
    return found


def test_shards_of_stock_dcp_load_onto_other_ranks(world4: World) -> None:
    path = Path(__file__).parents[1] / "golden" / "foreign"
    for name in ("hf-sharded", "hf-consolidated/sharded"):
        for found in world4.results(load_golden, path / name):
            for each in found:
                for key, value in each.items():
                    assert (value == sharded()[key].float().numpy()).all(), key


def small(**options: Any) -> aiockpt.SyncCheckpointer:
    return aiockpt.SyncCheckpointer(**{"chunk_bytes": CHUNK, "staging_bytes": 3 * CHUNK, **options})


def patterned(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor in which each byte differs from its neighbours."""
    count = torch.Size(shape).numel() * dtype.itemsize
    once = ((torch.arange(251) * 7 + seed) % 251).to(torch.uint8)
    return once.repeat(count // 251 + 1)[:count].clone().view(dtype).reshape(shape)


def whole_state() -> dict[str, Any]:
    """Return the whole tensors: the same in every process."""
    tied = patterned(torch.float32, 90, 33, seed=1)
    return {
        "model": {
            **full_tensors(),
            "tied": tied,
            "bf16": patterned(torch.bfloat16, 513, 65, seed=2),
            "fp8": patterned(torch.uint8, 41, 6, seed=3),  # viewed as float8 after sharding: torch can't shard float8
            "bytes": patterned(torch.uint8, 1001, seed=4),
            "one row": patterned(torch.int32, 1, 5, seed=5),  # most ranks have no part of it
            "turned": patterned(torch.float32, 64, 48, seed=6),
            "direct": patterned(torch.float32, 4, 1 << 19, seed=7),  # rows of 2 MiB, large enough for direct I/O
        },
        "head": tied,
        "plain": patterned(torch.float64, 77, seed=8),
    }


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with its float8 tensor, which is uint8 in ``state``."""
    model = state["model"]
    cut = model["fp8"]
    if isinstance(cut, DTensor):
        local = cut.to_local().view(torch.float8_e4m3fn)
        fp8 = DTensor.from_local(local, cut.device_mesh, cut.placements, shape=cut.shape, stride=cut.stride())
    else:
        fp8 = cut.view(torch.float8_e4m3fn)
    return {**state, "model": {**model, "fp8": fp8}}


def laid_out(layout: str, world_size: int) -> dict[str, Any]:
    """Return the whole tensors sharded by rows, by columns, by both, not at all, or each one differently."""
    state = whole_state()
    mesh = mesh_of(2, world_size // 2) if layout in ("grid", "hsdp") else mesh_of(world_size)

    def placements(name: str, tensor: torch.Tensor) -> list[Placement]:
        rows = Shard(0) if tensor.dim() else Replicate()
        columns = Shard(tensor.dim() - 1) if tensor.dim() > 1 else rows
        if layout == "mixed":
            return [(Replicate(), rows, columns)[zlib.crc32(name.encode()) % 3]]
        return {
            "rows": [rows],
            "columns": [columns],
            "replicated": [Replicate()],
            "grid": [rows, columns],
            "hsdp": [Replicate(), rows],
        }[layout]

    cut: dict[int, torch.Tensor] = {}
    model = {}
    for name, tensor in state["model"].items():
        model[name] = cut.setdefault(id(tensor), distribute_tensor(tensor, mesh, placements(name, tensor)))
    turned = model["turned"]
    local = turned.to_local().t().contiguous().t()
    model["turned"] = DTensor.from_local(
        local, mesh, turned.placements, shape=turned.shape, stride=turned.stride(), run_check=False
    )
    return as_saved({"model": model, "head": model["tied"], "plain": state["plain"]})


def save(rank: int, world_size: int, path: Path, layout: str, given: dict[str, Any]) -> aiockpt.SaveResult:
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    with small(**options) as ckpt:
        return ckpt.save(laid_out(layout, world_size), path, format="safetensors", **given)


def alone(path: Path, **given: Any) -> aiockpt.SaveResult:
    """Save the whole tensors as one process."""
    with small(process_group=None) as ckpt:
        return ckpt.save(as_saved(whole_state()), path, format="safetensors", **given)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".aiockpt.json"}


def assert_same_directory(found: Path, expected: Path) -> None:
    mine, theirs = contents(found), contents(expected)
    assert mine.keys() == theirs.keys()
    for name, data in theirs.items():
        assert mine[name] == data, f"{name} differs"
    manifests = [json.loads((path / ".aiockpt.json").read_text()) for path in (found, expected)]
    for key in ("files", "metadata", "containers"):
        assert manifests[0][key] == manifests[1][key]
    assert manifests[0]["totals"].items() >= manifests[1]["totals"].items()


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "rows"),
        *(pytest.param(2, layout, marks=pytest.mark.full) for layout in ("columns", "mixed")),
        *((4, layout) for layout in ("columns", "grid", "mixed")),
        *(pytest.param(4, layout, marks=pytest.mark.full) for layout in ("rows", "replicated", "hsdp")),
    ],
)
def test_files_equal_those_of_one_process(worlds: dict[int, World], tmp_path: Path, ranks: int, layout: str) -> None:
    given = {"shard_bytes": 3_000_000, "metadata": {"step": 3, "run": "ä"}}
    expected = alone(tmp_path / "one", **given)
    results = worlds[ranks].results(save, tmp_path / "many", layout, dict(given))
    assert_same_directory(tmp_path / "many", tmp_path / "one")
    assert len(contents(tmp_path / "many")) > 3
    assert results[0].files == expected.files
    for result in results:
        assert (result.nbytes, result.tensor_bytes, result.tensors, result.objects) == (
            *(expected.nbytes, expected.tensor_bytes, expected.tensors, 0),
        )
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(tmp_path / "many").ok
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    whole = as_saved(whole_state())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "many" / file, "pt") as opened:
            tensor = whole["model"][name.removeprefix("model.")] if "." in name else whole[name]
            assert raw_bytes(opened.get_tensor(name)) == raw_bytes(tensor)
            assert opened.metadata()["step"] == "3"


@pytest.mark.main
@pytest.mark.parametrize("chunk_bytes", [CHUNK, 3 << 20], ids=["page cache", "direct I/O"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_one_file(world2: World, tmp_path: Path, layout: str, chunk_bytes: int) -> None:
    expected = alone(tmp_path / "one.safetensors")
    given = {"chunk_bytes": chunk_bytes, "staging_bytes": 3 * chunk_bytes}
    results = world2.results(save, tmp_path / "many.safetensors", layout, given)
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert [result.files for result in results] == [{"many.safetensors": expected.nbytes}] * 2
    assert sorted(os.listdir(tmp_path)) == ["many.safetensors", "one.safetensors"]


def test_writer_processes_write_the_same_files(tmp_path: Path) -> None:
    with World(2, may_start=True) as world:
        world.results(save, tmp_path / "many", "mixed", {"writer": "process"})
    alone(tmp_path / "one")
    assert_same_directory(tmp_path / "many", tmp_path / "one")


def save_again(rank: int, world_size: int, path: Path) -> None:
    """Save a state that changes its values, then its metadata, then its keys."""
    mesh = mesh_of(world_size)
    whole = {f"w{n}": patterned(torch.float32, 40 + n, 9, seed=n) for n in range(9)}
    state: dict[str, Any] = {name: distribute_tensor(tensor, mesh, [Shard(n % 2)]) for n, (name, tensor) in enumerate(
        whole.items()
    )}  # fmt: skip
    with small() as ckpt:
        for step, metadata in enumerate(({"step": 1}, {"step": 2}, {"step": 10**9}, {"step": 3})):
            for name, tensor in whole.items():
                local = distribute_tensor(tensor.view(torch.int32) + step, mesh, state[name].placements).to_local()
                state[name].to_local().view(torch.int32).copy_(local)
            if step == 3:
                state["late"] = torch.full((5,), 7.0)
            # Rank 0's metadata is saved.
            ckpt.save(
                state, path / str(step), format="safetensors", metadata=metadata if rank == 0 else {"step": "other"}
            )


def test_a_cached_layout_is_used_until_it_no_longer_fits(world2: World, tmp_path: Path) -> None:
    world2.results(save_again, tmp_path)
    for step, said in enumerate(("1", "2", str(10**9), "3")):
        found = load_file(tmp_path / str(step) / "model.safetensors")
        assert len(found) == 9 + (step == 3)
        for n in range(9):
            expected = patterned(torch.float32, 40 + n, 9, seed=n).view(torch.int32) + step
            assert torch.equal(found[f"w{n}"].view(torch.int32), expected)
        with safe_open(tmp_path / str(step) / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "step": said}


def save_stages(rank: int, world_size: int, path: Path) -> None:
    """Save pipeline stages: each rank has keys of its own, and rank 1 has none."""
    state = {f"stage{rank}.w": patterned(torch.float32, 100 * rank, 70, seed=rank)} if rank != 1 else {}
    with small() as ckpt:
        ckpt.save(state, path, format="safetensors", shard_bytes=40_000)


def test_ranks_may_have_different_keys_or_none(world4: World, tmp_path: Path) -> None:
    world4.results(save_stages, tmp_path / "many")
    whole = {f"stage{rank}.w": patterned(torch.float32, 100 * rank, 70, seed=rank) for rank in (0, 2, 3)}
    with small(process_group=None) as ckpt:
        ckpt.save(whole, tmp_path / "one", format="safetensors", shard_bytes=40_000)
    assert_same_directory(tmp_path / "many", tmp_path / "one")


def save_few(rank: int, world_size: int, path: Path, count: int, writer: str) -> None:
    state = {f"w{number}": patterned(torch.float32, 300, seed=number) for number in range(count)}
    with small(writer=writer) as ckpt:
        ckpt.save(state, path)


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_file_of_fewer_tensors_than_ranks(world2: World, tmp_path: Path, count: int, writer: str) -> None:
    world2.results(save_few, tmp_path / "many.safetensors", count, writer)
    save_few(0, 1, tmp_path / "one.safetensors", count, "thread")
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_a_mapping_divides_the_tensors_among_files(world2: World, tmp_path: Path) -> None:
    names = [*(f"model.{name}" for name in whole_state()["model"]), "head", "plain", "not there"]
    mapping = {name: 1 + 2 * (zlib.crc32(name.encode()) % 2) for name in names}  # the second file of three is missing
    world2.results(save, tmp_path / "many", "columns", {"fqn_to_index_mapping": mapping})
    alone(tmp_path / "one", fqn_to_index_mapping=mapping)
    assert_same_directory(tmp_path / "many", tmp_path / "one")
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 3)]
    assert sorted(contents(tmp_path / "many")) == [*files, INDEX]
    expected = {name: f"model-0000{n}-of-00003.safetensors" for name, n in mapping.items()}
    del expected["not there"], expected["head"]
    assert json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"] == expected
    with aiockpt.SyncCheckpointer() as ckpt:
        assert torch.equal(ckpt.load(tmp_path / "many")["plain"], whole_state()["plain"])


def refused(rank: int, world_size: int, path: Path) -> list[str]:
    """Return the errors of states and options that can't be saved."""
    said = []
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"w": torch.ones(3), "n": 5} if rank else {"w": torch.ones(3)}, {}),
        ({"w": torch.ones(3)}, {"shard_bytes": 100 + rank}),
        ({"w": torch.ones(3)}, {"fqn_to_index_mapping": {"v": 1}}),
        ({"w": torch.ones(3 + rank)}, {}),
    ]
    with small() as ckpt:
        for state, given in cases:
            with pytest.raises(aiockpt.SaveError) as caught:
                ckpt.save(state, path, format="safetensors", **given)
            said.append(str(caught.value))
        ckpt.save({"w": torch.ones(3)}, path, format="safetensors")
    return said


def test_invalid_states_and_options_are_refused_on_all_ranks(world2: World, tmp_path: Path) -> None:
    said = world2.results(refused, tmp_path / "c")
    expected = ["n is not a plain tensor", "division into files", "w is not in fqn_to_index_mapping", "tensor of (3,)"]
    for texts in said:
        for text, part in zip(texts, expected, strict=True):
            assert part in text
    assert sorted(os.listdir(tmp_path)) == ["c"]


def fail(rank: int, world_size: int, path: Path, step: str, where: int) -> Any:
    """Save while the storage of one rank fails."""
    storage = LocalStorage()
    if rank == where:
        storage = FaultyStorage(storage, step, OSError(errno.ENOSPC, "No space left on device"))
    with small() as ckpt:
        with pytest.raises(aiockpt.SaveError) as caught:
            ckpt.save(
                laid_out("columns", world_size), path, format="safetensors", shard_bytes=3_000_000, storage=storage
            )
        assert os.listdir(path.parent) == [] or rank
        ckpt.save({"w": torch.ones(3)}, path.parent / "next", format="safetensors")
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("step", "where"),
    [("reserve", 0), ("join", 1), ("open_part", 0), ("open_part", 1), ("write", 0), ("write", 1), ("finish", 1),
     ("commit", 0)],
)  # fmt: skip
def test_a_rank_that_fails_leaves_nothing(world2: World, tmp_path: Path, step: str, where: int) -> None:
    outcomes = world2.results(fail, tmp_path / "c", step, where)
    assert all("No space left on device" in text for _, text in outcomes), outcomes
    assert os.listdir(tmp_path) == ["next"]


def die(rank: int, world_size: int, path: Path) -> None:
    """Save while rank 1 is killed at its first write."""

    class Deadly(FaultyStorage):
        async def before(self, step: str, name: str) -> None:
            if step == "write" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with small() as ckpt:
        ckpt.save(laid_out("rows", world_size), path, format="safetensors", storage=Deadly(LocalStorage()))


def test_a_rank_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with World(2) as world:
        outcomes = world.run(die, tmp_path / "c")
        assert isinstance(outcomes[0], RankFailure)
        assert outcomes[0].kind == "CoordinationError"
        assert outcomes[1].killed
    assert os.listdir(tmp_path) == []


def save_llama(rank: int, world_size: int, path: Path) -> None:
    """Save a tiny model whose tensors are sharded by rows or by columns."""
    mesh = mesh_of(world_size)
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(number % tensor.dim())])
        for number, (name, tensor) in enumerate(llama().state_dict().items())
    }
    with small() as ckpt:
        ckpt.save(state, path, format="safetensors", shard_bytes=60_000)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config)


def test_transformers_reads_the_model(world2: World, tmp_path: Path) -> None:
    model = llama()
    world2.results(save_llama, tmp_path / "llama")
    assert len(list((tmp_path / "llama").glob("model-*.safetensors"))) > 2
    model.config.save_pretrained(tmp_path / "llama")
    found, told = type(model).from_pretrained(tmp_path / "llama", output_loading_info=True)
    assert not any(told.values()), told
    assert found.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
