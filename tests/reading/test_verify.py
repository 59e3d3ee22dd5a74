"""Verifying: every kind of damage on real checkpoints, and the number and size of reads."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed.checkpoint as dcp
from isal.isal_zlib import crc32

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.reading.verify.verify import STEP_BYTES, verify_checkpoint
from aiockpt.storage.base import Source, Storage
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperStorage
from aiockpt.telemetry.verification import Problem, VerifyReport
from tests.places import storage_of
from tests.states import assert_same, large_state, random_tensor, training_state
from tests.stock import ALONE, PAYLOAD_OFFSET

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

WRITERS = pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
WRITERS_ANYWHERE = pytest.mark.parametrize(
    ("anywhere", "stock"),
    [("local", False), ("local", True), ("server", False)],
    indirect=["anywhere"],
    ids=["ours", "stock", "ours-server"],
)


def verify(path: Path, storage: Storage | None = None) -> VerifyReport:
    workers = Workers(3, "aiockpt-verify")
    try:
        return anyio.run(verify_checkpoint, storage or storage_of(path), str(path), workers)
    finally:
        workers.close()


def save(state: dict[str, Any], path: Path, *, stock: bool = False) -> None:
    if stock:
        dcp.save(state, checkpoint_id=path, **ALONE)
    else:
        with aiockpt.SyncCheckpointer(io_threads=3) as ckpt:
            ckpt.save(state, path)


def places_of(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return file, offset and length of each item; for a tensor, of its first chunk."""
    entries: Any = decode_metadata((path / ".metadata").read_bytes()).entries
    places = {key: entry.chunks[0].place if hasattr(entry, "chunks") else entry.place for key, entry in entries.items()}
    return {key: (place.file, place.offset, place.length) for key, place in places.items()}


def place_of(path: Path, key: str) -> tuple[str, int, int]:
    return places_of(path)[key]


def flip(path: Path, key: str, at: int) -> str:
    """Flip a bit at an offset of an item, counted from its end if negative. Return the item's file."""
    file, offset, length = place_of(path, key)
    flip_byte(path / file, offset + at + (length if at < 0 else 0))
    return file


