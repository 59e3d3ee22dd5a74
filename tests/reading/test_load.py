"""Loads into new and into given states, and loads of damaged or hostile checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import aiockpt
from aiockpt.dcp import FileSystemReader
from tests.states import assert_same, large_state, random_tensor, training_state
from tests.stock import ALONE, PAYLOAD_OFFSET

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


@pytest.mark.asyncio
async def test_load_into_model_and_optimizer(anywhere: Path) -> None:
    state = training_state(seed=1)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, anywhere / "c")
        target = training_state(seed=2)
        tensors = {name: tensor.data_ptr() for name, tensor in target["model"].items()}
        version = target["model"]["0.weight"]._version
        assert await ckpt.load(anywhere / "c", target) is target
        assert_same(state, target)
        assert {name: tensor.data_ptr() for name, tensor in target["model"].items()} == tensors
        assert target["model"]["0.weight"]._version > version  # autograd sees that the tensor changed


@pytest.mark.asyncio
async def test_load_only_keys_of_the_target(tmp_path: Path) -> None:
    state = training_state()
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "c")
        target = {"model": {"0.weight": torch.zeros(128, 64)}, "step": None}
        await ckpt.load(tmp_path / "c", target)
    assert_same({"model": {"0.weight": state["model"]["0.weight"]}, "step": 2}, target)


def test_load_into_strided_tensors(ckpt, anywhere: Path) -> None:
    values = random_tensor(torch.float32, (600, 700), 3)
    small = random_tensor(torch.int16, (6, 7), 4)
    ckpt.save({"w": values, "s": small, "t": values.t()}, anywhere / "c")
    for make in (
        lambda *s: torch.zeros(s),
        lambda *s: torch.zeros(s[::-1]).t(),
        lambda *s: torch.zeros(2 * s[0], 3 * s[1])[::2, 1::3],
        lambda *s: torch.nn.Parameter(torch.zeros(s)),
    ):
        target = {"w": make(600, 700), "t": make(700, 600), "s": torch.zeros(7, 12, dtype=torch.int16)[:, ::2].t()}
        ckpt.load(anywhere / "c", target)
        assert_same(
            {"w": values.view(torch.int32), "s": small}, {"w": target["w"].detach().view(torch.int32), "s": target["s"]}
        )
        assert torch.equal(target["t"].detach().view(torch.int32), values.t().view(torch.int32))


def test_small_tensors_have_storages_of_their_own(ckpt, anywhere: Path) -> None:
    """Although one operator makes all tensors of the same dtype, shape and strides."""
    kinds = {
        "rows": lambda: torch.randn(3, 5),
        "columns": lambda: torch.randn(5, 3).t(),
        "one row": lambda: torch.randn(7).as_strided((1, 7), (3, 1)),  # any stride fits a dimension of size 1
        "scalars": lambda: torch.randn(()),
        "none": lambda: torch.empty(0, 4),
        "halves": lambda: torch.randn(9).bfloat16(),
        "eighths": lambda: torch.randn(6).to(torch.float8_e4m3fn),
        "complex": lambda: torch.randn(4, dtype=torch.complex64),
    }
    state = {f"{name} {number}": make() for number in range(4) for name, make in kinds.items()}
    ckpt.save(state, anywhere / "c")
    loaded = ckpt.load(anywhere / "c")
    assert_same(state, loaded)
    assert {name: each.stride() for name, each in loaded.items()} == {n: each.stride() for n, each in state.items()}
    for each in loaded.values():
        assert each.untyped_storage().nbytes() == each.nbytes
        assert not each._is_view()
        each.resize_(each.numel() + 1)
    begins = [each.data_ptr() for each in loaded.values()]
    assert len(set(begins)) == len(state)


def test_first_load_inside_fake_tensor_mode(tmp_path: Path) -> None:
    """The mode does not apply to tensors that the engine makes for itself."""
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.arange(5)}, tmp_path / "c")
    with FakeTensorMode(), aiockpt.SyncCheckpointer() as ckpt:
        loaded = ckpt.load(tmp_path / "c")
    assert loaded["x"].tolist() == [0, 1, 2, 3, 4]


def test_tuples_in_the_target_are_replaced(ckpt, tmp_path: Path) -> None:
    ckpt.save({"t": (torch.ones(2), {"k": 5}, [1]), "l": [{"a": 1}, {"a": 2}]}, tmp_path / "c")
    target = {"t": (torch.zeros(2), {"k": 0}, [9]), "l": [{"a": 0}, {"a": 0}]}
    ckpt.load(tmp_path / "c", target)
    assert_same({"t": (torch.ones(2), {"k": 5}, [1]), "l": [{"a": 1}, {"a": 2}]}, target)


def test_tuple_with_a_tensor_written_by_dcp(ckpt, tmp_path: Path) -> None:
    dcp.save({"t": (torch.ones(2), 3)}, checkpoint_id=tmp_path / "c", **ALONE)
    target = {"t": (torch.zeros(2), 0)}
    ckpt.load(tmp_path / "c", target)
    assert_same({"t": (torch.ones(2), 3)}, target)


def test_tensors_in_several_chunks(ckpt, tmp_path: Path) -> None:
    """Chunks as several ranks write them, made by hand from two tensors of one file."""
    whole = random_tensor(torch.int32, (1000, 600), 5)
    state = {"top": whole[:300].clone(), "bottom": whole[300:].clone(), "small": whole[:4].clone()}
    dcp.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    with open(tmp_path / "c" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    described = metadata.state_dict_metadata
    index = {key.fqn: key for key in metadata.storage_data}
    tensor = described.pop("top")
    tensor.size = torch.Size([1000, 600])
    other = described.pop("bottom").chunks[0]
    other.offsets = torch.Size([300, 0])
    tensor.chunks.append(other)
    described["deep.whole"] = tensor
    metadata.planner_data = {"deep.whole": ("deep", "whole"), "small": ("small",)}
    places = metadata.storage_data
    make = type(index["top"])
    places[make("deep.whole", torch.Size([0, 0]))] = places.pop(index["top"])
    places[make("deep.whole", torch.Size([300, 0]))] = places.pop(index["bottom"])
    with open(tmp_path / "c" / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    assert_same({"deep": {"whole": whole}, "small": whole[:4]}, ckpt.load(tmp_path / "c"))
    target = {"deep": {"whole": torch.zeros(600, 1000, dtype=torch.int32).t()}}
    ckpt.load(tmp_path / "c", target)
    assert_same(whole, target["deep"]["whole"])


def test_map_location(ckpt, anywhere: Path) -> None:
    state = {"a": torch.arange(5), "b": {"c": torch.ones(400_000)}, "n": 1}
    ckpt.save(state, anywhere / "c")
    for where in ("meta", torch.device("meta"), {"cpu": "meta"}):
        loaded = ckpt.load(anywhere / "c", map_location=where)
        assert loaded["a"].is_meta
        assert loaded["b"]["c"].is_meta
        assert loaded["n"] == 1
    assert_same(state, ckpt.load(anywhere / "c", map_location={"cuda:0": "cuda:1"}))
    seen = []

    def place(storage, location):
        seen.append((storage.nbytes(), location))
        return storage

    assert_same(state, ckpt.load(anywhere / "c", map_location=place))
    assert sorted(seen) == [(40, "cpu"), (1_600_000, "cpu")]


def test_missing_key_error_suggests_similar_keys(ckpt, anywhere: Path) -> None:
    ckpt.save({"a": torch.ones(3), "encoder": {"weight": torch.ones(1)}}, anywhere / "c")
    looks = r"What looks alike: 'encoder\.weight' for 'encoder\.wieght'\."
    target = {"a": torch.zeros(3), "encoder": {"wieght": torch.zeros(1)}}
    with pytest.raises(aiockpt.MissingKeysError, match=looks + r" Pass strict=False"):
        ckpt.load(anywhere / "c", target)
    with pytest.raises(aiockpt.MissingKeysError, match=looks):
        ckpt.load(anywhere / "c", keys=["a", "encoder.wieght"])
    with ckpt.open(anywhere / "c") as reader:
        with pytest.raises(KeyError, match=looks):
            reader.read("encoder.wieght")
        with pytest.raises(aiockpt.MissingKeysError, match=looks):
            reader.read_many(["a", "encoder.wieght"])
        with pytest.raises(KeyError, match="has no 5; keys"):
            reader.read(5)
    with pytest.raises(aiockpt.MissingKeysError) as caught:
        ckpt.load(anywhere / "c", {"\x1b[2J": 1})
    assert "\x1b" not in str(caught.value)


def test_missing_keys(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(3)}, tmp_path / "c")
    target = {"a": torch.zeros(3), "b": torch.zeros(1), "c": {"d": 1}}
    with pytest.raises(
        aiockpt.MissingKeysError, match=r"lacks 2 of the keys asked for: b, c\.d\. Pass strict=False"
    ) as caught:
        ckpt.load(tmp_path / "c", target)
    assert caught.value.keys == ("b", "c.d")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, RuntimeError)  # torch's loaders raise it for missing keys
    assert not target["a"].any()
    ckpt.load(tmp_path / "c", target, strict=False)
    assert_same({"a": torch.ones(3), "b": torch.zeros(1), "c": {"d": 1}}, target)


def test_shapes_and_dtypes_are_checked_before_anything_is_written(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(3), "w": torch.ones(4, 5), "o": [1]}, tmp_path / "c")
    for wrong, message in (
        (torch.zeros(5, 4), r"w has the shape \(5, 4\) in the target but \(4, 5\)"),
        (torch.zeros(4, 5, dtype=torch.float64), r"w is torch\.float64 in the target but torch\.float32"),
        (torch.zeros(4, 5, device="meta"), "w is on the meta device"),
        (torch.zeros(4, 5).to_sparse(), "w has the layout torch.sparse_coo"),
    ):
        target = {"a": torch.zeros(3), "w": wrong}
        with pytest.raises(aiockpt.ShapeMismatchError, match=message):
            ckpt.load(tmp_path / "c", target)
        assert not target["a"].any()
    with pytest.raises(aiockpt.ShapeMismatchError, match="o is a tensor in the target but an object"):
        ckpt.load(tmp_path / "c", {"o": torch.zeros(1)})
    with pytest.raises(aiockpt.LoadError, match="keys must be str, int"):
        ckpt.load(tmp_path / "c", {b"x": torch.zeros(1)})


def test_paths_without_a_checkpoint(ckpt, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").write_text("x")
    for name, message in (
        ("none", "no such path"),
        ("file", "neither a torch.save file, nor"),
        ("folder", r"has no \.metadata"),
    ):
        with pytest.raises(aiockpt.CheckpointNotFoundError, match=message):
            ckpt.load(tmp_path / name)
    with pytest.raises(aiockpt.CorruptCheckpointError, match="its save was never finished"):
        ckpt.load(tmp_path / "half")
    assert isinstance(aiockpt.CheckpointNotFoundError("x"), FileNotFoundError)


def test_directory_of_checkpoints_is_refused_with_a_list(ckpt, tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for step in (9, 90, 1000):
        ckpt.save(state, tmp_path / "run" / f"step-{step}")
    ckpt.save(state, tmp_path / "run" / "last", format="safetensors")
    torch.save(state, tmp_path / "run" / "old.pt")
    hidden = tmp_path / "run" / ".hidden"
    shutil.copytree(tmp_path / "run" / "step-9", hidden)
    says = r"run: it is no checkpoint, but holds several: step-1000, step-90, step-9, old\.pt, last; add one of these"
    for attempt in (ckpt.load, ckpt.verify, ckpt.open, lambda path: FileSystemReader(path).read_metadata()):
        with pytest.raises(aiockpt.CheckpointNotFoundError, match=says):
            attempt(tmp_path / "run").__enter__()
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"run/step-1000, run/step-90, .*add one of these"):
        ckpt.load(tmp_path)
    for step in range(20):
        shutil.copytree(hidden, tmp_path / "many" / f"s{step}")
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"several: s19, s18, .*, s10 and 10 more; add"):
        ckpt.load(tmp_path / "many")
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"holds one: s; add this to the path"):
        ckpt.load(shutil.copytree(hidden, tmp_path / "one" / "s").parent)


def test_file_inside_a_checkpoint_is_refused_with_its_directory(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    ckpt.save({"w": torch.ones(2)}, path)
    shutil.copy(path / ".metadata", path / "__0.metadata")
    for name in (".metadata", ".aiockpt.json", "__0_0.distcp", "__0.metadata"):
        for attempt in (
            ckpt.load,
            ckpt.verify,
            ckpt.open,
            lambda inner: FileSystemReader(inner).read_metadata(),
            lambda inner: FileSystemReader(inner).read_metadata(rank=0),
        ):
            with pytest.raises(aiockpt.CheckpointNotFoundError, match=f"{name} is a file inside of .*, {path}$"):
                attempt(path / name).__enter__()


def _copy(source: Path, name: str) -> Path:
    return Path(shutil.copytree(source, source.parent / name))


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_missing_and_truncated_files(stock: bool, ckpt, tmp_path: Path) -> None:
    state = large_state(4) | {"note": "x"}
    if stock:
        dcp.save(state, checkpoint_id=tmp_path / "good", **ALONE)
    else:
        ckpt.save(state, tmp_path / "good")
    lost = _copy(tmp_path / "good", "lost")
    (lost / "__0_0.distcp").unlink()
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"lacks .*__0_0\.distcp"):
        ckpt.load(lost)
    short = _copy(tmp_path / "good", "short")
    size = (short / "__0_0.distcp").stat().st_size
    os.truncate(short / "__0_0.distcp", size - 1)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"__0_0\.distcp.*truncated"):
        ckpt.load(short)
    for count in range(0, (tmp_path / "good" / ".metadata").stat().st_size, 97):
        broken = _copy(tmp_path / "good", f"m{count}")
        os.truncate(broken / ".metadata", count)
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"\.metadata"):
            ckpt.load(broken)


def _flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_flipped_payload_bit_is_found_and_named(stock: bool, ckpt, tmp_path: Path) -> None:
    from aiockpt.format.dcp.metadata import decode_metadata

    state = {**large_state(4, kib=2048), "small": torch.arange(50), "text": "abc" * 10}
    if stock:
        dcp.save(state, checkpoint_id=tmp_path / "good", **ALONE)
    else:
        ckpt.save(state, tmp_path / "good")
    index = decode_metadata((tmp_path / "good" / ".metadata").read_bytes())
    for name in ("w0", "w3", "small", "text"):
        entry = index.entries[name]
        place = entry.place if name == "text" else entry.chunks[0].place
        bad = _copy(tmp_path / "good", f"bad-{name}")
        data = (bad / place.file).read_bytes()[place.offset : place.offset + place.length]
        inside = data.find(b"abcabc") if name == "text" else PAYLOAD_OFFSET + 17
        _flip(bad / place.file, place.offset + inside, 3)
        with pytest.raises(aiockpt.CorruptCheckpointError, match=f"{place.file}.*{name}"):
            ckpt.load(bad)
        target = {key: torch.zeros_like(value) if key != "text" else "" for key, value in state.items()}
        with pytest.raises(aiockpt.CorruptCheckpointError, match=name):
            ckpt.load(bad, target)
        if name != "text":
            loaded = ckpt.load(bad, verify=False)[name]
            assert int((loaded != state[name]).sum()) == 1


@pytest.mark.slow
def test_flips_anywhere_are_found_or_harmless(ckpt, tmp_path: Path) -> None:
    """After a bit flip in a small checkpoint, a load raises an error of ours or returns the saved state."""
    state = {"a": torch.arange(9), "s": {"x": torch.tensor(2.5)}, "o": [1, "two"]}
    ckpt.save(state, tmp_path / "c", metadata={"k": 1})
    found = tried = 0
    for name in ("__0_0.distcp", ".metadata", ".aiockpt.json"):
        file = tmp_path / "c" / name
        step = 1 if name == ".aiockpt.json" else 7  # the manifest holds the CRCs of the other files
        for offset in range(0, file.stat().st_size, step):
            _flip(file, offset, offset % 8)
            tried += 1
            try:
                assert_same(state, ckpt.load(tmp_path / "c"))
            except (aiockpt.CorruptCheckpointError, aiockpt.UnsafeCheckpointError) as exc:
                assert name in str(exc)
                found += 1
            _flip(file, offset, offset % 8)
    assert_same(state, ckpt.load(tmp_path / "c"))
    assert tried > 2000
    assert found > tried // 4  # flips in `.metadata` are harmless: the manifest has the whole index


def test_checkpoint_without_a_manifest_loads_as_plain_dcp(ckpt, tmp_path: Path) -> None:
    state = training_state()
    ckpt.save(state, tmp_path / "c")
    (tmp_path / "c" / ".aiockpt.json").unlink()
    loaded = ckpt.load(tmp_path / "c")
    assert_same(state["model"]["0.weight"], loaded["model"]["0.weight"])
    assert list(loaded["optim"]["state"]) == [str(i) for i in range(6)]


def test_edited_manifest_is_refused(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(1)}, tmp_path / "c", metadata={"step": 1})
    text = (tmp_path / "c" / ".aiockpt.json").read_text()
    (tmp_path / "c" / ".aiockpt.json").write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"aiockpt\.json is damaged or was edited"):
        ckpt.load(tmp_path / "c")
    later = json.loads(text) | {"format_version": 99}
    (tmp_path / "c" / ".aiockpt.json").write_text(json.dumps(later))
    with pytest.raises(aiockpt.CorruptCheckpointError):
        ckpt.load(tmp_path / "c")


def test_objects_do_not_run_code(ckpt, anywhere: Path) -> None:
    ckpt.save({"o": Custom(5), "t": torch.ones(1)}, anywhere / "c")
    with pytest.raises(
        aiockpt.UnsafeCheckpointError,
        match=r"object o needs tests\.reading\.test_load\.Custom.*safe_globals=\[tests\.reading\.test_load\.Custom\]",
    ):
        ckpt.load(anywhere / "c")
    assert ckpt.load(anywhere / "c", safe_globals=[Custom])["o"] == Custom(5)
    assert ckpt.load(anywhere / "c", trust=True)["o"] == Custom(5)
    with pytest.raises(aiockpt.UnsafeCheckpointError):
        ckpt.load(anywhere / "c")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/aiockpt-was-here",))


def test_metadata_does_not_run_code(ckpt, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"names posix\.system"):
        ckpt.load(tmp_path / "c")
    assert not os.path.exists("/tmp/aiockpt-was-here")


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "sub/../../secret", "link"])
def test_path_outside_the_directory_is_refused(path: str, ckpt, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "c", **ALONE)
    shutil.copy(tmp_path / "c" / "__0_0.distcp", tmp_path / "secret")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "secret")
    with open(tmp_path / "c" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = path
    with open(tmp_path / "c" / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="outside"):
        ckpt.load(tmp_path / "c")


@pytest.mark.asyncio
async def test_concurrent_loads_and_saves(anywhere: Path) -> None:
    states = [{name: tensor + i for name, tensor in large_state(12).items()} for i in range(4)]
    async with aiockpt.AsyncCheckpointer() as ckpt:
        for i, state in enumerate(states):
            await ckpt.save(state, anywhere / str(i))
        saving = ckpt.save(states[0], anywhere / "more")
        loaded = await asyncio.gather(*(ckpt.load(anywhere / str(i)) for i in range(4)))
        await saving
    for state, back in zip(states, loaded, strict=True):
        assert_same(state, back)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_cancelled_load_stops(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(large_state(20, kib=2048), anywhere / "c")
        target = {name: torch.zeros_like(tensor) for name, tensor in large_state(20, kib=2048).items()}
        task = asyncio.ensure_future(ckpt.load(anywhere / "c", target))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = {name: tensor.clone() for name, tensor in target.items()}
        await ckpt.load(anywhere / "c")
        assert_same(before, target)  # no thread wrote to it after the cancellation


def test_expanded_target_is_refused(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(4, 5), "z": torch.ones(2)}, tmp_path / "c")
    target = {"z": torch.zeros(2), "w": torch.zeros(1, 5).expand(4, 5)}
    with pytest.raises(aiockpt.ShapeMismatchError, match="w overlaps itself"):
        ckpt.load(tmp_path / "c", target)
    assert not target["z"].any()


def test_safe_globals_of_the_user_are_kept(ckpt, tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Custom])
    try:
        ckpt.save({"o": Custom(5)}, tmp_path / "c")
        assert ckpt.load(tmp_path / "c", safe_globals=[Custom])["o"] == Custom(5)
        assert Custom in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()


def test_strings_with_a_lone_surrogate(ckpt, anywhere: Path) -> None:
    lone = os.fsdecode(b"\xff")  # a file name that is not UTF-8
    ckpt.save({lone: {}, "t": lone}, anywhere / "c", metadata={"file": lone, "name": "grün"})
    assert ckpt.load(anywhere / "c") == {lone: {}, "t": lone}


def test_overlapping_chunks_are_corrupt(ckpt, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4), "b": torch.ones(4)}, checkpoint_id=tmp_path / "c", **ALONE)
    with open(tmp_path / "c" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    tensor = metadata.state_dict_metadata["a"]
    tensor.size = torch.Size([8])
    tensor.chunks.append(type(tensor.chunks[0])(torch.Size([0]), torch.Size([4])))
    with open(tmp_path / "c" / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"chunks of a overlap|two chunks at"):
        ckpt.load(tmp_path / "c")


def test_map_location_may_raise_keyboard_interrupt(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(4)}, tmp_path / "c")

    def stop(storage, location):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckpt.load(tmp_path / "c", map_location=stop)
    assert_same({"a": torch.ones(4)}, ckpt.load(tmp_path / "c"))


# --- targets that share memory ------------------------------------------------------------------------


def test_targets_that_overlap_themselves_are_refused(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(3), "w": torch.ones(3, 4)}, tmp_path / "c")
    memory = torch.zeros(100)
    for wrong in (
        torch.zeros(1, 4).expand(3, 4),
        memory.as_strided((3, 4), (1, 1)),
        memory.as_strided((3, 4), (3, 1)),
        memory.as_strided((3, 4), (2, 4)),
    ):
        target = {"a": torch.zeros(3), "w": wrong}
        with pytest.raises(aiockpt.ShapeMismatchError, match="w overlaps itself in the target"):
            ckpt.load(tmp_path / "c", target)
        assert not target["a"].any()
    crossed = memory.as_strided((3, 4), (2, 3))  # interleaved strides, but no address twice
    ckpt.load(tmp_path / "c", {"w": crossed})
    assert crossed.eq(1).all()


def test_targets_that_share_memory_are_refused(ckpt, tmp_path: Path) -> None:
    ckpt.save(
        {"a": torch.ones(4, 4), "b": torch.zeros(4, 4), "c": torch.ones(4, 4), "f": torch.ones(3)}, tmp_path / "c"
    )
    memory, first = torch.full((8, 8), 7.0), torch.zeros(3)
    for a, b in (
        (memory[:4, :4], memory[3:7, :4]),
        (memory[:4, :4], memory[:4, 3:7]),
        (memory[:4, :4], memory[:4, :4].t()),
        (memory[::2, ::2], memory[2:6, 2:6]),
        (memory[:4, :4], memory[:4, :4]),
    ):
        is_same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        which = "are the same memory" if is_same else "share memory in the target, but are not the same there"
        with pytest.raises(aiockpt.ShapeMismatchError, match=f"[ab] and [ab] {which}"):
            ckpt.load(tmp_path / "c", {"f": first, "a": a, "b": b})
        assert memory.eq(7).all()
        assert not first.any()
    for a, b in ((memory[:4, :4], memory[:4, 4:]), (memory[::2, ::2], memory[1::2, ::2])):  # side by side
        ckpt.load(tmp_path / "c", {"a": a, "b": b})
        assert a.eq(1).all()
        assert b.eq(0).all()
    tied = torch.zeros(4, 4)
    ckpt.load(tmp_path / "c", {"a": tied, "c": tied})  # stored twice, with equal values
    assert tied.eq(1).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tied_tensors_load_into_tied_targets(ckpt, tmp_path: Path) -> None:
    tied, other = torch.arange(6.0), torch.zeros(6)
    ckpt.save({"a": tied, "b": tied}, tmp_path / "c")
    dcp.save({"a": tied, "b": tied}, checkpoint_id=tmp_path / "stock", **ALONE)
    for name in ("c", "stock"):
        other.zero_()
        ckpt.load(tmp_path / name, {"a": other, "b": other})
        assert torch.equal(tied, other)
