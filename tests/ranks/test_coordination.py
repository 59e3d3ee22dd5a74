"""Rounds between ranks: all agree, or all fail with the same message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import psutil
import pytest
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.coordination.coordinator import Coordinator, Kind, coordinator_of
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CoordinationError, WriteError
from tests.ranks.failing import die, expect_no_reason
from tests.ranks.world import RankFailure, World

LONG_S = 60.0
SHORT_S = 3.0


def default_group() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextlib.asynccontextmanager
async def coordinator(timeout_s: float = LONG_S, group: Any = None) -> AsyncIterator[Coordinator]:
    made = coordinator_of(group or default_group(), timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.close()


async def tagged(values: Sequence[Any]) -> list[Any]:
    """Reply to each rank with its number and all values."""
    return [(rank, list(values)) for rank in range(len(values))]


async def never(values: Sequence[Any]) -> list[Any]:
    raise AssertionError(f"must not be called, but got {values}")


def texts(outcomes: list[Any]) -> set[str]:
    assert all(isinstance(outcome, RankFailure) for outcome in outcomes), outcomes
    return {outcome.text for outcome in outcomes if not outcome.killed}


async def run_rounds(rank: int, world_size: int, seed: int) -> list[Any]:
    values = random.Random(seed).sample(range(10**6), world_size * 3)
    async with coordinator() as ranks:
        assert (ranks.rank, ranks.world_size, ranks.leads) == (rank, world_size, rank == 0)
        found = []
        for number in range(3):
            mine = values[number * world_size + rank]
            found.append(
                await ranks.round(ranks.call("save"), f"the save of {number}", mine, tagged if rank == 0 else never)
            )
    return found


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_values_come_in_rank_order_and_replies_go_to_their_rank(any_world: World, loop) -> None:
    size = any_world.size
    values = random.Random(size).sample(range(10**6), size * 3)
    rounds = [values[i * size : (i + 1) * size] for i in range(3)]
    assert any_world.results(run_rounds, size, loop=loop) == [[(rank, row) for row in rounds] for rank in range(size)]


async def exchange_blobs(rank: int, world_size: int, size_bytes: int) -> bool:
    def blob(seed: int) -> bytes:
        return random.Random(seed).randbytes(size_bytes)

    async def swap(values: Sequence[bytes]) -> list[bytes]:
        assert list(values) == [blob(r) for r in range(world_size)]
        return [blob(100 + r) for r in range(world_size)]

    async with coordinator() as ranks:
        return await ranks.round(ranks.call("save"), "the save of a", blob(rank), swap) == blob(100 + rank)


@pytest.mark.parametrize("size_bytes", [0, 5_000_003])
def test_payloads_of_any_size(world4: World, size_bytes: int) -> None:
    assert world4.results(exchange_blobs, size_bytes) == [True] * 4


async def fail_then_succeed(rank: int, world_size: int, failing: list[int]) -> Any:
    undone = []

    async def undo() -> None:
        undone.append(rank)

    async with coordinator() as ranks:
        mine = OSError(28, f"disk {rank} is full") if rank in failing else rank
        failure = None
        try:
            await ranks.round(ranks.call("agree"), "the save of a", mine, never, undo)
        except Exception as exc:
            failure = (type(exc).__name__, str(exc), exc.__cause__ is mine, getattr(exc, "__notes__", []))
        after = await ranks.round(ranks.call("agree"), "the save of b", rank * 7, tagged, undo)
    return failure, after, undone


@pytest.mark.parametrize("failing", [[0], [2], [1, 3]])
def test_an_error_of_one_rank_reaches_all_and_the_next_round_works(world4: World, failing: list[int]) -> None:
    first = failing[0]
    text = f"rank {first}: OSError: [Errno 28] disk {first} is full"
    for rank, (failure, after, undone) in enumerate(world4.results(fail_then_succeed, failing)):
        notes = [f"this rank had failed as well: OSError: [Errno 28] disk {rank} is full"]
        expected = notes if rank in failing and rank != first else []
        assert failure == ("SaveError", text, rank == first, expected)
        assert after == (rank, [0, 7, 14, 21])
        assert undone == ([0] if rank == 0 else [])


async def fail_to_decide(rank: int, world_size: int, how: str) -> None:
    undone = []

    async def decide(values: Sequence[Any]) -> list[Any]:
        if how == "few":
            return values[:1]
        if how == "unpicklable":
            return [threading.Lock()] * world_size
        if how == "cancelled":
            raise asyncio.CancelledError("itself")
        raise WriteError("no room")

    async def undo() -> None:
        undone.append(rank)
        if how == "undo":
            raise FileNotFoundError("what is to be undone")

    async with coordinator() as ranks:
        try:
            await ranks.round(ranks.call("agree"), "the save of a", rank, decide, undo)
        finally:
            assert undone == ([0] if rank == 0 else [])
            assert await ranks.round(ranks.call("agree"), "the save of b", rank, tagged) == (
                rank,
                list(range(world_size)),
            )


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("error", "WriteError", "rank 0: no room"),
        ("few", "SaveError", "rank 0: ValueError: 1 replies were made for 4 ranks"),
        ("unpicklable", "SaveError", "rank 0: TypeError: cannot pickle '_thread.lock' object"),
        ("cancelled", "SaveError", "rank 0: CancelledError: itself"),
        (
            "undo",
            "WriteError",
            "rank 0: no room (and undoing it on rank 0 failed: FileNotFoundError: what is to be undone)",
        ),
    ],
)
def test_a_failed_decision_reaches_all(world4: World, how: str, kind: str, text: str) -> None:
    outcomes = world4.run(fail_to_decide, how)
    assert [(outcome.kind, outcome.text) for outcome in outcomes] == [(kind, text)] * 4
    assert outcomes[0].cause != ""
    assert [outcome.cause for outcome in outcomes[1:]] == [""] * 3


async def send_a_lock(rank: int, world_size: int) -> None:
    async with coordinator() as ranks:
        mine = threading.Lock() if rank == 1 else rank
        await ranks.round(ranks.call("load"), "the load of a", mine, never)


def test_a_value_that_cannot_be_pickled_is_an_error_of_its_rank(world2: World) -> None:
    outcomes = world2.run(send_a_lock)
    assert {outcome.kind for outcome in outcomes} == {"LoadError"}
    assert texts(outcomes) == {"rank 1: TypeError: cannot pickle '_thread.lock' object"}
    assert outcomes[1].cause == "TypeError: cannot pickle '_thread.lock' object"


async def call_different_operations(rank: int, world_size: int) -> Any:
    async with coordinator() as ranks:
        with pytest.raises(CoordinationError) as raised:
            await ranks.round(ranks.call("save"), "the save of b" if rank == 2 else "the save of a", rank, never)
        return str(raised.value), await ranks.round(ranks.call("save"), "the save of c", rank, tagged)


def test_ranks_at_different_operations_raise(world4: World) -> None:
    outcomes = world4.results(call_different_operations)
    (text,) = {text for text, _ in outcomes}
    assert text.startswith("rank 0 is at the save of a while rank 2 is at the save of b: every rank must call")
    assert [after for _, after in outcomes] == [(rank, [0, 1, 2, 3]) for rank in range(4)]


async def die_in_a_round(rank: int, world_size: int, victim: int, when: str) -> Any:
    expect_no_reason()
    seen = []
    async with coordinator() as ranks:
        if when == "between":
            await ranks.round(ranks.call("save"), "the save of a", rank, tagged)
            if rank == victim:
                die()

        async def decide(values: Sequence[Any]) -> list[Any]:
            die()
            return []

        for number in range(2):
            try:
                await ranks.round(ranks.call("save"), f"the save of {number}", rank, decide)
            except CoordinationError as exc:
                seen.append(str(exc))
        try:
            await ranks.round(ranks.call("agree"), "the save of c", rank, never)
        except CoordinationError as exc:
            seen.append(str(exc))
    return os.getpid(), seen


async def wait_for_a_dead_rank(rank: int, world_size: int, victim: int) -> list[str]:
    """Wait in two lanes at once for a rank that has died."""
    if rank == victim:
        die()
    async with coordinator(SHORT_S) as ranks:
        lanes: list[Kind] = ["save", "agree"]
        rounds = (ranks.round(ranks.call(lane), "the save of a", rank, never) for lane in lanes)
        errors = await asyncio.gather(*rounds, return_exceptions=True)
    assert all(isinstance(error, CoordinationError) for error in errors), errors
    return [str(error) for error in errors]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["tcp", "file"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_was_killed_is_named_in_every_later_round(size: int, store) -> None:
    with World(size, store=store) as world:
        pid = world.pids[1]
        outcomes = world.run(die_in_a_round, 1, "between")
    assert outcomes[1].killed
    for _, seen in [outcome for rank, outcome in enumerate(outcomes) if rank != 1]:
        assert seen == [
            f"rank 1 on host {os.uname().nodename}, process {pid}, is gone, so the ranks can't agree on "
            f"the save of {name}: its process has ended, or its checkpointer was closed; restart the job, or make a "
            "new checkpointer over a process group of the ranks that are left"
            for name in (0, 1)
        ] + [seen[2]]
        assert seen[2].startswith(f"rank 1 on host {os.uname().nodename}, process {pid}, is gone")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_leader_that_is_killed_while_it_decides_is_named(store) -> None:
    with World(4, store=store) as world:
        pid = world.pids[0]
        outcomes = world.run(die_in_a_round, 0, "deciding")
    assert outcomes[0].killed
    for _, seen in outcomes[1:]:
        assert len(seen) == 3
        assert all(text.startswith(f"rank 0 on host {os.uname().nodename}, process {pid}, is gone") for text in seen)


@pytest.mark.slow
def test_a_rank_that_was_killed_before_the_first_round_is_reported_as_absent() -> None:
    with World(4) as world:
        outcomes = world.run(wait_for_a_dead_rank, 2)
    assert outcomes[2].killed
    assert outcomes[0] == outcomes[1] == outcomes[3]
    for text in outcomes[0]:
        assert text.startswith("rank 2 did not come to the save of a within 3 s: every rank must call save")
        assert "process_group=None" in text


# --- ranks that time out; all cases run at once, since each takes as long as a timeout ---------------

Case = tuple[str, tuple[int, ...], bool]
"""``away`` or ``late``, the ranks concerned, and whether all ranks have finished a round before."""
CASES: list[Case] = [
    *(("away", absent, warm) for absent in ((3,), (1, 2), (0,)) for warm in (False, True)),
    *(("late", late, warm) for late in ((0,), (2,)) for warm in (False, True)),
]


async def wait_for_absent_ranks(ranks: Coordinator, absent: Sequence[int]) -> str:
    if ranks.rank in absent:
        return ""
    with pytest.raises(CoordinationError) as raised:
        await ranks.round(ranks.call("save"), "the save of a", ranks.rank, never)
    return str(raised.value)


async def run_timeout_cases(rank: int, world_size: int) -> list[tuple[str, Any]]:
    """Run all cases, each with a coordinator; return for each this rank's error and the result of its next round."""
    async with contextlib.AsyncExitStack() as stack:
        all_ranks = [await stack.enter_async_context(coordinator(SHORT_S)) for _ in CASES]
        cases = list(zip(all_ranks, CASES, strict=True))
        for ranks, (_, _, warm) in cases:
            if warm:
                await ranks.round(ranks.call("save"), "the save of warm", rank, tagged)
        texts_by_case = await asyncio.gather(*(wait_for_absent_ranks(ranks, absent) for ranks, (_, absent, _) in cases))
        await asyncio.to_thread(dist.barrier)
        late = [number for number, (how, absent, _) in enumerate(CASES) if how == "late" and rank in absent]
        # The other ranks have given up by now.
        late_texts = await asyncio.gather(*(wait_for_absent_ranks(all_ranks[number], ()) for number in late))
        for number, text in zip(late, late_texts, strict=True):
            texts_by_case[number] = text
        return [
            (text, await ranks.round(ranks.call("save"), "the save of b", rank * 3, tagged))
            for text, ranks in zip(texts_by_case, all_ranks, strict=True)
        ]


