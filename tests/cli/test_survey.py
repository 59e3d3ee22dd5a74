import math

import pytest
import torch

import aiockpt
from aiockpt.cli import statistics
from aiockpt.cli.statistics import survey

pytestmark = pytest.mark.asyncio
NAN, INF = math.nan, math.inf


async def survey_state(state, path):
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, path)
    async with aiockpt.open(path) as reader:
        infos = [reader[key] for key in state]
        return {info.key: found async for info, found in survey(reader, infos, histograms=True)}


@pytest.mark.parametrize("most", [32 << 20, 4096], ids=["whole", "in-parts"])
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
    assert found["nan"].figures.nan == 1000
    assert found["flag"].counts == (2000, *(0,) * 30, 4000)
    assert [count for count in found["wide"].counts if count] == [1000] * 3
    assert found["complex"].low < 5 < found["complex"].high
    assert sum(found["complex"].counts) == 2000


async def test_no_histogram_without_a_finite_range(tmp_path):
    state = {
        "empty": torch.zeros(0, 3),
        "nan": torch.full((4,), NAN),
        "large": torch.tensor([-1e308, 1e308], dtype=torch.float64),
    }
    found = await survey_state(state, tmp_path / "c")
    assert all(each.counts == () for each in found.values())
    assert found["nan"].as_json() == [["", "", "", "4"], 0, 0, ()]


async def test_pattern_characters_in_keys_are_literal(tmp_path):
    found = await survey_state(
        {"a*": torch.zeros(3), "ab": torch.ones(3), "[a]": torch.full((3,), 2.0)}, tmp_path / "c"
    )
    assert {key: each.figures.mean for key, each in found.items()} == {"a*": 0, "ab": 1, "[a]": 2}
