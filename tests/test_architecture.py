"""Imports point downward, and form no cycles."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import aiockpt

PACKAGE = Path(aiockpt.__file__).parent

# Each folder and each module of the root, by floors: imports go to floors below, never up, and never to the same floor.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"manager", "observers", "plots", "progress"},
    {"__init__", "dcp"},
    {"checkpointer", "sync_checkpointer"},
    {"engine"},
    {"saving", "reading"},
    {"snapshot"},
    {"staging", "writing"},
    {"options"},
    {"planning", "storage"},
    {"format", "coordination", "telemetry"},
    {"core"},
    {"errors", "_version"},
]
LEVEL = {name: number for number, floor in enumerate(FLOORS) for name in floor}
# The same for the benchmarks.
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BENCHMARK_FLOORS = [
    {"__main__"},
    {"matrix", "__init__"},
    {"ranks", "gpu", "crash"},
    {"measured"},
    {"peers", "report"},
    {"limits"},
    {"harness"},
]
# Shipped for tests of users' storages; nothing in the package imports it.
BESIDE = {"testing"}


def _imports_below(root: Path) -> dict[str, set[str]]:
    """Return what each module of a package imports from it, also within functions."""
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == root.name:
                base = node.module
                is_package = (root.parent / Path(*base.split("."))).is_dir()
                for alias in node.names:
                    inner = root.parent / Path(*base.split("."), alias.name)
                    names.add(f"{base}.{alias.name}" if is_package and (inner.with_suffix(".py").exists()) else base)
            elif isinstance(node, ast.Import) and root == PACKAGE:
                assert all(alias.name != "aiockpt" for alias in node.names) or module.startswith("aiockpt.cli"), module
        found[module] = names
    return found


@functools.cache
def _imports() -> dict[str, set[str]]:
    return _imports_below(PACKAGE)


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_module_is_on_a_floor() -> None:
    assert {_part(module) for module in _imports()} == {*LEVEL, *BESIDE}


def test_the_root_is_small() -> None:
    assert len([name for name in LEVEL if (PACKAGE / f"{name}.py").exists()]) <= 8


@pytest.mark.parametrize("module", sorted(_imports()))
def test_imports_point_downward(module: str) -> None:
    mine = _part(module)
    for imported in _imports()[module]:
        theirs = _part(imported)
        if mine == theirs or module == "aiockpt" or mine in BESIDE:
            continue
        assert theirs not in BESIDE, f"{module} imports {imported}, which is for tests"
        assert LEVEL[mine] < LEVEL[theirs], f"{module} imports {imported}, which is not below it"


def test_every_folder_states_its_purpose() -> None:
    for file in [*PACKAGE.rglob("__init__.py"), *BENCHMARKS.rglob("__init__.py")]:
        purpose = ast.get_docstring(ast.parse(file.read_text()))
        assert purpose, f"{file.parent.name} has no docstring"
        assert purpose.partition("\n")[0].endswith("."), f"the purpose of {file.parent.name} is not one sentence"


@pytest.mark.parametrize("root", [PACKAGE, BENCHMARKS], ids=lambda root: root.name)
def test_no_cycles(root: Path) -> None:
    graph = {module: names - {module} for module, names in _imports_below(root).items()}
    TopologicalSorter(graph).prepare()


def test_folders_of_benchmarks_import_downward() -> None:
    level = {name: number for number, floor in enumerate(BENCHMARK_FLOORS) for name in floor}
    for module, names in _imports_below(BENCHMARKS).items():
        for imported in names:
            mine, theirs = _part(module), _part(imported)
            assert mine == theirs or level[mine] < level[theirs], f"{module} imports {imported}, which is not below it"


def test_pure_folders_do_no_io() -> None:
    forbidden = {"os", "io.open", "anyio", "asyncio", "aiofiles", "pathlib.Path"}
    for folder in ("format", "planning"):
        for file in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names.append(node.module)
                assert not forbidden & set(names), f"{file.name} imports {forbidden & set(names)}"


def test_importing_costs_little_beyond_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from aiockpt import *; new = set(sys.modules) - before;"
        "bad = [m for m in new if m.split('.')[0] in {'typer', 'rich', 'uvloop'}"
        " or m.startswith('torch.distributed.checkpoint')]; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SAVE = "ckpt.save({'x': torch.ones(2)}, sys.argv[1])"
LOAD = "ckpt.load(sys.argv[1])"


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (SAVE, "aiockpt.reading aiockpt.writing.process.client aiockpt.planning.collective aiockpt.dcp"),
        (LOAD, "aiockpt.saving.job aiockpt.writing aiockpt.planning.dcp_plan aiockpt.reading.verify aiockpt.dcp"),
    ],
    ids=["save", "load"],
)
def test_a_process_imports_only_what_it_uses(call: str, other: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(2)}, tmp_path / "c")
    code = (
        "import sys, torch, aiockpt\n"
        f"with aiockpt.SyncCheckpointer() as ckpt: {call}\n"
        f"bad = [m for m in sys.modules if m.startswith({tuple(other.split())})]; sys.exit(str(bad) if bad else 0)"
    )
    path = tmp_path / ("c" if call == LOAD else "d")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_are_sorted_and_exist() -> None:
    assert aiockpt.__all__ == sorted(aiockpt.__all__)
    assert all(hasattr(aiockpt, name) for name in aiockpt.__all__)
    assert dir(aiockpt) == aiockpt.__all__


def test_type_checkers_know_every_public_name() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = [(alias.asname, node.module) for node in imports for alias in node.names if alias.asname == alias.name]
    assert sorted(names) == sorted(aiockpt._HOME_OF.items())


@pytest.mark.parametrize(
    "name", ["aiockpt", "aiockpt.dcp", "aiockpt.manager", "aiockpt.observers", "aiockpt.progress", "aiockpt.testing"]
)
def test_public_names_are_documented(name: str) -> None:
    """A method may inherit its docstring."""
    module = importlib.import_module(name)
    bare = [
        f"{each}.{member}"
        for each in getattr(module, "__all__", ())
        if inspect.isclass(found := getattr(module, each))
        for member, value in inspect.getmembers(found)
        if not member.startswith("_") and (callable(value) or isinstance(value, property))
        if getattr(getattr(value, "fget", value), "__module__", "").startswith("aiockpt")
        if not any(inspect.getdoc(base.__dict__[member]) for base in found.__mro__ if member in base.__dict__)
    ]
    assert bare == []


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    import aiockpt.errors as errors

    for name in vars(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.AiockptError):
            assert name in (errors.__doc__ or ""), name
            assert name in aiockpt.__all__


# --- the pages for contributors ---------------------------------------------------------------------------

CONTRIBUTING = (PACKAGE / "docs" / "contributing.md").read_text()


def _thread_names() -> set[str]:
    """Return the names that the package gives its threads, with dots for what is not constant."""
    kinds = {"Thread", "Timer", "Workers", "DaemonThreads", "ThreadPoolExecutor"}
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in kinds:
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    if isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
                        names.add(f"{value.values[0].value}...")
                    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                        names.add(value.value)
            elif isinstance(node, ast.Assign) and ".name" in ast.unparse(node.targets[0]):  # of a timer
                names |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return {name for name in names if str(name).startswith("aiockpt-")} - {"aiockpt-conformance"}


def test_every_thread_is_in_the_map_of_threads() -> None:
    rows = [line for line in CONTRIBUTING.splitlines() if line.startswith("| `aiockpt-")]
    described = {name for row in rows for name in re.findall(r"`(aiockpt-[^`]+)`", row.split("|")[1])}
    assert described == _thread_names()


# What is still called alike: no name may be added.
ALIKE = """
Bar Block Budget Contents Conversion Decoder Display Encoder Follower Loader Outcome Owner Pending Piece Planner Ready
Record Request Saved Slot Span Statistics Storage StoredItem UnsupportedError View
"""


def test_no_two_classes_have_one_name() -> None:
    """Leading underscores don't count."""
    count = Counter(
        node.name.lstrip("_")
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in count.items() if times > 1} <= set(ALIKE.split())
