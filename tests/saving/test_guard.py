"""Training while saves are staged: every checkpoint reported as written is a state between two steps."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import StepGuard
from aiockpt.core.threads import Workers
from aiockpt.engine.resources import EngineResources
from aiockpt.saving import job as save_job
from aiockpt.snapshot.capture import capture_state
from aiockpt.staging.base import Stager
from aiockpt.staging.cpu import copy_pieces
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.states import assert_same, large_state

CHUNK = 64 << 10
STEPS = 4


class Trainer:
    """A small model with statistics that forward changes, and its optimizer."""

    def __init__(self, **options: Any) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(128, 160), torch.nn.BatchNorm1d(160), torch.nn.ReLU(), torch.nn.Linear(160, 128)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.step_number = 0
        self.apply: Callable[[], Any] = self.optimizer.step

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 128)).square().mean().backward()

    def step(self) -> None:
        self.apply()
        self.step_number += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "step": self.step_number}

    def copied(self) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self.state())


def _train(ckpt: aiockpt.SyncCheckpointer, trainer: Trainer, directory: Path, before_step: Callable[[], Any]):
    """Save before every step; return the states at those times, and the saves."""
    states, saves = [], []
    for number in range(STEPS):
        trainer.forward_backward()
        states.append(trainer.copied())
        while True:
            try:
                saves.append(ckpt.submit(trainer.state(), directory / str(number)))
                break
            except aiockpt.TornSnapshotError:  # of an earlier save that was never awaited
                continue
        trainer.model(torch.randn(4, 128))  # changes the BatchNorm statistics
        before_step()
        trainer.step()
    return states, saves


def _check(ckpt: aiockpt.SyncCheckpointer, states: list[Any], saves: list[aiockpt.SaveHandle]) -> list[bool]:
    """Compare each published checkpoint with its state; return which saves succeeded."""
    succeeded = []
    for state, save in zip(states, saves, strict=True):
        error = save.written.exception(60)
        succeeded.append(error is None)
        if error is None:
            assert_same(state, ckpt.load(save.path))
        else:
            assert isinstance(error, aiockpt.TornSnapshotError)
            assert not Path(save.path).exists()
    return succeeded


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("how", ["fence", "guard", "nothing"])
def test_every_checkpoint_is_a_state_between_two_steps(how, options, tmp_path: Path) -> None:
    trainer = Trainer(**options)
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, fsync=False) as ckpt:
        if how == "guard":
            with ckpt.guard(trainer.optimizer):
                states, saves = _train(ckpt, trainer, tmp_path, lambda: None)
        else:
            states, saves = _train(ckpt, trainer, tmp_path, ckpt.fence if how == "fence" else lambda: None)
        succeeded = _check(ckpt, states, saves)
    if how != "nothing":
        assert succeeded == [True] * STEPS


def test_a_step_without_a_fence_tears_a_pending_save(tmp_path: Path) -> None:
    trainer = Trainer(foreach=True)
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        trainer.forward_backward()
        save = ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        trainer.step()
        storage.open("create")
        with pytest.raises(aiockpt.TornSnapshotError, match=r"model\.0\.weight"):
            ckpt.fence(timeout=60)
        with pytest.raises(aiockpt.TornSnapshotError):
            save.written.result(60)
        ckpt.fence()  # with nothing in flight


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_a_step_counts_from_its_beginning(options, tmp_path: Path) -> None:
    """A copy that ends during a step is torn, even before torch has incremented a version counter."""
    trainer = Trainer(**options)
    trainer.forward_backward()
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        save = ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        errors = []

        def within_the_step(*_) -> None:
            storage.open("create")
            errors.append(save.written.exception(60))

        trainer.optimizer.register_step_pre_hook(within_the_step)
        trainer.step()
        assert isinstance(errors[0], aiockpt.TornSnapshotError)


@pytest.mark.parametrize(
    "make",
    [torch.optim.SGD, lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.LBFGS(p, max_iter=3)],
    ids=["sgd", "fused", "lbfgs"],
)
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_step_with_a_closure_counts_from_the_end_of_the_closure(make, how: str, tmp_path: Path) -> None:
    """A closure may run forward and backward and wait for the copies: the step changes tensors only after it."""
    parameter = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = make([parameter])
    storage = GatedStorage(LocalStorage(), ["create"])
    held: list[aiockpt.SaveHandle] = []
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        good = ckpt.submit({"w": parameter}, tmp_path / "good")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            if not held:
                good.staged.result(60)
                held.append(ckpt.submit({"w": parameter}, tmp_path / "torn", storage=storage))
            return loss

        assert (optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)) == 200 * 200
        storage.open("create")
        good.written.result(60)
        with pytest.raises(aiockpt.TornSnapshotError, match="w changed"):
            held[0].written.result(60)
        assert torch.equal(ckpt.load(tmp_path / "good")["w"], torch.ones(200, 200))
        assert not torch.equal(parameter, torch.ones(200, 200))


def test_a_guarded_step_waits_after_its_closure(tmp_path: Path) -> None:
    trainer = Trainer(fused=True)
    trainer.forward_backward()
    trainer.step()
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt, ckpt.guard(trainer.optimizer):
        expected = trainer.copied()
        save = ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)

        def closure() -> None:
            trainer.forward_backward()
            storage.open("create")

        trainer.optimizer.step(closure)
        save.written.result(60)
        assert_same(expected, ckpt.load(tmp_path / "c"))


class Perturbing(torch.optim.SGD):
    """Changes its parameters before it evaluates the closure."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        closure()


