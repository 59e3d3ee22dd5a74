import functools
import json
import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest

from aiockpt.cli.bench import DEFAULT_THREADS, Measured, best_direct_io, best_threads
from aiockpt.options import CheckpointerOptions
from aiockpt.storage.local.temp_dir import read_ticket
from tests import commands
from tests.polling import until

MIB = 1 << 20
SMALL = ("--size", "16M")
TIMEOUT_S = 300


invoke = functools.partial(commands.invoke, "bench")


@pytest.mark.slow
def test_all_settings_are_measured_and_no_file_is_left(tmp_path):
    (tmp_path / "mine").touch()
    result = invoke(f"file://{tmp_path}", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert os.listdir(tmp_path) == ["mine"]
    settings = [(each["direct_io"], each["io_threads"]) for each in found["measured"]]
    assert settings == [(direct, threads) for direct in (True, False) for threads in (1, 2, 4, 8)]
    assert all(each["nbytes"] == 16 * MIB for each in found["measured"])
    assert all(each["written_s"] > 0 and each["loaded_s"] > 0 for each in found["measured"])
    assert found["settings"].keys() == {"io_threads", "direct_io"}


@pytest.mark.slow
def test_settings_are_printed_as_code(tmp_path):
    result = invoke(tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == f"{tmp_path}: saves and loads of 16.0 MiB"
    assert result.stdout.splitlines()[-1].startswith("  aiockpt.AsyncCheckpointer(io_threads=")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--size", "many"], ["--size", "-1"]])
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
    command = [*python, "-m", "aiockpt", "bench", str(tmp_path), "--size", "256M"]
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
        assert commands.invoke("clean", tmp_path).exit_code == 0
    else:
        assert process.returncode == 128 + number
    assert os.listdir(tmp_path) == []


# --- advice -----------------------------------------------------------------------------------------------


def measured(speed, direct=True, threads=4):
    return Measured(direct, threads, speed, 0.5, 1.0 / speed, 1.0)


@pytest.mark.parametrize(
    ("direct", "buffered", "expected"), [(100, 100, True), (100, 124, True), (100, 126, False), (200, 100, True)]
)
def test_page_cache_is_proposed_only_if_clearly_faster(direct, buffered, expected):
    assert best_direct_io([measured(direct), measured(buffered, direct=False)]) is expected


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((100, 100, 100, 100), 4), ((100, 50, 91, 60), 4), ((100, 95, 50, 60), 1), ((10, 95, 50, 100), 2)],
)
def test_other_threads_are_proposed_only_if_clearly_faster(speeds, expected):
    assert best_threads([measured(speed, threads=n) for n, speed in zip((1, 2, 4, 8), speeds, strict=True)]) == expected


def test_the_default_is_that_of_a_checkpointer():
    options = CheckpointerOptions()
    assert (options.writing_threads, options.direct_io) == (DEFAULT_THREADS, True)
