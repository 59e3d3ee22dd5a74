"""Reading local files: from the page cache, with direct I/O, and through buffers."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from isal.isal_zlib import crc32
from safetensors.torch import save_file

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.storage.local.source import LocalSource, open_source
from aiockpt.storage.patched import PatchedStorage
from aiockpt.storage.syscalls import UnsupportedError, cached_pages
from tests.manager import runs
from tests.states import random_tensor

SIZE = 20 * (1 << 20) + 12_345


@pytest.fixture(scope="module")
def data() -> bytes:
    return random_tensor(torch.uint8, (SIZE,), 3).numpy().tobytes()


def _refuse_flags(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
    if flags:
        raise OSError(errno.EOPNOTSUPP, "no flags")
    return _preadv(fd, buffers, offset)


_preadv = os.preadv


@pytest.fixture(
    params=["cached", "cold", "half cached", "no direct I/O", "residency unknown", "probed", "refused", "no NOWAIT"]
)
def source(request, tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "f"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if request.param in ("cached", "no NOWAIT"):
        path.read_bytes()
    elif request.param == "half cached":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, SIZE, 3 << 20):
            os.pread(fd, 1_100_000, offset)
    os.close(fd)
    opened = open_source(str(tmp_path), direct_io=request.param != "no direct I/O")
    assert isinstance(opened, LocalSource)
    with opened._file("f") as file:
        if request.param == "probed":
            file.tells_cached = False
        if request.param == "residency unknown":
            file._is_cached = lambda offset, nbytes: True
    if request.param == "no NOWAIT":
        monkeypatch.setattr(os, "preadv", _refuse_flags)
    if request.param == "refused":
        with opened._file("f") as file:
            direct_fd = file._direct_fd

        def preadv(fd: int, *rest: object) -> int:
            if fd == direct_fd:
                raise OSError(errno.EINVAL, "no direct reads")
            return _preadv(fd, *rest)

        monkeypatch.setattr(os, "preadv", preadv)
    yield opened
    opened.close()
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1, 64, 512, 4000])
def test_read_any_range_to_any_address(source: LocalSource, data: bytes, shift: int) -> None:
    assert source.files == {"f": SIZE}
    memory = mmap.mmap(-1, SIZE + 8192)
    view = memoryview(memory)
    for offset, nbytes in (
        (0, SIZE),
        (1, SIZE - 1),
        (4096, 9 << 20),
        (4096 + 704, (9 << 20) + 3),
        (SIZE - 5, 5),
        (5_000_000, 0),
        (7_000_001, 300_000),
        (SIZE - 300_001, 300_001),
    ):
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0x5A, len(memory))
        target = view[shift : shift + nbytes]
        crc = 0
        total = 0

        def seen(part: memoryview) -> None:
            nonlocal crc, total
            crc = crc32(part, crc)
            total += len(part)

        source.read("f", offset, target, seen)
        assert target == data[offset : offset + nbytes], (offset, nbytes)
        assert (crc, total) == (crc32(data[offset : offset + nbytes]), nbytes)
        assert set(view[:shift]) <= {0x5A}
        assert set(view[shift + nbytes : shift + nbytes + 4096]) <= {0x5A}
        del target
    view.release()


RUNS = {
    "a band of columns": [(2_053 * 4 + at, 1024) for at in range(0, SIZE - 16_384, 16_384)],
    "of many lengths": [(at, 1 + at % 5000) for at in range(77, SIZE - 5100, 7_001)],
    "bands with a step": [(at + 4 * step, 4) for at in range(0, SIZE - 9999, 1 << 20) for step in range(0, 900, 9)],
    "up to the end": [(at, 300) for at in range(SIZE % 5000, SIZE - 5000, 5000)] + [(SIZE - 300, 300)],
    "far apart": [(at, 1 + at % 700) for at in range(0, SIZE - 800, 49_999)] + [(100, 400_000), (SIZE - 1, 1)],
}


def test_read_runs(source: LocalSource, data: bytes) -> None:
    for name, places in RUNS.items():
        buffer = bytearray(sum(length for _, length in places))
        source.read_runs("f", places, memoryview(buffer))
        assert bytes(buffer) == b"".join(data[at : at + length] for at, length in places), name
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"f ends at byte \d+, \d+ bytes too early"):
            source.read_runs("f", [*places, (SIZE - 1, 2)], memoryview(bytearray(len(buffer) + 2)))


@pytest.fixture
def cold(tmp_path: Path, data: bytes) -> Iterator[int]:
    """A descriptor of the file ``f``, with none of its pages in the page cache."""
    path = tmp_path / "f"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(fd, 0, SIZE):
            pytest.skip("this file system keeps its pages in memory")
        yield fd
    except UnsupportedError:
        pytest.skip("this kernel does not tell what is cached")
    finally:
        os.close(fd)


@pytest.mark.usefixtures("cold")
def test_direct_reads_fill_whole_huge_pages(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(tmp_path), direct_io=True)
    calls: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
        assert address % (2 << 20) == 0 or flags, "not a whole huge page"
        calls.append((offset, len(buffers[0])))
        return _preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = bytearray(SIZE - 100)
    source.read("f", 100, memoryview(buffer))
    source.close()
    assert buffer == data[100:]
    assert [offset for offset, _ in calls] == list(range(0, SIZE, 2 << 20))
    assert {nbytes for _, nbytes in calls[:-1]} == {2 << 20}


def test_direct_reads_do_not_fill_the_page_cache(tmp_path: Path, cold: int) -> None:
    """A range that is read with direct I/O is not read into the page cache too."""
    source = open_source(str(tmp_path), direct_io=True)
    source.read_bytes("f", 0, 2048)  # the framing of an item, which is read before the item
    source.read("f", 0, memoryview(bytearray(10 << 20)))
    source.close()
    assert cached_pages(cold, 0, SIZE) <= 2


@pytest.mark.usefixtures("cold")
def test_short_runs_with_small_gaps_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(tmp_path), direct_io=True)
    calls: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        calls.append(len(buffers[0]))
        return _preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    near, far = RUNS["a band of columns"], [(at, 1024) for at in range(5 << 20, 10 << 20, 64 << 10)]
    source.read_runs("f", near, memoryview(bytearray(1024 * len(near))))
    assert len(calls) == 10
    calls.clear()
    source.read_runs("f", far, memoryview(bytearray(1024 * len(far))))
    source.close()
    assert calls == [1024] * len(far)


@pytest.mark.usefixtures("cold")
def test_a_group_that_is_read_together_leaves_the_other_runs_announced(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, announced = open_source(str(tmp_path), direct_io=True), set[int]()
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (announced.add(args[1]), advise(*args)))
    before, after = (
        [(at, 100) for at in range(1000, 2 << 20, 90_000)],
        [(at, 50) for at in range(9 << 20, 11 << 20, 80_001)],
    )
    few = [(at, 100) for at in range(3 << 20, (3 << 20) + 20_000, 2_000)]  # together, but short
    near = [(at, 900) for at in range(4 << 20, 8 << 20, 12_000)]
    runs = [*before, *few, *near, *after]
    buffer = bytearray(sum(length for _, length in runs))
    source.read_runs("f", runs, memoryview(buffer))
    source.close()
    assert bytes(buffer) == b"".join(data[at : at + length] for at, length in runs)
    assert announced >= {at for at, _ in [*before, *few, *after]}
    assert not announced & {at for at, _ in near}


def test_checkpointer_frees_the_memory_of_direct_reads(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": torch.frombuffer(bytearray(data), dtype=torch.uint8)}, tmp_path / "x.pt")
    fd = os.open(tmp_path / "x.pt", os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    used: list[weakref.ref[object]] = []

    def preadv(fd: int, buffers: list[memoryview], *rest: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
        if address % (2 << 20) == 0 and len(rest) == 1 and isinstance(buffers[0].obj, mmap.mmap):
            used.append(weakref.ref(buffers[0].obj))
        return _preadv(fd, buffers, *rest)

    with monkeypatch.context() as patch, aiockpt.SyncCheckpointer() as ckpt:
        patch.setattr(os, "preadv", preadv)
        assert ckpt.load(tmp_path / "x.pt")["x"].numpy().tobytes() == data
        if not used:
            pytest.skip("this file system has no direct reads")
    assert not [ref for ref in used if ref() is not None]


def test_read_past_the_end_of_the_file(source: LocalSource) -> None:
    for offset, nbytes in ((SIZE - 10, 11), (SIZE, 1), (SIZE + 5000, 400_000), (0, SIZE + 1)):
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"f ends at byte \d+, \d+ bytes too early"):
            source.read("f", offset, memoryview(bytearray(nbytes)))
    with pytest.raises(aiockpt.CorruptCheckpointError, match="too early"):
        source.read_runs("f", [(0, 5), (SIZE - 1, 2)], memoryview(bytearray(7)))


def test_maps_are_copy_on_write(source: LocalSource, data: bytes, tmp_path: Path) -> None:
    mapped = source.map("f")
    assert mapped[5_000_000:5_000_100] == data[5_000_000:5_000_100]
    mapped[0] = data[0] ^ 1
    assert (tmp_path / "f").read_bytes() == data
    mapped.close()


@pytest.mark.parametrize("below", ["", "unet", "a/snapshots/b"])
def test_only_symlinks_of_the_hub_cache_are_followed(below: str, tmp_path: Path) -> None:
    repo = tmp_path / "models--x"
    home = repo / "snapshots" / "abc" / below
    home.mkdir(parents=True)
    for blob in (repo / "blobs" / "1234", tmp_path / "models--y" / "blobs" / "1234", tmp_path / "secret"):
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"hello")
    (repo / "blobs" / "outside").symlink_to(tmp_path / "secret")
    (home / "good").symlink_to(os.path.relpath(repo / "blobs" / "1234", home))
    outside = tmp_path / "secret", tmp_path / "models--y" / "blobs" / "1234", repo / "blobs" / "outside"
    source = open_source(str(home), direct_io=True)
    buffer = bytearray(5)
    source.read("good", 0, memoryview(buffer))
    assert buffer == b"hello"
    for number, target in enumerate(outside):
        (home / f"bad{number}").symlink_to(os.path.relpath(target, home))
        with pytest.raises(aiockpt.UnsafeCheckpointError, match=f"'bad{number}', which is outside"):
            source.read(f"bad{number}", 0, memoryview(buffer))
    source.close()


def test_a_folder_of_a_hub_snapshot_is_a_checkpoint_as_the_snapshot_is(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc" / "unet" / "fp16"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    names = {key: f"model-0000{part}-of-00002.safetensors" for part, key in enumerate("vw", 1)}
    for key, name in names.items():
        save_file({key: torch.ones(2)}, blobs / name)
    (blobs / "index").write_text(json.dumps({"weight_map": names}))
    for name, blob in [("model.safetensors.index.json", "index"), *zip(names.values(), names.values(), strict=True)]:
        (folder / name).symlink_to(os.path.relpath(blobs / blob, folder))
    for path in (folder, folder / "model.safetensors.index.json"):
        assert sorted(aiockpt.load(path)) == ["v", "w"]
        assert aiockpt.verify(path).ok


def test_checkpoint_file_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_bytes(b"hello")
    (tmp_path / "link").symlink_to("real/f")
    source = open_source(str(tmp_path / "link"), direct_io=True)
    buffer = bytearray(5)
    source.read("link", 0, memoryview(buffer))
    assert (buffer, source.files) == (b"hello", {"link": 5})
    with pytest.raises(aiockpt.UnsafeCheckpointError):
        source.read("../x", 0, memoryview(buffer))
    source.close()


def test_close_during_a_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    source = open_source(str(tmp_path), direct_io=True)
    before = len(os.listdir("/proc/self/fd"))
    buffer = bytearray(SIZE)
    parts = []

    def seen(part: memoryview) -> None:
        if not parts:
            source.close()
            (tmp_path / "other").write_bytes(b"x")
            with open(tmp_path / "other", "rb"):  # would reuse the descriptor's number, had it been closed too early
                pass
        parts.append(len(part))

    source.read("f", 0, memoryview(buffer), seen)
    assert buffer == data
    assert len(parts) > 10
    assert len(os.listdir("/proc/self/fd")) < before
    with pytest.raises(aiockpt.LoadError, match="was closed before it was read"):
        source.read("f", 0, memoryview(buffer))


def test_open_source_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "f").write_bytes(b"old")
    (tmp_path / "latest").symlink_to("c")
    source = open_source(str(tmp_path / "latest"), direct_io=True)
    (tmp_path / "c").rename(tmp_path / "gone")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "f").write_bytes(b"new")
    assert not source.is_current(str(tmp_path / "latest"))
    buffer = bytearray(3)
    source.read("f", 0, memoryview(buffer))
    assert buffer == b"old"
    (tmp_path / "gone" / "f").unlink()
    source.read("f", 0, memoryview(buffer))
    source.close()


def test_dangling_symlink_and_subdirectory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g").write_bytes(b"yy")
    (tmp_path / "nowhere").symlink_to("missing")
    source = open_source(str(tmp_path), direct_io=True)
    assert source.files == {"f": 1, "sub/g": 2}
    source.close()


def test_only_regular_files_belong_to_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    os.symlink("a", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    os.symlink("loop", tmp_path / "loop")
    os.symlink("nowhere", tmp_path / "gone")
    source = open_source(str(tmp_path), direct_io=False)
    try:
        assert dict(source.files) == {"a": 3, "link": 3}
    finally:
        source.close()


def test_failing_stat_raises(tmp_path: Path) -> None:
    os.symlink("n" * 300, tmp_path / "odd")
    with pytest.raises(aiockpt.LoadError, match=r"can't look into .* File name too long"):
        open_source(str(tmp_path), direct_io=False)


def _open_below(folder: Path) -> set[str]:
    """Return the names of the files of a folder that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = Path(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            continue
        if target.parent == folder:
            found.add(target.name)
    return found


@pytest.mark.slow
def test_at_most_64_files_are_open_at_a_time(tmp_path: Path) -> None:
    for n in range(200):
        (tmp_path / f"f{n}").write_bytes(b"%d" % n)
    source = open_source(str(tmp_path), direct_io=True)
    most = 0
    for n in (*range(200), *range(200)):
        assert source.read_bytes(f"f{n}", 0, len(str(n))) == b"%d" % n
        source.read_bytes("f0", 0, 1)
        most = max(most, len(_open_below(tmp_path)))
    assert most == 64
    # Those that were used last.
    assert _open_below(tmp_path) == {"f0", *(f"f{n}" for n in range(137, 200))}
    source.close()
    assert not _open_below(tmp_path)


def test_a_file_stays_open_while_it_is_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "large").write_bytes(data)
    for n in range(100):
        (tmp_path / f"f{n}").write_bytes(b"x")
    source = open_source(str(tmp_path), direct_io=True)
    buffer, still_open = bytearray(SIZE), []

    def seen(_part: memoryview) -> None:
        if not still_open:
            for n in range(100):
                source.read_bytes(f"f{n}", 0, 1)
            still_open.append(_open_below(tmp_path))

    source.read("large", 0, memoryview(buffer), seen)
    assert buffer == data
    assert "large" in still_open[0]
    assert len(still_open[0]) == 64
    source.close()


