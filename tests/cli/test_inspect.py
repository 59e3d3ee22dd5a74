import functools
import json

import pytest
import torch

import aiockpt
from tests import commands
from tests.cli.checkpoints import FORMATS, make, tensors

DTYPES = {"model.0.weight": "float32", "model.0.bias": "bfloat16", "head": "int64"}


invoke = functools.partial(commands.invoke, "inspect")


def document(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_shown(form, anywhere):
    path = make(form, anywhere / "c")
    result = invoke(path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == [str(path)]
    assert {tuple(line) for line in lines} >= {
        ("weight", "float32", "3x4", "48", "B"),
        ("bias", "bfloat16", "3", "6", "B"),
        ("head", "int64", "5", "40", "B"),
    }
    assert ["model.0", "54", "B"] in lines


def test_files_beside_are_named(tmp_path):
    make("sharded", tmp_path / "c")
    for name in ("optimizer.pt", "\x1b.bin", "notes.txt"):
        (tmp_path / "c" / name).touch()
    result = invoke(tmp_path / "c")
    assert "not read: \\x1b.bin, optimizer.pt" in result.output
    assert document(tmp_path / "c")["beside"] == ["\x1b.bin", "optimizer.pt"]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_statistics_as_json(form, anywhere):
    path = make(form, anywhere / "c")
    found = document(path, "--stats")
    assert (found["path"], found["tensors"], found["objects"], found["bytes"]) == (str(path), 3, 0, 94)
    assert found["dtypes"] == {"float32": 48, "int64": 40, "bfloat16": 6}
    keys = {each["key"]: each for each in found["keys"]}
    assert {key: (each["dtype"], each["shape"]) for key, each in keys.items()} == {
        key: (DTYPES[key], list(value.shape)) for key, value in tensors().items()
    }
    assert {key: each["stats"] for key, each in keys.items()} == {
        "model.0.weight": {"minimum": -2.0, "maximum": 9.0, "mean": 3.5, "nan": 0},
        "model.0.bias": {"minimum": -0.5, "maximum": 1.5, "mean": 0.5, "nan": 1},
        "head": {"minimum": 0, "maximum": 12, "mean": 6.0, "nan": 0},
    }
    assert all(chunk["file"] for each in keys.values() for chunk in each["chunks"])


def test_statistics_in_the_table(tmp_path):
    result = invoke(make("aiockpt", tmp_path / "c"), "--stats")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["min", "max", "mean", "nan"] in lines
    assert ["weight", "float32", "3x4", "48", "B", "-2", "9", "3.5", "0"] in lines
    assert ["bias", "bfloat16", "3", "6", "B", "-0.5", "1.5", "0.5", "1"] in lines


def test_page_is_not_written_where_there_is_no_directory(tmp_path):
    result = invoke(make("aiockpt", tmp_path / "c"), "--html", tmp_path / "none" / "page.html")
    assert result.exit_code == 3
    assert result.stderr == f"aiockpt: {tmp_path / 'none'} is no directory; make it, or name another file\n"


def test_metadata_and_objects_are_shown(anywhere):
    state = {"step": 7, "name": "größe\n模型", "odd": slice(1, 2), "long": list(range(50)), "w": torch.ones(2)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, anywhere / "c", metadata={"loss": float("inf"), "note": "ü\x1b"})
    result = invoke(anywhere / "c")
    assert "1 tensor, 8 B (float32 8 B); 4 objects" in result.stdout
    assert 'metadata: {"loss": Infinity, "note": "ü\\u001b"}' in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "step int 7" in lines
    assert "name str 'größe\\n模型'" in lines
    assert "long list [0, 1, 2, 3, ...]" in lines
    assert document(anywhere / "c")["metadata"] == {"loss": "inf", "note": "ü\x1b"}


def test_equal_layers_are_folded_unless_all(tmp_path):
    state = {f"h.{n}.{name}": torch.ones(4, 4) for n in range(6) for name in ("q", "k")}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
    folded = invoke(tmp_path / "c").stdout
    assert [line.split()[0] for line in folded.splitlines()[3:]] == ["h", "0..5", "q", "k"]
    assert "6 x 128 B" in folded
    assert len(invoke(tmp_path / "c", "--all").stdout.splitlines()) == 3 + 1 + 6 * 3
    cut = invoke(tmp_path / "c", "--depth", "1").stdout
    assert [line.split() for line in cut.splitlines()[3:4]] == [["h", "12", "tensors", "768", "B"]]


def test_keys_and_patterns_select_tensors(tmp_path):
    path = make("aiockpt", tmp_path / "c")
    assert [each["key"] for each in document(path, "model")["keys"]] == ["model.0.weight", "model.0.bias"]
    assert [each["key"] for each in document(path, "*.bias", "head")["keys"]] == ["model.0.bias", "head"]
    result = invoke(path, "model.0.wieght")
    assert result.exit_code == 3
    assert "has no key that matches model.0.wieght" in result.stderr
    assert "model.0.weight" in result.stderr


@pytest.mark.parametrize("name", ["nothing", "file", "folder"])
def test_paths_without_a_checkpoint_exit_with_3(name, tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    result = invoke(tmp_path / name)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("aiockpt: ")
    assert result.stderr.count("\n") == 1


def test_control_characters_in_keys_are_escaped(tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a\x1b[31m\n": torch.ones(1)}, tmp_path / "c")
    assert "a\\x1b[31m\\n" in invoke(tmp_path / "c").stdout


def test_damaged_object_does_not_hide_other_keys(tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(3), "text": "changed", "step": 7}, tmp_path / "c")
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"changed", b"Changed"))
    result = invoke(tmp_path / "c")
    assert result.exit_code == 0
    found = {line.split()[0]: line.split()[1:3] for line in result.stdout.splitlines()[3:]}
    assert found == {"w": ["float32", "3"], "text": ["object", "damaged"], "step": ["int", "7"]}


@pytest.mark.parametrize("name", ["c", "c.pt", "c.safetensors"])
def test_scalars_have_their_values_and_tied_tensors_count_once(name, tmp_path):
    weight = torch.arange(1000.0)
    state = {"embed": weight, "head": weight, "lr": torch.tensor(0.125)}
    if not name.endswith(".safetensors"):
        state |= {"step": 300, "name": "x" * 80}
    aiockpt.save(state, tmp_path / name)
    lines = [line.split() for line in invoke(tmp_path / name).stdout.splitlines()]
    assert ["embed", "float32", "1000", "3.9", "KiB"] in lines
    assert ["head", "float32", "1000", "tied"] in lines
    assert ["lr", "float32", "scalar", "0.125", "4", "B"] in lines
    assert ["step", "int", "300"] in lines or name.endswith(".safetensors")
    found = document(tmp_path / name)
    assert found["bytes"] == found["dtypes"]["float32"] == 4004
    assert {each["key"]: each.get("tied_to") for each in found["keys"]}["head"] == "embed"
    page = tmp_path / "page.html"
    assert invoke(tmp_path / name, "--html", page).exit_code == 0
    for text in ("tied to embed", "0.125"):
        assert text in page.read_text()
