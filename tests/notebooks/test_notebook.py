"""The tutorial, executed cell by cell in a real kernel that is interrupted and restarted where its text says so.

``python -m tests.notebooks.test_notebook`` executes it so and stores its outputs.
"""

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


ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "aiockpt" / "docs" / "tutorial.ipynb"
WAIT_S = 240
INTERRUPT = """
import signal
uninterrupted = train_step
def train_step(number):
    if number == 35:
        signal.raise_signal(signal.SIGINT)
    return uninterrupted(number)
"""


async def execute(notebook: Any, folder: Path, *, attended: bool) -> None:
    """Execute the cells in a kernel that runs in ``folder``; if attended, do what their tags ask the reader for."""
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
                tags = cell.metadata.get("tags", []) if attended else []
                if "restart" in tags:
                    await manager.restart_kernel()
                    await client.kc.wait_for_ready(timeout=WAIT_S)
                    for again, other in enumerate(notebook.cells[:number]):
                        if "set-up" in other.metadata.get("tags", []):
                            await client.async_execute_cell(other, again)
                if "interrupt" in tags:
                    await client.async_execute_cell(nbformat.v4.new_code_cell(INTERRUPT), number)
                await client.async_execute_cell(cell, number)
            notebook.metadata["widgets"] = client.widget_state
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)
        shutil.rmtree(sockets, ignore_errors=True)


def text_of(cell: Any) -> str:
    """Return what a cell printed and showed as text."""
    found = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(found)


def html_of(cell: Any) -> str:
    """Return what a cell showed as HTML."""
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def run_in(folder: Path, *, attended: bool = True) -> Any:
    """Return the notebook with its outputs, executed in a folder; see `execute`."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the client's libraries
            asyncio.run(execute(notebook, folder, attended=attended))
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return notebook


def store() -> None:
    """Execute the notebook and store its outputs in it, without what is particular to this machine."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_in(Path(folder))
    bar = "application/vnd.jupyter.widget-view+json"
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # a bar shows nothing without its kernel
            cell.outputs = [output for output in cell.outputs if bar not in output.get("data", {})]
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}"]
    text = nbformat.writes(notebook)
    NOTEBOOK.write_text(text.replace(f"{folder}/", ""), encoding="utf-8")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The notebook with its outputs, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("notebook")
    yield run_in(folder), folder
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def cell_with(notebook: Any, words: str) -> Any:
    (found,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return found


def test_save_completes_while_a_cell_blocks(executed: tuple[Any, Path]) -> None:
    notebook, folder = executed
    text = text_of(cell_with(notebook, "while not save.written.done()"))
    found = re.search(r"steps while the checkpoint was written: (\d+)", text)
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
        ("read_only=True", ["<table", "KeepLatest(3)", "complete", "loss"]),
        ("plain.save", ["saved", "runs/plain", "<svg"]),
    ],
)
def test_values_have_html(words: str, shown: list[str], executed: tuple[Any, Path]) -> None:
    notebook, _ = executed
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    page = html_of(cells[0])
    for word in shown:
        assert word in page, (word, page)


def test_interrupted_run_resumes_in_a_restarted_kernel(executed: tuple[Any, Path]) -> None:
    notebook, folder = executed
    cut = cell_with(notebook, "train(more=300)")
    assert [output.ename for output in cut.outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    saved = [int(step) for step in re.findall(r"step (\d+):", text_of(cut))]
    assert "from step 1 on" in text_of(cut)
    latest = int(text_of(cell_with(notebook, "run.latest()")))
    assert latest == saved[-1] == 30  # the save in flight was written too
    resumed = text_of(cell_with(notebook, "train(more=20)"))
    assert f"from step {latest + 1} on" in resumed
    assert re.findall(r"step (\d+):", resumed) == [str(latest + 10), str(latest + 20)]
    with aiockpt.SyncCheckpointManager(folder / "runs" / "tutorial", read_only=True) as run:
        assert run.steps()[-1] == latest + 20
        assert not [info for info in run.infos() if info.state != "complete"]


def test_run_all_ends_without_anybody_who_interrupts_it(tmp_path: Path) -> None:
    notebook = run_in(tmp_path, attended=False)
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"
    ]
    assert text_of(cell_with(notebook, "run.latest()")).strip() == "300"
    assert "from step 301 on" in text_of(cell_with(notebook, "train(more=20)"))


def test_notebook_is_stored_with_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for words, kind in (
        ("await save", "text/html"),
        ("ckpt.last_load", "text/html"),
        ("read_only=True", "text/html"),
    ):
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
        assert any(kind in output.get("data", {}) for cell in cells for output in cell.outputs), words
    assert not re.search(r"/(tmp|root|home|work|usr)/", NOTEBOOK.read_text())


if __name__ == "__main__":
    store()
