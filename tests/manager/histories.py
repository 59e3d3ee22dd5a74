"""Random histories of a run, compared with a model of its directory."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiockpt
from tests.manager.faulty import Keep, Stored, open_run, save_and_be_killed
from tests.manager.runs import empty, flip, is_untouched, names, path_of, state_of, step_in, truncate, unfinish
from tests.places import ServerPath, left_in, remove
from tests.ranks.world import _context

# --- the model ------------------------------------------------------------------------------------------------

KEEPS = st.one_of(
    st.builds(Keep, latest=st.integers(1, 3)),
    st.builds(Keep, latest=st.integers(0, 2), every=st.sampled_from([0, 2, 3]), best=st.integers(0, 2)),
    st.just(Keep()),  # keeps protected steps only
    st.builds(Keep, both=st.tuples(st.integers(1, 4), st.integers(2, 3)), best=st.integers(0, 1)),
    st.just(Keep(all=True)),
)


@dataclass
class Model:
    """The expected contents of the directory."""

    steps: dict[int, Stored] = field(default_factory=dict)
    keep: Keep = field(default_factory=Keep)
    pins: set[int] = field(default_factory=set)
    last: int | None = None  # the step last written or restored by the open manager
    asides: Counter[int] = field(default_factory=Counter)

    def protected(self) -> set[int]:
        complete = {step: each.loss for step, each in self.steps.items() if each.looks_complete}
        newest = {max(complete)} if complete else set()
        return self.keep.kept(complete) | newest | self.pins | ({self.last} - {None})  # type: ignore[operator]

    def surplus(self) -> list[int]:
        keeps = self.protected()
        return sorted(step for step, each in self.steps.items() if each.looks_complete and step not in keeps)

    def written(self, step: int, stored: Stored, *, stays: int | None = None) -> None:
        """Record an announced save and the deletions after it, of which number ``stays`` failed."""
        self.steps[step] = stored
        self.last = step
        for number, each in enumerate(self.surplus(), 1):
            if number != stays:
                del self.steps[each]

    def good(self) -> set[int]:
        return {step for step, each in self.steps.items() if not each.harm}

    def ranked(self) -> list[int]:
        valued = {s: e.loss for s, e in self.steps.items() if e.looks_complete and e.loss is not None}
        return sorted(valued, key=lambda step: (valued[step], -step))

    def set_aside(self, steps: list[int]) -> None:
        for step in steps:
            del self.steps[step]
            self.asides[step] += 1


# --- the machine ------------------------------------------------------------------------------------------------

LOSSES = st.one_of(st.none(), st.integers(0, 5).map(float))
STEPS = st.sampled_from(["begin", "create", "write", "finish", "commit"])
HARMS: dict[str, Callable[[Path, int], None]] = {
    "flip": flip,
    "truncate": truncate,
    "unfinish": unfinish,
    "delete": lambda folder, step: remove(path_of(folder, step)),
}


class Histories(RuleBasedStateMachine):
    """A run under random saves, faults, kills, damage and restarts."""

    def __init__(self, folder: ServerPath | None = None) -> None:
        super().__init__()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="history-"))
        # A commit object has the sizes that were written, and without it nothing is there.
        self.harms = {"flip", "delete"} if folder else set(HARMS)
        self.model = Model()
        self.run: aiockpt.SyncCheckpointManager | None = None
        self.versions = 0
        self.has_killed = False
        # Not the manager's.
        self.others = set() if folder else {"step-7", "final", "step-00000001.bak", "step-000000001"}
        for name in self.others:
            (self.folder / name).mkdir()

    def teardown(self) -> None:
        self.close()
        self.open(Keep(all=True))  # a last owner removes the leftovers of killed processes
        self.restores("latest", "auto")
        self.close()
        assert self.leftovers() == set()
        remove(self.folder)

    def leftovers(self) -> set[str]:
        if isinstance(self.folder, ServerPath):
            return {key for key in left_in(str(self.folder)) if not key.endswith("/.lease")}
        return {name for name in names(self.folder) if name.startswith(".aiockpt-")}

    def fresh(self, loss: float | None) -> Stored:
        self.versions += 1
        return Stored(self.versions, loss)

    # --- managers

    @initialize(keep=KEEPS)
    def begins(self, keep: Keep) -> None:
        self.open(keep)

    @rule(keep=KEEPS)
    def restarts(self, keep: Keep) -> None:
        self.close()
        self.open(keep)
        self.check_other_managers()

    def open(self, keep: Keep) -> None:
        self.model.keep, self.model.pins, self.model.last = keep, set(), None
        self.run, self.saving, self.deleting = open_run(str(self.folder), keep, drain_timeout=60)
        assert self.leftovers() == set(), "opening the run removes the leftovers of killed processes"

    def close(self) -> None:
        assert self.run is not None
        self.run.close()
        self.run = None
        assert not (self.folder / ".aiockpt.lock").exists()

    def check_other_managers(self) -> None:
        """Check that a second writer is refused, and that a reader restores as the owner would but renames nothing."""
        with pytest.raises(aiockpt.RunLockedError, match=f"process {os.getpid()} on host"):
            aiockpt.SyncCheckpointManager(self.folder).__enter__()
        with aiockpt.SyncCheckpointManager(self.folder, read_only=True) as reader:
            self.check_infos(reader)
            self.restores("latest", "auto", reader)

    # --- saves

    def next_step(self, gap: int) -> int:
        """Return an unused step number: after the latest, or, for a gap below 1, before it, as after going back."""
        latest = max([*self.model.steps, 0])
        if gap < 1:
            return next((step for step in range(latest + gap, 0, -1) if step not in self.model.steps), latest + 1)
        return latest + gap

    def begin_save(self, step: int, stored: Stored, **options: Any) -> aiockpt.SaveHandle:
        assert self.run is not None
        metrics = {} if stored.loss is None else {"loss": stored.loss}
        return self.run.submit(step, state_of(stored.version), metrics, **options)

    def settle(self) -> None:
        assert self.run is not None
        self.run._retention.finished().result()
        self.saving.arm("")
        self.deleting.arm("")

    @rule(gap=st.integers(-1, 3), loss=LOSSES)
    def saves(self, gap: int, loss: float | None) -> None:
        step, stored = self.next_step(gap), self.fresh(loss)
        self.begin_save(step, stored).written.result()
        self.model.written(step, stored)
        self.settle()

    # Of what must be among the latest, less stays the more saves a deletion finds.
    @precondition(lambda self: not self.model.keep.both)
    @rule(gap=st.integers(1, 2), losses=st.lists(LOSSES, min_size=2, max_size=4))
    def saves_many(self, gap: int, losses: list[float | None]) -> None:
        """Begin several saves before the first is written."""
        begun = []
        for number, loss in enumerate(losses):
            step, stored = self.next_step(1) + gap * number, self.fresh(loss)
            begun.append((step, stored, self.begin_save(step, stored)))
        for step, stored, handle in begun:
            handle.written.result()
            self.model.written(step, stored)
        self.settle()

    @rule(loss=LOSSES, nth=st.integers(1, 2))
    def saves_while_a_deletion_fails(self, loss: float | None, nth: int) -> None:
        self.deleting.arm("delete", nth)
        step, stored = self.next_step(1), self.fresh(loss)
        self.begin_save(step, stored).written.result()
        self.model.written(step, stored, stays=nth)
        self.settle()

    @rule(where=STEPS, nth=st.integers(1, 3), data=st.data())
    def fails(self, where: str, nth: int, data: st.DataObject) -> None:
        step, overwrite = self.a_step(data)
        self.saving.arm(where, nth)
        stored = self.fresh(1.0)
        self.ends(step, stored, self.begin_save(step, stored, overwrite=overwrite))

    def a_step(self, data: st.DataObject) -> tuple[int, bool]:
        """Draw a new step, or one to overwrite."""
        old = [step for step, each in self.model.steps.items() if each.looks_complete]
        if old and data.draw(st.booleans(), "overwrite"):
            return data.draw(st.sampled_from(sorted(old)), "step"), True
        return self.next_step(1), False

    def ends(self, step: int, stored: Stored, handle: aiockpt.SaveHandle) -> None:
        """Update the model if the save was announced, whatever fault was injected."""
        try:
            handle.written.result()
        except aiockpt.SaveError as exc:
            note(f"step {step} failed: {exc}")
        else:
            self.model.written(step, stored)
        self.settle()

    @rule(where=st.sampled_from(["pre_commit", "post_commit"]), data=st.data())
    def hook_fails(self, where: str, data: st.DataObject) -> None:
        def hook(_: str) -> None:
            raise RuntimeError("not today")

        step, overwrite = self.a_step(data)
        stored = self.fresh(2.0)
        self.ends(step, stored, self.begin_save(step, stored, overwrite=overwrite, **{where: hook}))
        assert (self.model.steps.get(step) == stored) == (where == "post_commit")

    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        step, overwrite = self.a_step(data)
        stored = self.fresh(0.0)
        handle = self.begin_save(step, stored, overwrite=overwrite)
        cancelled = handle.cancel().result()
        self.ends(step, stored, handle)
        assert cancelled == (self.model.steps.get(step) != stored)

    @precondition(lambda self: not self.has_killed and self.versions > 5)
    @rule(
        keep=KEEPS,
        losses=st.lists(LOSSES, min_size=1, max_size=3),
        where=st.tuples(st.sampled_from(["begin", "create", "write", "finish", "commit", "delete"]), st.integers(1, 8)),
    )
    def a_process_is_killed(self, keep: Keep, losses: list[float | None], where: tuple[str, int]) -> None:
        self.has_killed = True  # once per history: a process costs as much as all the rest
        self.close()
        model = self.model
        model.keep, model.pins, model.last = keep, set(), None
        saves = [(self.next_step(1 + number), self.fresh(loss)) for number, loss in enumerate(losses)]
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=save_and_be_killed, args=(theirs, str(self.folder), keep, saves, where))
        process.start()
        theirs.close()
        heard: dict[int, tuple[Stored, str]] = {}
        with contextlib.suppress(EOFError):
            while True:
                step, stored, what = ours.recv()
                heard[step] = stored, what
        ours.close()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        process.close()
        for step, (stored, what) in heard.items():
            if what == "begun" and not path_of(self.folder, step).exists():
                continue
            before = dict(model.steps)
            model.written(step, stored)
            if what != "cleared":  # steps that are no longer kept may not be deleted yet
                there = {each for each in before if path_of(self.folder, each).exists()}
                model.steps |= {each: before[each] for each in there}
        self.open(keep)

    # --- restores

    @rule(
        choice=st.sampled_from(["latest", "latest", "best", "one"]),
        verify=st.sampled_from(["auto", "before"]),
        data=st.data(),
    )
    def restores_one(self, choice: str, verify: str, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([*sorted(self.model.steps), 9999]), "step") if choice == "one" else choice
        self.restores(one, verify)

    def restores(self, choice: Any, verify: Any, reader: aiockpt.SyncCheckpointManager | None = None) -> None:
        """Restore, and check that the result is the first undamaged candidate, as it was announced."""
        model, state = self.model, empty()
        candidates = (
            sorted(model.steps, reverse=True)
            if choice == "latest"
            else model.ranked()
            if choice == "best"
            else [step for step in model.steps if step == choice]
        )
        good = next((step for step in candidates if not model.steps[step].harm), None)
        run = self.run if reader is None else reader
        assert run is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", aiockpt.DamagedCheckpointWarning)
            try:
                start = run.restore(
                    state, choice, metric="loss" if choice == "best" else None, verify_when=verify, discard_later=False
                )
            except aiockpt.CheckpointNotFoundError:
                assert not candidates
                assert choice != "latest"
                start = None
            except aiockpt.CorruptCheckpointError:
                assert candidates
                assert good is None
                assert verify == "auto" or is_untouched(state)
                return
        if start is None:
            assert candidates == []
            assert is_untouched(state)
            return
        assert start.step == good
        assert step_in(state) == model.steps[start.step].version
        assert start.metrics == ({} if (loss := model.steps[start.step].loss) is None else {"loss": loss})
        skipped = [] if isinstance(choice, int) else candidates[: candidates.index(start.step)]
        assert [each.step for each in start.skipped] == skipped
        if reader is None:
            model.set_aside(skipped)
            model.last = start.step

    # --- pins and damage

    @precondition(lambda self: self.model.steps)
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model.steps)))
        assert self.run is not None
        (self.run.unpin if step in self.model.pins else self.run.pin)(step)
        self.model.pins ^= {step}

    @precondition(lambda self: self.model.good())
    @rule(data=st.data())
    def is_harmed(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(self.harms)), "kind")
        step = data.draw(st.sampled_from(sorted(self.model.good())))
        HARMS[kind](self.folder, step)
        if kind == "delete":
            del self.model.steps[step]
        else:
            self.model.steps[step] = replace(self.model.steps[step], harm=kind)

    # --- invariants

    @invariant()
    def directory_matches_the_model(self) -> None:
        if not hasattr(self, "saving"):
            return
        there = {name for name in names(self.folder) if not name.startswith(".aiockpt")}
        aside = {
            f"step-{step:08d}.damaged{'' if not number else f'-{number}'}"
            for step, count in self.model.asides.items()
            for number in range(count)
        }
        expected = {path_of(self.folder, step).name for step in self.model.steps} | aside | self.others
        assert there == expected, f"too many: {there - expected}, missing: {expected - there}, {self.model}"
        assert self.run is not None
        self.check_infos(self.run)

    def check_infos(self, run: aiockpt.SyncCheckpointManager) -> None:
        infos = {info.step: info for info in run.infos()}
        assert list(infos) == sorted(self.model.steps)
        for step, each in self.model.steps.items():
            states = {"truncate": "damaged", "unfinish": "unfinished"}
            assert infos[step].state == states.get(each.harm, "complete")
            if each.looks_complete:
                assert infos[step].metrics == ({} if each.loss is None else {"loss": each.loss})
