"""The python examples of the README and of the documentation, run unchanged."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import signal
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.engine.requests import LoadRequest
from aiockpt.manager.requests import ManagerOptions
from aiockpt.options import CheckpointerOptions, LoadOptions, SaveOptions
from tests.format.transforms.encryption import ChaCha20
from tests.states import assert_same

README = Path(__file__).parents[1] / "README.md"
DOCS = Path(aiockpt.__file__).parent / "docs"
FILES = [README, *sorted(DOCS.glob("*.md"))]
ELSEWHERE = "# train.py\n", "# ranks.py\n"  # run by tests in tests/ranks


def examples(file: Path) -> list[str]:
    """Return the python blocks of a file."""
    return re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)


EXAMPLES = [
    pytest.param(example, id=f"{file.stem}-{number}")
    for file in FILES
    for number, example in enumerate(examples(file), 1)
    if not example.startswith(ELSEWHERE)
]


def block(title: str) -> str:
    """Return the first code block under a title."""
    found = re.search(rf"^\*\*{title}\*\*\n\n```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def run(source: str, names: dict[str, Any]) -> None:
    """Run a block; `await` is allowed at its top level, as in a notebook."""
    if not torch.cuda.is_available():
        source = "".join(line for line in source.splitlines(keepends=True) if '="cuda"' not in line)
    code = compile(source, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        names["runner"].run(result)


# --- each example by itself ---------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model with the parameter names that examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.q = torch.nn.Parameter(torch.randn(256, 256))
        self.k = torch.nn.Parameter(torch.randn(256, 256))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(batch)) @ self.q @ self.k


def trained() -> dict[str, Any]:
    """Return the objects that examples call `model`, `optim`, `sched` and `state`."""
    model = Model()
    optim = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(optim, 30)
    model(torch.randn(4, 8)).square().mean().backward()
    optim.step()
    optim.zero_grad()
    sched.step()
    state = {"model": model, "optim": optim, "sched": sched, "step": 100}
    return {**state, "optimizer": optim, "state": state, "step": 200}


@contextmanager
def restored_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_twice(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if needed := re.match(r"# needs: (\w+)\n", example):
        pytest.importorskip(needed[1])
    names = trained() | {
        "aiockpt": aiockpt,
        "torch": torch,
        "ckpt": aiockpt.AsyncCheckpointer(),
        "batches": [torch.randn(4, 8) for _ in range(3)],
        "MyEncryption": ChaCha20,
        "key": bytes(range(32)),
    }
    if re.search(r"""\b(?:load|open|verify|clean)\("runs/a""", example) and "save(" not in example:
        Path("runs").mkdir()
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(names["state"], "runs/a/step-100")
    if "loader" in example:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        names["loader"] = stateful.StatefulDataLoader(torch.arange(12), batch_size=4)
    given = names["ckpt"]
    if "dcp.save(" in example:  # it takes tensors, not modules
        names["state"] = {"model": names["model"].state_dict()}
    with asyncio.Runner() as runner, restored_signals():
        names["runner"] = runner
        used: set[aiockpt.AsyncCheckpointer] = {given}
        try:
            for _ in range(1 if "PrometheusObserver" in example else 2):  # a registry takes each metric once
                run(example, here := dict(names))
                used |= {value for value in here.values() if isinstance(value, aiockpt.AsyncCheckpointer)}
        finally:
            for each in used:
                runner.run(each.aclose())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_links_point_to_files(file: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text()):
        assert (file.parent / target).is_file(), target


@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.stem)
def test_links_of_a_page_stay_in_the_package(file: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text()):
        assert (file.parent / target).resolve().is_relative_to(DOCS), target


def test_the_license_is_in_the_package() -> None:
    text = (DOCS.parent / "LICENSE").read_text()
    assert "Apache License\n" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_that_are_named_exist(file: Path) -> None:
    root, package = README.parent, DOCS.parent
    for name in re.findall(r"`([\w./-]+(?:\.py|/))`", re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)):
        assert (root / name).exists() or (package / name).exists(), name


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 260


