"""Hundreds of fixed inputs; ``python -m benchmarks crash --full --part fuzz`` tries others for longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy.ma  # noqa: F401 - imported by torch when it comes to it, which would count as an opened file
import pytest
import torch._subclasses.schema_check_mode  # noqa: F401

import aiockpt
from tests.fuzz.judge import Judge
from tests.fuzz.targets import Target, make_targets
from tests.fuzz.watch import Watch

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = (
    *(
        "metadata",
        "rank metadata",
        "manifest",
        "transformed",
        "tensor pickle",
        "tensor zip",
        "object pickle",
        "object zip",
    ),
    *("torch pickle", "torch zip", "torch legacy", "header", "offsets", "safetensors", "shards", "frames"),
)
INPUTS = 50


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return make_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture
def judge(watch: Watch) -> Iterator[Judge]:
    made = Judge(watch)
    yield made
    made.close()


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Yield the seeds, then mutations of seeds and of recent mutations."""
    rng = Random(f"{seed} {target.name}")
    pool = list(target.seeds)
    yield from target.seeds
    for _ in range(INPUTS):
        data = target.mutate(rng.choice(pool), rng, rng.choice(target.seeds))
        if len(data) < 50_000:
            yield data
            pool.append(data)
            pool = [*target.seeds, *pool[-20:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_input_loads_or_is_refused(name: str, targets, judge: Judge, record_property) -> None:
    target, tried = targets[name], 0
    for data in inputs(target, 1):
        wrong = judge.wrong_with(target, data)
        assert not wrong, f"{wrong}\n{data!r}"
        tried += 1
    record_property("inputs", tried)
    assert judge.outcomes.get("load: done"), judge.outcomes  # else no input reaches its parser
    assert judge.outcomes.get("load: CorruptCheckpointError", 0) + judge.outcomes.get("load: UnsafeCheckpointError", 0)


def test_every_target_is_tested(targets) -> None:
    assert set(targets) == set(NAMES)


class _RawError(aiockpt.LoadError):
    def __str__(self) -> str:
        return self.args[0]


@pytest.mark.slow
def test_the_judge_detects_each_kind_of_problem(targets, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path) -> None:
        data = path.read_bytes()
        if data == b"slow":
            sum(range(5_000_000))
        if data == b"large":
            bytearray(600 << 20)
        if data == b"writes":
            (path.parent / "x").write_bytes(b"x")
        if data == b"odd":
            raise _RawError("\x1b[31m")
        if data == b"long":
            raise _RawError("x" * 10_000)
        if data == b"cause":
            raise aiockpt.LoadError("x") from ValueError("\x1b[31m")
        raise ValueError(data)

    target = targets["torch zip"]
    monkeypatch.setattr("tests.fuzz.judge.MOST_S", 0.02)
    monkeypatch.setattr(judge, "_load", load)
    for data, expected in (
        *((b"slow", "it takes"), (b"large", "MiB"), (b"writes", "files have changed"), (b"odd", "message with")),
        (b"cause", "message with"),
        *((b"long", "10000 letters"), (b"other", "raises ValueError")),
    ):
        assert expected in (judge.wrong_with(target, data) or "")
