"""Facts that contributors rely on: the folders of the benchmarks, the map of threads, and one name for each class."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import aiockpt

PACKAGE = Path(aiockpt.__file__).parent

# --- the benchmarks ---------------------------------------------------------------------------------------

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# Its folders, and the modules of its root, by floors: imports go to floors below, also those within functions.
FLOORS = [
    {"__main__"},
    {"matrix", "__init__"},
    {"gpu", "crash", "integrations"},
    {"measured"},
    {"ranks"},
    {"peers", "report"},
    {"limits"},
    {"harness"},
]


@functools.cache
def _imports(root: Path) -> dict[str, set[str]]:
    """Return the modules below a folder that each of them imports."""
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        names = found[".".join(file.relative_to(root.parent).with_suffix("").parts)] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == root.name:
                folder = root.parent / Path(*node.module.split("."))
                inner = {f"{node.module}.{each.name}" for each in node.names if (folder / f"{each.name}.py").exists()}
                names |= inner or {node.module}
    return found


def test_the_benchmarks_import_each_other_without_cycles() -> None:
    TopologicalSorter(_imports(BENCHMARKS)).prepare()


def test_folders_of_benchmarks_import_downward() -> None:
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for module, names in _imports(BENCHMARKS).items():
        for imported in names:
            mine, theirs = module.split(".")[1], imported.split(".")[1]
            assert mine == theirs or level[mine] < level[theirs], f"{module} imports {imported}, which is not below it"


def test_every_folder_of_benchmarks_states_its_purpose() -> None:
    for file in BENCHMARKS.rglob("__init__.py"):
        purpose = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert purpose.partition("\n")[0].endswith("."), file.parent.name


@functools.cache
def _trees() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]


# --- the map of threads -----------------------------------------------------------------------------------

CONTRIBUTING = (PACKAGE / "docs" / "contributing.md").read_text()


def _thread_names() -> set[str]:
    """Return the names that the package gives its threads, with dots for what is not constant."""
    kinds = {"Thread", "Timer", "Workers", "DaemonThreads", "ThreadPoolExecutor"}
    names = set()
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in kinds:
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    if isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
                        names.add(f"{value.values[0].value}...")
                    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                        names.add(value.value)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "name":  # of a timer
                names |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return {name for name in names if str(name).startswith("aiockpt-")} - {"aiockpt-conformance"}


def test_every_thread_is_in_the_map_of_threads() -> None:
    rows = [line for line in CONTRIBUTING.splitlines() if line.startswith("| `aiockpt-")]
    described = {name for row in rows for name in re.findall(r"`(aiockpt-[^`]+)`", row.split("|")[1])}
    assert described == _thread_names()


# --- names -------------------------------------------------------------------------------------------------

# What is still called alike: no name may be added.
ALIKE = """
Contents Record Trainer
"""


def test_no_two_classes_have_one_name() -> None:
    """Leading underscores don't count."""
    count = Counter(node.name.lstrip("_") for tree in _trees() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, times in count.items() if times > 1} <= set(ALIKE.split())


# Words that the glossary has replaced: no identifier of the package is called so any more.
RETIRED = """
checkpoints_below book pass_phase choose_form make_form agree_filled _Span _MAX_SPANS _close_owner
"""


def test_retired_words_are_gone() -> None:
    found = {
        token.string
        for file in PACKAGE.rglob("*.py")
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        if token.type == tokenize.NAME
    }
    assert not found & set(RETIRED.split())


# Folders in which these words, which say nothing, are no names, and begin no docstring.
NAMED_WELL = ("coordination", "saving", "snapshot")
EMPTY_WORDS = {"each", "found", "at", "those", "what"}


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to variables, parameters, attributes, functions and classes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _docstrings(tree: ast.Module) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes)]


def test_words_that_say_nothing_are_no_names_and_no_subjects() -> None:
    for folder in NAMED_WELL:
        for file in (PACKAGE / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            assert not {name.strip("_") for name in _bound_names(tree)} & EMPTY_WORDS, file
            subjects = {text.partition(" ")[0].lower() for text in _docstrings(tree)}
            assert not subjects & EMPTY_WORDS, file


def test_the_glossary_has_at_most_60_words() -> None:
    table = CONTRIBUTING.partition("## Glossary")[2].partition("\n## ")[0]
    rows = [
        line
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith(("| **", "| word", "| ---"))
    ]
    assert 30 < len(rows) <= 60


# --- the tests use what users use ---------------------------------------------------------------------------

TESTS = Path(__file__).parent
PUBLIC = {"aiockpt", *(f"aiockpt.{name}" for name in aiockpt._MODULES), "aiockpt.integrations"} | {
    "aiockpt.dcp.format_utils",
    "aiockpt.dcp.megatron",
    "aiockpt.manager.scan.scan",
    "aiockpt.storage.base",
    "aiockpt.storage.wrapper",
}
UNITS = {"core", "fakecuda", "format", "gpu", "planning", "staging", "storage"}
"""Folders whose tests are mostly of the parts of one room, which they may import."""
# The most test files that may name what is not public, in other folders; at most 45 % of all.
MOST = {
    "": 5,
    "cli": 8,
    "dcp": 5,
    "engine": 2,
    "environments": 0,
    "faults": 2,
    "fuzz": 1,
    "manager": 9,
    "objects": 5,
    "ranks": 7,
    "reading": 11,
    "saving": 4,
    "snapshot": 3,
    "telemetry": 2,
    "writing": 3,
}
NAMED = re.compile(r"(?:\b(?:from|import) |[\"'])(aiockpt(?:\.\w+)+)(?: import (\([^)]*\)|[\w, ]+))?")


def _inner_names(file: Path) -> set[str]:
    """Return the names of the package in imports and texts of a file that are not public."""
    names = {
        f"{module}.{name}".rstrip(".")
        for module, listed in NAMED.findall(file.read_text())
        for name in re.sub(r" as \w+|[()\s]", "", listed).split(",")
        if _is_module(".".join(module.split(".")[:2]))
    }
    return {name for name in names if not _is_public(name)}


def _is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.exists() or path.with_suffix(".py").exists()


def _is_public(name: str) -> bool:
    above = name.rpartition(".")[0]
    is_attribute = above in PUBLIC and not _is_module(name) and "._" not in name
    return name in PUBLIC or is_attribute or name.startswith("aiockpt.integrations.")


def test_tests_use_what_users_use() -> None:
    files = [
        file for file in TESTS.rglob("test_*.py") if file.name not in ("test_architecture.py", "test_contributing.py")
    ]
    inner = [file.relative_to(TESTS) for file in files if _inner_names(file)]
    count = Counter(file.parts[0] if len(file.parts) > 1 else "" for file in inner)
    assert {folder: n for folder, n in count.items() if folder not in UNITS and n > MOST.get(folder, 0)} == {}
    assert len(inner) <= 0.45 * len(files)


def test_what_tests_take_for_public_is_documented() -> None:
    pages = "".join(file.read_text() for file in (PACKAGE / "docs").rglob("*.md") if file.name != "contributing.md")
    for name in PUBLIC:
        assert name in pages or f"{name.replace('.', '/')}.py" in pages, name
