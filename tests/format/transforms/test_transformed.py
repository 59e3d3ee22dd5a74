"""Compressed and encrypted checkpoints: round trips, other readers, damage and hostile metadata."""

from __future__ import annotations

import gc
import json
import mmap
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from isal.isal_zlib import crc32
from torch.distributed.checkpoint._extension import ZStandard

import aiockpt
import aiockpt.dcp
from aiockpt.dcp.format_utils import dcp_to_torch_save
from aiockpt.format.transforms.zstd import ZSTD_DESCRIPTOR
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from aiockpt.writing import file_writer
from tests.format.transforms.encryption import ChaCha20
from tests.states import assert_same, large_state, random_tensor, raw_bytes
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning",  # torch's DCP warns that it runs without a process group, as it should here
    "ignore::FutureWarning",
    # What torch puts between its file and a compressor flushes the file when it is freed, which may be too late.
    "ignore:(?s).*flush of closed file:pytest.PytestUnraisableExceptionWarning",
)

KEY = bytes(range(32))


def a_state() -> dict[str, Any]:
    """Return small and large items, compressible or not, with views, ties, objects and empty ones."""
    weights = torch.randn(700, 300).bfloat16()
    return {
        "model": {f"layers.{n}.weight": torch.randn(40 + n, 30) for n in range(12)},
        "moments": {"zeros": torch.zeros(900_000), "sparse": torch.randn(500_000) * (torch.arange(500_000) % 50 == 0)},
        "tokens": torch.arange(300_000) % 1000,
        "random": random_tensor(torch.uint8, (2_500_000,), 1),
        "weights": weights,
        "tied": weights,
        "transposed": torch.randn(400, 300).t(),
        "every_other": torch.arange(1000.0)[::2],
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "notes": {"text": "abc " * 2000, "nothing": None, "step": 7},
    }


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Free torch's writers within the test, where the warnings about them are ignored."""
    yield
    gc.collect()


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    return state


