"""Packages that change asyncio or anyio for a program, or are merely imported."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

NEIGHBOURS = [name for name in ("sniffio", "trio", "nest_asyncio", "ipykernel") if importlib.util.find_spec(name)]

PROGRAM = """
import asyncio
import torch, aiockpt

STATE = {"x": torch.arange(5.0)}

async def main(ckpt, name):
    save = ckpt.save(STATE, name)
    await save.staged
    await save
    assert torch.equal((await ckpt.load(name))["x"], STATE["x"])

def in_turn():
    ckpt = aiockpt.AsyncCheckpointer()
    for name in "ab":
        asyncio.run(main(ckpt, name))
    asyncio.run(ckpt.aclose())
    with aiockpt.SyncCheckpointer() as plain:
        plain.delete("a")
        plain.delete("b")
"""

NESTED = """
async def nested():
    ckpt = aiockpt.AsyncCheckpointer()
    await main(ckpt, "c")
    asyncio.get_running_loop().run_until_complete(main(ckpt, "d"))
    asyncio.run(main(ckpt, "e"))
    with aiockpt.SyncCheckpointer() as plain:
        plain.save(STATE, "f")
    await ckpt.aclose()

asyncio.run(nested())
"""


def _run(python: list[str], program: str, folder: Path) -> None:
    program = f"import warnings\nwarnings.simplefilter('error')\n{program}"
    subprocess.run([*python, "-c", program], cwd=folder, check=True, timeout=300)


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_program_that_imports_a_neighbour(
    neighbour: str, first: bool, python_with_torch: list[str], tmp_path: Path
) -> None:
    """Warnings of the neighbour's own import are ignored."""
    load = f"with warnings.catch_warnings(action='ignore'):\n    import {neighbour}\n"
    _run(python_with_torch, f"{load if first else ''}{PROGRAM}{'' if first else load}in_turn()", tmp_path)


@pytest.mark.parametrize("when", ["before", "between"])
def test_nest_asyncio(when: str, python_with_torch: list[str], tmp_path: Path) -> None:
    pytest.importorskip("nest_asyncio")
    apply = "import nest_asyncio\nnest_asyncio.apply()\n"
    begin = f"{apply}{PROGRAM}" if when == "before" else f"{PROGRAM}in_turn()\n{apply}"
    _run(python_with_torch, f"{begin}in_turn()\n{NESTED}", tmp_path)
