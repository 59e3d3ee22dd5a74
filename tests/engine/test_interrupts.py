"""A Ctrl-C while a checkpointer starts, wherever Python calls handlers of signals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the places are those of CPython 3.11")
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_an_interrupted_start_leaves_nothing_and_the_next_one_works(writer: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.interrupted_starts", writer, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    *wrong, last = ran.stdout.splitlines() or [""]
    assert not ran.returncode, ran.stderr
    assert not wrong
    assert int(last.removeprefix("places ")) >= 10
