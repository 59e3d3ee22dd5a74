"""The commands on URLs: schemes, options, leftovers, and storages that can do little.

The tests of each command also run on a storage that is no file system.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result

import aiockpt
from aiockpt.storage import register, storage_for
from tests import commands
from tests.cli.checkpoints import killed_save, make, tensors
from tests.places import ServerPath, storage_of
from tests.storage.memory_storage import MemoryStorage

UNKNOWN = "nowhere://bucket/c"


def invoke(*arguments: object, code: int = 0) -> Result:
    done = commands.invoke(*arguments)
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


@pytest.mark.parametrize(
    "command",
    [
        ["ls", UNKNOWN],
        ["inspect", UNKNOWN],
        ["verify", UNKNOWN],
        ["diff", UNKNOWN, UNKNOWN],
        ["convert", UNKNOWN, "c"],
        ["convert", "c", UNKNOWN],
        ["convert", "c", f"{UNKNOWN}.pt", "--keys", "head"],
        ["prune", UNKNOWN, "--keep-latest", "1"],
        ["rm", "-y", UNKNOWN],
        ["clean", UNKNOWN],
    ],
    ids=" ".join,
)
def test_an_unknown_scheme_says_what_is_known(command: list[str]) -> None:
    done = invoke(*command, code=3)
    assert done.stdout == ""
    assert "no storage is registered for nowhere://, but for" in done.stderr
    assert done.stderr.count("\n") == 1


def test_urls_of_the_file_system(tmp_path: Path) -> None:
    one, other = make("aiockpt", tmp_path / "run 1" / "c"), tmp_path / "run 1" / "d"
    run = f"file://{tmp_path}/run%201"
    assert json.loads(invoke("ls", run, "--json").stdout)["directory"] == str(tmp_path / "run 1")
    assert invoke("inspect", f"{run}/c").stdout.startswith(f"{one}\n")
    assert invoke("convert", f"{run}/c", f"{run}/d").stdout.startswith(f"{other}: dcp, ")
    assert invoke("diff", f"{run}/c", other).stdout.startswith(f"- {one}  aiockpt\n+ {other}  aiockpt\n")
    assert invoke("rm", "-y", f"{run}/c/").stdout == f"removed {one}\n"
    assert list(other.parent.iterdir()) == [other]


# --- leftovers ------------------------------------------------------------------------------------------


@pytest.mark.kills
def test_what_a_killed_save_has_left_is_removed_where_nothing_else_is(python: list[str], server_url: str) -> None:
    killed_save(python, f"{server_url}/run/c")
    (removed,) = json.loads(invoke("clean", f"{server_url}/run", "--json").stdout)["removed"]
    assert removed.startswith(f"{server_url}/run/c/")
    assert "nothing is at" in invoke("clean", f"{server_url}/run", code=3).stderr


# --- options --------------------------------------------------------------------------------------------


def test_options_go_to_the_storages_of_urls(server_url: str) -> None:
    paths = [make("aiockpt", ServerPath(f"{server_url}/{name}")) for name in "ab"]
    objects = storage_of(server_url).objects
    invoke("rm", "-y", paths[0])
    assert objects.below("a/")  # for those that read it
    invoke("--storage-option", "grace_s=0", "--storage-option", "timeout_s=30", "rm", "-y", paths[1])
    assert not objects.below("b/")


@pytest.mark.parametrize(
    ("text", "value"),
    [("eu", "eu"), ("5", 5), ("true", True), ('"5"', "5"), ("a=b", "a=b"), ("", ""), ('{"a": [1]}', {"a": [1]})],
)
def test_values_of_options_are_json_or_text(text: str, value: object) -> None:
    seen: list[dict[str, object]] = []
    register("mem", lambda root, **options: seen.append(options) or MemoryStorage(), replace=True)
    invoke("--storage-option", f"region={text}", "inspect", "mem://x", code=3)
    storage_for("mem://x")
    assert seen == [{"region": value}, {}]  # none are left to what comes after the command


@pytest.mark.parametrize("option", ["region", "=eu", "no-name=1"])
def test_options_need_names(option: str) -> None:
    assert "region=eu" in invoke("--storage-option", option, "ls", code=2).stderr


# --- storages that can do little ------------------------------------------------------------------------


@pytest.fixture
def memory() -> MemoryStorage:
    """Return a storage for mem://, which has no list of what it holds."""
    storage = MemoryStorage()
    register("mem", lambda root: storage, replace=True)
    return storage


def test_commands_that_need_no_list_do_without_one(memory: MemoryStorage, tmp_path: Path) -> None:
    invoke("convert", make("torch", tmp_path / "c"), "mem://x/a")
    assert "mem://x/a: sound" in invoke("verify", "mem://x/a").stdout
    assert "no differences" in invoke("diff", "mem://x/a", tmp_path / "c.pt").stdout
    invoke("convert", "mem://x/a", "mem://x/h.pt", "--keys", "head")
    assert "--overwrite" in invoke("convert", tmp_path / "c.pt", "mem://x/a", code=3).stderr
    assert torch.equal(aiockpt.load("mem://x/h.pt")["head"], tensors()["head"])
    assert invoke("rm", "-y", "mem://x/a").stdout == "removed mem://x/a\n"
    assert list(memory.checkpoints) == ["mem://x/h.pt"]


@pytest.mark.parametrize(
    "command", [["ls", "mem://x"], ["clean", "mem://x"], ["prune", "mem://x", "--keep-latest", "1"]], ids=" ".join
)
def test_commands_that_need_a_list_say_so(command: list[str], memory: MemoryStorage) -> None:
    assert "can't list what is at mem://x" in invoke(*command, code=3).stderr
