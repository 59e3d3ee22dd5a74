import functools
import json

import pytest
import torch

import aiockpt
from tests import commands
from tests.cli.checkpoints import FORMATS, make

invoke = functools.partial(commands.invoke, "verify")


VALUES = b"\0\0\0\xc0\0\0\x80\xbf"  # -2 and -1, the first elements of the first tensor


def damage(path):
    """Change a byte of the first tensor."""
    (file,) = [file for file in ([path] if path.is_file() else path.iterdir()) if VALUES in file.read_bytes()]
    file.write_bytes(file.read_bytes().replace(VALUES, b"\1" + VALUES[1:]))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_checked(form, anywhere):
    path = make(form, anywhere / "c")
    result = invoke(path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{path}: sound")
    if form == "safetensors":
        return  # the format stores no CRCs
    damage(path)
    result = invoke(path)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.startswith(f"{path}: ")
    assert "error: " in result.stdout
    (record,) = json.loads(invoke(path, "--json").stdout)
    assert (record["path"], record["ok"]) == (str(path), False)
    assert {problem["severity"] for problem in record["problems"]} == {"error"}


def test_every_checkpoint_in_a_directory_is_checked(anywhere):
    for name, form in (("step-9", "aiockpt"), ("step-10", "dcp"), ("old", "torch")):
        make(form, anywhere / name)
    damage(anywhere / "step-9")
    result = invoke(anywhere)
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert [line.partition(": ")[0] for line in lines] == [str(anywhere / n) for n in ("old.pt", "step-9", "step-10")]
    assert [record["ok"] for record in json.loads(invoke(anywhere, "--json").stdout)] == [True, False, True]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_directory_that_is_a_checkpoint_is_checked_as_loading_takes_it(form, tmp_path):
    damage(make("aiockpt", tmp_path / "a" / "b" / "step-1"))
    make(form, tmp_path / "m")
    assert aiockpt.load(tmp_path)
    result = invoke(tmp_path)
    assert (result.exit_code, result.stdout.count("sound")) == (0, 1)


def test_unreadable_paths_do_not_hide_the_others(tmp_path):
    (tmp_path / "empty").mkdir()
    good, bad = make("aiockpt", tmp_path / "good"), make("dcp", tmp_path / "bad")
    damage(bad)
    result = invoke("nowhere://bucket/c", tmp_path / "none", bad, tmp_path / "empty", f"file://{good}")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 3
    assert f"{good}: sound" in result.stdout
    records = json.loads(invoke(tmp_path / "none", good, "--json").stdout)
    assert [record["ok"] for record in records] == [False, True]
    assert "error" in records[0]


class Unknown:
    """Of no class that torch allows."""


def test_a_refused_pickle_is_a_warning_without_advice(tmp_path):
    torch.save({"w": torch.ones(3), "other": Unknown()}, tmp_path / "a.pt")
    result = invoke(tmp_path / "a.pt")
    assert result.exit_code == 0
    name = f"{__name__}.Unknown"
    line = f"  warning: metadata: a.pt: the pickle in a.pt needs {name}, which could run code."
    assert result.stdout.splitlines()[1:] == [line]