def test_a_step_of_an_unknown_optimizer_counts_from_its_beginning_even_with_a_closure(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = Perturbing([parameter])
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt, ckpt.guard(optimizer):
        save = ckpt.submit({"w": parameter}, tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        step = threading.Thread(target=optimizer.step, args=[lambda: None])
        step.start()
        storage.open("create")
        step.join()
        save.written.result(60)
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], torch.ones(200, 200))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # used by the compiler itself
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python:RuntimeWarning")  # from the compiler, on 3.13.0
def test_compiled_steps_wait_each_time(tmp_path: Path) -> None:
    trainer = Trainer(fused=True)  # fused steps bump no version counter: only our hook counts them
    trainer.apply = torch.compile(lambda: trainer.optimizer.step(), backend="eager")
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, fsync=False) as ckpt:
        asked = []

        def jobs():
            asked.append(torch.compiler.is_compiling())
            return ckpt._engine.queue.staging()

        with StepGuard(trainer.optimizer, jobs, 60):
            states, saves = _train(ckpt, trainer, tmp_path, lambda: None)
            assert asked == [False] * STEPS
        assert _check(ckpt, states, saves) == [True] * STEPS
        trainer.step()
        assert len(asked) == STEPS
    torch.compiler.reset()


def test_a_step_waits_while_copies_are_held_up(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.forward_backward()
    expected = trainer.copied()
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        guard = ckpt.guard(trainer.optimizer)
        save = ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        step = threading.Thread(target=trainer.step)
        step.start()
        assert_same(expected, trainer.copied())
        storage.open("create")
        step.join()
        guard.remove()
        guard.remove()
        save.written.result(60)
        assert_same(expected, ckpt.load(tmp_path / "c"))
        assert trainer.step_number == 1


def test_a_snapshot_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.forward_backward()
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        with ckpt.guard(trainer.optimizer, timeout=0):
            # The steps do not change this tensor, so its version counter shows nothing:
            save = ckpt.submit({"w": torch.ones(100_000)}, tmp_path / "c", storage=storage)
            storage.reached["create"].result(60)
            trainer.step()
            trainer.step()
        with pytest.raises(aiockpt.TornSnapshotError, match=r"given up: .* timeout of guard"):
            save.staged.result(60)
        with pytest.raises(aiockpt.TornSnapshotError, match="given up"):
            save.written.result(60)
        storage.open("create")
        ckpt.save(trainer.state(), tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_failures_are_raised_by_the_handle_and_never_by_a_step(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.forward_backward()
    storage = FaultyStorage(LocalStorage(), "create", OSError("the disk is on fire"))
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt, ckpt.guard(trainer.optimizer):
        ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)
        trainer.step()
        torn = GatedStorage(LocalStorage(), ["create"])
        with pytest.raises(aiockpt.WriteError, match="on fire"):  # the save was never awaited, so a later one raises
            while True:
                ckpt.save({"x": torch.ones(1)}, tmp_path / "d", overwrite=True)
        save = ckpt.submit(large_state(2) | trainer.state(), tmp_path / "e", storage=torn)
        torn.reached["create"].result(60)
        with torch.no_grad():
            trainer.model[0].weight.zero_()
        torn.open("create")
        trainer.step()
        with pytest.raises(aiockpt.TornSnapshotError, match=r"model\.0\.weight"):
            save.written.result(60)


@pytest.mark.asyncio
async def test_a_guard_works_within_an_event_loop(tmp_path: Path) -> None:
    trainer = Trainer()
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK) as ckpt:
        trainer.forward_backward()
        expected = trainer.copied()
        with ckpt.guard(trainer.optimizer):
            save = ckpt.save(trainer.state(), tmp_path / "c")
            trainer.step()
        await save
        assert_same(expected, await ckpt.load(tmp_path / "c"))


def test_guarding_a_non_optimizer_is_refused() -> None:
    ckpt = aiockpt.SyncCheckpointer()
    with pytest.raises(TypeError, match=r"call fence\(\) before their steps"):
        ckpt.guard(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout"):
            ckpt.guard(optimizer, timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            ckpt.fence(timeout)
    with ckpt.guard(optimizer):
        optimizer.step()  # the checkpointer was never used


class LaggingStager(Stager):
    """Copies at issue, in the order of a stream, but reports completion only when its gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.error: Exception | None = None
        self._workers = Workers(1, "aiockpt-lagging")

    async def issue(self, fills, capture, layout):
        for chunk, pieces in fills:
            copy_pieces(pieces, chunk, capture, layout)
        return [self] * len(fills)

    async def wait(self) -> None:
        await self._workers.run(self.gate.wait, 60)

    def fence(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._workers.close()


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch):
    """Stage host tensors as those of an accelerator are staged."""
    stager = LaggingStager()
    monkeypatch.setattr(EngineResources, "stager_for", lambda self, device: self.stagers.setdefault(device, stager))
    yield stager
    stager.gate.set()


def _two() -> tuple[dict[str, torch.Tensor], list[torch.optim.Optimizer]]:
    """Return two parameters with their momentum buffers, and an optimizer for each."""
    parameters = [torch.nn.Parameter(torch.full((200, 200), float(number))) for number in range(2)]
    optimizers = [torch.optim.SGD([each], lr=1.0, momentum=0.9) for each in parameters]
    for each, optimizer in zip(parameters, optimizers, strict=True):
        each.grad = torch.ones_like(each)
        optimizer.step()
    momenta = [optimizer.state[each]["momentum_buffer"] for each, optimizer in zip(parameters, optimizers, strict=True)]
    return dict(zip(("a", "b", "a.m", "b.m"), (*parameters, *momenta), strict=True)), optimizers


@pytest.mark.parametrize("other", ["nothing", "guarded", "fenced", "step", "average"])
def test_a_guard_covers_only_its_own_optimizer(other, lagging, tmp_path: Path) -> None:
    state, (one, two) = _two()
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.guard(one):
        save = ckpt.submit(state, tmp_path / "c")
        one.step()
        if other == "guarded":
            with ckpt.guard(two):
                two.step()
        elif other == "fenced":
            ckpt.fence()
            two.step()
        elif other == "step":
            thread = threading.Thread(target=two.step)
            thread.start()
            thread.join()
        elif other == "average":
            state["b.m"].lerp_(state["a.m"], 0.5)
        one.step()
        lagging.gate.set()
        if other in ("step", "average"):
            with pytest.raises(aiockpt.TornSnapshotError, match=r"b\.m"):
                save.written.result(60)
        else:
            save.written.result(60)
            assert_same(expected, ckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("victim", ["guarded", "other", "early"])
def test_a_guard_exempts_only_the_tensors_of_its_optimizer(victim: str, lagging, tmp_path: Path) -> None:
    """The optimizer's tensors may change after the guarded step; an earlier change is still detected."""
    own, other = (torch.nn.Parameter(torch.full((200, 200), value)) for value in (1.0, 2.0))
    optimizer = torch.optim.SGD([own], lr=1.0)
    state = {"own": own, "other": other.detach()}
    expected = {name: value.detach().clone() for name, value in state.items()}
    own.grad = torch.ones_like(own)
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt, ckpt.guard(optimizer):
        save = ckpt.submit(state, tmp_path / "c")
        if victim == "early":
            save._job.consistency.issued.wait(60)
            own.data.mul_(3)
        optimizer.step()
        (other if victim == "other" else own).data.add_(1)
        lagging.gate.set()
        if victim == "guarded":
            save.written.result(60)
            assert_same(expected, ckpt.load(tmp_path / "c"))
            return
        with pytest.raises(aiockpt.TornSnapshotError, match="^other changed" if victim == "other" else "^own changed"):
            save.written.result(60)


def test_a_snapshot_can_be_given_up_until_it_is_copied(lagging, tmp_path: Path) -> None:
    state, (one, _) = _two()
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.guard(one):
        save = ckpt.submit(state, tmp_path / "c")
        ckpt.fence()
        lagging.error = RuntimeError("the device is gone")
        one.step()
        lagging.gate.set()
        with pytest.raises(aiockpt.TornSnapshotError, match=r"given up: .*the device is gone"):
            save.written.result(60)


def test_a_fence_can_not_be_captured(lagging, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(_two()[0], tmp_path / "c")
        with monkeypatch.context() as patch:
            patch.setattr(save_job, "is_capturing", lambda device: True)
            save._job.snapshot.events[torch.device("cpu")] = torch.device("cpu")  # any object does
            for fence in (ckpt.fence, save.fence):
                with pytest.raises(aiockpt.AiockptError, match="before the capture"):
                    fence()
            save._job.snapshot.events.clear()
        save.fence(math.inf)
        lagging.gate.set()
        save.written.result(60)


def test_a_fence_may_race_with_the_release_of_the_tensors() -> None:
    capture = capture_state({"w": torch.ones(300, 300)})

    class Releasing(list):
        def __len__(self) -> int:
            capture.release()
            return super().__len__()

    capture.tensors = Releasing(capture.tensors)
    assert capture.changed() == []
    assert capture.changed() == []


class Delegating(torch.optim.Optimizer):
    """Forwards steps, without the attributes that hooks need."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_guard_finds_the_wrapped_optimizer(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.forward_backward()
    trainer.optimizer.step()
    outer = Delegating(Delegating(trainer.optimizer))
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt, ckpt.guard(outer, timeout=0):
        save = ckpt.submit(trainer.state(), tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        outer.step()
        storage.open("create")
        with pytest.raises(aiockpt.TornSnapshotError, match="timeout of guard"):
            save.written.result(60)
        with pytest.raises(TypeError, match="steps of a Delegating call no hooks"):
            ckpt.guard(Delegating(None))


class Odd(torch.optim.SGD):
    """Keeps its state in other ways than torch's own optimizers."""

    broken = False

    @property
    def param_groups(self) -> Any:
        if self.broken:
            raise LookupError("no groups today")
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


@pytest.mark.parametrize("changed", ["tensor", "nested", "listed", "anything"])
def test_any_optimizer_state_is_counted_and_none_fails_the_step(changed, lagging, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = Odd([parameter])
    value = torch.ones(200, 200)
    optimizer.state[parameter] = {"tensor": value, "nested": {"x": {"y": value}}, "listed": {"old": [value]}}.get(
        changed
    )
    optimizer.broken = changed == "anything"
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit({"value": value}, tmp_path / "c")
        optimizer.step()
        lagging.gate.set()
        with pytest.raises(aiockpt.TornSnapshotError, match="a step of an optimizer" if optimizer.broken else "value"):
            save.written.result(60)


def _opcodes_of_a_step(count: int, ckpt: aiockpt.SyncCheckpointer, path: Path, lagging: LaggingStager) -> int:
    """Save parameters that each have an optimizer; return the opcodes of the package in the second guarded step."""
    parameters = [torch.nn.Parameter(torch.full((200, 200), float(number))) for number in range(count)]
    state = {f"w{number}": each for number, each in enumerate(parameters)}
    expected = {name: each.detach().clone() for name, each in state.items()}
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in parameters]
    for each in parameters:
        each.grad = torch.ones_like(each)
    executed = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal executed
        if not frame.f_globals.get("__name__", "").startswith("aiockpt."):
            return None
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    lagging.gate.clear()
    with contextlib.ExitStack() as guards:
        for each in optimizers:
            guards.enter_context(ckpt.guard(each))
        save = ckpt.submit(state, path)
        assert save._job.consistency.issued.wait(60)
        optimizers[0].step()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            optimizers[1].step()
        finally:
            sys.settrace(before)
        for each in optimizers[2:]:
            each.step()
        lagging.gate.set()
        save.written.result(60)
        assert_same(expected, ckpt.load(path))
    return executed


@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_a_guarded_step_looks_at_its_own_tensors_only(validate, lagging, tmp_path: Path) -> None:
    """With an optimizer for each of n parameters, n steps do not look n times at n tensors."""
    with aiockpt.SyncCheckpointer(validate=validate) as ckpt:
        few, many = (_opcodes_of_a_step(count, ckpt, tmp_path / str(count), lagging) for count in (4, 40))
    assert 0 < many <= few
