"""Following a run: versions as they appear, and loads of what has changed."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.polling import until

POLL_S = 0.01


def state_of(seed: int = 0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(seed)), "frozen": torch.arange(1000.0), "n": seed}


def target() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "frozen": torch.zeros(1000), "n": -1}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[k], other[k]) if torch.is_tensor(one[k]) else one[k] == other[k] for k in one)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[aiockpt.SyncCheckpointManager]:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        yield run


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Iterator[aiockpt.SyncVersion]]:
    with aiockpt.watch_sync(tmp_path / "run", poll_s=POLL_S) as watch:
        iterator = iter(watch)
        yield iterator
        iterator.close()  # type: ignore[attr-defined]


def test_only_changed_tensors_are_read(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    into = target()
    run.save(1, state_of(1), hashes=True, metrics={"loss": 0.5})
    version = next(versions)
    assert (version.step, dict(version.metrics), version.path) == (1, {"loss": 0.5}, run.path_of(1))
    assert version.age_s < 3600
    assert set(version.load(into)) == {"w", "frozen", "n"}
    assert version.load(into) == ["n"]  # an object is read each time
    run.save(2, state_of(2), hashes=True)
    assert set(next(versions).load(into)) == {"w", "n"}
    assert is_same(into, state_of(2))


def test_without_hashes_everything_is_read(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    into = target()
    for step in (1, 2):
        run.save(step, state_of(1))
        assert set(next(versions).load(into)) == {"w", "frozen", "n"}


@pytest.mark.parametrize("change", ["in place", "replaced", "another state"])
def test_what_the_caller_has_changed_is_read_again(
    run: aiockpt.SyncCheckpointManager, versions: Any, change: str
) -> None:
    into = target()
    run.save(1, state_of(1), hashes=True)
    next(versions).load(into)
    run.save(2, state_of(1), hashes=True)
    if change == "in place":
        into["frozen"].zero_()
    elif change == "replaced":
        into["frozen"] = torch.zeros(1000)
    else:
        into = target()
    assert "frozen" in next(versions).load(into)
    assert is_same(into, state_of(1))


class Own:
    """Loads by code of its own, which is no plain copy."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.value = torch.arange(1000.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given.append({key: value.clone() for key, value in state.items()})


