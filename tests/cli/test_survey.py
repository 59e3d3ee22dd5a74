import math
import random

import pytest
import torch

import aiockpt
from aiockpt.cli import statistics
from aiockpt.cli.statistics import survey

NAN, INF = math.nan, math.inf


async def survey_state(state, path):
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, path)
    async with aiockpt.open(path) as reader:
        infos = [reader[key] for key in state]
        return {info.key: found async for info, found in survey(reader, infos, histograms=True)}


@pytest.mark.parametrize("most", [32 << 20, 4096], ids=["whole", "in-parts"])
@pytest.mark.asyncio
async def test_histogram_counts_every_finite_element(most, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "PART_BYTES", most)
    state = {
        "ramp": torch.arange(32_000, dtype=torch.float32).reshape(80, 400),
        "half": torch.linspace(-1, 1, 6400).to(torch.bfloat16).reshape(10, 640),
        "nan": torch.tensor([NAN, 1.0, 2.0, INF, -INF] * 1000),
        "flag": torch.tensor([True, False, True] * 2000),
        "wide": torch.tensor([-(2**62), 0, 2**62] * 1000),
        "complex": torch.full((2000,), 3 + 4j),
    }
    found = await survey_state(state, tmp_path / "c")
    assert (found["ramp"].low, found["ramp"].high) == (0, 31_999)
    assert found["ramp"].counts == (1000,) * 32
    assert sum(found["half"].counts) == 6400
    assert (found["half"].low, found["half"].high) == (-1, 1)
    assert (found["nan"].low, found["nan"].high) == (1, 2)
    assert found["nan"].counts == (1000, *(0,) * 30, 1000)
    assert found["nan"].figures["nan"] == 1000
    assert found["flag"].counts == (2000, *(0,) * 30, 4000)
    assert [count for count in found["wide"].counts if count] == [1000] * 3
    assert found["complex"].low < 5 < found["complex"].high
    assert sum(found["complex"].counts) == 2000


@pytest.mark.asyncio
async def test_no_histogram_without_a_finite_range(tmp_path):
    state = {
        "empty": torch.zeros(0, 3),
        "nan": torch.full((4,), NAN),
        "large": torch.tensor([-1e308, 1e308], dtype=torch.float64),
    }
    found = await survey_state(state, tmp_path / "c")
    assert all(each.counts == () for each in found.values())
    assert found["nan"].as_json() == [["", "", "", "4"], 0, 0, ()]


@pytest.mark.asyncio
async def test_pattern_characters_in_keys_are_literal(tmp_path):
    found = await survey_state(
        {"a*": torch.zeros(3), "ab": torch.ones(3), "[a]": torch.full((3,), 2.0)}, tmp_path / "c"
    )
    assert {key: each.figures["mean"] for key, each in found.items()} == {"a*": 0, "ab": 1, "[a]": 2}


@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 3), (2, 3, 4), (0,), (3, 0), (1, 1, 9)])
@pytest.mark.parametrize("most", [1, 2, 4, 100])
def test_parts_cover_each_element_once(shape, most):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = [whole[index] for index in statistics.part_indices(shape, most)]
    assert all(part.numel() <= most for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts] or [whole.reshape(-1)]), whole.reshape(-1))


VALUES = [
    torch.tensor([1.0, float("inf"), float("nan"), -2.0]),
    torch.full((3,), float("nan"), dtype=torch.float64),
    torch.tensor([0.1] * 5, dtype=torch.float16),
    torch.tensor([240.0, -1.5, 0.0]).to(torch.float8_e4m3fn),
    torch.tensor([3 + 4j, 0j]),
    torch.tensor([True, False, True, True]),
    torch.tensor([-128, 127], dtype=torch.int8),
    torch.tensor([2**62, -(2**62)]),
    torch.tensor([2**63 + 2**40, 1], dtype=torch.uint64),
    torch.tensor(2.5),
    torch.zeros(0),
]
EXPECTED = [
    (-2.0, float("inf"), float("inf"), 1),
    (None, None, None, 3),
    (torch.tensor(0.1, dtype=torch.float16).item(),) * 3 + (0,),
    (-1.5, 240.0, 79.5, 0),
    (0.0, 5.0, 2.5, 0),
    (0, 1, 0.75, 0),
    (-128, 127, -0.5, 0),
    (-(2**62), 2**62, 0.0, 0),
    (1.0, float(2**63 + 2**40), float(2**62 + 2**39), 0),
    (2.5, 2.5, 2.5, 0),
    (None, None, None, 0),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("part_bytes", [8, 32 << 20])
async def test_statistics_of_each_dtype_whole_and_in_parts(part_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "PART_BYTES", part_bytes)
    found = await survey_state({f"t{number:02}": value for number, value in enumerate(VALUES)}, tmp_path / "c")
    for number, (low, high, mean, nan) in enumerate(EXPECTED):
        figures = found[f"t{number:02}"].figures
        assert (figures["minimum"], figures["maximum"], figures["nan"]) == (low, high, nan)
        assert figures["mean"] == (mean if mean is None else pytest.approx(mean))


@pytest.mark.asyncio
async def test_statistics_of_random_tensors_in_parts(tmp_path, monkeypatch):
    chance = random.Random(5)
    torch.manual_seed(5)
    shapes = [[chance.randrange(1, 7) for _ in range(chance.randrange(1, 4))] for _ in range(30)]
    state = {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}
    monkeypatch.setattr(statistics, "PART_BYTES", 40)
    for key, found in (await survey_state(state, tmp_path / "c")).items():
        value = state[key]
        assert (found.figures["minimum"], found.figures["maximum"]) == (value.min().item(), value.max().item())
        assert found.figures["mean"] == pytest.approx(value.double().mean().item())
