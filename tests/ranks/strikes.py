"""Passing faults of one rank, at every step of its rounds: each fails the save on all ranks, and the next save works.

An episode is a checkpointer on every rank and some saves, one after the other. In one of them one rank, the victim, is
struck once: its n-th operation on a socket or on the store fails, its connection is cut, the save is refused, skipped,
cancelled or interrupted there, or its process is stopped for a while. The faults are those of the system; they are put
in at the calls of sockets, of the store and of the storage, in the engine's threads alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

import aiockpt
from tests.ranks.failing import noise
from tests.ranks.world import RankFailure, World

KINDS = {
    "socket": 16,
    "cut": 12,
    "store": 8,
    "storage": 6,
    "cancel": 12,
    "refuse": 1,
    "skip": 1,
    "interrupt": 1,
    "stop": 3,
}
"""Kinds of faults, and the number of moments that differ: operations in an episode, or milliseconds."""
TIMEOUT_S = 4.0
_STOP_S = 6.0
SAVES = 5
_STRUCK = (0, 2)
"""The saves that are struck: the first, in which the links are made, and one with a plan that is reused."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One episode."""

    kind: str
    victim: int
    save: int  # in which it strikes
    moment: int  # the operation that fails, from 1 on; for "cancel" and "stop" milliseconds

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.victim} in save {self.save} at {self.moment}"


@dataclass(slots=True)
class Counts:
    """The outcome of a campaign.

    Attributes:
        episodes: the number of episodes, and ``struck`` of those in which the fault took place.
        saves: the number of saves, ``failed`` those that failed on all ranks, ``written`` those of which all ranks said
            that they are written, and that were loaded back bit for bit.
        lost: the saves that a rank announced, and that can't be loaded or differ.
        wrong: failed checks, one line for each.
        kinds: the number of episodes of each kind that struck.
        longest_s: the longest wait for the end of a save, on any rank.
    """

    episodes: int = 0
    struck: int = 0
    saves: int = 0
    failed: int = 0
    written: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def every_strike(size: int, *, stops: bool) -> list[Strike]:
    """Return all episodes of a world."""
    return [
        Strike(kind, victim, save, moment)
        for kind, most in KINDS.items()
        for victim in {0, size - 1}
        for save in _STRUCK
        for moment in range(1, most + 1)
        if stops or kind != "stop"
    ]


def run_strikes(
    *, full: bool, folder: Path, seconds: float = 300.0, seed: int = 0, size: int = 3, most: int | None = None
) -> Counts:
    """Strike at random moments, each once; with ``full`` at all of them, in any order, until the time is over."""
    strikes, counts = every_strike(size, stops=full), Counts()
    random.Random(seed).shuffle(strikes)
    until = time.monotonic() + seconds
    with World(size) as world:
        for number, strike in enumerate(strikes[: None if full else most]):
            if time.monotonic() >= until:
                break
            check(world, folder / str(number), strike, counts)
    return counts


def check(world: World, folder: Path, strike: Strike, counts: Counts) -> None:
    """Run an episode, and count what came of it."""
    folder.mkdir()
    outcomes = world.run(struck_saves, folder, strike, timeout_s=20 * TIMEOUT_S)
    counts.episodes += 1
    broken = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    if broken:
        counts.wrong.append(f"{strike}: {broken[0].kind}: {broken[0].text}")
        return
    ends: list[list[str]] = [ended for ended, _, _ in outcomes]
    if any(has_struck for _, has_struck, _ in outcomes):
        counts.struck += 1
        counts.kinds[strike.kind] += 1
    counts.longest_s = max(counts.longest_s, *(longest for _, _, longest in outcomes))
    for number in range(SAVES):
        told = [each[number] for each in ends]
        counts.saves += 1
        written = [rank for rank, text in enumerate(told) if text == "written"]
        if len(written) not in (0, world.size) and not (strike.kind == "stop" or number == strike.save):
            counts.wrong.append(f"{strike}: save {number} ended differently: {told}")
        if not written and number > strike.save + (strike.kind == "stop"):
            counts.wrong.append(f"{strike}: save {number} failed as well: {told}")
        if not written and number < strike.save:
            counts.wrong.append(f"{strike}: save {number} failed before: {told}")
        path = folder / str(number)
        if written:
            counts.written += 1
            if not _is_whole(path, world.size, number):
                counts.lost += 1
                counts.wrong.append(f"{strike}: save {number} was announced by {written} and is not whole")
        else:
            counts.failed += 1
    left = {entry.name for entry in folder.iterdir()} - {str(number) for number in range(SAVES)}
    if left and strike.kind != "stop":
        counts.wrong.append(f"{strike}: left {sorted(left)}")


def _is_whole(path: Path, size: int, number: int) -> bool:
    with aiockpt.SyncCheckpointer(process_group=None) as alone:
        try:
            loaded = alone.load(path)
        except aiockpt.LoadError:
            return False
    wanted = {f"w{rank}": _own(rank, number) for rank in range(size)}
    return loaded.keys() == wanted.keys() and all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def _own(rank: int, number: int) -> torch.Tensor:
    return noise((3_001 + rank,), 100 * number + rank)


