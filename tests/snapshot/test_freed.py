"""Tensors that extend beyond their storage are refused before any access to their memory."""

from __future__ import annotations

import subprocess

import pytest

CASES = "tests.snapshot.freed_cases"


@pytest.fixture(scope="module")
def outcomes(python: list[str]) -> dict[str, str]:
    """Return the outcome of each case, run in another process because a bad read would crash this one."""
    done = subprocess.run([*python, "-m", CASES], capture_output=True, text=True, timeout=200, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("save", "SaveError: the memory of k was freed"),
        ("dcp save", "SaveError: the memory of k was freed"),
        ("load", "ShapeMismatchError: the memory of "),
        ("read", "ShapeMismatchError: the memory of "),
        ("dcp load", "ShapeMismatchError: the memory of k in the target was freed"),
    ],
)
def test_freed_memory_is_refused_at_the_call(outcomes: dict[str, str], way: str, error: str) -> None:
    found = {what: how for what, how in outcomes.items() if what.startswith(f"{way} ")}
    assert len(found) >= 10
    assert {what: how for what, how in found.items() if not how.startswith(error)} == {}


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("save", "SaveError: k has no memory to copy"),
        ("load", "ShapeMismatchError: k in the target has no memory"),
        ("read", "ShapeMismatchError: k in the target has no memory"),
    ],
)
def test_tensors_without_memory_are_refused_at_the_call(outcomes: dict[str, str], way: str, error: str) -> None:
    found = {what: how for what, how in outcomes.items() if what.startswith(f"absent {way} ")}
    assert len(found) >= 5
    assert {what: how for what, how in found.items() if not (how.startswith(error) and "clone()" in how)} == {}


def test_tensors_that_fit_their_storage_are_saved(outcomes: dict[str, str]) -> None:
    found = {what: how for what, how in outcomes.items() if what.startswith("fine ")}
    assert found == dict.fromkeys(found, "done")
    assert found
