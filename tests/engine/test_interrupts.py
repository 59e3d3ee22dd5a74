"""Signals while a checkpointer starts, and handlers that save while a save is submitted and awaited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("way", "writer", "places"),
    [
        pytest.param("raises", "thread", 100, id="an interrupt"),
        pytest.param("raises", "process", 100, id="an interrupt, with a writer process", marks=pytest.mark.slow),
        pytest.param("saves", "thread", 30, id="a handler that saves", marks=pytest.mark.slow),
        pytest.param("saves", "process", 30, id="a handler that saves, with a writer process", marks=pytest.mark.slow),
        pytest.param("within", "thread", 50, id="a handler that saves within a save", marks=pytest.mark.slow),
    ],
)
def test_what_is_disturbed_leaves_nothing_and_the_next_one_works(
    way: str, writer: str, places: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.engine.interrupted_starts", way, writer, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    *wrong, last = ran.stdout.splitlines() or [""]
    assert not ran.returncode, ran.stderr
    assert not wrong
    assert int(last.removeprefix("places ")) >= places
