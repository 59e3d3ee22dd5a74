"""Imports that run go downward, without cycles."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
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
    {"integrations", "following"},
    {"manager", "observers", "progress"},
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
# Shipped for tests of users' storages; nothing in the package imports it.
BESIDE = {"testing"}


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of what runs: imports for types alone may point anywhere."""
    yield node
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for inner in () if is_for_types else ast.iter_child_nodes(node):
        yield from _running(inner)


@functools.cache
def _imports() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        names = set()
        for node in _running(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("aiockpt"):
                base = node.module
                is_package = (PACKAGE.parent / Path(*base.split("."))).is_dir()
                for alias in node.names:
                    inner = PACKAGE.parent / Path(*base.split("."), alias.name)
                    names.add(f"{base}.{alias.name}" if is_package and (inner.with_suffix(".py").exists()) else base)
            elif isinstance(node, ast.Import):
                assert all(alias.name != "aiockpt" for alias in node.names) or module.startswith("aiockpt.cli"), module
        found[module] = names
    return found


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.slow
def test_every_module_is_on_a_floor() -> None:
    assert {_part(module) for module in _imports()} == {*LEVEL, *BESIDE}


def test_the_root_is_small() -> None:
    assert len([name for name in LEVEL if (PACKAGE / f"{name}.py").exists()]) <= 8


def test_imports_point_downward() -> None:
    wrong = []
    for module, names in _imports().items():
        mine = _part(module)
        for imported in names:
            theirs = _part(imported)
            if mine == theirs or module == "aiockpt" or mine in BESIDE:
                continue
            if theirs in BESIDE:
                wrong.append(f"{module} imports {imported}, which is for tests")
            elif LEVEL[mine] >= LEVEL[theirs]:
                wrong.append(f"{module} imports {imported}, which is not below it")
    assert wrong == []


def test_every_folder_states_its_purpose() -> None:
    for file in PACKAGE.rglob("__init__.py"):
        purpose = ast.get_docstring(ast.parse(file.read_text()))
        assert purpose, f"{file.parent.name} has no docstring"
        assert purpose.partition("\n")[0].endswith("."), f"the purpose of {file.parent.name} is not one sentence"


def test_no_cycles() -> None:
    graph = {module: {name for name in names if name != module} for module, names in _imports().items()}
    TopologicalSorter(graph).prepare()


# Folders without cycles of imports for types alone, and with functions of at most 40 lines beside their docstrings, and
# objects of at most 25 attributes, with those of their bases.
SMALL = ("manager",)
MOST_LINES, MOST_ATTRIBUTES = 40, 25


def test_no_cycles_of_types_in_small_folders() -> None:
    graph: dict[str, set[str]] = {}
    for folder in SMALL:
        for file in (PACKAGE / folder).glob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text()))
            names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            graph[f"aiockpt.{folder}.{file.stem}"] = {name for name in names if name.startswith(f"aiockpt.{folder}.")}
    TopologicalSorter(graph).prepare()


