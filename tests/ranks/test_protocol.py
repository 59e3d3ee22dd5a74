"""The rounds of ranks without sockets: any order of messages, broken links, skipped calls, ranks that leave or die."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiockpt.coordination.protocol import (
    Ask,
    Asking,
    Kind,
    Left,
    RankCall,
    RemoteError,
    Reply,
    Rounds,
    coordination_failure,
    first_failure,
)

TIMEOUT_S, PATIENCE_S = 100.0, 5.0
LANES: tuple[Kind, ...] = ("save", "load")
Program = dict[Kind, list[tuple[str, int]]]
"""The calls of a rank in each lane: an operation, and its number of rounds."""


def program(rng: random.Random, calls: int, *, repeat: bool = False) -> Program:
    """Return calls of one path each, or of few paths again and again."""
    names = {lane: [f"{lane} {number % 2 if repeat else number}" for number in range(calls)] for lane in LANES}
    return {lane: [(name, rng.randint(1, 3)) for name in names[lane]] for lane in LANES}


@dataclass
class Running:
    """A call that a rank has begun."""

    call: RankCall
    operation: str
    steps: int
    is_waiting: bool = False  # for the end of a round


@dataclass
class Simulated:
    """A rank, and its link to rank 0."""

    asking: Asking
    todo: dict[Kind, Iterator[tuple[str, int]]]
    running: dict[Kind, Running | None] = field(default_factory=lambda: dict.fromkeys(LANES))
    ended: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by operation
    order: list[str] = field(default_factory=list)
    is_linked: bool = False
    broken: float = 0.0
    is_dead: bool = False
    to_leader: deque[Ask | Left] = field(default_factory=deque)
    from_leader: deque[Reply] = field(default_factory=deque)


class World:
    """All ranks, a network that is as slow and as bad as the random numbers say, and a clock."""

    def __init__(self, rng: random.Random, programs: list[Program]) -> None:
        self.rng, self.now = rng, 0.0
        self.rounds = Rounds([f"rank {rank}" for rank in range(len(programs))], TIMEOUT_S, PATIENCE_S)
        self.ranks = [
            Simulated(Asking(rank), {lane: iter(calls) for lane, calls in own.items()})
            for rank, own in enumerate(programs)
        ]
        for rank in range(1, len(programs)):
            self.connect(rank)

    # --- events -----------------------------------------------------------------------------------------

    def go_on(self, rank: int, lane: Kind) -> bool:
        """Begin the next round or call of a lane, if the last one has ended."""
        one = self.ranks[rank]
        running = one.running[lane]
        if one.is_dead or (running is not None and running.is_waiting):
            return False
        if running is None:
            following = next(one.todo[lane], None)
            if following is None:
                return False
            running = one.running[lane] = Running(RankCall(lane), *following)
        running.is_waiting = True
        value = (rank, running.operation, len(one.ended[running.operation]), running.call.step)
        if rank == 0:
            self.rounds.begin(running.call, running.operation, self.now)
        else:
            ask = one.asking.ask(running.call, running.operation, pickle.dumps(value))
            if one.is_linked:
                one.to_leader.append(ask)
        return True

    def deliver(self, rank: int) -> bool:
        """Let a message arrive, to rank 0 or from it."""
        one = self.ranks[rank]
        ways = [way for way in (one.to_leader, one.from_leader) if way]
        if not ways:
            return False
        message = self.rng.choice(ways).popleft()
        if isinstance(message, Ask):
            self.rounds.ask(rank, message, self.now)
        elif isinstance(message, Left):
            self.rounds.leave(message, self.now)
        elif one.asking.answers(message):
            (lane,) = (lane for lane, own in one.running.items() if own and own.call.number == message.number)
            self._end_round(one, lane, pickle.loads(message.message))
        return True

    def cut(self, rank: int) -> None:
        """Break a link: what is on its way is lost."""
        one = self.ranks[rank]
        if one.is_linked:
            one.is_linked, one.broken = False, self.now
            one.to_leader.clear()
            one.from_leader.clear()
            self.rounds.lose(rank, self.now)

    def connect(self, rank: int) -> bool:
        one = self.ranks[rank]
        if one.is_linked or one.is_dead:
            return False
        one.is_linked = True
        self.rounds.join(rank, f"rank {rank}")
        one.to_leader.extend(one.asking.unanswered())
        return True

    def leave(self, rank: int, lane: Kind, text: str) -> None:
        """Let a rank give up its call in a lane."""
        one = self.ranks[rank]
        running = one.running[lane]
        if running is None or one.is_dead:
            return
        failure = coordination_failure(rank, text)
        if rank == 0:
            self.rounds.fail(running.call, running.operation, failure, self.now)
        else:
            left = one.asking.leave(running.call, running.operation, failure)
            if one.is_linked:
                one.to_leader.append(left)
        self._end_call(one, lane, failure)

    def die(self, rank: int) -> None:
        self.cut(rank)
        self.ranks[rank].is_dead = True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        heard = {rank: self.now for rank, one in enumerate(self.ranks) if rank and one.is_linked}
        self.rounds.tick(self.now, heard)
        for rank, one in enumerate(self.ranks[1:], 1):
            if not one.is_linked and self.now - one.broken > PATIENCE_S:
                for lane in LANES:
                    if one.running[lane] is not None:
                        self.leave(rank, lane, "rank 0 can't be reached")

    # --- what follows -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let rank 0 decide what it can, and put its replies on their way."""
        leader = self.ranks[0]
        for lane, running in leader.running.items():
            if running is None or not running.is_waiting or not running.call.over.is_set():
                continue
            own = (0, running.operation, len(leader.ended[running.operation]), running.call.step)
            values = [own, *(running.call.arrivals[rank] for rank in range(1, len(self.ranks)))]
            failure = first_failure(values)
            if failure is None:
                self.rounds.reply(running.call, [pickle.dumps((values,))] * (len(self.ranks) - 1))
                self._end_round(leader, lane, (values,))
            else:
                self.rounds.fail(running.call, running.operation, failure, self.now)
                self._end_round(leader, lane, failure)
        replies, self.rounds.outbox = self.rounds.outbox, []
        for rank, reply in replies:
            if self.ranks[rank].is_linked:
                self.ranks[rank].from_leader.append(reply)

    def _end_round(self, one: Simulated, lane: Kind, outcome: Any) -> None:
        running = one.running[lane]
        assert running is not None
        running.is_waiting = False
        running.call.step += 1
        if isinstance(outcome, RemoteError) or running.call.step == running.steps:
            self._end_call(one, lane, outcome)
        else:
            assert {value[1:] for value in outcome[0]} == {outcome[0][0][1:]}, outcome

    def _end_call(self, one: Simulated, lane: Kind, outcome: Any) -> None:
        running = one.running[lane]
        assert running is not None
        one.ended[running.operation].append(outcome)
        one.order.append(running.operation)
        one.running[lane] = None

    # --- runs -------------------------------------------------------------------------------------------

    def disturb(self, steps: int, **faults: float) -> None:
        """Let things happen at random; ``faults``: their probability at a step."""
        for _ in range(steps):
            rank, lane = self.rng.randrange(len(self.ranks)), self.rng.choice(LANES)
            for kind, probability in faults.items():
                if self.rng.random() < probability and (rank or kind == "leave"):
                    getattr(self, kind)(*((rank, lane, f"rank {rank} has left") if kind == "leave" else (rank,)))
            chance = self.rng.random()
            if chance < 0.3:
                self.go_on(rank, lane)
            elif chance < 0.9:
                self.deliver(rank)
            elif rank:
                self.connect(rank)
            if self.rng.random() < 0.01:
                if "leave" not in faults:  # a link that is broken for long fails calls
                    for other in range(1, len(self.ranks)):
                        self.connect(other)
                self.pass_time(self.rng.uniform(0, 2))
            self.settle()

    def finish(self) -> None:
        """Let everything come to its end: nothing may hang."""
        for _ in range(10_000):
            self.settle()
            ranks = range(len(self.ranks))
            if sum(map(self.connect, ranks[1:])) or sum(map(self.deliver, ranks)):
                continue
            if sum(self.go_on(rank, lane) for rank in ranks for lane in LANES):
                continue
            if all(one.is_dead or not any(one.running.values()) for one in self.ranks):
                return
            self.pass_time(TIMEOUT_S / 10)
        raise AssertionError(f"it hangs: {[one.running for one in self.ranks]}")


