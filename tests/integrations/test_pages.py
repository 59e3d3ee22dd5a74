"""The programs on the pages of Transformers, accelerate and Ray run as they stand, and again where they can go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import DOCS, examples

PAGES = {"transformers": ["transformers", "accelerate"], "accelerate": ["accelerate"], "ray": ["ray"]}
PROGRAMS = [
    pytest.param(page, program, id=f"{page}-{number}")
    for page in PAGES
    for number, program in enumerate(examples(DOCS / "integrations" / f"{page}.md"), 1)
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_a_program_runs_and_goes_on(page: str, program: str, tmp_path: Path) -> None:
    for package in PAGES[page]:
        pytest.importorskip(package)  # the program itself imports it
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0"}
    for _ in range(1 if "Meeting" in program else 2):
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert any((tmp_path / "runs").rglob(".aiockpt.json"))
    assert list(tmp_path.rglob(".aiockpt-*")) == []


def test_each_page_has_a_program() -> None:
    assert {program.values[0] for program in PROGRAMS} == PAGES.keys()
