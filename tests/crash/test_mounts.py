"""Saves on a FUSE mount, where the kernel refuses RENAME_EXCHANGE, as on the file systems of many clusters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.crash.campaign import points_of, spread
from tests.crash.matrix import run_points, survey
from tests.crash.scenarios import Scenario, save_one
from tests.crash.zygote import Zygote

TESTS = Path(__file__).parents[1] / "storage"
# These tests need another file system: one that exchanges names, requires aligned direct I/O, and removes files that
# are open.
OTHERS = ["before_the_exchange", "direct_io_refused", "durable_is_undone", "open_reader_survives"]
COUNT = 6


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    source, target = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    target.mkdir()
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    done = subprocess.run(["bindfs", source, target], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"bindfs can't mount here: {done.stderr.strip()}")
    # It unmounts also when this process is killed: a later run of pytest fails at a mount that is left behind.
    command = ["sh", "-c", 'read -r _; exec fusermount -u -z "$0"', target]
    unmounter = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    yield target
    unmounter.communicate(b"\n", timeout=60)
    assert unmounter.returncode == 0


@pytest.mark.full
def test_the_tests_of_the_storage_pass_on_the_mount(mount: Path) -> None:
    chosen = " and ".join(f"not {name}" for name in OTHERS)
    files = [TESTS / f"test_{name}.py" for name in ("local", "delete", "belonging")]
    options = ["-p", "no:cacheprovider", f"--basetemp={mount / 'tests'}", "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parents[1])
    assert done.returncode == 0, done.stdout


def test_no_checkpoint_is_lost_at_any_kill_point_of_an_overwrite(zygote: Zygote, mount: Path) -> None:
    scenario = Scenario(partial(save_one, overwrite=True), {"c": 1}, refused=True)
    calls = zygote.call(survey, mount, "overwrite", scenario)
    assert "exchange" not in {call.name for call in calls if call.to.endswith("/c")}
    points = spread([point for point in points_of("overwrite", calls) if calls[point.number].name != "mark"], COUNT)
    # The spread may miss the few renames, which matter most.
    points += [point for point in points_of("overwrite", calls) if calls[point.number].name == "rename"]
    outcomes = zygote.call(run_points, mount, "overwrite", points, scenario, timeout_s=300.0)
    assert [(outcome.point, outcome.call, outcome.problems) for outcome in outcomes if outcome.problems] == []
    assert len(outcomes) > COUNT