@pytest.fixture(scope="module")
def missed(world4: World) -> dict[Case, list[tuple[str, Any]]]:
    """Return for each case every rank's error and the result of its next round."""
    outcomes = world4.results(run_timeout_cases)
    return {case: [outcome[number] for outcome in outcomes] for number, case in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("absent", [(3,), (1, 2)])
def test_ranks_that_stay_away_are_named_and_the_next_round_works(missed, absent: tuple[int, ...], warm: bool) -> None:
    outcomes = missed["away", absent, warm]
    (text,) = {failure for rank, (failure, _) in enumerate(outcomes) if rank not in absent}
    names = ", ".join(f"rank {rank}" for rank in absent)
    if warm:  # then rank 0 knows their hosts
        assert all(f"rank {rank} on host" in text for rank in absent)
    else:
        assert text.startswith(f"{names} did not come to the save of a within 3 s")
    assert [after for _, after in outcomes] == [(rank, [0, 3, 6, 9]) for rank in range(4)]


@pytest.mark.parametrize("warm", [False, True])
def test_a_leader_that_stays_away_is_named_and_the_next_round_works(missed, warm: bool) -> None:
    outcomes = missed["away", (0,), warm]
    (text,) = {failure for failure, _ in outcomes[1:]}
    assert text.startswith("rank 0")
    assert "did not come to the save of a within 3 s" in text
    assert [after for _, after in outcomes] == [(rank, [0, 3, 6, 9]) for rank in range(4)]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_fails_with_the_message_of_the_others(missed, late: int, warm: bool) -> None:
    outcomes = missed["late", (late,), warm]
    (text,) = {text for text, _ in outcomes}
    assert text.startswith(f"rank {late}")
    assert "did not come to the save of a within 3 s" in text
    assert [after for _, after in outcomes] == [(rank, [0, 3, 6, 9]) for rank in range(4)]


async def run_rounds_in_all_lanes(rank: int, world_size: int) -> Any:
    lanes: list[Kind] = ["save", "agree", "load"]
    if rank % 2:
        lanes.reverse()
    async with coordinator() as ranks:
        found: dict[str, Any] = {}

        async def rounds(lane: Kind) -> None:
            found[lane] = [
                await ranks.round(ranks.call(lane), f"{lane} {n}", (lane, n, rank), tagged) for n in range(5)
            ]

        async with anyio.create_task_group() as group:
            for lane in lanes:
                group.start_soon(rounds, lane)
                await asyncio.sleep(0)
    return found


def test_lanes_do_not_wait_for_each_other(world4: World) -> None:
    for rank, found in enumerate(world4.results(run_rounds_in_all_lanes)):
        for lane in ("save", "agree", "load"):
            assert found[lane] == [(rank, [(lane, n, r) for r in range(4)]) for n in range(5)]


async def block_a_lane(rank: int, world_size: int) -> Any:
    planned = asyncio.Event()

    async def slowly(values: Sequence[Any]) -> list[Any]:
        await planned.wait()
        return list(values)

    async with coordinator() as ranks:
        finish = asyncio.ensure_future(ranks.round(ranks.call("agree"), "the save of a", rank, slowly))
        plan = await ranks.round(ranks.call("save"), "the save of b", rank, tagged)
        planned.set()
        return plan, await finish


def test_a_long_decision_in_one_lane_does_not_delay_the_others(world4: World) -> None:
    assert world4.results(block_a_lane) == [((rank, [0, 1, 2, 3]), rank) for rank in range(4)]


async def queue_rounds(rank: int, world_size: int) -> Any:
    async with coordinator() as ranks:
        tasks = [asyncio.ensure_future(ranks.round(ranks.call("save"), f"{n}", (n, rank), tagged)) for n in range(6)]
        return [await task for task in tasks]


def test_rounds_of_a_lane_keep_their_order(world4: World) -> None:
    for rank, found in enumerate(world4.results(queue_rounds)):
        assert found == [(rank, [(n, r) for r in range(4)]) for n in range(6)]


async def cancel_twice(ranks: Coordinator, rank: int, task: asyncio.Task[Any]) -> None:
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await ranks.round(ranks.call("agree"), "the cancellation", rank, tagged)


async def cancel_a_round(rank: int, world_size: int, victim: int, how: str) -> Any:
    decided, others = asyncio.Event(), []

    async def decide(values: Sequence[Any]) -> list[Any]:
        decided.set()
        others.extend(values)
        return await tagged(values)

    async with coordinator() as ranks:
        task = asyncio.current_task()
        assert task is not None
        outcome: Any = None
        if rank == victim and how == "scope":
            with anyio.CancelScope() as scope:
                scope.cancel()
                outcome = await ranks.round(ranks.call("save"), "the save of a", rank, decide)
                await anyio.lowlevel.checkpoint()
                raise AssertionError("the cancellation was lost")
            assert scope.cancelled_caught
        elif rank == victim:
            if how == "before":
                task.cancel()
            else:
                told = asyncio.ensure_future(cancel_twice(ranks, rank, task))
            try:
                await ranks.round(ranks.call("save"), "the save of a", rank, decide)
            except asyncio.CancelledError:
                while task.cancelling():
                    task.uncancel()
                outcome = "cancelled"
            if how == "during":
                await told
        else:
            if how == "during":  # the victim is cancelled while it waits for this rank
                await ranks.round(ranks.call("agree"), "the cancellation", rank, tagged)
            outcome = await ranks.round(ranks.call("save"), "the save of a", rank, decide)
        return outcome, others, await ranks.round(ranks.call("save"), "the save of b", rank, tagged)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["before", "during", "scope"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_cancelled_rank_finishes_its_round(world2: World, victim: int, how: str, loop) -> None:
    for rank, (outcome, others, after) in enumerate(world2.results(cancel_a_round, victim, how, loop=loop)):
        expected = "cancelled" if rank == victim and how != "scope" else (rank, [0, 1])
        assert outcome == expected
        assert others == ([0, 1] if rank == 0 else [])
        assert after == (rank, [0, 1])


async def train_during_rounds(rank: int, world_size: int) -> Any:
    sums = []

    def step(number: int) -> None:
        total = torch.tensor([float(rank + number)])
        dist.all_reduce(total)
        sums.append(total.item())

    def train() -> None:
        for number in range(30):
            step(number)
            if number % 10 == 3:
                dist.new_group(list(range(world_size)), backend="gloo")

    async with coordinator() as ranks:
        training = asyncio.ensure_future(asyncio.to_thread(train))
        found = [
            await ranks.round(ranks.call(lane), f"{n}", rank, tagged) for n in range(10) for lane in ("save", "agree")
        ]
        await training
    return sums, found


def test_rounds_do_not_disturb_the_process_groups_of_the_caller(world4: World) -> None:
    for rank, (sums, found) in enumerate(world4.results(train_during_rounds)):
        assert sums == [6 + 4 * number for number in range(30)]
        assert found == [(rank, [0, 1, 2, 3])] * 20


def wait_in_new_group(rank: int, world_size: int) -> Any:
    async def first_round(ranks: Coordinator) -> Any:
        return await ranks.round(ranks.call("save"), "the save of a", rank, tagged)

    ranks = coordinator_of(default_group(), timeout_s=LONG_S)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(first_round(ranks))))
    if rank == 1:
        dist.new_group([0, 1])  # waits in the store for rank 0, which waits for this rank's round
        thread.start()
    else:
        thread.start()
        dist.new_group([0, 1])
    thread.join()
    ranks.close()
    return found