def test_functions_of_small_folders_are_short() -> None:
    long = []
    for file in (file for folder in SMALL for file in (PACKAGE / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = node.body[0] if ast.get_docstring(node) is not None else None
                lines = (node.end_lineno or 0) - node.lineno + 1
                lines -= 0 if doc is None else (doc.end_lineno or 0) - doc.lineno + 1
                long += [f"{file.stem}.{node.name}"] if lines > MOST_LINES else []
    assert long == []


def test_objects_of_small_folders_have_few_attributes() -> None:
    """Fields of dataclasses that are parameters of a call do not count."""
    classes = [
        kind
        for folder in SMALL
        for file in (PACKAGE / folder).glob("*.py")
        for kind in vars(importlib.import_module(f"aiockpt.{folder}.{file.stem}")).values()
        if inspect.isclass(kind) and kind.__module__.startswith(f"aiockpt.{folder}.") and not is_dataclass(kind)
    ]
    assert {kind.__name__ for kind in classes if len(_attributes(kind)) > MOST_ATTRIBUTES} == set()


def _attributes(kind: type) -> set[str]:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("aiockpt.")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in bases]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_pure_folders_do_no_io() -> None:
    forbidden = {"os", "io.open", "anyio", "asyncio", "aiofiles", "pathlib.Path"}
    for folder in ("format", "planning"):
        for file in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names.append(node.module)
                assert not forbidden & set(names), f"{file.name} imports {forbidden & set(names)}"


def test_importing_costs_little_beyond_torch(python_with_torch: list[str]) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from aiockpt import *; new = set(sys.modules) - before;"
        "bad = [m for m in new if m.split('.')[0] in {'typer', 'rich', 'uvloop'}"
        " or m.startswith('torch.distributed.checkpoint')]; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([*python_with_torch, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr  # which says so also when closing waits for a mirror


SAVE = "ckpt.save({'x': torch.ones(2)}, sys.argv[1])"
LOAD = "ckpt.load(sys.argv[1])"


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (SAVE, "aiockpt.reading aiockpt.writing.process.client aiockpt.saving.collective aiockpt.dcp"),
        (LOAD, "aiockpt.saving.job aiockpt.writing aiockpt.planning.dcp_plan aiockpt.reading.verify aiockpt.dcp"),
    ],
    ids=["save", "load"],
)
def test_a_process_imports_only_what_it_uses(
    call: str, other: str, python_with_torch: list[str], tmp_path: Path
) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(2)}, tmp_path / "c")
    code = (
        "import sys, torch, aiockpt\n"
        f"with aiockpt.SyncCheckpointer() as ckpt: {call}\n"
        f"bad = [m for m in sys.modules if m.startswith({tuple(other.split())})]; sys.exit(str(bad) if bad else 0)"
    )
    path = tmp_path / ("c" if call == LOAD else "d")
    done = subprocess.run(
        [*python_with_torch, "-c", code, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr  # which says so also when closing waits for a mirror


TIERS = "aiockpt.manager.mirror aiockpt.manager.disks aiockpt.storage.hosts aiockpt.storage.peers aiockpt.saving.hosts"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [("", ""), ("mirror='there'", TIERS.split()[0]), ("own_disks=True", " ".join(TIERS.split()[1:]))],
)
def test_a_manager_imports_what_its_options_ask_for(
    options: str, wanted: str, python_with_torch: list[str], tmp_path: Path
) -> None:
    """When it is made: nothing is left for a thread to import."""
    code = (
        "import sys, torch, aiockpt\n"
        f"run = aiockpt.SyncCheckpointManager('run', {options})\n"
        f"found = {{m for m in {TIERS.split()} if m in sys.modules}}\n"
        f"with run: run.save(1, {{'x': torch.ones(2)}})\n"
        f"later = {{m for m in {TIERS.split()} if m in sys.modules}} - found\n"
        f"sys.exit(str((found, later)) if found != set({wanted.split()}) or later else 0)"
    )
    done = subprocess.run(
        [*python_with_torch, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr  # on a slow machine, closing says what it waits for


def test_public_names_are_sorted_and_exist() -> None:
    assert aiockpt.__all__ == sorted(aiockpt.__all__)
    assert all(hasattr(aiockpt, name) for name in aiockpt.__all__)
    assert dir(aiockpt) == aiockpt.__all__


def test_type_checkers_know_every_public_name() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = [(alias.asname, node.module) for node in imports for alias in node.names if alias.asname == alias.name]
    modules = [(name, "aiockpt") for name in aiockpt._MODULES]
    assert sorted(names) == sorted([*aiockpt._HOME_OF.items(), *modules])


@pytest.mark.slow
@pytest.mark.parametrize("name", aiockpt._MODULES)
def test_a_public_module_needs_no_import_of_its_own(name: str, python_with_torch: list[str]) -> None:
    code = f"import sys, aiockpt; assert 'aiockpt.{name}' not in sys.modules; aiockpt.{name}.__doc__.strip()"
    done = subprocess.run([*python_with_torch, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr  # which says so also when closing waits for a mirror


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
    """Every error and warning is in it, below its base and with its further bases, is public, and is in the pages."""
    import aiockpt.errors as errors

    tree = re.findall(
        r"^    ([│ ├└─]*)(\w+(?:Error|Warning))\b *(?:\(([\w, ]+)\))?", errors.__doc__ or "", re.MULTILINE
    )
    bases: list[str] = []
    for indent, name, further in tree:
        kind, depth = getattr(errors, name), len(indent) // 4
        bases = [*bases[:depth], name]
        expected = [*bases[-2:-1], *(further.split(", ") if further else [])] if depth else [further or "Exception"]
        assert [base.__name__ for base in kind.__bases__] == expected
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {name for _, name, _ in tree} == kinds <= set(aiockpt.__all__)
    pages = "".join(file.read_text() for file in (PACKAGE / "docs").rglob("*.md"))
    assert {name for name in kinds if not re.search(rf"\b{name}\b", pages)} == set()
