import functools
import json
import math
import pickle

import pytest
import torch

import aiockpt
from tests import commands
from tests.cli.checkpoints import FORMATS, make
from tests.memory import peak_growth

invoke = functools.partial(commands.invoke, "diff")


def document(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert found["same"] is (result.exit_code == 0)
    return found


def save(path, state, **kwargs):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path, **kwargs)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("b", FORMATS)
def test_no_difference_between_formats_of_one_state(a, b, tmp_path, anywhere):
    result = invoke(make(a, tmp_path / "a"), make(b, anywhere / "b"))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no differences: 3 keys are the same")


STATE = {
    "model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([math.nan, 1.0]), "gone": torch.ones(2)},
    "wide": torch.ones(3),
    "turned": torch.zeros(2, 3),
    "half": torch.tensor([1.0, 2.5]),
    "kind": torch.ones(1),
    "step": 3,
    "nested": {"x": [1.0, math.nan]},
}


def changed(tmp_path):
    state = {
        "model": {"a": STATE["model"]["a"].clone(), "b": STATE["model"]["b"].clone(), "new": torch.zeros(1)},
        "wide": torch.ones(4),
        "turned": torch.zeros(3, 2),
        "half": torch.tensor([1.0, 2.75], dtype=torch.float16),
        "kind": 1,
        "step": 4,
        "nested": {"x": [1.0, math.nan]},
    }
    state["model"]["a"][1, 2] += 0.5
    state["model"]["a"][2, 3] -= 1
    return save(tmp_path / "a", STATE), save(tmp_path / "b", state)


def test_all_kinds_of_changes_are_reported(anywhere):
    a, b = changed(anywhere)
    found = document(a, b)
    assert (found["a"], found["b"], found["unchanged"]) == (str(a), str(b), 2)
    assert [each["key"] for each in found["removed"]] == ["model.gone"]
    assert found["added"] == [{"key": "model.new", "kind": "tensor", "dtype": "float32", "shape": [1], "bytes": 4}]
    keys = {each.pop("key"): each for each in found["changed"]}
    assert list(keys) == ["model.a", "wide", "turned", "half", "kind", "step"]
    tensor = {"kind": "tensor", "dtype": "float32", "shape": [3, 4], "bytes": 48}
    figures = {"elements": 12, "differing": 2, "max_abs": 1.0, "max_rel": 1 / 11, "nan": 0}
    assert keys["model.a"] == {"what": "values", "a": tensor, "b": tensor, **figures}
    assert [keys[key]["what"] for key in ("wide", "turned", "half", "kind")] == ["shape", "shape", "dtype", "kind"]
    assert (keys["half"]["differing"], keys["half"]["max_abs"]) == (1, 0.25)
    assert (keys["step"]["before"], keys["step"]["after"]) == ("3", "4")


def test_table_has_a_line_for_each_change(anywhere):
    a, b = changed(anywhere)
    result = invoke(a, b)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == [f"- {a} aiockpt", f"+ {b} aiockpt"]
    assert lines[3:] == [
        "key what differing max abs max rel",
        "- model.gone float32 2",
        "+ model.new float32 1",
        "~ model.a float32 3x4 2 of 12 1 0.09091",
        "~ wide float32 3 -> float32 4",
        "~ turned float32 2x3 -> float32 3x2",
        "~ half float32 2 -> float16 2 1 of 2 0.25 0.09091",
        lines[10],  # with the size of the object
        "~ step 3 -> 4",
        "",
        "1 removed, 1 added, 6 changed, 2 the same",
    ]


def test_keys_and_tolerances(anywhere):
    a, b = changed(anywhere)
    assert [each["key"] for each in document(a, b, "model.a", "s*")["changed"]] == ["model.a", "step"]
    assert document(a, b, "model.a", "--atol", "0.5")["changed"][0]["differing"] == 1
    assert document(a, b, "model.a", "--atol", "1")["same"]
    assert document(a, b, "model.a", "--rtol", "0.1")["same"]
    result = invoke(a, b, "no.such")
    assert result.exit_code == 3
    assert "no.such" in result.stderr


