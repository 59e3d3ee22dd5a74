"""Tensors of torch.save files whose elements share memory: a file of a kilobyte may show exabytes."""

import json
import math
import re

import pytest
import torch

from tests.commands import invoke
from tests.memory import peak_growth

BASES = {
    "number": (torch.tensor(0.1), (2**60,), (0,)),
    "rows": (torch.tensor([0.1, 0.7, -3.0, math.nan]), (2**40, 4), (0, 1)),
    "columns": (torch.tensor([[3.0], [0.1], [math.nan]]), (3, 2**33), (1, 0)),
    "between": (torch.arange(6.0).reshape(2, 1, 3), (2, 2**40, 3), (3, 0, 1)),
}
MOST_BYTES = 64 << 20


def measured(call):
    """Return the result of a call, and the growth of the memory in bytes."""
    results = []
    growth = peak_growth(lambda: results.append(call()))
    return results[0], growth


def save(path, base, shape, stride):
    torch.save({"w": base.as_strided(shape, stride)}, path)
    return path


@pytest.fixture(params=BASES)
def bomb(request, tmp_path):
    base, shape, stride = BASES[request.param]
    return save(tmp_path / "bomb.pt", base, shape, stride), base, math.prod(shape) // base.numel()


def test_statistics_are_those_of_the_stored_elements(bomb, tmp_path):
    path, base, times = bomb
    torch.save({"w": base}, tmp_path / "base.pt")
    result, growth = measured(lambda: invoke("inspect", path, "--stats", "--json"))
    assert result.exit_code == 0, result.output
    assert growth < MOST_BYTES
    expected = json.loads(invoke("inspect", tmp_path / "base.pt", "--stats", "--json").stdout)["keys"][0]["stats"]
    expected["nan"] *= times
    assert json.loads(result.stdout)["keys"][0]["stats"] == expected


def test_histogram_counts_each_repetition(bomb, tmp_path):
    path, base, times = bomb
    assert invoke("inspect", path, "--stats", "--html", tmp_path / "page.html").exit_code == 0
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    ((_, (*_, counts)),) = json.loads(data[1])["stats"]
    assert sum(counts) == times * int(base.isfinite().sum())


def test_differences_count_each_repetition(bomb, tmp_path):
    path, base, times = bomb
    assert invoke("diff", path, path).exit_code == 0
    _, shape, stride = next(each for each in BASES.values() if each[0] is base)
    changed = base.clone()
    changed.view(-1)[0] += 1
    other = save(tmp_path / "other.pt", changed, shape, stride)
    result, growth = measured(lambda: invoke("diff", path, other, "--json"))
    assert result.exit_code == 1, result.output
    assert growth < MOST_BYTES
    (each,) = json.loads(result.stdout)["changed"]
    assert (each["elements"], each["differing"]) == (times * base.numel(), times)
    assert each["max_abs"] == pytest.approx(1)


def test_expanded_tensors_equal_plain_ones(tmp_path):
    wide = save(tmp_path / "wide.pt", torch.arange(3.0), (2_000_000, 3), (0, 1))
    plain = tmp_path / "plain.pt"
    torch.save({"w": torch.arange(3.0).expand(2_000_000, 3).contiguous()}, plain)
    tall = save(tmp_path / "tall.pt", torch.arange(2_000_000.0), (2_000_000, 3), (1, 0))
    assert invoke("diff", wide, plain).exit_code == 0
    (each,) = json.loads(invoke("diff", wide, tall, "--json").stdout)["changed"]
    assert each["elements"] - each["differing"] == 3


@pytest.mark.parametrize("command", [("inspect", "--stats"), ("inspect", "--stats", "--html"), ("diff",)])
def test_elements_that_overlap_each_other_are_refused(command, tmp_path):
    path = save(tmp_path / "bomb.pt", torch.arange(200_000.0), (2**16, 2**16), (1, 1))
    rest = {"diff": [path], "--html": [tmp_path / "page.html"]}.get(command[-1], [])
    arguments = [*command, *rest, path] if command[-1] == "--html" else [*command, path, *rest]
    result, growth = measured(lambda: invoke(*arguments))
    assert result.exit_code == 3
    assert growth < MOST_BYTES
    assert "w shows" in result.stderr
    assert f"{2**34} bytes of which 800000 are stored" in result.stderr


@pytest.mark.parametrize("target", ["out", "out.pt", "out.safetensors"])
def test_conversion_refuses_what_no_disk_holds(bomb, target, tmp_path):
    path, base, times = bomb
    result, growth = measured(lambda: invoke("convert", path, tmp_path / target))
    assert result.exit_code == 3
    assert growth < MOST_BYTES
    assert "w of" in result.stderr
    assert f"{times * base.nbytes} bytes" in result.stderr
    assert f" {base.nbytes} " in result.stderr
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["out", "out.pt", "out.safetensors"])
def test_conversion_writes_out_what_is_expanded_a_little(target, tmp_path):
    path = save(tmp_path / "wide.pt", torch.arange(5.0), (1000, 5), (0, 1))
    result = invoke("convert", path, tmp_path / target)
    assert result.exit_code == 0, result.output
    assert invoke("diff", path, tmp_path / target).exit_code == 0