def is_good(outcome: Any) -> bool:
    return not isinstance(outcome, RemoteError)


def check_agreement(world: World) -> None:
    """Check that rank 0 has the success that any rank has, and that it is one of the same call on all ranks."""
    leader = world.ranks[0]
    for one in world.ranks:
        for operation, outcomes in one.ended.items():
            for outcome in filter(is_good, outcomes):
                assert outcome in leader.ended[operation]
                assert {value[1:] for value in outcome[0]} == {outcome[0][0][1:]}


SEEDS = range(60)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("faults", [{}, {"cut": 0.05}], ids=["orders", "cuts"])
def test_orders_and_broken_links_fail_nothing(size: int, faults: dict[str, float]) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        calls = program(rng, 6, repeat=seed % 2 == 1)
        world = World(rng, [calls] * size)
        world.disturb(400, **faults)
        world.finish()
        for one in world.ranks:
            assert sorted(one.order) == sorted(world.ranks[0].order)
            assert all(is_good(outcome) for outcomes in one.ended.values() for outcome in outcomes), seed
        check_agreement(world)


@pytest.mark.parametrize("size", [2, 4])
def test_a_skipped_call_fails_alone_or_with_the_next_one(size: int) -> None:
    """Which rank skips what is random."""
    for seed in SEEDS:
        rng = random.Random(seed)
        calls = program(rng, 8)
        skipping, skipped = rng.randrange(size), rng.randrange(5)
        own = {lane: [*those[:skipped], *those[skipped + 1 :]] for lane, those in calls.items()}
        world = World(rng, [own if rank == skipping else calls for rank in range(size)])
        world.disturb(200)
        world.finish()
        assert world.now < TIMEOUT_S
        check_agreement(world)
        for lane in LANES:
            for one in world.ranks:
                for number, (operation, _) in enumerate(calls[lane]):
                    outcomes = one.ended[operation]
                    if number == skipped or (number == skipped + 1 and skipping == 0):
                        names = (f"{lane} {skipped}", f"{lane} {skipped + 1}")
                        assert all(not is_good(out) and all(name in out.message for name in names) for out in outcomes)
                    else:
                        assert [is_good(outcome) for outcome in outcomes] == [True], (seed, operation)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_leave_or_die_hang_nobody(size: int) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        calls = program(rng, 10)
        world = World(rng, [calls] * size)
        faults = {"leave": 0.02, "cut": 0.03, "die": 0.002 if seed % 2 else 0.0}
        world.disturb(500, **faults)
        world.finish()
        check_agreement(world)
        if seed % 2 == 0:
            assert all(len(one.order) == 2 * 10 for one in world.ranks)


