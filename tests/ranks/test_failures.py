"""A save that fails on one rank fails on all with the same message and leaves nothing; the next save works."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.storage import WrapperStorage
from tests.places import ServerPath, left_in
from tests.ranks import failing
from tests.ranks.failing import Ended
from tests.ranks.world import Rendezvous, World
from tests.states import assert_same
from tests.storage.memory_storage import MemoryStorage


@pytest.fixture(scope="module", params=["world2-1", "world4-0", pytest.param("world4-2", marks=pytest.mark.full)])
def place(request: pytest.FixtureRequest) -> tuple[World, int]:
    """Return a world and the rank that fails in it."""
    name, failing_rank = request.param.split("-")
    return request.getfixturevalue(name), int(failing_rank)


FEW = pytest.mark.parametrize("place", ["world2-0", "world4-2"], indirect=True)
"""Places for tests that do not depend on the size of the world."""
OTHERS = pytest.mark.parametrize("place", ["world2-1", "world4-2"], indirect=True)
"""Places where a rank other than 0 fails."""
LEADERS = pytest.mark.parametrize("place", ["world4-0"], indirect=True)


def check_next(folder: Path, size: int, published: dict[str, int] | None = None) -> None:
    """Check that the folder has the checkpoints with these seeds, the next one, and nothing else."""
    expected = {"next": 2, **(published or {})}
    assert {entry.name for entry in folder.iterdir()} == set(expected)
    with aiockpt.SyncCheckpointer() as ckpt:
        for name, seed in expected.items():
            assert_same(failing.whole_state(size, seed), ckpt.load(folder / name))


def same_error(ends: list[Ended], kind: str) -> str:
    """Check that all ranks got the same error, and return its text."""
    errors = [end.written for end in ends]
    assert all(error is not None for error in errors), ends
    assert {error.kind for error in errors if error} == {kind}
    (text,) = {error.text for error in errors if error}
    for end in ends:  # a rank that was not staged yet has the same error there
        assert end.staged is None or end.staged.text == text
    return text


# --- at the call ------------------------------------------------------------------------------------

AT_THE_CALL = [
    ("unpicklable", "SaveError", "bad is a builtins.list that can't be pickled: I stay here"),
    ("meta", "SaveError", "bad is on the meta device"),
    ("metadata", "SaveError", "metadata['loss'] is a Tensor"),
    ("format", "ValueError", "format is 'pickle'"),
]


def check_refused(ends: list[Ended], rank: int, kind: str, message: str) -> None:
    """Check that the call raised on one rank, and that the saves of the others failed with its error."""
    call = ends[rank].call
    assert call is not None
    assert call.kind == kind
    assert call.text.startswith(message)
    text = same_error([end for other, end in enumerate(ends) if other != rank], "SaveError")
    assert text == f"rank {rank}: " + ("" if kind == "SaveError" else f"{kind}: ") + call.text
    assert all(end.call is None for other, end in enumerate(ends) if other != rank)


@pytest.mark.parametrize(("wrong", "kind", "message"), AT_THE_CALL, ids=lambda value: value if " " not in value else "")
def test_a_call_that_one_rank_refuses_fails_on_all(
    place: tuple[World, int], anywhere: Path, wrong: str, kind: str, message: str
) -> None:
    world, rank = place
    check_refused(world.results(failing.save_with, anywhere, wrong, rank), rank, kind, message)
    check_next(anywhere, world.size)


@pytest.mark.parametrize("place", ["world2-1"], indirect=True)
def test_partial_sums_on_one_rank(place: tuple[World, int], anywhere: Path) -> None:
    world, rank = place
    ends = world.results(failing.save_with, anywhere, "partial", rank)
    check_refused(ends, rank, "SaveError", "bad is a DTensor of partial values")
    check_next(anywhere, world.size)


@FEW
def test_an_invalid_path_on_one_rank(place: tuple[World, int], anywhere: Path) -> None:
    world, rank = place
    ends = world.results(failing.save_with, anywhere, "no path", rank)
    assert ends[rank].call is not None
    assert ends[rank].call.kind == "TypeError"
    told = [end.written for other, end in enumerate(ends) if other != rank]
    assert len({error.text for error in told}) == 1
    assert f"rank {rank}" in told[0].text
    check_next(anywhere, world.size)


def test_a_path_that_exists(world4: World, tmp_path: Path) -> None:
    world4.results(failing.save_well, tmp_path / "c", 3)
    for rank, end in enumerate(world4.results(failing.save_on_taken, tmp_path)):
        assert end.call is not None, rank
        assert end.call.kind == "CheckpointExistsError"
    check_next(tmp_path, 4, {"c": 3})


@pytest.mark.parametrize("seeing", [0, 2])
def test_a_failure_that_only_one_rank_retrieved(world4: World, anywhere: Path, seeing: int) -> None:
    outcomes = world4.results(failing.fail_unseen, anywhere, seeing)
    text = outcomes[seeing][1]
    assert text.startswith("rank 3: write __3_0.distcp: [Errno 28] No space left")
    for rank, (end, _) in enumerate(outcomes):
        error = end.error
        assert error is not None
        if rank == seeing:  # it retrieved the first error, so the second call works and its save fails
            assert end.call is None
            assert text in error.text
        else:
            assert end.call is not None
            assert error.text == text
    check_next(anywhere, 4)


def test_a_storage_for_one_process_is_refused(world2: World, tmp_path: Path) -> None:
    """The call fails; if a wrapper hides the kind of the storage, the save fails before it writes anything."""
    said = "takes the files of one process only: save with process_group=None and writer='thread'"
    for end in world2.results(failing.save_with, tmp_path, "", -1, {"storage": MemoryStorage()}):
        assert end.call is not None
        assert end.call.kind == "SaveError"
        assert end.call.text.startswith(f"MemoryStorage {said}")
    check_next(tmp_path, 2)
    (tmp_path / "wrapped").mkdir()
    wrapped = WrapperStorage(MemoryStorage())
    ends = world2.results(failing.save_with, tmp_path / "wrapped", "", -1, {"storage": wrapped})
    assert same_error(ends, "SaveError").startswith(f"rank 0: _MemoryTransaction {said}")
    check_next(tmp_path / "wrapped", 2)


# --- ranks that contradict each other ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ("shape", "SaveError", "model.both is a torch.float32 tensor of (4001"),
        ("dtype", "SaveError", "model.both is a torch.float"),
        ("object", "SaveError", "model.both is a"),
        ("left out", "SaveError", "cut: the ranks have"),
        ("other path", "CoordinationError", "is at the save of"),
        ("overwrite", "SaveError", "all ranks must pass the same"),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
@FEW
def test_ranks_that_contradict_each_other(
    place: tuple[World, int], anywhere: Path, wrong: str, kind: str, message: str
) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, anywhere, wrong, rank), kind)
    assert message in text
    assert wrong == "left out" or f"rank {rank or 1}" in text  # the rank that differs from rank 0
    check_next(anywhere, world.size)


# --- storages ---------------------------------------------------------------------------------------


@pytest.mark.main
@pytest.mark.parametrize("step", ["create", "write", "finish", "commit"])
def test_a_fault_of_the_storage_of_one_rank(place: tuple[World, int], anywhere: Path, step: str) -> None:
    world, rank = place
    ends = world.results(failing.save_with, anywhere, step, rank)
    text = same_error(ends, "CommitError" if step == "commit" else "WriteError")
    assert text.startswith(f"rank {rank}: {step} ")
    assert text.endswith("[Errno 28] No space left on device")
    assert ends[rank].written.cause == text.replace(f"rank {rank}: ", f"{ends[rank].written.kind}: ")
    check_next(anywhere, world.size)


@pytest.mark.parametrize("rank", [0, 7])
def test_a_fault_in_a_larger_world(world8: World, anywhere: Path, rank: int) -> None:
    text = same_error(world8.results(failing.save_with, anywhere, "write", rank), "WriteError")
    assert text == f"rank {rank}: write __{rank}_0.distcp: [Errno 28] No space left on device"
    check_next(anywhere, 8)


@LEADERS
@pytest.mark.parametrize(
    "wrong",
    [
        "begin",
        *(f"{step} {name}" for step in ("create", "write", "finish") for name in (".metadata", ".aiockpt.json")),
    ],
)
def test_a_fault_in_a_file_that_rank_0_alone_writes(place: tuple[World, int], anywhere: Path, wrong: str) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, anywhere, wrong, rank), "WriteError")
    assert text.startswith(f"rank 0: {wrong}")
    check_next(anywhere, world.size)


@OTHERS
@pytest.mark.parametrize("wrong", ["join", "elsewhere"])
def test_a_rank_that_cannot_join(place: tuple[World, int], tmp_path: Path, wrong: str) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, tmp_path, wrong, rank), "WriteError")
    assert text.startswith(f"rank {rank}: ")
    assert wrong == "join" or "all ranks must save to one file system that every host has mounted" in text
    check_next(tmp_path, world.size)


@OTHERS
@pytest.mark.parametrize(("wrong", "found"), [("file gone", "which is not there"), ("file short", "has 17 bytes")])
def test_files_that_rank_0_does_not_see(place: tuple[World, int], tmp_path: Path, wrong: str, found: str) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, tmp_path, wrong, rank), "SaveError")
    assert f"rank {rank} has written __{rank}_0.distcp (" in text
    assert found in text
    check_next(tmp_path, world.size)


@FEW
def test_a_rank_that_also_fails_to_clean_up(place: tuple[World, int], anywhere: Path) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, anywhere, "stubborn", rank), "WriteError")
    assert text.startswith(f"rank {rank}: write __{rank}_0.distcp: [Errno 28]")
    check_next(anywhere, world.size)


@FEW
@pytest.mark.parametrize("wrong", ["write", "commit", "hook", "meta"])
def test_a_failed_overwrite_keeps_the_old_checkpoint(place: tuple[World, int], anywhere: Path, wrong: str) -> None:
    world, rank = place
    ends = world.results(failing.save_over, anywhere, wrong, rank)
    assert all(end.error is not None for end in ends)
    check_next(anywhere, world.size, {"c": 3})


# --- hooks ------------------------------------------------------------------------------------------


@FEW
@pytest.mark.parametrize("wrong", ["hook", "async hook"])
def test_a_hook_before_the_commit_fails_on_one_rank(place: tuple[World, int], anywhere: Path, wrong: str) -> None:
    world, rank = place
    text = same_error(world.results(failing.save_with, anywhere, wrong, rank), "SaveError")
    assert text == f"rank {rank}: the pre_commit hook of {anywhere / 'c'} failed: ZeroDivisionError: in the hook"
    check_next(anywhere, world.size)


@FEW
@pytest.mark.parametrize("wrong", ["late hook", "late async hook"])
def test_a_hook_after_the_commit_fails_on_one_rank(place: tuple[World, int], anywhere: Path, wrong: str) -> None:
    world, rank = place
    text = f"the post_commit hook of {anywhere / 'c'} failed: ZeroDivisionError: in the hook"
    for other, end in enumerate(world.results(failing.save_with, anywhere, wrong, rank)):
        assert end == Ended(after_commit=text if other == rank else "")
    check_next(anywhere, world.size, {"c": 1})


# --- staging ----------------------------------------------------------------------------------------


@FEW
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("change", "TornSnapshotError", "own.of{} changed between save() and staged"),
        ("free", "StageError", "was freed: its storage is smaller than the tensor"),
    ],
)
def test_a_tensor_changes_on_one_rank(
    place: tuple[World, int], anywhere: Path, how: str, kind: str, message: str
) -> None:
    world, rank = place
    ends = world.results(failing.change_while_saving, anywhere, how, rank)
    text = same_error(ends, kind)
    assert text.startswith(f"rank {rank}: ")
    assert message.format(rank) in text
    assert ends[rank].staged is not None
    check_next(anywhere, world.size)


# --- cancellations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[0], [2], [1, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("function", [failing.cancel_early, failing.cancel_while_copying])
def test_a_cancellation_on_some_ranks_cancels_all(
    world4: World, anywhere: Path, function: Any, ranks: list[int]
) -> None:
    ends = world4.results(function, anywhere, ranks)
    text = same_error(ends, "SaveCancelledError")
    # A cancellation that comes when its rank has already sent its part of the plan takes effect one round later.
    assert any(text.startswith(f"rank {rank}: the save of {anywhere / 'c'} was cancelled") for rank in ranks)
    assert [end.cancelled for end in ends] == [True if rank in ranks else None for rank in range(4)]
    check_next(anywhere, 4)


@pytest.mark.parametrize("ranks", [[0], [1]], ids=str)
def test_a_cancellation_when_all_have_planned_cancels_all(world2: World, anywhere: Path, ranks: list[int]) -> None:
    ends = world2.results(failing.cancel_while_planning, anywhere, ranks)
    text = same_error(ends, "SaveCancelledError")
    assert text.startswith(f"rank {ranks[0]}: the save of {anywhere / 'c'} was cancelled")
    assert [end.cancelled for end in ends] == [True if rank in ranks else None for rank in range(2)]


@pytest.mark.parametrize("step", ["finish", "commit"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_cancellation_is_too_late_once_other_ranks_may_publish(
    world4: World, anywhere: Path, rank: int, step: str
) -> None:
    ends = world4.results(failing.cancel_while_waiting, anywhere, rank, step)
    assert ends == [Ended(cancelled=False if other == rank else None) for other in range(4)]
    check_next(anywhere, 4, {"c": 1})


# --- ranks that are late ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("step", ["call", "create"])
def test_a_rank_that_comes_late(world4: World, anywhere: Path, rank: int, step: str) -> None:
    ends = world4.results(failing.come_late, anywhere, rank, step)
    told = [end for other, end in enumerate(ends) if step == "create" or other != rank]
    text = same_error(told, "CoordinationError")
    assert f"rank {rank} " in text
    assert f"did not come to the save of {anywhere / 'c'} within 2 s" in text
    check_next(anywhere, 4, {"before": 3})


# --- several in flight ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_saves_in_flight_of_which_the_first_fails(world4: World, anywhere: Path, rank: int) -> None:
    outcomes = world4.results(failing.save_in_flight, anywhere, rank)
    text = same_error([ends[0][0] for ends in outcomes], "WriteError")
    assert text.startswith(f"rank {rank}: finish ")
    for ends in outcomes:
        assert [end for end, _ in ends[1:]] == [Ended()] * 2
        assert ends[2][1] == [str(anywhere / "1"), str(anywhere / "2")]  # the order of the commits
    assert {entry.name for entry in anywhere.iterdir()} == {"1", "2", "next"}
    with aiockpt.SyncCheckpointer() as ckpt:
        for number in (1, 2):
            expected = failing.whole_state(4, 4 + number)
            expected["extra"] = {f"only{number}": failing.noise((30_001,), number)}
            assert_same(expected, ckpt.load(anywhere / str(number)))
        assert_same(failing.whole_state(4, 2), ckpt.load(anywhere / "next"))


# --- deaths -----------------------------------------------------------------------------------------


def survivors_of(
    folder: Path, size: int, moment: str, rank: int, store: Rendezvous, *, before: int | None = 3, **options: Any
) -> list[Ended]:
    """Kill a rank during a save, let the others save again, and return the outcomes of the first save.

    ``before`` is the seed that the checkpoint of an earlier save must have afterwards; None: there is no earlier save.
    """
    with World(size, store=store) as world, tempfile.TemporaryDirectory() as own:
        outcomes = world.run(failing.survive, folder, moment, rank, before is not None, options)
        assert outcomes.pop(rank).killed
        hidden = left_in(str(folder)) if isinstance(folder, ServerPath) else [path.name for path in folder.glob(".*")]
        afterwards = world.run(failing.go_on, folder, rank, f"{own}/store")
        assert afterwards.pop(rank).killed
    assert hidden == []
    assert afterwards == [None] * (size - 1)
    for end, took_s in outcomes:
        assert took_s < 30, end  # usually a tenth of a second; never as long as a timeout
    with aiockpt.SyncCheckpointer() as ckpt:
        for other in set(range(size)) - {rank}:
            assert_same({"alone": failing.noise((9,), other)}, ckpt.load(folder / f"alone{other}"))
        assert_same(failing.whole_state(size - 1, 2), ckpt.load(folder / "next"))
        if before is not None:
            assert_same(failing.whole_state(size, before), ckpt.load(folder / "before"))
    return [end for end, _ in outcomes]


def check_death_reported(ends: list[Ended], rank: int) -> None:
    text = same_error(ends, "CoordinationError")
    assert text.startswith(f"rank {rank} on host ")
    assert "is gone" in text


DEATHS = [
    (4, "call", 0, "tcp"),
    (4, "call", 3, "file"),
    (2, "begin", 0, "file"),
    (2, "join", 1, "tcp"),
    (4, "create", 0, "tcp"),
    (2, "create", 1, "tcp"),
    (2, "write", 0, "file"),
    (4, "write", 1, "file"),
    (2, "finish", 0, "file"),
    (8, "finish", 5, "tcp"),
    (4, "commit", 0, "tcp"),
    (4, "commit", 0, "file"),
    (4, "commit", 2, "file"),
]


@pytest.mark.parametrize(
    ("size", "moment", "rank", "store"),
    [each if number % 2 else pytest.param(*each, marks=pytest.mark.full) for number, each in enumerate(DEATHS)],
)
def test_a_rank_that_dies(anywhere: Path, size: int, moment: str, rank: int, store: Rendezvous) -> None:
    check_death_reported(survivors_of(anywhere, size, moment, rank, store), rank)
    assert not (anywhere / "c").exists()


@pytest.mark.main
@pytest.mark.parametrize(("moment", "rank", "store"), [("create", 0, "tcp"), ("write", 0, "file"), ("write", 2, "tcp")])
def test_a_rank_that_dies_in_the_first_save(anywhere: Path, moment: str, rank: int, store: Rendezvous) -> None:
    check_death_reported(survivors_of(anywhere, 4, moment, rank, store, before=None), rank)
    assert not (anywhere / "c").exists()


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_rank_0_dies_when_it_has_just_published(anywhere: Path, store: Rendezvous) -> None:
    check_death_reported(survivors_of(anywhere, 4, "committed", 0, store), 0)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(anywhere / "c").ok
        assert_same(failing.whole_state(4, 1), ckpt.load(anywhere / "c"))


@pytest.mark.parametrize(("moment", "rank", "seed"), [("write", 1, 3), ("commit", 0, 3), ("committed", 0, 1)])
def test_a_rank_that_dies_while_overwriting(anywhere: Path, moment: str, rank: int, seed: int) -> None:
    check_death_reported(survivors_of(anywhere, 2, moment, rank, "tcp", before=seed, overwrite=True), rank)
