import json
import os
import pty
import subprocess

import pytest

from tests.cli.checkpoints import FORMATS, make
from tests.commands import invoke

TIMEOUT_S = 120


# --- rm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_removed(form, anywhere):
    path, other = make(form, anywhere / "c"), make(form, anywhere / "d")
    result = invoke("rm", path, "--yes")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"removed {path}\n", "")
    assert list(anywhere.iterdir()) == [other]


def test_rm_skips_other_directories_and_removes_the_rest(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    path = make("dcp", tmp_path / "c")
    result = invoke("rm", "-y", tmp_path / "notes", "nowhere://bucket/c", tmp_path / "none", f"file://{path}")
    assert result.exit_code == 3
    assert result.stdout == f"removed {path}\n"
    assert result.stderr.count("\n") == 3
    assert os.listdir(tmp_path) == ["notes"]


def test_rm_without_a_terminal_requires_yes(tmp_path):
    path = make("dcp", tmp_path / "c")
    result = invoke("rm", path)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code", "is_there"), [(b"y\n", 0, False), (b"n\n", 0, True), (b"\x04", 130, True)])
def test_rm_in_a_terminal_asks_for_confirmation(answer, code, is_there, python, tmp_path):
    path = make("dcp", tmp_path / "c")
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*python, "-m", "aiockpt", "rm", str(path)], stdin=end, stdout=end, stderr=subprocess.PIPE
    )
    os.close(end)
    try:
        asked = b""
        while b"[y/N]" not in asked:
            part = process.stderr.read1()
            assert part, asked
            asked += part
        assert path.name.encode() in asked
        assert path.exists()
        os.write(terminal, answer)
        process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, path.exists()) == (code, is_there)
    finally:
        os.close(terminal)
        process.kill()
        process.wait()


# --- clean ------------------------------------------------------------------------------------------------


def test_clean_removes_orphans(orphan):
    make("dcp", orphan.parent / "c")
    result = invoke("clean", orphan.parent)
    assert (result.exit_code, result.stdout) == (0, f"removed {orphan}\n")
    assert os.listdir(orphan.parent) == ["c"]
    assert invoke("clean", orphan.parent).stdout == "There is nothing to remove.\n"


def test_clean_keeps_orphans_of_other_machines_until_they_are_old(orphan):
    foreign = orphan.with_name(f".aiockpt-{'b' * 30}.7.8.0123456789abcdef")
    orphan.rename(foreign)
    found = json.loads(invoke("clean", foreign.parent, "--json").stdout)
    assert found["removed"] == []
    assert [each["path"] for each in found["left"]] == [str(foreign)]
    result = invoke("clean", foreign.parent, "--older-than", "1h")
    assert result.stdout.startswith(f"left {foreign}: process 7 of another machine")
    for path in (*foreign.iterdir(), foreign):
        os.utime(path, (1, 1))
    found = json.loads(invoke("clean", foreign.parent, "--older-than", "1h", "--json").stdout)
    assert found == {"removed": [str(foreign)], "left": []}


def test_usage_errors_of_clean(tmp_path):
    assert invoke("clean", tmp_path, "--older-than", "soon").exit_code == 2
    result = invoke("clean", tmp_path / "none")
    assert (result.exit_code, result.stderr) == (3, f"aiockpt: {tmp_path / 'none'}: No such file or directory\n")


def test_clean_expands_the_home_directory(orphan, monkeypatch):
    monkeypatch.setenv("HOME", str(orphan.parent))
    result = invoke("clean", "~")
    assert (result.exit_code, result.stdout) == (0, f"removed {orphan}\n")