def test_a_round_and_new_group_do_not_wait_for_each_other(world2: World) -> None:
    assert world2.results(wait_in_new_group) == [[(0, [0, 1])], [(1, [0, 1])]]


async def open_and_close(rank: int, world_size: int, fail: bool) -> Any:
    process = psutil.Process()
    counts = []
    for number in range(3):
        async with coordinator(SHORT_S if fail and number else LONG_S) as ranks:
            for lane in ("save", "agree", "load"):
                if fail and number and lane == "agree":
                    with contextlib.suppress(CoordinationError):
                        if rank != 1:
                            await ranks.round(ranks.call(lane), "the save of a", rank, never)
                    dist.barrier()
                await ranks.round(ranks.call(lane), "the save of b", rank, tagged)
            assert [t for t in threading.enumerate() if t.name.startswith("aiockpt-ranks")]
            ranks.close()  # idempotent
        left = [t.name for t in threading.enumerate() if t.name.startswith("aiockpt")]
        dist.barrier()
        counts.append((left, process.num_fds(), process.num_threads()))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("fail", [False, True])
def test_close_leaves_no_thread_and_no_file_descriptor(fail: bool) -> None:
    with World(4, store="file") as world:  # a TCP store closes connections at any time, which changes the counts
        outcomes = world.results(open_and_close, fail)
    for counts in outcomes:
        assert counts[1] == counts[2]
        assert counts[1][0] == []