def test_live_objects(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    model, own, into, mine = torch.nn.Linear(4, 4), Own(), torch.nn.Linear(4, 4), Own()
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optim.step()
    theirs = torch.optim.Adam(into.parameters())
    last = {"model": into, "own": mine, "optim": theirs}
    for step in (1, 2):
        run.save(step, {"model": model, "own": own, "optim": optim}, hashes=True)
        loaded = next(versions).load(last)
        assert "own.value" in loaded
        assert torch.equal(into.bias, model.bias)
    assert len(mine.given) == 2  # its whole state, each time
    assert all(torch.equal(each["value"], own.value) for each in mine.given)
    assert torch.equal(theirs.state_dict()["state"][0]["exp_avg"], optim.state_dict()["state"][0]["exp_avg"])
    with torch.no_grad():
        model.bias.add_(1)
    run.save(3, {"model": model, "own": own, "optim": optim}, hashes=True)
    version = next(versions)
    version.load(last)
    with torch.no_grad():
        model.weight.add_(1)
    run.save(4, {"model": model, "own": own, "optim": optim}, hashes=True)
    loaded = next(versions).load(last)
    assert "model.weight" in loaded
    assert "model.bias" not in loaded
    assert torch.equal(into.weight, model.weight)
    assert torch.equal(into.bias, model.bias)


class Scaling(Own):
    """Changes a model when it is loaded, after it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.weight.data.mul_(2)


def test_what_an_object_has_changed_is_read_again(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    model, into = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    last = {"model": into, "own": Scaling(into)}
    for step in (1, 2):
        run.save(step, {"model": model, "own": Scaling(model)}, hashes=True)
        next(versions).load(last)
        assert torch.equal(into.weight, model.weight * 2)


def test_rollbacks_and_replaced_steps_are_versions(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    into = target()
    for step in (1, 2):
        run.save(step, state_of(step), hashes=True)
    next(versions).load(into)
    shutil.rmtree(run.path_of(2))
    version = next(versions)
    version.load(into)
    assert (version.step, is_same(into, state_of(1))) == (1, True)
    run.save(1, state_of(7), hashes=True, overwrite=True)
    version = next(versions)
    version.load(into)
    assert (version.step, is_same(into, state_of(7))) == (1, True)


def test_a_failed_load_has_the_next_one_read_everything(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    into = target()
    run.save(1, state_of(1), hashes=True)
    next(versions).load(into)
    run.save(2, state_of(2), hashes=True)
    (file,) = Path(run.path_of(2)).glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(torch.full((100,), 2.0).numpy().tobytes())
    data[at + 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(aiockpt.CorruptCheckpointError):
        next(versions).load(into)
    run.save(3, state_of(3), hashes=True)
    assert set(next(versions).load(into)) == {"w", "frozen", "n"}
    assert is_same(into, state_of(3))


def test_a_version_in_use_outlives_its_deletion(run: aiockpt.SyncCheckpointManager, versions: Any) -> None:
    into = target()
    run.save(1, state_of(1), hashes=True)
    version = next(versions)
    shutil.rmtree(run.path_of(1))
    version.load(into)
    assert is_same(into, state_of(1))


def test_a_manager_keeps_the_version_in_use(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, keep=aiockpt.KeepLatest(1)) as run:
        run.save(1, state_of(1))
        with aiockpt.watch_sync(run, poll_s=POLL_S) as watch:
            for version in watch:
                if version.step == 3:
                    break
                for step in (2, 3):
                    run.save(step, state_of(step))
                assert Path(version.path).exists()
        run.save(4, state_of(4))
    assert [info.step for info in aiockpt.SyncCheckpointManager(tmp_path, read_only=True).infos()] == [4]


@pytest.mark.parametrize("nbytes", [1, 5000, 1 << 20])
def test_buckets(run: aiockpt.SyncCheckpointManager, versions: Any, nbytes: int) -> None:
    state = {**state_of(1), "half": torch.ones(2048, dtype=torch.bfloat16)}
    run.save(1, state)
    buckets = list(next(versions).buckets(nbytes))
    tensors = [pair for bucket in buckets for pair in bucket]
    assert is_same(dict(tensors), {key: state[key] for key in ("w", "frozen", "half")})
    assert all(len(each) == 1 or sum(t.nbytes for _, t in each) <= nbytes for each in buckets)
    assert len(buckets) == (1 if nbytes == 1 << 20 else 3)


def test_until_ends_a_watch_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    assert list(aiockpt.watch_sync(tmp_path / "none", poll_s=POLL_S, until=lambda: next(asked))) == []


@pytest.mark.parametrize(
    ("options", "error"), [({"poll_s": 0}, ValueError), ({"until": 3}, TypeError), ({"names": "x"}, ValueError)]
)
def test_wrong_options_are_refused_at_the_call(tmp_path: Path, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        aiockpt.watch_sync(tmp_path, **options)


def test_random_histories(tmp_path: Path) -> None:
    """Whatever is saved, replaced and deleted, each version is the newest step, and the state has its values."""
    drawn = random.Random(7)
    with aiockpt.SyncCheckpointManager(tmp_path) as run, aiockpt.watch_sync(tmp_path, poll_s=POLL_S) as watch:
        versions, into, steps, seed = iter(watch), target(), {}, 0
        for number in range(40):
            newest, seed = max(steps, default=0), seed + 1
            if len(steps) > 1 and drawn.random() < 0.3:
                shutil.rmtree(run.path_of(newest))
                del steps[newest]
            elif steps and drawn.random() < 0.3:
                steps[newest] = state_of(seed)
                run.save(newest, steps[newest], hashes=drawn.random() < 0.7, overwrite=True)
            else:
                steps[newest + 1] = state_of(drawn.choice([seed, number // 4]))
                run.save(newest + 1, steps[newest + 1], hashes=drawn.random() < 0.7)
            if drawn.random() < 0.7 or number == 39:
                version = next(versions)
                version.load(into)
                assert version.step == max(steps)
                assert is_same(into, steps[version.step])
            if drawn.random() < 0.2:
                into["frozen"].add_(1)
        versions.close()  # type: ignore[attr-defined]


WRITER = textwrap.dedent(
    """
    import sys, torch, aiockpt
    begin = int(sys.argv[2])
    with aiockpt.SyncCheckpointManager(sys.argv[1], keep=aiockpt.KeepLatest(2)) as run:
        for step in range(begin, begin + 200):
            run.save(step, {"w": torch.full((1000,), float(step)), "frozen": torch.arange(1000.0), "n": step},
                     hashes=True)
            print(step, flush=True)
    """
)


@pytest.mark.kills
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Each version is whole, while another process writes, deletes, is killed, and goes on."""
    into, seen = target(), 0
    with aiockpt.watch_sync(tmp_path / "run", poll_s=POLL_S) as watch:
        versions = iter(watch)
        for begin in (1, 1001):
            command = [sys.executable, "-c", WRITER, str(tmp_path / "run"), str(begin)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                try:
                    for _ in range(3):
                        version = next(versions)
                        version.load(into)
                        assert is_same(into, state_of(version.step))
                        assert version.step > seen
                        seen = version.step
                finally:
                    writer.send_signal(signal.SIGKILL)
        versions.close()  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "run")  # with the directories that the dead ones have left


LEFT_OPEN = textwrap.dedent(
    """
    import sys, aiockpt
    versions = iter(aiockpt.watch_sync(sys.argv[1]))
    print(next(versions).step)
    """
)


def test_a_program_ends_whose_iterator_is_left_open(run: aiockpt.SyncCheckpointManager) -> None:
    """The interpreter closes it when no other thread runs any more."""
    run.save(1, state_of(1))
    command = [sys.executable, "-c", LEFT_OPEN, str(run.directory)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout == "1\n"


# --- asyncio ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_follow_a_task_that_saves(tmp_path: Path) -> None:
    async def train() -> None:
        async with aiockpt.CheckpointManager(tmp_path, keep=aiockpt.KeepLatest(2)) as run:
            for step in range(1, 11):
                await (await run.save(step, state_of(step), hashes=True)).written

    training, into, steps = asyncio.create_task(train()), target(), []
    async with aiockpt.watch(tmp_path, poll_s=POLL_S) as versions:
        async for version in versions:
            await version.load(into)
            assert is_same(into, state_of(version.step))
            tensors = [pair async for bucket in version.buckets(4000) for pair in bucket]
            assert torch.equal(dict(tensors)["w"], into["w"])
            steps.append(version.step)
            if version.step == 10:
                break
    await training
    assert steps == sorted(set(steps))


@pytest.mark.asyncio
async def test_cancelled_at_every_suspension(tmp_path: Path) -> None:
    """A cancelled watch closes what it has, and a cancelled load has the next one read everything."""
    async with aiockpt.CheckpointManager(tmp_path) as run:
        await (await run.save(1, state_of(1), hashes=True)).written
    cancelled = 0
    for turns in range(60):
        into, done = target(), asyncio.Event()

        async def follow(into: dict[str, Any], done: asyncio.Event) -> None:
            async with aiockpt.watch(tmp_path, poll_s=POLL_S) as versions:
                async for version in versions:
                    await version.load(into)
                    done.set()

        task = asyncio.create_task(follow(into, done))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 59:
            await done.wait()
        cancelled += not done.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # A poll that was cancelled ends by itself, as it may hang.
    until(lambda: not any(thread.name.startswith("aiockpt-call") for thread in threading.enumerate()))
    assert cancelled
    assert is_same(into, state_of(1))


@pytest.mark.asyncio
async def test_a_cancelled_load_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    async with aiockpt.CheckpointManager(tmp_path) as run, aiockpt.watch(tmp_path, poll_s=POLL_S) as versions:
        iterator: AsyncIterator[aiockpt.Version] = aiter(versions)
        into = target()
        await (await run.save(1, state_of(1), hashes=True)).written
        version = await anext(iterator)
        await version.load(into)
        load = asyncio.create_task(version.load(into))
        await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert set(await version.load(into)) == {"w", "frozen", "n"}
        await iterator.aclose()  # type: ignore[attr-defined]
