"""Saving the steps of a run and resuming from them."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import aiockpt
from tests.manager.runs import empty, is_untouched, names, path_of, state_of, step_in


@pytest.mark.asyncio
async def test_run_resumes_from_its_latest_step(anywhere: Path) -> None:
    folder = anywhere / "runs" / "a"
    async with aiockpt.CheckpointManager(folder, save=aiockpt.EverySteps(2)) as run:
        state = empty()
        assert await run.restore(state) is None
        assert is_untouched(state)
        assert await run.alatest() is None
        for step in range(6):
            if run.due(step):
                save = await run.save(step, state_of(step), metrics={"loss": 1 / (step + 1)}, metadata={"note": step})
                await save.staged
    assert names(folder) == ["step-00000002", "step-00000004"]
    async with aiockpt.CheckpointManager(folder) as run:
        state = empty()
        start = await run.restore(state)
        assert start == aiockpt.Restored(4, str(folder / "step-00000004"), {"loss": 0.2}, {"note": 4}, ())
        assert step_in(state) == 4
        again = await run.restore(state, step=2, discard_later=False)
        assert again is not None
        assert (again.step, step_in(state)) == (2, 2)
        assert await run.asteps() == [2, 4]
        latest = await run.alatest()
        assert latest is not None
        assert latest.step == 4


def test_sync_loop(anywhere: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere, keep=aiockpt.KeepLatest(2)) as run:
        assert run.restore(empty()) is None
        for step in (1, 2, 3):
            result = run.save(step, state_of(step), {"loss": step})
            assert result.path == str(path_of(anywhere, step))
        stage, write = run.submit(4, state_of(4))
        stage.result()
        write.result()
        run._retention.finished().result(60)  # a restore holds the steps that it may turn to
        state = empty()
        start = run.restore(state)
        assert start is not None
        assert (start.step, step_in(state)) == (4, 4)
        with run.open(4) as reader:
            assert reader.metadata["run"]["step"] == 4
    assert names(anywhere) == ["step-00000003", "step-00000004"]


@pytest.mark.asyncio
async def test_step_facts_are_stored_in_the_metadata(anywhere: Path) -> None:
    keep = [aiockpt.KeepLatest(3), aiockpt.KeepBest(1, "loss")]
    async with aiockpt.CheckpointManager(anywhere, keep=keep) as run:
        await (await run.save(7, state_of(7), metrics={"loss": torch.tensor(0.5)}, metadata={"mine": [1]}))
        async with run.open(7) as reader:
            facts = dict(reader.metadata["run"])
            assert facts.pop("time") == pytest.approx((await run.ainfos())[0].time)
            assert facts.pop("id") == (await run.ainfos())[0].run_id
            assert facts == {"step": 7, "metrics": {"loss": 0.5}}
            assert reader.metadata["mine"] == [1]


@pytest.mark.asyncio
async def test_best_step_is_found_and_restored(anywhere: Path) -> None:
    values = {1: 3.0, 2: math.nan, 3: 1.0, 4: 2.0, 5: None}
    async with aiockpt.CheckpointManager(anywhere, keep=aiockpt.KeepBest(9, "loss")) as run:
        with pytest.raises(ValueError, match="metric"):
            await aiockpt.CheckpointManager(anywhere, read_only=True).abest()
        for step, value in values.items():
            await (await run.save(step, state_of(step), {"acc": step} if value is None else {"loss": value}))
        best, worst, other = [await run.abest(*each) for each in (("loss",), ("loss", "max"), ("nothing",))]
        assert best is not None
        assert worst is not None
        assert (best.step, worst.step, other) == (3, 1, None)
        state = empty()
        start = await run.restore(state, step="best", discard_later=False)
        assert start is not None
        assert (start.step, step_in(state)) == (3, 3)
        start = await run.restore(state, step="best", metric="acc", mode="max")
        assert start is not None
        assert start.step == 5
        with pytest.raises(aiockpt.CheckpointNotFoundError, match="the metric 'nothing'; there are: acc, loss"):
            await run.restore(state, step="best", metric="nothing")


@pytest.mark.asyncio
async def test_metrics_may_be_numbers_of_any_type(anywhere: Path) -> None:
    metrics = {
        "int": 3,
        "float": 0.25,
        "tensor": torch.tensor(1.5, dtype=torch.float64),
        "numpy": np.float32(2.5),
        "one": torch.tensor(7),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "loss": torch.ones(3, requires_grad=True).sum(),
        "nan": float("nan"),
        "inf": float("-inf"),
    }
    async with aiockpt.CheckpointManager(anywhere) as run:
        await (await run.save(0, state_of(0), metrics))
        found = dict((await run.ainfos())[0].metrics)
    assert math.isnan(found.pop("nan"))
    assert found == {
        "int": 3.0,
        "float": 0.25,
        "tensor": 1.5,
        "numpy": 2.5,
        "one": 7.0,
        "half": 0.5,
        "loss": 3.0,
        "inf": -math.inf,
    }


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"step": -1}, ValueError, "at least 0"),
        ({"step": 1.0}, TypeError, "integer"),
        ({"step": True}, TypeError, "integer"),
        ({"step": "1"}, TypeError, "integer"),
        ({"metrics": {"loss": "low"}}, TypeError, "'loss'"),
        ({"metrics": {"loss": torch.ones(2)}}, TypeError, "'loss'"),
        ({"metrics": {"loss": 1j}}, TypeError, "'loss'"),
        ({"metrics": {"loss": 10**400}}, ValueError, "'loss'"),
        ({"metrics": {3: 1.0}}, TypeError, "name of a metric"),
        ({"metrics": [1.0]}, TypeError, "mapping"),
        ({"metadata": {"run": 1}}, ValueError, "'run'"),
        ({"metadata": {"x": object()}}, aiockpt.SaveError, "JSON"),
        ({"storage": object()}, ValueError, "storage"),
        ({"step": 5}, aiockpt.CheckpointExistsError, "step-00000005"),
    ],
)
@pytest.mark.asyncio
async def test_invalid_arguments_raise_at_the_call(tmp_path: Path, arguments: dict, kind: type, words: str) -> None:
    async with aiockpt.CheckpointManager(tmp_path) as run:
        await (await run.save(5, state_of(5)))
        with pytest.raises(kind, match=words):
            await run.save(**{"step": 6, "state_dict": state_of(6)} | arguments)
        await (await run.save(7, state_of(7)))
        await (await run.save(5, state_of(55), overwrite=True))
    assert names(tmp_path) == ["step-00000005", "step-00000007"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"keep": 3}, TypeError),
        ({"save": 100}, TypeError),
        ({"mode": "append"}, ValueError),
        ({"directory": "nowhere://bucket/run"}, aiockpt.AiockptError),
        ({"checkpointer": aiockpt.SyncCheckpointer()}, TypeError),
        ({"checkpointer": aiockpt.AsyncCheckpointer(), "io_threads": 2}, TypeError),
        ({"io_threads": 0}, ValueError),
        ({"nothing": 0}, TypeError),
    ],
)
def test_invalid_options_raise_in_the_constructor(tmp_path: Path, arguments: dict, kind: type) -> None:
    with pytest.raises(kind):
        aiockpt.CheckpointManager(**{"directory": tmp_path} | arguments)


@pytest.mark.asyncio
async def test_closing_the_manager_leaves_a_given_checkpointer_open(anywhere: Path) -> None:
    async with aiockpt.AsyncCheckpointer(io_threads=2) as ckpt:
        async with aiockpt.CheckpointManager(anywhere, checkpointer=ckpt, keep=aiockpt.KeepLatest(1)) as run:
            assert run.checkpointer is ckpt
            for step in (1, 2, 3):
                save = await run.save(step, state_of(step))
        assert save.written.done()  # or else another owner could take the lock first
        assert names(anywhere) == ["step-00000003"]
        await ckpt.save(state_of(4), anywhere / "final")


@pytest.mark.asyncio
async def test_options_of_the_checkpointer_and_of_save_are_passed_on(anywhere: Path) -> None:
    async with aiockpt.CheckpointManager(anywhere, io_threads=2, on_failure="warn", max_in_flight=2) as run:
        assert run.checkpointer._options.io_threads == 2
        await (await run.save(1, {"x": torch.ones(3)}, format="safetensors"))
        state = {"x": torch.zeros(3)}
        start = await run.restore(state)
    assert start is not None
    assert state["x"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.asyncio
async def test_manager_opens_at_its_first_use(tmp_path: Path) -> None:
    run = aiockpt.CheckpointManager(tmp_path / "new")
    assert run.steps() == []
    assert not (tmp_path / "new").exists()
    assert await run.restore(empty()) is None
    assert names(tmp_path / "new") == [".aiockpt.lock"]
    await run.save(1, state_of(1))
    await run.aclose()
    await run.aclose()
    assert names(tmp_path / "new") == ["step-00000001"]
    assert run.steps() == [1]
    with pytest.raises(aiockpt.CheckpointerClosedError):
        await run.save(2, state_of(2))


@pytest.mark.asyncio
async def test_manager_in_read_mode(anywhere: Path) -> None:
    async with aiockpt.CheckpointManager(anywhere) as owner:
        await (await owner.save(1, state_of(1)))
        async with aiockpt.CheckpointManager(anywhere, read_only=True) as run:
            state = empty()
            start = await run.restore(state)
            assert start is not None
            assert step_in(state) == 1
            with pytest.raises(aiockpt.SaveError, match="read_only=True"):
                await run.save(2, state_of(2))
    assert names(anywhere) == ["step-00000001"]


@pytest.mark.asyncio
async def test_a_run_that_is_not_there_is_not_read(anywhere: Path) -> None:
    """A wrong path is no run without steps: an evaluation would go on with the weights of a new model."""
    state, folder = empty(), anywhere / "misspelled"
    async with aiockpt.CheckpointManager(folder, read_only=True, keep=aiockpt.KeepBest(1, "loss")) as run:
        for step in ("latest", "best", 3):
            with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"no run at .*misspelled.*missing_ok=True"):
                await run.restore(state, step=step)  # type: ignore[arg-type]
    with aiockpt.SyncCheckpointManager(folder, read_only=True) as blocking:
        for look in (
            blocking.steps,
            blocking.infos,
            blocking.latest,
            lambda: blocking.best("loss"),
            lambda: blocking.restore(state),
        ):
            with pytest.raises(aiockpt.CheckpointNotFoundError, match="no run at"):
                look()
    with aiockpt.SyncCheckpointManager(folder, read_only=True, missing_ok=True) as waiting:
        assert (waiting.steps(), waiting.latest(), waiting.restore(state)) == ([], None, None)
    assert is_untouched(state)
    with aiockpt.SyncCheckpointManager(folder) as owner:
        owner.save(1, state_of(1))
        assert waiting.steps() == [1]


def test_a_reader_may_have_the_mirror_alone(anywhere: Path, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere / "there") as run:
        run.save(1, state_of(1))
    for there, found in (("there", 1), ("missing", None)):
        with aiockpt.SyncCheckpointManager(tmp_path / "none", mirror=anywhere / there, read_only=True) as reader:
            assert reader.steps() == []
            if found is None:
                with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"no run at .*none or .*missing"):
                    reader.restore(empty())
            else:
                start = reader.restore(empty())
                assert start is not None
                assert start.step == found
        assert not (tmp_path / "none").exists()


@pytest.mark.asyncio
async def test_looks_at_a_run_do_not_block_the_loop(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    async with aiockpt.CheckpointManager(anywhere, keep=aiockpt.KeepBest(2, "loss")) as run:
        for step in (1, 2):
            await (await run.save(step, state_of(step), {"loss": step}))
        steps = run._scanner._steps

        def slow() -> dict[int, str]:
            loop.call_soon_threadsafe(asked.set)
            assert answers.wait(60)
            return steps()

        monkeypatch.setattr(run._scanner, "_steps", slow)
        for look, expected in (
            (run.alatest, 2),
            (run.abest, 1),
            (run.asteps, [1, 2]),
            (run.ainfos, [1, 2]),
        ):
            looking = asyncio.ensure_future(look())
            await asked.wait()  # the loop runs while the storage is silent
            assert not looking.done()
            answers.set()
            found = await looking
            got = [getattr(each, "step", each) for each in found] if isinstance(found, tuple | list) else found.step
            assert got == expected
            asked.clear()
            answers.clear()


@pytest.mark.asyncio
async def test_looks_that_block_the_loop_are_warned_of_once(server_url: str, tmp_path: Path) -> None:
    url = f"{server_url}/{tmp_path.name}"
    for directory, warns in ((url, True), (tmp_path / "run", False)):
        async with aiockpt.CheckpointManager(directory) as run:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert (run.steps(), run.latest(), await run.asteps()) == ([], None, [])
            assert [str(each.message).partition(" until")[0] for each in caught] == (
                ["this blocks the event loop"] if warns else []
            )
            assert all(each.filename == __file__ for each in caught)
    with aiockpt.SyncCheckpointManager(url) as blocking:
        assert blocking.steps() == []


def test_a_second_manager_of_this_process_is_told_that_it_is_this_process(anywhere: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        run.save(1, state_of(1))
        with pytest.raises(aiockpt.RunLockedError, match="this very process: close the other manager") as caught:
            aiockpt.SyncCheckpointManager(anywhere).restore(empty())
        assert "end that" not in str(caught.value)


@pytest.mark.asyncio
async def test_close_raises_a_failure_that_was_not_awaited(anywhere: Path) -> None:
    from aiockpt.errors import SaveError

    def refuse(_: str) -> None:
        raise RuntimeError("refused")

    with pytest.raises(SaveError, match="refused"):
        async with aiockpt.CheckpointManager(anywhere) as run:
            await run.save(1, state_of(1), pre_commit=refuse)
    assert names(anywhere) == []
    with pytest.raises(KeyError) as caught:
        async with aiockpt.CheckpointManager(anywhere) as run:
            await run.save(1, state_of(1), pre_commit=refuse)
            raise KeyError("first")
    assert "closing the manager also failed" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_repr_and_html_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "a<b"
    keep = [aiockpt.KeepLatest(2), aiockpt.KeepBest(1, "lo<ss")]
    run = aiockpt.CheckpointManager(folder, keep=keep)
    assert repr(run) == f"<CheckpointManager {folder}: idle>"
    assert "<table>" in run._repr_html_()
    async with run:
        for step in range(1, 4):
            await (await run.save(step, {"x": torch.ones(3)}, metrics={"lo<ss": step / 3}))
        run.pin(2)
        (path_of(folder, 2) / ".metadata").unlink()
        shown = run._repr_html_()
        assert repr(run) == f"<CheckpointManager {folder}: open>"
    assert repr(run) == f"<CheckpointManager {folder}: closed>"
    assert repr(aiockpt.SyncCheckpointManager(folder, read_only=True)).endswith("idle, reading only>")
    for words in (
        "a&lt;b: open",
        "<th>lo&lt;ss</th>",
        "<td>0.333333</td>",
        "KeepBest(1, &#x27;lo&lt;ss&#x27;)",
        "a pin",
    ):
        assert words in shown, shown
    assert "damaged: it lacks its file .metadata" in shown
    assert "a<b" not in shown


class KeepOdd(aiockpt.KeepPolicy):
    def select(self, infos, now):
        return {info.step: ["it is odd"] for info in infos if info.step % 2}


class Thirds(aiockpt.SavePolicy):
    def is_due(self, facts: aiockpt.StepFacts) -> bool:
        return facts.step % 3 == 0 and facts.previous is not None


def test_custom_policies(anywhere: Path) -> None:
    policy = Thirds() | aiockpt.EverySteps(5)
    with aiockpt.SyncCheckpointManager(anywhere, keep=KeepOdd() | aiockpt.KeepBest(1, "loss"), save=policy) as run:
        for step in range(11):
            if run.due(step):
                run.save(step, {"x": torch.ones(2)}, {"loss": abs(step - 6)})
        assert "it is odd" in run._repr_html_()
    assert names(anywhere) == ["step-00000003", "step-00000005", "step-00000006", "step-00000009", "step-00000010"]
