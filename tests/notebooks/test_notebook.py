"""The tutorial, executed cell by cell in a real kernel that is interrupted and restarted where its text says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiockpt

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parent / "tutorial.ipynb"
ROOT = Path(__file__).parents[2]
WAIT_S = 240


async def execute(notebook: Any, folder: Path) -> None:
    """Execute the cells in a kernel that runs in ``folder``; restart and interrupt it where their tags say so."""
    from jupyter_client import AsyncKernelManager

    sockets = tempfile.mkdtemp()  # not TCP: concurrent tests could take each other's ports
    manager = AsyncKernelManager(transport="ipc", ip=f"{sockets}/ipc")
    client = nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=WAIT_S,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--HistoryManager.enabled=False"],
    )
    try:
        async with client.async_setup_kernel():
            for number, cell in enumerate(notebook.cells):
                tags = cell.metadata.get("tags", [])
                if "restart" in tags:
                    await manager.restart_kernel()
                    await client.kc.wait_for_ready(timeout=WAIT_S)
                    for again, other in enumerate(notebook.cells[:number]):
                        if "set-up" in other.metadata.get("tags", []):
                            await client.async_execute_cell(other, again)
                if "interrupt" in tags:
                    await execute_and_interrupt(client, cell, number, until="step 30:")
                else:
                    await client.async_execute_cell(cell, number)
            notebook.metadata["widgets"] = client.widget_state
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)
        shutil.rmtree(sockets, ignore_errors=True)


async def execute_and_interrupt(client: Any, cell: Any, number: int, until: str) -> None:
    """Execute a cell, and interrupt the kernel once the cell has printed ``until``."""
    running = asyncio.ensure_future(client.async_execute_cell(cell, number))
    while until not in text_of(cell):
        assert not running.done(), text_of(cell)
        await asyncio.sleep(0.01)  # nbclient has no event for output
    await client.km.interrupt_kernel()
    await running


def text_of(cell: Any) -> str:
    """Return what a cell printed and showed as text."""
    found = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(found)


def html_of(cell: Any) -> str:
    """Return what a cell showed as HTML."""
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The notebook with its outputs, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the client's libraries
            asyncio.run(execute(notebook, folder))
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    yield notebook, folder
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def cell_with(notebook: Any, words: str) -> Any:
    (found,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return found


def test_save_completes_while_a_cell_blocks(executed: tuple[Any, Path]) -> None:
    notebook, folder = executed
    text = text_of(cell_with(notebook, "while not save.written.done()"))
    found = re.search(r"(\d+) steps while the checkpoint was written", text)
    assert found, text
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(folder / "runs" / "first").ok


def test_progress_bars(executed: tuple[Any, Path]) -> None:
    notebook, _ = executed
    for words in ("aiockpt.progress.bar(save)", "ckpt.last_load", "train(more=20)"):
        outputs = cell_with(notebook, words).outputs
        assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs), words
    states = list(notebook.metadata["widgets"].values())
    texts = [state["value"].replace("\u2007", " ") for state in states if isinstance(state.get("value"), str)]
    assert any("save first" in text for text in texts), texts
    assert any("written" in text for text in texts), texts
    assert sum("done" in text for text in texts) == 2, texts
    assert not any("/0.00" in text for text in texts), texts
    bars = [state for state in states if state.get("bar_style") is not None]
    assert {bar["bar_style"] for bar in bars} == {"success"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("await save", ["saved", "runs/first", "<svg", "staged after"]),
        ('reader = await ckpt.open("runs/first")', ["model.0.weight", "2048x64", "<table"]),
        ("ckpt.last_load", ["loaded", "<svg"]),
        ("await ckpt.verify", ["verified: sound", "<svg"]),
        ('mode="read"', ["<table", "KeepLatest(3)", "complete", "loss"]),
        ("plain.save", ["saved", "runs/plain", "<svg"]),
    ],
)
def test_values_have_html(words: str, shown: list[str], executed: tuple[Any, Path]) -> None:
    notebook, _ = executed
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    page = html_of(cells[0])
    for word in shown:
        assert word in page, (word, page)


def test_figure_is_drawn(executed: tuple[Any, Path]) -> None:
    notebook, _ = executed
    outputs = cell_with(notebook, "aiockpt.plots.timeline").outputs
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_interrupted_run_resumes_in_a_restarted_kernel(executed: tuple[Any, Path]) -> None:
    notebook, folder = executed
    cut = cell_with(notebook, "train(more=1_000_000)")
    assert [output.ename for output in cut.outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    saved = [int(step) for step in re.findall(r"step (\d+):", text_of(cut))]
    assert "from step 1 on" in text_of(cut)
    latest = int(text_of(cell_with(notebook, "run.latest()")))
    assert latest >= saved[-1] >= 30  # the save in flight was written too
    resumed = text_of(cell_with(notebook, "train(more=20)"))
    assert f"from step {latest + 1} on" in resumed
    assert re.findall(r"step (\d+):", resumed) == [str(latest + 10), str(latest + 20)]
    with aiockpt.SyncCheckpointManager(folder / "runs" / "tutorial", mode="read") as run:
        assert run.steps()[-1] == latest + 20
        assert not [info for info in run.infos() if info.state != "complete"]


def test_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