def transforms_of(path: Path) -> dict[str, list[str] | None]:
    """Return the descriptors of each item, as torch reads them."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return {index.fqn: info.transform_descriptors for index, info in metadata.storage_data.items()}


def save(state: Any, path: Path, *, compress: Any = "zstd", transforms: Any = (), **options: Any) -> aiockpt.SaveResult:
    with aiockpt.SyncCheckpointer(transforms=transforms, chunk_bytes=1 << 20, io_threads=3, **options) as ckpt:
        return ckpt.save(state, path, compress=compress)


def load(path: Path, into: Any = None, *, transforms: Any = (), **options: Any) -> Any:
    with aiockpt.SyncCheckpointer(transforms=transforms, io_threads=2) as ckpt:
        return ckpt.load(path, into, **options)


def verify(path: Path, transforms: Any = ()) -> aiockpt.VerifyReport:
    with aiockpt.SyncCheckpointer(transforms=transforms, io_threads=2) as ckpt:
        return ckpt.verify(path)


@pytest.mark.asyncio
async def test_a_compressed_state_comes_back(tmp_path: Path) -> None:
    state, path = a_state(), tmp_path / "c"
    async with aiockpt.AsyncCheckpointer(chunk_bytes=1 << 20, staging_bytes=2 << 20) as ckpt:
        result = await ckpt.save(state, path, compress="zstd").written
        assert_same(state, await ckpt.load(path))
        target = zeroed(state)
        await ckpt.load(path, target)
        assert_same(state, target)
        assert (await ckpt.verify(path)).ok
        again = await ckpt.save(state, tmp_path / "d", compress=aiockpt.Zstd(level=9)).written
    assert again.nbytes < result.nbytes
    described = transforms_of(path)
    assert described["random"] is None
    assert described["moments.zeros"] == described["notes.text"] == described["scalar"] == [ZSTD_DESCRIPTOR]
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.name.endswith(".distcp")}
    assert result.nbytes == sum(sizes.values()) < 0.5 * result.tensor_bytes
    manifest = json.loads((path / ".aiockpt.json").read_text())
    assert manifest["totals"]["file_bytes"] == result.nbytes
    for name, rows in manifest["transformed"].items():
        data = (path / name).read_bytes()
        assert rows
        assert all(crc32(data[offset : offset + length]) == crc for offset, length, crc, *_ in rows)


def test_a_writer_process_compresses_and_encrypts(tmp_path: Path) -> None:
    state, lock = a_state(), [ChaCha20(KEY)]
    result = save(state, tmp_path / "c", transforms=lock, writer="process")
    assert result.nbytes < 0.5 * result.tensor_bytes
    assert transforms_of(tmp_path / "c")["tokens"] == [lock[0].descriptor, ZSTD_DESCRIPTOR]
    assert_same(state, load(tmp_path / "c", transforms=lock))
    assert verify(tmp_path / "c", lock).ok


def test_encoded_bytes_pass_through_two_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, lock, made = {"random": random_tensor(torch.uint8, (24 << 20,), 1)}, [ChaCha20(KEY)], []

    def allocate(*args: Any, **kwargs: Any) -> mmap.mmap:
        made.append(args)
        return mmap.mmap(*args, **kwargs)

    monkeypatch.setattr(file_writer, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": allocate}))
    with aiockpt.SyncCheckpointer(transforms=lock, io_threads=1) as ckpt:
        ckpt.save(state, tmp_path / "c")
    assert (tmp_path / "c" / "__0_0.distcp").stat().st_size > 24 << 20
    assert len(made) == 2
    assert_same(state, load(tmp_path / "c", transforms=lock))


def test_torch_reads_a_checkpoint_of_aiockpt(tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path / "c")
    target = zeroed(state)
    dcp.load(target, checkpoint_id=tmp_path / "c", **ALONE)
    assert_same(state, target)


def test_aiockpt_reads_a_checkpoint_of_torch(tmp_path: Path) -> None:
    state, path = a_state(), tmp_path / "c"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, _extensions=[ZStandard()], thread_count=2), **ALONE)
    assert set(map(str, transforms_of(path).values())) == {str([ZSTD_DESCRIPTOR])}
    target = zeroed(state)
    load(path, target)
    assert_same(state, target)
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        assert torch.equal(reader.read("weights", slice(3, 9)), state["weights"][3:9])
    assert verify(path).ok


def test_the_adapters_read_both(tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path / "ours")
    writer = dcp.FileSystemWriter(tmp_path / "torchs", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, **ALONE)
    for name in ("ours", "torchs"):
        target = zeroed(state)
        dcp.load(target, storage_reader=aiockpt.dcp.FileSystemReader(tmp_path / name), **ALONE)
        assert_same(state, target)
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        assert_same(state, torch.load(tmp_path / f"{name}.pt"))


def test_rules_choose_the_compressed_items(tmp_path: Path) -> None:
    state = {"a": {"x": torch.zeros(9000), "y": torch.zeros(9000)}, "b": torch.zeros(9000), "n": "abc " * 900}
    for number, (rule, compressed) in enumerate(
        [
            ({"a.x": None, "a": "zstd", "*": None}, {"a.y"}),
            ({"*": aiockpt.Zstd(1)}, {"a.x", "a.y", "b", "n"}),
            ({"n": "zstd", "c": "zstd"}, {"n"}),
            (lambda name, tensor: "zstd" if name != "b" and tensor.numel() > 10 else None, {"a.x", "a.y"}),
            (lambda _name, _tensor: None, set()),
            ({}, set()),
        ]
    ):
        path = tmp_path / str(number)
        save(state, path, compress=rule)
        assert {name for name, found in transforms_of(path).items() if found} == compressed
        assert_same(state, load(path))


def test_items_without_compression_are_written_as_before(tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path / "plain", compress=None)
    save(state, tmp_path / "none", compress={"*": None})
    for file in (tmp_path / "plain").iterdir():
        if file.name != ".aiockpt.json":
            assert file.read_bytes() == (tmp_path / "none" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("compress", "error", "match"),
    [
        ("gzip", ValueError, "compress is 'gzip'; it must be None, 'zstd', or aiockpt.Zstd"),
        ({"*": 3}, ValueError, "compress is 3"),
        ({3: "zstd"}, TypeError, "has the key 3"),
        (lambda name, tensor: tensor.no_such, aiockpt.SaveError, "failed for w: AttributeError"),
    ],
)
def test_wrong_rules_are_refused_at_the_call(tmp_path: Path, compress: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        save({"w": torch.ones(3)}, tmp_path / "c", compress=compress)
    assert not list(tmp_path.iterdir())


def test_other_formats_and_wrong_transforms_are_refused(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(ValueError, match="compress is for format='dcp'"):
        ckpt.save({"w": torch.ones(3)}, tmp_path / "c", compress="zstd", format="safetensors")
    with (
        aiockpt.SyncCheckpointer(transforms=[ChaCha20(KEY)]) as ckpt,
        pytest.raises(ValueError, match="transforms is for format='dcp'"),
    ):
        ckpt.save({"w": torch.ones(3)}, tmp_path / "c", format="safetensors")
    for wrong, error in (
        ([ChaCha20], TypeError),
        ([object()], TypeError),
        ([ChaCha20(KEY, "no version")], ValueError),
        ([ChaCha20(KEY), ChaCha20(KEY)], ValueError),
    ):
        with pytest.raises(error):
            aiockpt.SyncCheckpointer(transforms=wrong)


def test_encryption(tmp_path: Path) -> None:
    secret = "the launch code is 4711"
    state, path = a_state() | {"secret": secret, "w": torch.arange(40_000.0)}, tmp_path / "c"
    lock = [pickle.loads(pickle.dumps(ChaCha20(KEY)))]
    save(state, path, compress={"w": "zstd"}, transforms=lock)
    described = transforms_of(path)
    assert described["w"] == [lock[0].descriptor, ZSTD_DESCRIPTOR]  # in the order of decoding
    assert described["random"] == described["secret"] == [lock[0].descriptor]
    everything = b"".join(file.read_bytes() for file in path.iterdir())
    for plain in (secret.encode(), raw_bytes(state["weights"])[:64], raw_bytes(state["random"])[5000:5064]):
        assert plain not in everything
    assert_same(state, load(path, transforms=lock))
    assert verify(path, lock).ok
    with pytest.raises(aiockpt.LoadError, match=r"transform 'example.chacha20/1', which .* was not given: pass transf"):
        load(path)
    target = zeroed(state)
    with pytest.raises(aiockpt.LoadError, match=r"example.chacha20/1 failed: InvalidTag.*made with the same key"):
        load(path, target, transforms=[ChaCha20(bytes(32))])
    assert {problem.kind for problem in verify(path).problems} == {"unreadable"}


@pytest.mark.asyncio
async def test_an_encrypted_checkpoint_is_opened_with_its_key(tmp_path: Path) -> None:
    state = {"w": torch.randn(900, 100), "s": "x"}
    save(state, tmp_path / "c", transforms=[ChaCha20(KEY)])
    async with aiockpt.open(tmp_path / "c", transforms=[ChaCha20(KEY)]) as reader:
        assert torch.equal(await reader.read("w", slice(5, 7)), state["w"][5:7])
    async with aiockpt.open(tmp_path / "c") as reader:
        assert list(reader) == ["w", "s"]


def test_parts_of_compressed_tensors_are_read(tmp_path: Path) -> None:
    state, path = a_state(), tmp_path / "c"
    save(state, path)
    zeros, weights, turned = state["moments"]["sparse"], state["weights"], state["transposed"]
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        for _ in range(2):
            assert torch.equal(reader.read("moments.sparse", slice(123_456, 400_000, 7)), zeros[123_456:400_000:7])
            assert torch.equal(reader.read("weights", (slice(650, None), 7)), weights[650:, 7])
            assert torch.equal(reader.read("transposed", (slice(0, 5), slice(9, 11))), turned[:5, 9:11])
        out = torch.zeros(300, 700, dtype=torch.bfloat16).t()
        assert torch.equal(reader.read("weights", out=out), weights)
        assert reader["weights"].shape == weights.shape
        assert dict(reader.stream("notes.*")) == reader.read_many("notes.*")
    assert torch.equal(load(path, keys="weights", dtype=torch.float64)["weights"], weights.double())
    with pytest.raises(aiockpt.LoadError, match=f"is stored with {ZSTD_DESCRIPTOR}, so it can't be mapped"):
        load(path, mmap=True)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    state = {"w": torch.arange(100_000), "v": torch.zeros(5000), "s": "abc" * 1000}
    save(state, tmp_path / "good")
    rows = json.loads((tmp_path / "good" / ".aiockpt.json").read_text())["transformed"]
    for name, items in rows.items():
        for offset, length, *_ in items:
            path = tmp_path / "bad"
            shutil.copytree(tmp_path / "good", path)
            data = bytearray((path / name).read_bytes())
            data[offset + length // 2] ^= 4
            (path / name).write_bytes(data)
            with pytest.raises(aiockpt.CorruptCheckpointError, match=rf"{name}: .* stored bytes of \w .* their CRC"):
                load(path)
            assert {"item crc", "file crc"} == {problem.kind for problem in verify(path).problems}
            shutil.rmtree(path)


class Inverting:
    """Transform that inverts every bit, so that any stored bytes can be decoded."""

    descriptor = "inverting/1"

    def encoder(self) -> Any:
        return self

    decoder = encoder

    def update(self, data: memoryview, most: int = 0) -> bytes:
        return bytes(data).translate(bytes(range(255, -1, -1)))

    def finish(self, most: int = 0) -> bytes:
        return b""


@pytest.mark.parametrize("key", ["w", "s"])
def test_a_flipped_bit_that_can_be_decoded_is_found(key: str, tmp_path: Path) -> None:
    state, path = {"w": torch.arange(3000), "s": "abc" * 1000}, tmp_path / "c"
    save(state, path, compress=None, transforms=[Inverting()])
    assert_same(state, load(path, transforms=[Inverting()]))
    for file in path.glob("*.distcp"):
        data, text = bytearray(file.read_bytes()), b"abcabc" if key == "s" else torch.arange(9, 12).numpy().tobytes()
        at = data.find(Inverting().update(memoryview(text)))
        if at >= 0:
            data[at] ^= 4
            file.write_bytes(data)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=f"stored bytes of {key} .* do not match their CRC"):
        load(path, transforms=[Inverting()])


class Spoiling(Inverting):
    """Transform that stores other bytes than it was given, with a matching CRC."""

    descriptor = "spoiling/1"

    def encoder(self) -> Any:
        return Spoiler()


class Spoiler(Inverting):
    def update(self, data: memoryview, most: int = 0) -> bytes:
        return super().update(memoryview(bytes(data).replace(b"\x2a\0\0\0\0", b"\x2b\0\0\0\0")))


@pytest.mark.parametrize("count", [1, 300_000])
def test_verify_checks_the_decoded_bytes(count: int, tmp_path: Path) -> None:
    save({"w": torch.tensor([42] * count)}, tmp_path / "c", compress=None, transforms=[Spoiling()])
    (problem,) = verify(tmp_path / "c", transforms=[Spoiling()]).problems
    assert (problem.kind, problem.key) == ("item crc", "w")


def change_metadata(path: Path, change: Any) -> None:
    """Change the metadata of a checkpoint of torch."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata, {index.fqn: info for index, info in metadata.storage_data.items()})
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_hostile_metadata(tmp_path: Path) -> None:
    """Impossible sizes, decompression bombs, cut frames, unknown transforms and paths outside are refused."""
    big = aiockpt.Zstd(1).encoder(64 << 20)
    bomb = big.update(memoryview(bytes(64 << 20))) + big.finish()

    def grow(metadata: Any, places: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size((1 << 40,))
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size((1 << 40,))

    def explode(_: Any, places: Any) -> None:
        name, offset = places["w"].relative_path, places["w"].offset
        file = tmp_path / "c" / name
        file.write_bytes(file.read_bytes()[:offset] + bomb)
        places["w"].length = len(bomb)

    def cut(_: Any, places: Any) -> None:
        places["w"].length -= 1

    def twice(_: Any, places: Any) -> None:
        places["w"].transform_descriptors = [ZSTD_DESCRIPTOR, ZSTD_DESCRIPTOR]

    def unknown(_: Any, places: Any) -> None:
        places["w"].transform_descriptors = ["stream.zstd/2"]

    def outside(_: Any, places: Any) -> None:
        places["w"].relative_path = "../x"

    for change, error, match in (
        (grow, aiockpt.CorruptCheckpointError, "stored ones can't be"),
        (explode, aiockpt.CorruptCheckpointError, "more than the"),
        (cut, aiockpt.CorruptCheckpointError, "cut short"),
        (twice, aiockpt.CorruptCheckpointError, "no zstd frame"),
        (unknown, aiockpt.LoadError, "transform 'stream.zstd/2', which"),
        (outside, aiockpt.UnsafeCheckpointError, "outside"),
    ):
        path = tmp_path / "c"
        writer = dcp.FileSystemWriter(path, _extensions=[ZStandard()])
        dcp.save({"w": torch.arange(1000.0)}, storage_writer=writer, **ALONE)
        change_metadata(path, change)
        with pytest.raises(error, match=match):
            load(path)
        assert not verify(path).ok
        shutil.rmtree(path)


def test_contradicting_manifests_are_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(100_000), "s": "abc" * 1000}, tmp_path / "c")
    manifest = tmp_path / "c" / ".aiockpt.json"
    good = manifest.read_text()
    rows = json.loads(good)["transformed"]["__0_0.distcp"]
    assert [len(row) for row in rows] == [5, 5]
    for at, column, value in ((1, 1, rows[1][1] - 1), (1, 3, 10), (1, 3, 1 << 50), (0, 3, 1 << 50), (1, 4, 1 << 50)):
        document = json.loads(good)
        document["transformed"]["__0_0.distcp"][at][column] = value
        del document["manifest_crc32"]
        body = json.dumps(document, indent=2).removesuffix("\n}")
        manifest.write_text(f'{body},\n  "manifest_crc32": "{crc32(body.encode()):08x}"\n}}\n')
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"(metadata|file) is damaged"):
            load(tmp_path / "c")
        assert not verify(tmp_path / "c").ok