async def struck_saves(rank: int, size: int, folder: Path, strike: Strike) -> tuple[list[str], bool, float]:
    """Save again and again, and be struck once; return how each save ended, whether it struck, and the longest wait."""
    ended, longest_s = list[str](), 0.0
    blow = _Blow(strike) if rank == strike.victim else _Blow(None)
    with blow:
        async with aiockpt.AsyncCheckpointer(coordination_timeout=TIMEOUT_S) as ckpt:
            for number in range(SAVES):
                begun = time.monotonic()
                ended.append(await _one_save(ckpt, blow, rank, folder / str(number), number))
                longest_s = max(longest_s, time.monotonic() - begun)
                await _all_are_here(folder, rank, size, number)
    return ended, blow.has_struck, longest_s


async def _one_save(ckpt: Any, blow: _Blow, rank: int, path: Path, number: int) -> str:
    state: dict[str, Any] = {f"w{rank}": _own(rank, number)}
    kind = blow.arm(number)
    if kind == "skip":
        return "skipped"
    if kind == "refuse":
        state["bad"] = threading.Lock()
    if kind == "interrupt":
        state["bad"] = _Interrupts()
    try:
        save = ckpt.save(state, path)
        if kind == "cancel":
            await asyncio.sleep(blow.moment / 1000)
            await save.cancel()
        await save
    except (aiockpt.AiockptError, KeyboardInterrupt) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        blow.disarm()
    return "written"


async def _all_are_here(folder: Path, rank: int, size: int, number: int) -> None:
    """Wait for the other ranks, as a step of training does, by none of the ways that are struck."""
    (folder.parent / f"{folder.name}-{number}-{rank}").touch()
    until = time.monotonic() + 10 * TIMEOUT_S
    while not all((folder.parent / f"{folder.name}-{number}-{each}").exists() for each in range(size)):
        if time.monotonic() > until:
            raise TimeoutError("a rank has not ended its save")
        await asyncio.sleep(0.002)


class _Interrupts:
    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Blow:
    """The strike of this rank, None if it is not the victim."""

    def __init__(self, strike: Strike | None) -> None:
        self._strike = strike
        self._left = 0
        self.has_struck = False
        self._stack = contextlib.ExitStack()

    @property
    def moment(self) -> int:
        return 0 if self._strike is None else self._strike.moment

    def __enter__(self) -> None:
        if self._strike is not None:
            sys.modules["uvloop"] = None  # type: ignore[assignment]  # its sockets can't be reached from Python
            self._stack.enter_context(_intercepted(self._operation))

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._strike is not None:
            del sys.modules["uvloop"]

    def arm(self, number: int) -> str:
        """Return what strikes in this save outside of the operations; else be ready."""
        if self._strike is None or number != self._strike.save:
            return ""
        if self._strike.kind in ("skip", "refuse", "interrupt", "cancel"):
            self.has_struck = True
            return self._strike.kind
        if self._strike.kind == "stop":
            self.has_struck = True
            script = f"sleep 0.00{self.moment}; kill -STOP {os.getpid()}; sleep {_STOP_S}; kill -CONT {os.getpid()}"
            subprocess.run(["sh", "-c", f"({script}) > /dev/null 2>&1 &"], check=True)
        self._left = self._strike.moment
        return ""

    def disarm(self) -> None:
        self._left = 0

    def _operation(self, kind: str, name: str) -> str:
        """Return the kind of fault that this operation shall have, "" for none."""
        if self._strike is None or not self._left or not threading.current_thread().name.startswith("aiockpt"):
            return ""
        wanted = self._strike.kind
        if kind != ("socket" if wanted == "cut" else wanted) or (wanted == "cut" and name not in ("recv", "send")):
            return ""
        self._left -= 1
        if self._left:
            return ""
        self.has_struck = True
        return wanted


@contextlib.contextmanager
def _intercepted(strikes: Callable[[str, str], str]) -> Iterator[None]:
    """Ask ``strikes`` before each operation of sockets, of the store and of directories."""
    with contextlib.ExitStack() as stack:
        for name in ("bind", "listen", "connect", "accept", "send", "recv"):
            stack.enter_context(_replaced(socket.socket, name, _on_socket(name, strikes)))
        for name in ("check", "get", "set", "add"):
            stack.enter_context(_replaced(PrefixStore, name, _on_store(name, strikes)))
        for name in ("mkdir", "open", "rename", "unlink"):
            stack.enter_context(_replaced(os, name, _on_storage(name, strikes)))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    old = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, made(old))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _on_socket(name: str, strikes: Callable[[str, str], str]) -> Callable[[Any], Any]:
    def made(old: Any) -> Any:
        def operation(self: Any, *args: Any) -> Any:
            is_network = self.family in (socket.AF_INET, socket.AF_INET6)
            fault = strikes("socket", name) if is_network else ""
            if fault == "cut":
                with contextlib.suppress(OSError):
                    self.shutdown(socket.SHUT_RDWR)
            elif fault:
                number = errno.EMFILE if name in ("bind", "listen", "connect", "accept") else errno.ECONNRESET
                raise OSError(number, os.strerror(number))
            return old(self, *args)

        return operation

    return made


def _on_store(name: str, strikes: Callable[[str, str], str]) -> Callable[[Any], Any]:
    def made(old: Any) -> Any:
        def operation(self: Any, *args: Any) -> Any:
            if strikes("store", name):
                raise RuntimeError(f"the store fails in {name}")
            return old(self, *args)

        return operation

    return made


def _on_storage(name: str, strikes: Callable[[str, str], str]) -> Callable[[Any], Any]:
    def made(old: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if strikes("storage", name):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(args[0]))
            return old(*args, **kwargs)

        return operation

    return made