async def run_in_a_subgroup(rank: int, world_size: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(CoordinationError, match="not a member"):
            coordinator_of(group, timeout_s=LONG_S)
        return None
    async with coordinator(group=group) as ranks, coordinator(group=group) as second:
        place = ranks.rank, ranks.world_size
        found = await ranks.round(ranks.call("save"), "the save of a", rank * 11, tagged)
        assert await second.round(second.call("save"), "the save of b", rank * 13, tagged) == (ranks.rank, [13, 39])
        with pytest.raises(CoordinationError) as raised:
            await ranks.round(ranks.call("save"), f"the save of {rank}", rank, never)
    return place, found, str(raised.value)


def test_a_group_of_some_ranks(world4: World) -> None:
    outcomes = world4.results(run_in_a_subgroup)
    assert (outcomes[0], outcomes[2]) == (None, None)
    assert outcomes[1][:2] == ((0, 2), (0, [11, 33]))
    assert outcomes[3][:2] == ((1, 2), (1, [11, 33]))
    assert outcomes[1][2] == outcomes[3][2]


async def wait_for_an_absent_subgroup_rank(rank: int, world_size: int) -> str:
    group = dist.new_group([1, 3])
    if rank != 1:
        return ""
    async with coordinator(SHORT_S, group=group) as ranks:
        with pytest.raises(CoordinationError) as raised:
            await ranks.round(ranks.call("save"), "the save of a", rank, never)
    return str(raised.value)


@pytest.mark.slow
def test_ranks_of_a_subgroup_are_named_with_their_global_rank(world4: World) -> None:
    text = world4.results(wait_for_an_absent_subgroup_rank)[1]
    assert text.startswith("rank 1 of the process group (global rank 3) did not come to the save of a")


# --- agreements ------------------------------------------------------------


async def agrees(rank: int, size: int) -> list[Any]:
    found: list[Any] = []
    async with aiockpt.AsyncCheckpointer(coordination_timeout=LONG_S, drain_timeout=LONG_S) as ckpt:
        access = EngineAccess(ckpt)
        found.append((access.world_size, access.leads))
        found.append(await access.agree("the sum", rank + 1, sum).wait())
        found.append(access.agree("all", {"rank": rank}, list).result())
        for culprit in range(size):
            value = aiockpt.CorruptCheckpointError("broken") if rank == culprit else 3
            with pytest.raises(aiockpt.CorruptCheckpointError, match=f"rank {culprit}: broken"):
                await access.agree("the load of it", value, sum).wait()
        with pytest.raises(aiockpt.SaveError, match="rank 0: ZeroDivisionError"):
            await access.agree("a quotient", 0, lambda values: 1 // values[0]).wait()
        found.append(await access.agree("the last", rank, max).wait())
    return found


def test_all_ranks_get_the_decision_of_rank_0(world2: World, world4: World) -> None:
    for world in (world2, world4):
        size = world.size
        all_ranks = [{"rank": rank} for rank in range(size)]
        expected = [[(size, rank == 0), size * (size + 1) // 2, all_ranks, size - 1] for rank in range(size)]
        assert world.results(agrees) == expected


@pytest.mark.asyncio
async def test_agree_without_other_ranks() -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        access = EngineAccess(ckpt)
        assert (access.world_size, access.leads) == (1, True)
        assert await access.agree("the sum", 3, sum).wait() == 3
        with pytest.raises(KeyError):
            access.agree("the sum", KeyError("x"), sum).result()