def test_keys_with_pattern_characters_are_keys(tmp_path):
    state = {"a*": torch.zeros(2), "ab": torch.zeros(2), "[a]": torch.zeros(2), "?": 1, "x": 2}
    other = {**state, "a*": torch.ones(2), "?": 5}
    found = document(save(tmp_path / "a", state), save(tmp_path / "b", other))
    assert [each["key"] for each in found["changed"]] == ["a*", "?"]


def test_large_tensors_are_compared_in_parts(anywhere):
    a = torch.zeros(48, 1 << 20, dtype=torch.float16)
    save(anywhere / "a", {"w": a, "b": torch.zeros(1 << 24, dtype=torch.int8)})
    a[0, 0], a[47, -1], a[20, 77] = 1, -3, 2
    save(anywhere / "b", {"w": a, "b": torch.zeros(1 << 24, dtype=torch.int8)})
    found = []
    del a
    invoke(anywhere / "a", anywhere / "a", "b")  # for allocations that happen once in a process
    assert peak_growth(lambda: found.append(document(anywhere / "a", anywhere / "b"))) < 150 << 20
    (each,) = found[0]["changed"]
    assert [each[name] for name in ("elements", "differing", "max_abs")] == [48 << 20, 3, 3.0]


class Config:
    def __init__(self, n):
        self.n = n


class Bomb:
    """Ends the process if it is unpickled."""

    def __reduce__(self):
        return exec, ("import os; os._exit(77)",)


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("chars", [999, 17 << 20], ids=["whole", "in-parts"])
def test_objects_that_would_run_code_are_compared_by_bytes(chars, compress, anywhere):
    state = {"bomb": Bomb(), "config": Config(1), "longer": Config("ab"), "same": Config("x" * chars), "step": 1}
    with pytest.warns(aiockpt.SafeGlobalsWarning):
        a = save(anywhere / "a", state, compress=compress)
    with pytest.warns(aiockpt.SafeGlobalsWarning):
        b = save(anywhere / "b", {**state, "config": Config(2), "longer": Config("ab" * chars)}, compress=compress)
    found = document(a, b)
    assert [(each["key"], each["what"]) for each in found["changed"]] == [("config", "bytes"), ("longer", "bytes")]
    assert found["unchanged"] == 3
    assert "other bytes, not unpickled" in invoke(a, b).stdout


def test_unreadable_checkpoint_is_an_error_not_a_difference(tmp_path):
    a = save(tmp_path / "a", STATE)
    missing = invoke(a, tmp_path / "no")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert str(tmp_path / "no") in missing.stderr
    file = tmp_path / "a" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(STATE["model"]["a"].numpy().tobytes())] ^= 1
    file.write_bytes(data)
    damaged = invoke(a, a)
    assert damaged.exit_code == 3
    assert "CRC" in damaged.stderr
    (tmp_path / "c.pt").write_bytes(pickle.dumps(Bomb()))
    assert invoke(a, tmp_path / "c.pt").exit_code == 3


def test_values_of_scalars_and_small_objects_are_shown(tmp_path):
    one = {"lr": torch.tensor(0.5), "step": 1, "gone": 7, "kind": 3, "w": torch.ones(2)}
    other = {"lr": torch.tensor(0.25), "step": 2, "new": torch.tensor(9), "kind": torch.tensor(4), "w": torch.ones(2)}
    aiockpt.save(one, tmp_path / "a")
    aiockpt.save(other, tmp_path / "b")
    result = invoke(tmp_path / "a", tmp_path / "b")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in ("- gone 7", "+ new int64 scalar 9", "~ step 1 -> 2", "~ kind 3 -> int64 scalar 4"):
        assert line in lines
    assert any(line.startswith("~ lr float32 scalar 0.5 -> 0.25 1 of 1") for line in lines)