def test_all_calls_after_the_last_fault_succeed() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        calls = program(rng, 30)
        world = World(rng, [calls] * 3)
        world.disturb(150, leave=0.03, cut=0.03)
        begun = {lane: max(_place(one, lane) for one in world.ranks) for lane in LANES}
        world.finish()
        check_agreement(world)
        for one in world.ranks:
            for lane in LANES:
                later = [one.ended[operation] for operation, _ in calls[lane][begun[lane] + 2 :]]
                assert all(is_good(outcome) for outcomes in later for outcome in outcomes), seed


def _place(one: Simulated, lane: Kind) -> int:
    return sum(operation.startswith(lane) for operation in one.order)


# --- single cases -----------------------------------------------------------------------------------


def asked(rank: int, operation: str, *, asking: Asking | None = None) -> Ask:
    return (asking or Asking(rank)).ask(RankCall("save"), operation, pickle.dumps(rank))


def test_a_message_that_is_sent_twice_counts_once() -> None:
    rounds, asking = Rounds(["rank 0", "rank 1", "rank 2"], TIMEOUT_S, PATIENCE_S), Asking(1)
    call = RankCall("save")
    first = asking.ask(RankCall("save"), "a", b"\x80\x04K\x01.")
    rounds.ask(1, first, 0.0)
    rounds.begin(call, "a", 0.0)
    rounds.ask(1, first, 1.0)
    assert call.arrivals == {1: 1}
    rounds.ask(2, asked(2, "a"), 1.0)
    rounds.reply(call, [b"one", b"two"])
    assert rounds.outbox == [(1, Reply(1, 0, b"one")), (2, Reply(1, 0, b"two"))]
    rounds.ask(1, first, 2.0)
    assert rounds.outbox[2:] == [(1, Reply(1, 0, b"one"))]


def test_rank_0_that_does_not_come_is_named_with_what_it_has_called() -> None:
    rounds = Rounds(["rank 0 on host h, process 5,", "rank 1", "rank 2"], TIMEOUT_S, PATIENCE_S)
    rounds.begin(RankCall("load"), "the load of b", 0.0)
    rounds.ask(1, asked(1, "the save of a"), 0.0)
    rounds.tick(TIMEOUT_S - 1, {})
    assert rounds.outbox == []
    rounds.tick(TIMEOUT_S, {})
    ((rank, reply),) = rounds.outbox
    told = pickle.loads(reply.message)
    assert rank == 1
    assert told.message.startswith(
        "rank 0 on host h, process 5, which is at the load of b, did not come to the save of a within 100 s: every rank"
    )
    late = RankCall("save")  # rank 0 comes to it then, and rank 2 later
    rounds.begin(late, "the save of a", TIMEOUT_S + 1)
    assert late.arrivals == {1: told}
    rounds.fail(late, "the save of a", told, TIMEOUT_S + 1)
    rounds.ask(2, asked(2, "the save of a"), TIMEOUT_S + 2)
    assert pickle.loads(rounds.outbox[-1][1].message) == told


