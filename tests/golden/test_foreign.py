"""Checkpoints of other tools, written by those tools, load whole, or fail with what to do."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.dcp.format_utils import convert_checkpoint
from tests.golden.make_foreign import LAYOUTS, PARTS, TOOLS, named, sharded, values
from tests.states import assert_same

DATA = Path(__file__).parent / "foreign"
CONFIG = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "model.layers.0.mlp.up_proj.weight": (8, 8)}
SETS = {
    "hf-sharded": sharded,
    "hf-consolidated": sharded,
    "hf-consolidated/sharded": sharded,
    "hf-safetensors": None,
    "hf-parts": None,
    "hf-bin": None,
}
LAST = "shard-00004-model-00001-of-00002.safetensors"  # no other file shows how much of its tensors it has


def load(path: Path, target: Any = None, **options: Any) -> Any:
    with aiockpt.SyncCheckpointer() as ckpt:
        return ckpt.load(path, target, **options)


def verify(path: Path) -> aiockpt.VerifyReport:
    with aiockpt.SyncCheckpointer() as ckpt:
        return ckpt.verify(path)


def assert_loaded(name: str, loaded: dict[str, Any]) -> None:
    if SETS.get(name) is sharded:
        assert_same(dict(sorted(sharded().items())), dict(sorted(loaded.items())))
        return
    assert CONFIG.keys() <= loaded.keys()
    assert ("lm_head.weight" in loaded) is (name in ("hf-safetensors", "hf-bin"))
    assert len(loaded) == 11 + ("lm_head.weight" in loaded)
    for key, value in loaded.items():
        assert_same(named(key, CONFIG.get(key, tuple(value.shape))), value, key)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return shutil.copytree(DATA / name, tmp_path / Path(name).name)

    return copy


def test_all_folders_are_here_and_small() -> None:
    names = {"accelerate", "deepspeed", "hf-trainer", "megatron", *(name.partition("/")[0] for name in SETS)}
    assert {path.name for path in DATA.iterdir()} == names
    assert len(TOOLS) == 5
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 200_000


# --- sets of files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_a_set_loads_whole(name: str) -> None:
    loaded = load(DATA / name)
    assert_loaded(name, loaded)
    target = {key: torch.ones_like(value) for key, value in loaded.items()}
    load(DATA / name, target)
    assert_loaded(name, target)
    assert_loaded(name, load(DATA / name, mmap=True))


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_sound_and_a_changed_length_is_not(name: str, copied: Callable[[str], Path]) -> None:
    path = copied(name)
    report = verify(path)
    assert (report.ok, report.problems) == (True, ())
    assert report.format == ("torch" if name == "hf-bin" else "safetensors")
    (file, *_) = sorted(each for each in path.iterdir() if each.suffix in (".bin", ".safetensors"))
    file.write_bytes(file.read_bytes()[:-7])
    assert not verify(path).ok
    with pytest.raises(aiockpt.CorruptCheckpointError, match=file.name):
        load(path)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        (name, file.name)
        for name in SETS
        for file in sorted((DATA / name).iterdir())
        if "-of-" in file.name and file.name != LAST
    ],
)
def test_a_set_without_one_of_its_files_is_corrupt(name: str, lost: str, copied: Callable[[str], Path]) -> None:
    path = copied(name)
    (path / lost).unlink()
    what = "rank 1 alone" if name == "hf-sharded" and "shard-00002" in lost else lost.removesuffix(".safetensors")
    if "shard" in lost and name != "hf-sharded":
        what = r"elements of \w+ with the shape|shard-"
    for use in (load, lambda path: verify(path).raise_if_bad()):
        with pytest.raises(aiockpt.CorruptCheckpointError, match=what):
            use(path)


def test_only_a_target_shows_that_the_last_rank_is_missing(copied: Callable[[str], Path]) -> None:
    path = copied("hf-consolidated/sharded")
    (path / LAST).unlink()
    assert load(path)["rows"].shape == (8, 4)
    with pytest.raises(aiockpt.ShapeMismatchError, match=r"rows .*\(10, 4\) in the target but \(8, 4\)"):
        load(path, sharded())


def test_slices_of_shards_are_read_in_part() -> None:
    whole = sharded()
    index = (slice(1, 4), slice(None, None, 2))
    for name in ("hf-sharded", "hf-consolidated/sharded"):
        with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(DATA / name) as reader:
            for key in LAYOUTS:
                part = index[: whole[key].dim()]
                assert_same(whole[key][part], reader.read(key, part), key)
            assert len(reader["rows"].chunks) == (2 if name == "hf-sharded" else 4)
            assert not reader.metadata.keys() & {"DCP_SHARDING_INFO", "DCP_VERSION"}


def test_one_file_of_the_shards_of_ranks_is_refused() -> None:
    (file, *_) = sorted((DATA / "hf-sharded").iterdir())
    with pytest.raises(aiockpt.LoadError, match=rf"{file.name}.* shards of one rank .*{file.parent}$"):
        load(file)
    (problem,) = verify(file).problems
    assert problem.severity == "error"
    assert "the shards of one rank" in problem.message


def test_one_file_of_a_set_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("hf-parts/model-00001-of-00003.safetensors", "hf-bin/pytorch_model-00001-of-00003.bin"):
        caplog.clear()
        loaded = load(DATA / name)
        assert 0 < len(loaded) < 11
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("aiockpt", logging.WARNING)
        assert "part 1 of 3" in record.message


def test_a_key_in_two_files_of_a_set_is_corrupt(copied: Callable[[str], Path]) -> None:
    path = copied("hf-parts")
    shutil.copy(path / "model-00001-of-00003.safetensors", path / "model-00002-of-00003.safetensors")
    pattern = r"model\.embed_tokens\.weight is in both model-00001-of-00003\S+ and model-00002-of-00003"
    with pytest.raises(aiockpt.CorruptCheckpointError, match=pattern):
        load(path)
    assert not verify(path).ok


def test_shards_of_other_dtypes_do_not_join(copied: Callable[[str], Path]) -> None:
    path = copied("hf-sharded")
    file = path / "shard-00002-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" '))
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"grid .*dtype"):
        load(path)


@pytest.mark.parametrize(
    "info",
    [
        *('{"rows": {}}', '{"rows": {"saved_offsets": [5]}}', '{"rows": {"saved_offsets": [5, 0.0]}}', "[", "[1]"),
        *('{"rows": {"saved_offsets": [-5, 0]}}', '{"rows": {"saved_offsets": [' + 4000 * "9" + ", 0]}}"),
    ],
)
def test_damaged_offsets_of_shards_are_corrupt(info: str, copied: Callable[[str], Path]) -> None:
    path = copied("hf-sharded")
    file = path / "shard-00002-model-00001-of-00001.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places | json.loads(info)) if info[0] == "{" else info
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"shard-00002.*DCP_SHARDING_INFO"):
        load(path)


@pytest.mark.parametrize("name", ["hf-sharded", "hf-consolidated/sharded", "hf-parts"])
def test_conversions_consolidate(name: str, tmp_path: Path) -> None:
    convert_checkpoint(DATA / name, tmp_path / "dcp", to="dcp")
    convert_checkpoint(DATA / name, tmp_path / "one.safetensors", to="safetensors", metadata={})
    convert_checkpoint(DATA / name, tmp_path / "all.pt", to="torch")
    convert_checkpoint(DATA / name, tmp_path / "again.safetensors", to="safetensors")
    for made in ("dcp", "one.safetensors", "all.pt", "again.safetensors"):
        assert_loaded(name, load(tmp_path / made))
    assert b"DCP_SHARDING_INFO" not in (tmp_path / "again.safetensors").read_bytes()


def test_the_parts_of_the_mapping_are_there() -> None:
    assert set(PARTS.values()) == {1, 2}
    assert len(list((DATA / "hf-consolidated/sharded").iterdir())) == 8


# --- folders with more than a model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("hf-trainer/checkpoint-1", ["optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"]),
        ("accelerate", ["optimizer.bin", "random_states_0.pkl", "scheduler.bin"]),
    ],
)
def test_what_lies_beside_a_model_is_reported(name: str, beside: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert_loaded(name, load(DATA / name))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("aiockpt", logging.WARNING)
    assert ", ".join(beside) in record.message
    report = verify(DATA / name)
    assert report.ok
    assert [problem.file for problem in report.problems] == beside
    assert {(problem.kind, problem.severity) for problem in report.problems} == {("unreferenced file", "warning")}
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(DATA / name) as reader:
        assert list(reader.beside) == beside


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed/global_step5"])
def test_deepspeed_is_named(name: str) -> None:
    for use in (load, verify):
        with pytest.raises(aiockpt.LoadError, match=r"DeepSpeed.*zero_to_fp32\.py") as caught:
            use(DATA / name)
        assert "to the path" not in str(caught.value)


def test_one_file_of_deepspeed_is_no_checkpoint(tmp_path: Path) -> None:
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(DATA / "deepspeed/global_step5" / name, tmp_path)
    with pytest.raises(aiockpt.LoadError, match="DeepSpeed"):
        load(tmp_path)
    assert load(tmp_path / name)["ds_version"] == "0.19.8"


def test_the_folder_of_the_trainer_names_its_checkpoint() -> None:
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"holds one: checkpoint-1"):
        load(DATA / "hf-trainer")


# --- Megatron -------------------------------------------------------------------------------------------


def assert_sharded(loaded: dict[str, Any]) -> None:
    assert_same(values(torch.float32, 6, 4, seed=1), loaded["decoder.weight"])
    assert_same(values(torch.float32, 5, seed=2), loaded["decoder.bias"])
    assert [loaded[f"rng_state/shard_{rank}_2"] for rank in range(2)] == [[{"seed": "a"}], [{"seed": "b"}]]


def allow_backend(path: Path) -> None:
    """Replace the class of the golden file, which is not installed here, by one that is."""
    with zipfile.ZipFile(path / "common.pt") as archive:
        text = archive.read("common/data.pkl")
    assert b"megatron.core.transformer.enums" in text
    common = {
        "optimizer": {"optimizer": {"param_groups": [{"lr": 0.125, "params": [0, 1]}]}, "scale": torch.tensor([2.0])},
        "args": argparse.Namespace(num_layers=2, attention_backend=logging.Filter),
        "iteration": 1234,
    }
    torch.save(common, path / "common.pt")


def test_common_state_of_megatron_needs_permission_but_the_rest_does_not() -> None:
    path = DATA / "megatron"
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"common\.pt.*megatron\.core\.transformer\.enums"):
        load(path)
    assert_sharded(load(path, keys=["decoder.*", "rng_state/*"]))
    target = {"decoder.weight": torch.zeros(6, 4), "decoder.bias": torch.zeros(5)}
    load(path, target)
    assert_same(values(torch.float32, 5, seed=2), target["decoder.bias"])
    report = verify(path)
    assert (report.ok, report.problems) == (True, ())


def test_common_state_of_megatron_is_loaded_with_the_rest(copied: Callable[[str], Path]) -> None:
    path = copied("megatron")
    allow_backend(path)
    loaded = load(path, safe_globals=[logging.Filter])
    assert_sharded(loaded)
    assert loaded["iteration"] == 1234
    assert loaded["optimizer"]["optimizer"] == {"param_groups": [{"lr": 0.125, "params": [0, 1]}]}
    assert_same(torch.tensor([2.0]), loaded["optimizer"]["scale"])
    assert loaded["args"].attention_backend is logging.Filter
    target = {"iteration": 0, "optimizer": {"scale": torch.zeros(1)}}
    load(path, target, safe_globals=[logging.Filter])
    assert target["iteration"] == 1234
    assert_same(torch.tensor([2.0]), target["optimizer"]["scale"])
    convert_checkpoint(path, path.with_name("one.pt"), to="torch", safe_globals=[logging.Filter])
    assert load(path.with_name("one.pt"), safe_globals=[logging.Filter])["iteration"] == 1234
    assert verify(path).problems == ()


def test_damaged_common_state_of_megatron_is_corrupt(copied: Callable[[str], Path]) -> None:
    path = copied("megatron")
    allow_backend(path)
    data = (path / "common.pt").read_bytes()
    torch.save({"decoder.bias": 1, "iteration": 2}, path / "common.pt")
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"decoder\.bias .*common\.pt"):
        load(path)
    assert not verify(path).ok
    (path / "common.pt").write_bytes(data[:-40])
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"common\.pt"):
        load(path)
    assert not verify(path).ok
    (path / "common.pt").unlink()
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"common\.pt"):
        load(path)
    assert [problem.file for problem in verify(path).errors] == ["common.pt"]


def test_a_changed_byte_of_common_state_is_found(copied: Callable[[str], Path]) -> None:
    path = copied("megatron")
    allow_backend(path)
    data = (path / "common.pt").read_bytes()
    at = data.index(torch.tensor([2.0]).numpy().tobytes(), data.index(b"common/data/0"))
    (path / "common.pt").write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    (problem,) = verify(path).errors
    assert (problem.kind, problem.file) == ("item crc", "common.pt")
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"optimizer\.scale"):
        load(path, safe_globals=[logging.Filter])
