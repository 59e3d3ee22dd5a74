"""Few file descriptors, and closed standard streams: calls raise errors, but the process never dies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("loop", "writer"),
    [
        ("uvloop", "thread"),
        pytest.param("asyncio", "process", marks=pytest.mark.full),
        pytest.param("asyncio", "thread", marks=pytest.mark.full),
        pytest.param("uvloop", "process", marks=pytest.mark.full),
    ],
)
def test_a_lack_of_descriptors_never_ends_the_process(
    loop: str, writer: str, python: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [*python, "-m", "tests.faults.few_descriptors", tmp_path, loop, writer],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Exception ignored" not in done.stderr