def flip_byte(file: Path, offset: int, bit: int = 4) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def edit_metadata(path: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def found(report: VerifyReport) -> set[tuple[str, str, str | None]]:
    return {(problem.kind, problem.file, problem.key) for problem in report.problems}


def mixed_state() -> dict[str, Any]:
    return {**large_state(4, kib=3000), **training_state(), "text": "abc" * 1000, "book": "xyz" * 900_000}


class SpySource(Source):
    """A source that reports each read to its `SpyStorage`."""

    def __init__(self, inner: Source, spy: SpyStorage) -> None:
        self.inner = inner
        self.spy = spy

    @property
    def files(self):
        return self.inner.files

    def read(self, name, offset, view, seen=None) -> None:
        self.spy.on_read(name, offset, len(view))
        self.inner.read(name, offset, view, seen)

    def close(self) -> None:
        self.spy.closed += 1
        self.inner.close()


class SpyStorage(WrapperStorage):
    """A storage that records each read. Its ``on_read`` may raise or block."""

    def __init__(self, on_read: Callable[[str, int, int], None] | None = None, inner: Storage | None = None) -> None:
        super().__init__(inner or LocalStorage())
        self.reads: list[tuple[str, int, int]] = []
        self.closed = 0
        self._on_read = on_read

    async def open(self, path: str, *, workers: Workers) -> Source:
        return SpySource(await super().open(path, workers=workers), self)

    def on_read(self, name: str, offset: int, nbytes: int) -> None:
        self.reads.append((name, offset, nbytes))
        if self._on_read is not None:
            self._on_read(name, offset, nbytes)


# --- sound checkpoints -------------------------------------------------------------------------------


@WRITERS_ANYWHERE
def test_sound_checkpoint(stock: bool, anywhere: Path) -> None:
    save(mixed_state(), anywhere / "c", stock=stock)
    report = verify(anywhere / "c")
    assert report.ok
    assert report.problems == ()
    report.raise_if_bad()
    sizes = {file.name: file.stat().st_size for file in (anywhere / "c").iterdir()}
    assert (report.files, report.items, report.unverifiable) == (len(sizes), len(places_of(anywhere / "c")), 0)
    assert report.checked_bytes == sum(sizes.values())
    assert report.format == ("dcp" if stock else "aiockpt")
    assert "sound" in str(report)
    assert str(anywhere / "c") in repr(report)


def test_empty_and_strided_tensors(tmp_path: Path) -> None:
    state = {
        "none": torch.zeros(0),
        "hollow": torch.zeros(3, 0, 2),
        "scalar": torch.tensor(4.0),
        "turned": torch.arange(600_000).reshape(600, 1000).t(),
        "bool": torch.tensor([True, False]),
        "deep": [{"a": 1}, (2, [3])],
    }
    for stock in (False, True):
        save(state, tmp_path / str(stock), stock=stock)
        assert verify(tmp_path / str(stock)).problems == ()
    save({}, tmp_path / "nothing")
    assert verify(tmp_path / "nothing").problems == ()


def test_verify_changes_no_file(tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c")
    flip(tmp_path / "c", "w1", 5000)

    def look() -> dict[str, tuple[int, bytes]]:
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.rglob("*.*")}

    before = look()
    assert not verify(tmp_path / "c").ok
    assert look() == before


def test_missing_path_raises(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.CheckpointNotFoundError):
        verify(tmp_path / "c")


# --- damage ------------------------------------------------------------------------------------------


@pytest.mark.slow
@WRITERS_ANYWHERE
@pytest.mark.parametrize(
    ("key", "at", "kind"),
    [
        ("w2", PAYLOAD_OFFSET, "item crc"),
        ("w2", 3_000_000, "item crc"),
        ("w2", 70, "framing"),
        ("w2", -30, "framing"),
        ("model.0.weight", PAYLOAD_OFFSET + 17, "item crc"),
        ("model.0.weight", 1, "framing"),
        ("model.0.weight", -4, "framing"),
        ("rng", -98, "framing"),
        ("text", 300, "item crc"),
        ("text", -9, "framing"),
        ("book", 2_000_000, "item crc"),
        ("book", 1, "framing"),
    ],
)
def test_flipped_bit(stock: bool, key: str, at: int, kind: str, anywhere: Path) -> None:
    save(mixed_state(), anywhere / "c", stock=stock)
    file = flip(anywhere / "c", key, at)
    report = verify(anywhere / "c")
    expected = {(kind, file, key)} | (set() if stock else {("file crc", file, None)})
    # Depending on the byte, damaged framing shows as a wrong item CRC, too or instead.
    assert found(report) - {("item crc", file, key)} <= expected | {("framing", file, key)}
    assert {problem.key for problem in report.errors} - {None} == {key}
    _, offset, length = place_of(anywhere / "c", key)
    assert all(offset <= problem.offset < offset + length for problem in report.errors if problem.key)
    if kind == "item crc":
        assert found(report) == expected
    with pytest.raises(CorruptCheckpointError, match=f"{file}.*{key}"):
        report.raise_if_bad()


def test_several_kinds_of_damage_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(large_state(6, kib=5000) | mixed_state(), path)
    files = {key: place_of(path, key)[0] for key in ("w0", "w1", "w2", "w3", "text", "step", "model.0.bias")}
    assert len(set(files.values())) == 3
    assert files["w0"] != files["w3"]
    for key in ("w0", "w1", "w2", "w3", "model.0.bias"):
        flip(path, key, 1000)
    flip(path, "text", 400)
    lost = files["w3"]
    gone = {key for key, place in places_of(path).items() if place[0] == lost}
    (path / lost).unlink()
    grown = files["w0"]
    with open(path / grown, "ab") as file:
        file.write(bytes(10))
    (path / "notes.txt").write_text("mine")
    expected = {("missing file", lost, None), ("size", grown, None), ("unreferenced file", "notes.txt", None)}
    expected |= {("missing file", lost, key) for key in gone}
    for key in {"w0", "w1", "w2", "text", "model.0.bias"} - gone:
        expected |= {("item crc", files[key], key)}
        expected |= {("file crc", files[key], None)} if files[key] != grown else set()
    report = verify(path)
    assert found(report) == expected
    assert len(report.problems) == len(expected)  # each is reported once
    assert set(report.damaged_keys) == gone | {"w0", "w1", "w2", "text", "model.0.bias"}
    assert len(str(report).splitlines()) == len(report.problems) + 1


def test_damage_between_items(anywhere: Path) -> None:
    save(large_state(3, kib=2000), anywhere / "c")
    places = sorted((place, key) for key, place in places_of(anywhere / "c").items())
    (file, offset, _), key = next(place for place in places if place[0][1] > 0)
    flip_byte(anywhere / "c" / file, offset - 1)
    report = verify(anywhere / "c")
    assert found(report) == {("file crc", file, None)}
    assert "no item shows it" in str(report)
    assert key not in report.damaged_keys


def test_zeroed_range_damages_exactly_its_items(anywhere: Path) -> None:
    """The report names each item that overlaps the zeroed range, and no other."""
    save({f"t{i}": torch.arange(i, i + 500) for i in range(300)} | large_state(2, kib=2000), anywhere / "c")
    file, low, _ = place_of(anywhere / "c", "t40")
    high = low + 30_000
    data = (anywhere / "c" / file).read_bytes()
    (anywhere / "c" / file).write_bytes(data[:low] + bytes(high - low) + data[high:])
    places = places_of(anywhere / "c")
    hit = {key for key, (name, at, n) in places.items() if name == file and at < high and low < at + n}
    assert 3 < len(hit) < 30
    assert set(verify(anywhere / "c").damaged_keys) == hit


@WRITERS
def test_truncated_and_grown_files(stock: bool, tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c", stock=stock)
    file, offset, length = place_of(tmp_path / "c", "w2")
    size = (tmp_path / "c" / file).stat().st_size
    os.truncate(tmp_path / "c" / file, offset + length - 1)
    report = verify(tmp_path / "c")
    assert ("place", file, "w2") in found(report)
    assert (("size", file, None) in found(report)) is not stock
    places = places_of(tmp_path / "c")
    assert set(report.damaged_keys) == {
        k for k, (f, at, n) in places.items() if f == file and at + n >= offset + length
    }
    os.truncate(tmp_path / "c" / file, 0)
    assert {key for kind, _, key in found(verify(tmp_path / "c")) if kind == "place"} == {
        key for key, (name, *_) in places.items() if name == file
    }
    shutil.rmtree(tmp_path / "c")
    save(mixed_state(), tmp_path / "c", stock=stock)
    os.truncate(tmp_path / "c" / file, size + 1)
    assert found(verify(tmp_path / "c")) == (set() if stock else {("size", file, None)})


@pytest.mark.slow
@WRITERS
def test_any_flip_is_found_or_harmless(stock: bool, tmp_path: Path) -> None:
    state = {"a": torch.arange(9), "s": {"x": torch.tensor(2.5)}, "o": [1, "two"], "b": torch.arange(9) + 7}
    path = tmp_path / "c"
    save(state, path, stock=stock)
    tried = 0
    with aiockpt.SyncCheckpointer() as ckpt:
        for file in sorted(path.iterdir()):
            for offset in range(tried % 5, file.stat().st_size, 11 if stock else 37):
                flip_byte(file, offset, offset % 8)
                tried += 1
                report = verify(path)
                if stock and file.name == ".metadata":
                    pass  # no CRC covers it, so any report is right
                elif report.ok:
                    assert stock, f"{file.name} at {offset}"
                    assert_same(state, ckpt.load(path, trust=True))
                else:
                    assert file.name in {problem.file for problem in report.errors}
                flip_byte(file, offset, offset % 8)
    assert verify(path).ok
    assert tried > 200


# --- metadata and manifest ---------------------------------------------------------------------------


def test_items_are_checked_despite_a_damaged_manifest(tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c")
    file = flip(tmp_path / "c", "w1", 2000)
    flip_byte(tmp_path / "c" / ".aiockpt.json", 50)
    report = verify(tmp_path / "c")
    assert found(report) == {("manifest", ".aiockpt.json", None), ("item crc", file, "w1")}
    assert report.format == "aiockpt"


def test_files_are_checked_despite_damaged_metadata(tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c")
    size = (tmp_path / "c" / ".metadata").stat().st_size
    os.truncate(tmp_path / "c" / ".metadata", size // 2)
    file = first_data_file(tmp_path / "c")
    flip_byte(tmp_path / "c" / file, 1000)
    report = verify(tmp_path / "c")
    assert {("metadata", ".metadata", None), ("size", ".metadata", None), ("file crc", file, None)} <= found(report)
    (tmp_path / "c" / ".metadata").unlink()
    report = verify(tmp_path / "c")
    assert {("missing file", ".metadata", None), ("file crc", file, None)} <= found(report)


def first_data_file(path: Path) -> str:
    return min(file.name for file in path.glob("*.distcp"))


def test_items_of_the_manifest_are_checked_despite_damaged_metadata(tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c")
    places = places_of(tmp_path / "c")
    for key in ("w1", "model.0.bias", "text"):
        flip(tmp_path / "c", key, 710)
    os.truncate(tmp_path / "c" / ".metadata", 100)
    report = verify(tmp_path / "c")
    assert {problem.key for problem in report.errors if problem.kind == "item crc"} == {"w1", "model.0.bias", "text"}
    assert report.items == len(places)
    (tmp_path / "c" / ".metadata").unlink()
    again = verify(tmp_path / "c")
    assert found(again) - found(report) == {("missing file", ".metadata", None)}
    assert again.damaged_keys == report.damaged_keys


def test_metadata_and_manifest_that_disagree(tmp_path: Path) -> None:
    save({"a": torch.arange(500), "b": torch.arange(500) + 1, "c": torch.ones(4)}, tmp_path / "c")

    def swap(metadata: Any) -> None:
        infos = {index.fqn: info for index, info in metadata.storage_data.items()}
        infos["a"].offset, infos["b"].offset = infos["b"].offset, infos["a"].offset

    edit_metadata(tmp_path / "c", swap)
    report = verify(tmp_path / "c")
    assert {("disagreement", ".metadata", "a"), ("disagreement", ".metadata", "b")} <= found(report)
    assert set(report.damaged_keys) == {"a", "b"}


def test_manifest_that_disagrees_with_items(tmp_path: Path) -> None:
    """The manifest's own CRC matches and the items are sound, but the manifest has other CRCs for them."""
    save({"a": torch.arange(500), "b": torch.arange(900_000), "c": torch.ones(4)}, tmp_path / "c")
    file = tmp_path / "c" / ".aiockpt.json"
    document = json.loads(file.read_text())
    body, seal, _ = file.read_bytes().rpartition(b',\n  "manifest_crc32": "')
    for crc in document["index"]["crc32"][:2]:
        body = body.replace(str(crc).encode(), str(crc ^ 1).encode())
    file.write_bytes(body + seal + f'{crc32(body):08x}"\n}}\n'.encode())
    report = verify(tmp_path / "c")
    assert {(problem.kind, problem.key) for problem in report.problems} == {
        ("disagreement", "a"),
        ("disagreement", "b"),
    }


def test_neither_manifest_nor_metadata(tmp_path: Path) -> None:
    save(mixed_state(), tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    (tmp_path / "c" / ".aiockpt.json").unlink()
    report = verify(tmp_path / "c")
    assert found(report) == {("missing file", ".metadata", None)}
    assert "never finished" in str(report)


def test_metadata_does_not_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    save({"a": torch.ones(3)}, tmp_path / "c", stock=True)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert found(verify(tmp_path / "c")) == {("metadata", ".metadata", None)}
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret", "link"])
def test_paths_outside_the_directory_are_unsafe(name: str, tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(900_000)}, tmp_path / "c", stock=True)
    shutil.move(tmp_path / "c" / "__0_0.distcp", tmp_path / "secret")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "secret")

    def point_outside(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    edit_metadata(tmp_path / "c", point_outside)
    report = verify(tmp_path / "c")
    assert {problem.kind for problem in report.errors} == {"unsafe path"}
    assert set(report.damaged_keys) == {"a", "b"}


def test_overlapping_items(tmp_path: Path) -> None:
    save({"a": torch.arange(500), "b": torch.arange(500) + 1, "c": torch.ones(4)}, tmp_path / "c", stock=True)

    def shift(metadata: Any) -> None:
        infos = {index.fqn: info for index, info in metadata.storage_data.items()}
        infos["b"].offset = infos["a"].offset + 64

    edit_metadata(tmp_path / "c", shift)
    report = verify(tmp_path / "c")
    assert {("overlap", "__0_0.distcp", "a"), ("overlap", "__0_0.distcp", "b")} <= found(report)
    assert set(report.damaged_keys) == {"a", "b"}
    assert ("framing", "__0_0.distcp", "b") in found(report)


def test_chunks_with_overlaps_and_gaps(tmp_path: Path) -> None:
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2, 3), "d": torch.ones(4)}
    save(state, tmp_path / "c", stock=True)

    def edit(metadata: Any) -> None:
        tensors = metadata.state_dict_metadata
        tensors["a"].size = torch.Size([8])
        tensors["a"].chunks.append(type(tensors["a"].chunks[0])(torch.Size([3]), torch.Size([4])))
        tensors["b"].size = torch.Size([5])
        index = next(index for index in metadata.storage_data if index.fqn == "d")
        metadata.storage_data[type(index)("a", torch.Size([3]))] = metadata.storage_data.pop(index)
        del tensors["d"]

    edit_metadata(tmp_path / "c", edit)
    report = verify(tmp_path / "c")
    assert {(problem.kind, problem.key) for problem in report.errors} == {("coverage", "b"), ("coverage", "a")}
    assert "4 elements, but its shape (5,) has 5" in str(report)
    assert "its chunk at (3,) of sizes (4,) overlaps the one at (0,) of sizes (4,)" in str(report)


def test_items_that_differ_from_the_metadata(tmp_path: Path) -> None:
    save(
        {"a": torch.ones(4), "b": torch.arange(4.0), "c": torch.ones(4, dtype=torch.int32)}, tmp_path / "c", stock=True
    )

    def edit(metadata: Any) -> None:
        infos = {index.fqn: info for index, info in metadata.storage_data.items()}
        one, other = infos["b"], infos["c"]
        one.offset, one.length, other.offset, other.length = other.offset, other.length, one.offset, one.length

    edit_metadata(tmp_path / "c", edit)
    report = verify(tmp_path / "c")
    assert found(report) == {("mismatch", "__0_0.distcp", "b"), ("mismatch", "__0_0.distcp", "c")}
    assert "holds torch.int32 (4,), but the metadata says torch.float32 (4,)" in str(report)


def test_metadata_of_another_checkpoint(tmp_path: Path) -> None:
    """The manifest shows the exchange of `.metadata`, by its size or its CRC."""
    for name in ("one", "two"):
        save({"a": torch.ones(4), "b": torch.zeros(4), "n": name * 5}, tmp_path / name)
    save({"b": torch.zeros(4), "a": torch.ones(4), "n": "x"}, tmp_path / "three")
    shutil.copy(tmp_path / "three" / ".metadata", tmp_path / "one" / ".metadata")
    assert ("file crc", ".metadata", None) in found(verify(tmp_path / "one")) or (
        "size",
        ".metadata",
        None,
    ) in found(verify(tmp_path / "one"))


def test_damage_to_tied_tensors_names_each_key(tmp_path: Path) -> None:
    shared = random_tensor(torch.float32, (700, 700), 1)
    save({"a": shared, "b": shared, "c": torch.ones(3)}, tmp_path / "c")
    assert place_of(tmp_path / "c", "a") == place_of(tmp_path / "c", "b")
    assert verify(tmp_path / "c").ok
    flip(tmp_path / "c", "a", 90_000)
    assert set(verify(tmp_path / "c").damaged_keys) == {"a", "b"}


# --- other files -------------------------------------------------------------------------------------


def test_extra_files_are_warnings(tmp_path: Path) -> None:
    save({"a": torch.ones(4)}, tmp_path / "c")
    left = tmp_path / "c" / ".aiockpt-x.12.0123456789abcdef"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    (left / ".metadata").write_bytes(b"half")
    (tmp_path / "c" / "extra.bin").write_bytes(bytes(5))
    save({"b": torch.ones(4)}, tmp_path / "c" / "inner", stock=True)
    report = verify(tmp_path / "c")
    shutil.rmtree(left)
    assert found(report) == {
        ("leftover", left.name, None),
        ("unreferenced file", "extra.bin", None),
        ("unreferenced file", "inner", None),
    }
    assert report.ok
    assert {problem.severity for problem in report.problems} == {"warning"}
    assert "sound, 3 warnings" in str(report)
    report.raise_if_bad()


def test_files_in_subdirectories(tmp_path: Path) -> None:
    save({"a": torch.ones(4)}, tmp_path / "c", stock=True)
    (tmp_path / "c" / "data").mkdir()
    shutil.move(tmp_path / "c" / "__0_0.distcp", tmp_path / "c" / "data" / "x.bin")
    (tmp_path / "c" / "data" / "y.bin").write_text("no")

    def move(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "data/x.bin"

    edit_metadata(tmp_path / "c", move)
    assert found(verify(tmp_path / "c")) == {("unreferenced file", "data/y.bin", None)}


def test_items_without_crcs(tmp_path: Path) -> None:
    state = {"small": torch.arange(9), "large": torch.ones(900_000), "n": 5, "empty": torch.zeros(0)}
    torch.serialization.set_crc32_options(False)
    try:
        save(state, tmp_path / "c", stock=True)
        save(state, tmp_path / "ours")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "c")
    assert report.problems == ()
    assert report.unverifiable == 4
    assert report.unverifiable_keys == ("empty", "large", "n", "small")
    assert "4 items without CRC" in str(report)
    assert report.checked_bytes == sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    flip(tmp_path / "c", "small", 710)
    assert verify(tmp_path / "c").ok  # without a CRC, nothing shows the flip
    flip(tmp_path / "c", "large", -10)
    assert set(verify(tmp_path / "c").damaged_keys) == {"large"}
    assert verify(tmp_path / "ours").unverifiable == 0  # the manifest has the CRCs of the files


# --- other formats -----------------------------------------------------------------------------------


def test_torch_save_file(tmp_path: Path) -> None:
    base = random_tensor(torch.float32, (500, 700), 3)
    state = {"a": base, "half": base[:250], "t": {"b": torch.arange(2_000_000)}, "s": torch.arange(9) + 7_777_777}
    torch.save(state, tmp_path / "model.pt")
    report = verify(tmp_path / "model.pt")
    assert report.problems == ()
    assert (report.format, report.unverifiable) == ("torch", 0)
    data = (tmp_path / "model.pt").read_bytes()
    flip_byte(tmp_path / "model.pt", data.index(base.numpy().tobytes()[:64]) + 1000)
    flip_byte(tmp_path / "model.pt", data.index(state["s"].numpy().tobytes()) + 30)
    report = verify(tmp_path / "model.pt")
    assert {(problem.kind, problem.key) for problem in report.errors} == {
        ("item crc", "a"),
        ("item crc", "half"),
        ("item crc", "s"),
    }


def test_torch_save_file_without_crcs(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9), "b": torch.arange(9)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "model.pt")
    assert (report.problems, report.unverifiable_keys) == ((), ("a", "b"))


def test_file_of_many_records_is_read_once(tmp_path: Path) -> None:
    torch.save({f"t{i}": random_tensor(torch.int32, (9000,), i) for i in range(200)}, tmp_path / "model.pt")
    storage = SpyStorage()
    assert verify(tmp_path / "model.pt", storage).problems == ()
    size = (tmp_path / "model.pt").stat().st_size
    assert size > 6 << 20
    assert sum(nbytes for _, _, nbytes in storage.reads) < 1.1 * size


class Custom:
    pass


def test_torch_save_file_with_a_custom_class(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(500_000), "c": Custom()}, tmp_path / "model.pt")
    report = verify(tmp_path / "model.pt")
    assert report.ok
    assert [(problem.kind, problem.severity) for problem in report.problems] == [("metadata", "warning")]
    flip_byte(tmp_path / "model.pt", 2_000_000)
    assert {(problem.kind, problem.file) for problem in verify(tmp_path / "model.pt").errors} == {
        ("item crc", "model.pt")
    }


def test_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.arange(9), "b": torch.ones(900_000)}, tmp_path / "model.safetensors")
    report = verify(tmp_path / "model.safetensors")
    assert report.problems == ()
    assert (report.format, report.unverifiable_keys) == ("safetensors", ("a", "b"))
    os.truncate(tmp_path / "model.safetensors", 3_000_000)
    assert {problem.kind for problem in verify(tmp_path / "model.safetensors").errors} == {"metadata"}


