"""The files that a command of pytest imports: none of which no test can run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

TESTS = Path(__file__).parent
COSTLY = "ranks or kills or docs or slow or hypothesis"


def config(markexpr: str = "", *args: str, full: bool = False) -> Any:
    options = {"markexpr": markexpr, "full": full}
    return SimpleNamespace(getoption=options.__getitem__, args=[str(TESTS / arg) for arg in args])


def is_ignored(name: str, config: Any) -> bool:
    return bool(conftest.pytest_ignore_collect(TESTS / name, config))


@pytest.mark.parametrize(("folder", "mark"), conftest.FOLDERS.items())
def test_what_needs_a_device_in_its_process_is_imported_with_its_mark_alone(folder: str, mark: str) -> None:
    for other in (config(), config(COSTLY), config("", folder), config("", full=True)):
        assert is_ignored(folder, other)
        assert all(is_ignored(f"{folder}/{file.name}", other) for file in (TESTS / folder).glob("test_*.py"))
    asked = config(mark)
    assert not is_ignored(folder, asked)
    assert not any(is_ignored(f"{folder}/{file.name}", asked) for file in (TESTS / folder).glob("test_*.py"))
    assert is_ignored("core/test_futures.py", asked)


def test_a_marked_file_is_imported_if_one_of_its_tests_may_run() -> None:
    left_out, with_main = "manager/test_histories.py", "crash/test_matrix.py"
    assert "mark.main" in (TESTS / with_main).read_text()
    assert is_ignored(left_out, config())
    assert is_ignored(left_out, config("", "manager"))
    assert not is_ignored(with_main, config())
    mark = conftest._mark_of(TESTS / left_out)
    for other in (config(mark), config(COSTLY), config("", f"{left_out}::test_a"), config("", full=True)):
        assert not is_ignored(left_out, other)


def test_other_files_are_imported() -> None:
    for asked in (config(), config(COSTLY), config("", full=True)):
        assert not is_ignored("core/test_futures.py", asked)
        assert not is_ignored("core", asked)


def test_each_marked_file_is_there() -> None:
    named = [name for names in (*conftest.MARKED.values(), conftest.LONGEST) for name in names]
    assert [name for name in named if not (TESTS / name).is_file()] == []