def test_objects_that_expand_far_beyond_their_stored_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that expand from a few KiB need trust=True; the tensors of the checkpoint are read without it."""
    monkeypatch.setattr("aiockpt.reading.decoded.OBJECT_BYTES", 3 << 20)
    half, w = bytearray(2 << 20), torch.arange(1000.0)
    save({"half": half, "w": w}, tmp_path / "half")
    dcp.save(
        {"a": half, "b": half, "w": w},
        storage_writer=dcp.FileSystemWriter(tmp_path / "stock", _extensions=[ZStandard()]),
        **ALONE,
    )
    save({"a": half, "b": half, "w": w}, tmp_path / "ours")
    assert load(tmp_path / "half")["half"] == half
    for path in (tmp_path / "stock", tmp_path / "ours"):
        assert sum(file.stat().st_size for file in path.iterdir()) < 1 << 16
        with pytest.raises(aiockpt.LoadError, match=r"the limit for an untrusted checkpoint.*trust=True"):
            load(path)
        into = {"w": torch.zeros(1000)}
        load(path, into)
        assert torch.equal(into["w"], w)
        state = load(path, trust=True)
        assert state["a"] == state["b"] == half
        with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
            for _ in range(2):  # repeated reads do not add up
                assert reader.read("a") == half
        assert {problem.key for problem in verify(path).errors} in ({"a"}, {"b"}, {"a", "b"})


@pytest.mark.parametrize("step", ["create", "write", "finish"])
def test_a_failing_disk_fails_the_save(tmp_path: Path, step: str) -> None:
    storage = FaultyStorage(LocalStorage(), step, OSError(28, "No space left on device"), nth=2)
    state = {f"w{n}": random_tensor(torch.uint8, (9 << 20,), n) for n in range(2)}
    with (
        aiockpt.SyncCheckpointer(chunk_bytes=1 << 18, staging_bytes=1 << 20) as ckpt,
        pytest.raises(aiockpt.WriteError, match="No space left"),
    ):
        ckpt.save(state, tmp_path / "c", compress="zstd", storage=storage)
    assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_a_save_is_cancelled_while_it_waits_for_the_disk(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    state = {"w": random_tensor(torch.uint8, (20 << 20,), 0)}
    async with aiockpt.AsyncCheckpointer(chunk_bytes=1 << 20, staging_bytes=4 << 20) as ckpt:
        save = ckpt.save(state, tmp_path / "c", compress="zstd", storage=storage)
        await storage.reached["write"]
        assert await save.cancel()
    assert not list(tmp_path.iterdir())


class Failing:
    """Transform that raises."""

    descriptor = "failing/1"

    def encoder(self) -> Any:
        return self

    decoder = encoder

    def update(self, data: memoryview) -> bytes:
        raise OSError("no key server")

    def finish(self) -> bytes:
        return b""


def test_a_failing_transform_fails_the_save(tmp_path: Path) -> None:
    with (
        aiockpt.SyncCheckpointer(transforms=[Failing()], chunk_bytes=1 << 16) as ckpt,
        pytest.raises(aiockpt.SaveError, match=r"failing/1 failed for .*: OSError: no key server"),
    ):
        ckpt.save(large_state(2), tmp_path / "c")
    assert not list(tmp_path.iterdir())