@pytest.mark.parametrize("options", [CheckpointerOptions, SaveOptions, LoadOptions, LoadRequest, ManagerOptions])
def test_each_option_has_its_row(options: type) -> None:
    rows = {name for row in _rows_of("options") for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(options)} - {"path", "directory"} <= rows


@pytest.mark.parametrize("kind", [aiockpt.Mirror, aiockpt.ProcessWriter, aiockpt.Retries, aiockpt.StagingWindow])
def test_each_field_of_an_option_has_its_row(kind: type) -> None:
    assert {f"`{kind.__name__}({field.name})`" for field in fields(kind)} <= set(_rows_of("options"))


def _rows_of(topic: str) -> list[str]:
    """Return the first cells of all tables of a page."""
    return re.findall(r"^\| (.*?) \|", (DOCS / f"{topic}.md").read_text(), re.MULTILINE)


# --- the quick start as a whole -----------------------------------------------------------------------


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = OrderedDict(linear=torch.nn.Linear(8, 8), norm=torch.nn.BatchNorm1d(8))
    model = torch.nn.Sequential(layers)
    optim = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(optim, 30)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(104)]
    return {"model": model, "optim": optim, "sched": sched, "batches": batches, "torch": torch, "aiockpt": aiockpt}


@pytest.mark.docs
def test_training_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        names = training(seed=1) | {"runner": runner}
        run(block("In an async loop"), names)
        assert sorted(path.name for path in Path("runs/a").iterdir()) == ["step-0", "step-100"]
        resumed = training(seed=2) | {"runner": runner, "ckpt": aiockpt.AsyncCheckpointer()}
        run(block("Resuming"), resumed)
        assert resumed["start"] == 101
        assert len(resumed["optim"].state_dict()["state"]) == 4
        assert_same(resumed["everything"]["optim"], resumed["optim"].state_dict())
        for batch in names["batches"][resumed["start"] :]:  # as in the first run
            resumed["model"](batch).square().mean().backward()
            resumed["optim"].step()
            resumed["optim"].zero_grad()
            resumed["sched"].step()
        runner.run(resumed["ckpt"].aclose())
    for name in ("model", "optim", "sched"):
        assert_same(names[name].state_dict(), resumed[name].state_dict())


@pytest.mark.docs
def test_an_interrupted_run_resumes_identically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner, restored_signals():
        first, resumed = (training(seed) | {"runner": runner} for seed in (1, 2))
        run(block("A whole run"), first)
        assert first["start"] is None
        assert first["run"].steps() == [100, 103]
        Path("runs/whole/step-00000103").rename("last")  # as if it had been killed before
        run(block("A whole run"), resumed)
        assert resumed["start"].step == 100
        assert set(resumed["start"].metrics) == {"loss"}
    for name in ("model", "optim", "sched"):
        assert_same(first[name].state_dict(), resumed[name].state_dict())


@pytest.mark.docs
def test_plain_loops_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        names = training(seed=1) | {"runner": runner}
        run(block("In a plain loop"), names)
        assert sorted(path.name for path in Path("runs/plain").iterdir()) == ["step-100", "step-200"]
        run(block("In a notebook"), names)
        runner.run(names["ckpt"].aclose())


TITLES = ["In an async loop", "A whole run", "In a plain loop", "In a notebook"]


@pytest.mark.docs
@pytest.mark.parametrize("title", TITLES)
def test_an_example_that_saves_runs_twice(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner, restored_signals():
        for seed in (1, 2):
            names = training(seed) | {"runner": runner}
            run(block(title), names)
            if title == "In a notebook":
                runner.run(names["ckpt"].aclose())


def test_examples_that_save_have_directories_of_their_own() -> None:
    used = [set(re.findall(r"runs/[\w-]+", block(title))) for title in TITLES]
    assert all(used)
    assert len(set().union(*used)) == sum(map(len, used)), used
