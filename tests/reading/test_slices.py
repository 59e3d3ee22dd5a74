"""Parts of tensors: right values, and no more bytes read than needed, with files of every writer."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from tests.counting import CountingStorage
from tests.examples import examples
from tests.places import storage_of
from tests.states import assert_same, random_tensor
from tests.stock import ALONE, PAYLOAD_OFFSET

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _write(state: dict[str, torch.Tensor], path: Path, writer: str) -> Path:
    if writer == "ours":
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, path)
    elif writer == "without a manifest":
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, path)
        (path / ".aiockpt.json").unlink()
    elif writer == "dcp":
        dcp.save(state, checkpoint_id=path, **ALONE)
    elif writer == "torch":
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


WRITERS = ["ours", "without a manifest", "dcp", "torch", "safetensors"]
INDICES = [
    slice(0, 8),
    slice(500, 517),
    slice(1023, None),
    slice(None, None, 100),
    (slice(3, 90), slice(10, 30)),
    (slice(None), slice(700, 760)),
    (slice(5, 500, 7), slice(2, 700, 3)),
    7,
    (-1, slice(0, 100)),
    (..., 5),
    (slice(1000, 1000),),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("anywhere", "writer"), [*(("local", each) for each in WRITERS), ("server", "ours")], indirect=["anywhere"]
)
def test_only_the_bytes_of_a_part_are_read(writer: str, anywhere: Path) -> None:
    state = {
        "w": random_tensor(torch.float32, (1024, 768), 1),
        "t": random_tensor(torch.float32, (768, 1024), 2).t(),
        "other": random_tensor(torch.int16, (1000, 1000), 3),
    }
    path = _write(state, anywhere / "c", writer)
    storage = CountingStorage(storage_of(anywhere))
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path, storage=storage) as reader:
        for name in ("w", "t"):
            reader.read(name, slice(0, 1))  # reads the framing, which is then kept
            for index in INDICES:
                storage.reads.clear()
                part = reader.read(name, index)
                expected = state[name][index]
                assert torch.equal(part.view(torch.int32), expected.view(torch.int32)), (name, index)
                assert part.shape == expected.shape
                assert storage.nbytes <= 1.1 * expected.numel() * 4, (name, index)


@pytest.mark.parametrize(
    ("anywhere", "writer"),
    [*(("local", each) for each in ("ours", "dcp", "safetensors")), ("server", "ours")],
    indirect=["anywhere"],
)
def test_adjacent_rows_take_one_read(writer: str, anywhere: Path) -> None:
    path = _write({"w": random_tensor(torch.float32, (1024, 768), 1)}, anywhere / "c", writer)
    storage = CountingStorage(storage_of(anywhere))
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path, storage=storage) as reader:
        reader.read("w", 0)
        storage.reads.clear()
        reader.read("w", slice(100, 200))
        assert [nbytes for _, _, nbytes in storage.reads] == [100 * 768 * 4]


def test_part_has_a_storage_of_its_own(tmp_path: Path) -> None:
    path = _write({"w": random_tensor(torch.float32, (4096, 768), 1)}, tmp_path / "c", "ours")
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        assert reader.read("w", slice(0, 2)).untyped_storage().nbytes() == 2 * 768 * 4
        assert reader.read("w", (slice(0, 1024), 3)).untyped_storage().nbytes() == 1024 * 4


def make_sharded(path: Path, whole: torch.Tensor, cuts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Path:
    """Make a checkpoint of one tensor ``w`` in several chunks, as several ranks write them."""
    pieces = {
        f"p{i}": whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
        for i, (offsets, sizes) in enumerate(cuts)
    }
    dcp.save(pieces, checkpoint_id=path, **ALONE)
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    described, places = metadata.state_dict_metadata, metadata.storage_data
    index = {key.fqn: key for key in places}
    tensor = described["p0"]
    tensor.size = whole.shape
    for i, (offsets, _) in enumerate(cuts):
        chunk = described.pop(f"p{i}").chunks[0]
        chunk.offsets = torch.Size(offsets)
        if i:
            tensor.chunks.append(chunk)
        places[type(index["p0"])("w", torch.Size(offsets))] = places.pop(index[f"p{i}"])
    described["w"] = tensor
    metadata.planner_data = {"w": ("w",)}
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    return path


GRID = [((i, j), (n, m)) for i, n in ((0, 300), (300, 500), (800, 224)) for j, m in ((0, 10), (10, 758))]


def test_parts_across_chunk_borders(tmp_path: Path) -> None:
    whole = random_tensor(torch.float32, (1024, 768), 7)
    path = make_sharded(tmp_path / "c", whole, GRID)
    storage = CountingStorage()
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path, storage=storage) as reader:
        assert len(reader["w"].chunks) == 6
        reader.read("w")
        for index in [*INDICES, (slice(290, 310), slice(5, 15)), (slice(0, 1024, 333), slice(9, 12))]:
            storage.reads.clear()
            expected = whole[index]
            assert torch.equal(reader.read("w", index).view(torch.int32), expected.view(torch.int32)), index
            assert storage.nbytes <= 1.1 * expected.numel() * 4, index
        target = torch.zeros(768, 1024).t()
        reader.read("w", out=target)
        assert torch.equal(target.view(torch.int32), whole.view(torch.int32))
        assert_same({"w": whole}, ckpt.load(path))


@pytest.mark.slow
@examples(60, [HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_any_tensor(data, readers) -> None:
    """Any hyper-rectangle, with steps, of tensors of several dtypes and strides, from several writers."""
    state, opened = readers
    reader = data.draw(st.sampled_from(opened))
    name = data.draw(st.sampled_from(sorted(reader)))
    tensor = state[name]
    index = []
    for size in tensor.shape:
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        step = data.draw(st.sampled_from([1, 1, 1, 2, 5]))
        whole = data.draw(st.booleans())
        index.append(slice(None) if whole else slice(start, stop, step))
    part = reader.read(name, tuple(index))
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    assert torch.equal(part.view(raw), tensor[tuple(index)].view(raw))
    out = torch.zeros((*part.shape, 2), dtype=tensor.dtype)[..., 1]
    assert reader.read(name, tuple(index), out=out) is out
    assert torch.equal(out.view(raw), part.view(raw))


def test_parts_of_views(tmp_path: Path) -> None:
    """A view has an offset and strides in its storage; a part of the view adds its own."""
    base = random_tensor(torch.float32, (800_000,), 6)
    state = {"tail": base[500_000:], "odd": base[1::2], "t": base[7 : 7 + 1000 * 600].view(1000, 600).t()}
    torch.save(state, tmp_path / "s.pt")
    dcp.save({"t": random_tensor(torch.float32, (1000, 600), 7).t()}, checkpoint_id=tmp_path / "c", **ALONE)
    parts = {
        "tail": [slice(3, 2000), slice(7, 290_000, 1000), 299_999],
        "odd": [slice(3, 2000), slice(11, 390_000, 1000)],
        "t": [(slice(3, 9), slice(5, 900)), (slice(2, 500, 7), slice(1, 990, 9)), (slice(None), 77), (599, 999)],
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in (tmp_path / "s.pt", tmp_path / "c"):
            with ckpt.open(path) as reader:
                for name in reader:
                    whole = reader.read(name).view(torch.int32)
                    assert path.name == "c" or torch.equal(whole, state[name].view(torch.int32))
                    for part in parts[name]:
                        assert torch.equal(reader.read(name, part).view(torch.int32), whole[part]), (name, part)


@pytest.fixture
def readers(tmp_path: Path):
    directory = tmp_path
    state = {
        "w": random_tensor(torch.float32, (1024, 768), 7),
        "deep": random_tensor(torch.bfloat16, (9, 8, 7, 6, 5), 8),
        "moved": random_tensor(torch.int64, (60, 50, 40), 9).permute(2, 0, 1),
        "bytes": random_tensor(torch.uint8, (3_000_000,), 10),
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        opened = [ckpt.open(_write(state, directory / writer, writer)) for writer in ("ours", "dcp", "torch")]
        opened.append(ckpt.open(make_sharded(directory / "sharded", state["w"], GRID)))
        for reader in opened:
            reader.__enter__()
        yield state, opened
        for reader in opened:
            reader.close()


def test_read_many_with_parts_and_a_cast(tmp_path: Path) -> None:
    state = {"w": torch.randn(1024, 768), "v": torch.randn(3000), "i": torch.arange(70)}
    path = _write(state, tmp_path / "c", "ours")
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        parts = reader.read_many({"v": slice(10, 20), "w": (slice(4), 2), "i": None}, dtype=torch.bfloat16)
        expected = {"v": state["v"][10:20].bfloat16(), "w": state["w"][:4, 2].bfloat16(), "i": state["i"]}
        assert_same(expected, parts)


def test_invalid_requests_are_refused(tmp_path: Path) -> None:
    path = _write({"w": torch.randn(10, 4)}, tmp_path / "c", "ours")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.randn(10, 4), "o": {"x": [1]}}, tmp_path / "d")
        with ckpt.open(tmp_path / "d") as reader:
            with pytest.raises(KeyError, match="has no 'v'"):
                reader.read("v")
            with pytest.raises(IndexError, match="index 10 is outside of dimension 0"):
                reader.read("w", 10)
            with pytest.raises(TypeError, match=r"o\.x is an object"):
                reader.read("o.x", 0)
            with pytest.raises(aiockpt.ShapeMismatchError, match=r"w has the shape \(4,\) in the target but \(3, 4\)"):
                reader.read("w", slice(3), out=torch.zeros(4))
            with pytest.raises(aiockpt.ShapeMismatchError, match=r"w is torch\.float64 in the target"):
                reader.read("w", slice(3), out=torch.zeros(3, 4, dtype=torch.float64))
            with pytest.raises(aiockpt.MissingKeysError, match=r"no key that matches 'x\*'"):
                reader.read_many(["w", "x*"])
        with pytest.raises(aiockpt.LoadError, match="is not open"):
            reader.read("w")
    with pytest.raises(aiockpt.CheckpointerClosedError):
        ckpt.open(path).__enter__()


def test_crc_is_checked_only_for_whole_chunks(tmp_path: Path) -> None:
    """Damage in a chunk raises if the whole chunk is read, and goes unnoticed if a slice of it is."""
    whole = random_tensor(torch.int32, (1024, 768), 7)
    path = make_sharded(tmp_path / "c", whole, [((0, 0), (500, 768)), ((500, 0), (524, 768))])
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        chunk = reader["w"].chunks[1]
        with open(path / chunk.file, "r+b") as file:
            file.seek(chunk.offset + PAYLOAD_OFFSET + 4 * 768 * 100)
            file.write(b"\x55\xaa\x55")
        with pytest.raises(aiockpt.CorruptCheckpointError, match="the bytes of w"):
            reader.read("w", slice(400, 1024))
        assert torch.equal(reader.read("w", slice(0, 500)), whole[:500])
        assert int((reader.read("w", slice(501, 1024)) != whole[501:]).sum()) == 1
        assert int((reader.read("w", verify=False) != whole).sum()) == 1


@pytest.mark.parametrize("shift", range(1, 16, 2))
def test_values_at_odd_offsets_of_the_file(shift: int, tmp_path: Path) -> None:
    """Stock items begin at any offset, and vector instructions fault on complex numbers at odd addresses."""
    state = {"x" * shift: torch.zeros(shift, dtype=torch.uint8)} | {
        "large": torch.randn(300, 400, dtype=torch.complex128),
        "small": torch.randn(20, 30, dtype=torch.complex128),
    }
    dcp.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(tmp_path / "c") as reader:
        for name in ("large", "small"):
            for target in (torch.zeros_like(state[name].t()).t(), torch.zeros_like(state[name]).repeat(1, 2)[:, ::2]):
                target.zero_()
                reader.read(name, out=target)
                assert torch.equal(target, state[name])
                ckpt.load(tmp_path / "c", {name: target.zero_()})
                assert torch.equal(target, state[name])
            assert torch.equal(reader.read(name, (slice(3, 9), slice(1, 7, 2))), state[name][3:9, 1:7:2])
