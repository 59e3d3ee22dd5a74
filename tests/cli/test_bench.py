import errno
import json
import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from aiockpt.cli.bench import DEFAULTS, MeasuredDisk, Setting, best, best_direct_io, chunk_sizes
from aiockpt.cli.main import app
from aiockpt.options import CheckpointerOptions
from aiockpt.storage.local.temp_dir import read_ticket
from tests.polling import until

MIB = 1 << 20
SMALL = ("--size", "16M", "--seconds", "0.05")
TIMEOUT_S = 300


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.slow
def test_all_settings_are_measured_and_no_file_is_left(tmp_path):
    (tmp_path / "mine").touch()
    result = invoke(f"file://{tmp_path}", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert os.listdir(tmp_path) == ["mine"]
    raw = {(each["kind"], each["direct"], each["threads"]) for each in found["raw"]}
    assert {(kind, False, threads) for kind in ("write", "read") for threads in (1, 2, 4, 8)} <= raw
    assert all(each["bytes"] > 0 and each["bytes_per_s"] > 0 for each in found["raw"])
    assert found["sync_s"]["worst"] >= found["sync_s"]["median"] > 0
    assert found["save"]["bytes"] == found["load"]["bytes"] == 16 * MIB
    assert found["settings"].keys() == {"io_threads", "chunk_bytes", "direct_io"}


def test_settings_are_printed_as_code(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)  # as on macOS
    result = invoke(tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    assert "This file system has no direct I/O." in result.stdout
    assert "direct write" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("  aiockpt.AsyncCheckpointer(io_threads=")
    assert result.stdout.rstrip().endswith("direct_io=False)")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--size", "many"], ["--seconds", "0"], ["--seconds", "x"]])
def test_wrong_usage(arguments, tmp_path):
    assert invoke(tmp_path, *arguments).exit_code == 2


@pytest.mark.parametrize("path", ["", "aiockpt-test://server/run"])
def test_what_is_no_directory_of_a_disk_is_refused(path):
    result = invoke(path, *SMALL)
    assert (result.exit_code, result.stdout) == (3, "")


def test_missing_directory_is_exit_code_3(tmp_path):
    result = invoke(tmp_path / "none", *SMALL)
    assert (result.exit_code, result.stderr) == (3, f"aiockpt: {tmp_path / 'none'}: No such file or directory\n")


def test_too_small_size_is_wrong_usage(tmp_path):
    result = invoke(tmp_path, "--size", "15M")
    assert result.exit_code == 2
    assert "16.0 MiB are the least to measure with" in result.stderr


def test_too_little_space_is_exit_code_3(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=63 << 20))
    result = invoke(tmp_path, *SMALL)
    assert result.exit_code == 3
    assert "too little to measure" in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL]
)
def test_interrupt_leaves_no_file(number, python, tmp_path):
    command = [*python, "-m", "aiockpt", "bench", str(tmp_path), "--seconds", "60", "--size", "1T"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: any(tmp_path.glob(".aiockpt-*/__0_0.distcp")) or process.poll() is not None, TIMEOUT_S)
        assert process.poll() is None, process.communicate()
        (hidden,) = tmp_path.glob(".aiockpt-*")
        os.kill(read_ticket(hidden.name).owner.pid, number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert (out, err) == (b"", b"")
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert CliRunner().invoke(app, ["clean", str(tmp_path)]).exit_code == 0
    else:
        assert process.returncode == 128 + number
    assert os.listdir(tmp_path) == []


# --- raw I/O ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_file_sizes_are_the_counted_bytes(direct, threads, tmp_path):
    disk = MeasuredDisk(str(tmp_path))
    noted = []
    written = disk.measure(Setting("write", direct, threads, MIB), 9 * MIB, 60, noted.append)
    if written is None:
        pytest.skip("this file system has no direct I/O")
    assert written.bytes == sum(noted) == 9 * MIB
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [9 * MIB // threads] * threads
    read = disk.measure(Setting("read", direct, threads, 2 * MIB), 9 * MIB, 60)
    assert read.bytes >= 6 * MIB
    times = disk.sync_s()
    assert 1 <= len(times) <= 100
    disk.remove_files()
    assert os.listdir(tmp_path) == []


def test_each_thread_moves_bytes_even_if_it_starts_late(tmp_path):
    """On a busy machine, the time may be over before a thread has run at all."""
    disk = MeasuredDisk(str(tmp_path))
    for kind in ("write", "read"):
        assert disk.measure(Setting(kind, False, 2, MIB), 8 * MIB, 0).bytes == 2 * MIB


def test_disk_error_is_raised(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        MeasuredDisk(str(tmp_path)).measure(Setting("write", False, 2, MIB), 4 * MIB, 60)


# --- advice -----------------------------------------------------------------------------------------------


def at(speed, direct=True, threads=4, chunk_bytes=16 * MIB):
    return Setting("write", direct, threads, chunk_bytes, speed, 1.0)


@pytest.mark.parametrize(
    ("direct", "buffered", "expected"), [(100, 100, True), (100, 124, True), (100, 126, False), (200, 100, True)]
)
def test_page_cache_is_proposed_only_if_clearly_faster(direct, buffered, expected):
    assert best_direct_io([at(direct), at(buffered, direct=False)]) is expected


def test_page_cache_is_proposed_without_direct_io():
    assert not best_direct_io([at(100, direct=False)])


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((100, 100, 100, 100), 4), ((100, 50, 91, 60), 4), ((100, 95, 50, 60), 1), ((10, 95, 50, 100), 2)],
)
def test_other_settings_are_proposed_only_if_clearly_faster(speeds, expected):
    assert best([at(speed, threads=n) for n, speed in zip((1, 2, 4, 8), speeds, strict=True)], "threads", 4) == expected
    chunks = {1: MIB, 2: 4 * MIB, 4: 16 * MIB, 8: 64 * MIB}
    measured = [at(speed, chunk_bytes=c) for c, speed in zip(chunks.values(), speeds, strict=True)]
    assert best(measured, "chunk_bytes", 16 * MIB) == chunks[expected]


@pytest.mark.parametrize(("nbytes", "sizes"), [(16, [1, 4, 16]), (32, [1, 4, 16]), (512, [1, 4, 16, 64])])
def test_others_are_compared_with_the_default_however_little_is_written(nbytes, sizes):
    assert chunk_sizes(4, nbytes * MIB) == [size * MIB for size in sizes]


def test_defaults_are_those_of_a_checkpointer():
    options = CheckpointerOptions()
    found = {"io_threads": options.writing_threads, "chunk_bytes": options.chunk, "direct_io": options.direct_io}
    assert found == DEFAULTS
