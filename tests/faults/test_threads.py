"""Programs that get no further thread, at each place where one is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("use", ["thread", "process", "manager", "asyncio"])
def test_a_lack_of_threads_is_an_error_of_this_package_and_leaves_nothing(use: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.few_threads", use, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    *wrong, last = ran.stdout.splitlines() or [""]
    assert not ran.returncode, ran.stderr
    assert not wrong
    assert int(last.removeprefix("starts ")) >= 8