def test_damaged_safetensors_header_is_reported_with_its_file(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": torch.ones(5)}, tmp_path / "c", format="safetensors")
    data = bytearray((tmp_path / "c" / "model.safetensors").read_bytes())
    data[3] ^= 0x40  # a byte of the header's length
    (tmp_path / "c" / "model.safetensors").write_bytes(data)
    problems = verify(tmp_path / "c").problems
    assert {(problem.kind, problem.file) for problem in problems} == {
        ("metadata", "model.safetensors"),
        ("file crc", "model.safetensors"),
    }


# --- read errors -------------------------------------------------------------------------------------


def test_bad_sector(anywhere: Path) -> None:
    save(mixed_state(), anywhere / "c")
    file, offset, length = place_of(anywhere / "c", "w1")
    bad = offset + length // 2
    other = flip(anywhere / "c", "w2", 4000)

    def fail(name: str, at: int, nbytes: int) -> None:
        if name == file and at <= bad < at + nbytes:
            raise LoadError(f"can't read {name} at offset {at}: Input/output error")

    report = verify(anywhere / "c", SpyStorage(fail, storage_of(anywhere)))
    assert {("unreadable", file, None), ("unreadable", file, "w1"), ("item crc", other, "w2")} <= found(report)
    assert set(report.damaged_keys) == {"w1", "w2"}
    assert ("file crc", file, None) not in found(report)
    assert "Input/output error" in str(report)


def test_file_that_is_cut_or_lost_after_it_was_listed_is_damaged(anywhere: Path) -> None:
    save(mixed_state(), anywhere / "c")
    file, _, _ = place_of(anywhere / "c", "w1")

    def fail(name: str, at: int, nbytes: int) -> None:
        if name == file:
            raise CorruptCheckpointError(f"{name} is missing, or ends too early")

    report = verify(anywhere / "c", SpyStorage(fail, storage_of(anywhere)))
    assert {kind for kind, _, _ in found(report)} == {"size"}
    assert {name for _, name, _ in found(report)} == {file}
    assert "w1" in report.damaged_keys


def test_unreadable_metadata(tmp_path: Path) -> None:
    def fail(name: str, at: int, nbytes: int) -> None:
        if name == ".metadata":
            raise LoadError("can't read .metadata at offset 0: Input/output error")

    save(large_state(2), tmp_path / "ours")
    assert ("unreadable", ".metadata", None) in found(verify(tmp_path / "ours", SpyStorage(fail)))
    save(large_state(2), tmp_path / "stock", stock=True)
    storage = SpyStorage(fail)
    with pytest.raises(LoadError, match="Input/output error"):
        verify(tmp_path / "stock", storage)
    assert storage.closed == 1


def test_unexpected_error_of_the_storage_propagates(tmp_path: Path) -> None:
    def fail(name: str, at: int, nbytes: int) -> None:
        if name.endswith(".distcp"):
            raise ZeroDivisionError("a defect")

    save(large_state(2), tmp_path / "c")
    storage = SpyStorage(fail)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        verify(tmp_path / "c", storage)
    assert storage.closed == 1


@pytest.mark.asyncio
async def test_cancelling_waits_for_the_threads(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(large_state(40, kib=4096), tmp_path / "c")
    begun, go_on = threading.Event(), threading.Event()

    def hold(name: str, at: int, nbytes: int) -> None:
        if nbytes > 1 << 20:
            begun.set()
            assert go_on.wait(60)

    storage = SpyStorage(hold)
    workers = Workers(2, "aiockpt-verify")
    scope = anyio.CancelScope()
    done: list[bool] = []

    async def run() -> None:
        with scope:
            await verify_checkpoint(storage, str(tmp_path / "c"), workers)
        done.append(scope.cancelled_caught)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            assert await asyncio.to_thread(begun.wait, 60)
            scope.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not done  # a thread still reads
            go_on.set()
        assert done == [True]
        assert sum(nbytes for _, _, nbytes in storage.reads) < 100 << 20
        assert storage.closed == 1
    finally:
        go_on.set()
        workers.close()


# --- the facade --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_verify_during_a_save(tmp_path: Path) -> None:
    state = large_state(4, kib=3000)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "one")
        saving = ckpt.save(state, tmp_path / "two")
        flip(tmp_path / "one", "w3", 90_000)
        reports = await asyncio.gather(*(ckpt.verify(tmp_path / "one") for _ in range(3)))
        await saving
        assert [report.damaged_keys for report in reports] == [("w3",)] * 3
        assert (await ckpt.verify(tmp_path / "two")).ok
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            await ckpt.verify(tmp_path / "three")


def test_sync_verify(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(training_state(), tmp_path / "c")
        assert ckpt.verify(str(tmp_path / "c")).problems == ()
        flip(tmp_path / "c", "rng", 800)
        report = ckpt.verify(tmp_path / "c")
        assert isinstance(report, aiockpt.VerifyReport)
        assert report.damaged_keys == ("rng",)


# --- number and size of reads ------------------------------------------------------------------------


@WRITERS
def test_each_byte_is_read_once_in_small_pieces(stock: bool, tmp_path: Path) -> None:
    state: dict[str, Any] = {f"t{i}": random_tensor(torch.float32, (i % 7 + 1, 3000), i) for i in range(400)}
    state |= large_state(9, kib=3000) | {"huge": torch.arange(5 << 20, dtype=torch.int32), "book": "xyz" * 1_500_000}
    save(state, tmp_path / "c", stock=stock)
    storage = SpyStorage()
    report = verify(tmp_path / "c", storage)
    assert report.ok
    total = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert total > 64 << 20
    assert max(nbytes for name, _, nbytes in storage.reads if name.endswith(".distcp")) <= STEP_BYTES <= 4 << 20
    assert total <= sum(nbytes for _, _, nbytes in storage.reads) <= 1.05 * total
    for file in (tmp_path / "c").iterdir():
        assert count_unread_bytes(storage.reads, file.name, file.stat().st_size) == 0


def count_unread_bytes(reads: list[tuple[str, int, int]], name: str, size: int) -> int:
    """Return the number of bytes of a file that no read covered."""
    end = lacking = 0
    for _, offset, nbytes in sorted(read for read in reads if read[0] == name):
        lacking += max(0, offset - end)
        end = max(end, offset + nbytes)
    return lacking + size - end


@pytest.mark.slow
@WRITERS
def test_many_small_tensors_take_few_reads(stock: bool, tmp_path: Path) -> None:
    count = 1000 if stock else 20_000
    state = {f"t{i}": torch.arange(i, i + i % 40 + 1) for i in range(count)}
    save(state, tmp_path / "c", stock=stock)
    places = places_of(tmp_path / "c")
    last = f"t{count - 1}"
    for key, at in (("t17", 0), ("t500", 11), ("t600", 16), (last, 8 * (count % 40))):
        flip_byte(tmp_path / "c" / places[key][0], places[key][1] + PAYLOAD_OFFSET + at)
    storage = SpyStorage()
    report = verify(tmp_path / "c", storage)
    assert set(report.damaged_keys) == {"t17", "t500", "t600", last}
    assert report.items == count
    assert len(storage.reads) < 60


# --- the report --------------------------------------------------------------------------------------


def report_of(problems: Iterator[Problem]) -> VerifyReport:
    return VerifyReport("runs/c", "aiockpt", tuple(problems), 3, 200, 5 << 20, 0, (), 0.5)


def test_text_of_the_report() -> None:
    report = report_of(Problem("item crc", "f", f"message {i}", f"k{i // 2}", i) for i in range(50))
    assert len(str(report).splitlines()) == 51
    assert len(repr(report).splitlines()) == 22
    assert repr(report).splitlines()[-1] == "  and 30 more"
    assert str(report).splitlines()[0] == "runs/c: 50 errors (aiockpt; 3 files, 200 items, 5.0 MiB in 0.50 s)"
    assert str(report).splitlines()[4] == "  error: item crc: f at byte 3, key k1: message 3"
    assert report.damaged_keys[:3] == ("k0", "k1", "k2")
    with pytest.raises(CorruptCheckpointError, match=r"runs/c has 50 errors: .*message 2.*; \.\.\."):
        report.raise_if_bad()