def test_more_than_64_files_in_use_are_closed_afterwards(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"f{n}").write_bytes(b"x")
    source = open_source(str(tmp_path), direct_io=True)

    def read_with_the_next(n: int) -> None:
        def seen(_part: memoryview) -> None:
            if n < 69:
                read_with_the_next(n + 1)
            else:
                assert len(_open_below(tmp_path)) == 70

        source.read(f"f{n}", 0, memoryview(bytearray(1)), seen)

    read_with_the_next(0)
    source.read_bytes("f99", 0, 1)
    assert len(_open_below(tmp_path)) == 64
    source.close()
    assert not _open_below(tmp_path)


def test_copy_that_was_replaced_meanwhile_repairs_nothing(tmp_path: Path) -> None:
    """A part of a tensor has no CRC, so nothing else would show that its bytes are those of two saves."""
    paths = [str(tmp_path / name) for name in ("here", "there")]
    with aiockpt.SyncCheckpointer() as ckpt:
        for path, step in zip(paths, (3, 7), strict=True):
            ckpt.save(runs.state_of(step), path)
        patches = {"__0_0.distcp": [(2_000_000, 2_100_000)]}
        storage = PatchedStorage(LocalStorage(), LocalStorage(), paths[1], patches)
        with (
            pytest.raises(aiockpt.CheckpointNotFoundError, match="was replaced"),
            ckpt.open(paths[0], storage=storage) as reader,
        ):
            reader.read("b", slice(0, runs.SIZE - 1))