def test_a_rank_that_is_at_another_call_is_named_with_it_after_the_timeout() -> None:
    rounds = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S)
    rounds.begin(call := RankCall("load"), "the load of b", 0.0)
    rounds.ask(1, asked(1, "the save of a"), 50.0)
    rounds.tick(TIMEOUT_S, {1: TIMEOUT_S})
    assert call.arrivals[1].message.startswith(
        "rank 1, which is at the save of a, did not come to the load of b within 100 s"
    )


def test_replies_are_kept_for_a_few_rounds() -> None:
    rounds, asking = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S), Asking(1)
    asks = []
    for number in range(20):
        asks.append(asked(1, f"save {number}", asking=asking))
        rounds.ask(1, asks[-1], 0.0)
        call = RankCall("save")
        rounds.begin(call, f"save {number}", 0.0)
        assert call.over.is_set()
        rounds.reply(call, [b"reply"])
    rounds.outbox = []
    rounds.ask(1, asks[19], 1.0)
    assert rounds.outbox == [(1, Reply(20, 0, b"reply"))]
    rounds.ask(1, asks[3], 1.0)
    assert "the reply of rank 0 to rank 1 was lost" in pickle.loads(rounds.outbox[1][1].message).message


def test_a_call_that_rank_0_has_given_up_before_it_came_fails_for_the_rank_that_waits() -> None:
    rounds = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S)
    rounds.ask(1, asked(1, "a"), 0.0)
    failure = coordination_failure(0, "rank 0 hangs")
    rounds.fail(RankCall("save"), "a", failure, 0.0)
    assert rounds.outbox == [(1, Reply(1, -1, pickle.dumps(failure)))]


def test_a_skipped_call_that_is_asked_again_is_refused_at_once() -> None:
    """Its first reply was lost with the link."""
    rounds, asking = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S), Asking(1)
    first, call = asked(1, "b", asking=asking), RankCall("save")
    rounds.begin(call, "a", 0.0)
    rounds.ask(1, first, 0.0)
    rounds.fail(call, "a", coordination_failure(1, "rank 0 is at a while rank 1 is at b"), 0.0)
    rounds.begin(call := RankCall("save"), "c", 1.0)
    rounds.ask(1, asked(1, "c", asking=asking), 1.0)
    assert call.arrivals == {1: 1}
    rounds.outbox = []
    rounds.ask(1, first, 2.0)
    ((_, reply),) = rounds.outbox
    assert "was lost" in pickle.loads(reply.message).message


def test_what_is_left_is_said_again_over_a_new_link() -> None:
    rounds, asking, call = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S), Asking(1), RankCall("save")
    own = RankCall("save")
    rounds.ask(1, asking.ask(own, "a", pickle.dumps(1)), 0.0)
    rounds.begin(call, "a", 0.0)
    assert call.over.is_set()
    rounds.reply(call, [b"reply"])
    call.step = 1
    failure = coordination_failure(1, "rank 1 hangs")
    left = asking.leave(own, "a", failure)  # it is lost with the link
    rounds.begin(call, "a", 1.0)
    assert asking.unanswered() == [left]
    for _ in range(2):
        rounds.leave(left, 2.0)
    assert call.arrivals == {1: failure}


def test_a_rank_that_is_ahead_waits_for_rank_0_but_not_for_long() -> None:
    for ended in ("next", "other", "late", "closed"):
        rounds = Rounds(["rank 0", "rank 1"], TIMEOUT_S, PATIENCE_S)
        call = RankCall("save")
        rounds.begin(call, "a", 0.0)
        rounds.ask(1, asked(1, "b"), 50.0)
        told = call.arrivals[1]
        assert told.message.startswith("rank 0 is at a while rank 1 is at b: every rank must call save")
        rounds.fail(call, "a", told, 50.0)
        rounds.tick(54.0, {})
        assert rounds.outbox == []
        if ended == "late":
            rounds.tick(56.0, {})
        elif ended == "closed":
            rounds.close()
        else:
            rounds.begin(following := RankCall("save"), "b" if ended == "next" else "c", 54.0)
            assert following.arrivals == ({1: 1} if ended == "next" else {})
        assert rounds.outbox == ([] if ended == "next" else [(1, Reply(1, -1, pickle.dumps(told)))])
