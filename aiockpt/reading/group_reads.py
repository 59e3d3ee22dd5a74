"""Shared reads over a process group of the caller's: the rank that reads a share broadcasts it to all others.

Every rank of the group takes part in every broadcast, in the order of the plan: send and receive calls between pairs
of ranks could wait for each other on NCCL. So a rank that fails, or is cancelled, takes part until its next turn to
send, in which it says that the sharing is over. That ends it on all ranks at the same broadcast, so none waits, and the
group can be used again. A rank whose broadcast fails reads the rest alone.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import torch
from isal.isal_zlib import crc32

from aiockpt.coordination.link import LinkBrokenError
from aiockpt.coordination.ranks import Ranks
from aiockpt.coordination.wires import MOST_STALL_S
from aiockpt.core.wording import some_of
from aiockpt.options import target_device
from aiockpt.reading.decoded import Held
from aiockpt.reading.sharing import MOST_READ, MOST_RECEIVED, CellBuffers, Lent, ReadsTogether, jobs_of
from aiockpt.staging.runtime import is_host, runtime_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BroadcastOptions
    from torch.distributed import ProcessGroup

    from aiockpt.coordination.choose import ProcessGroupLike
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.sharing import Cell, Share
    from aiockpt.reading.decoded import DecodedSource, DecodedStream
    from aiockpt.reading.executor import ReadExecutor
    from aiockpt.reading.sharing import DeviceJob, SharedJobs

Members = tuple[str, tuple[int, ...]]
"""The name of a process group, the same on all of its ranks; and their numbers in the checkpointer, in its order."""

_TRAILER = struct.Struct("!QII")
"""Behind the bytes of a share: its number, `_HAS_BYTES` or `_IS_OVER`, and the CRC-32 of the bytes."""
_HAS_BYTES, _IS_OVER = 1, 2
_POLL_S = 1e-4
_GRACE = timedelta(seconds=1)  # then a wait ends, if the backend has not ended the broadcast in time

logger = logging.getLogger("aiockpt")

_broken: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Groups over which a broadcast has failed: their ranks are at different ones, or no longer connected."""


def device_of(group: ProcessGroup) -> torch.device:
    """Return the device whose tensors a group can broadcast: the host if it can, else this thread's current one."""
    kinds = [device.type for device in group._device_types]
    return target_device("cpu" if "cpu" in kinds or not kinds else kinds[0])


class Broadcasts:
    """Broadcasts over a process group of the caller's, through host memory if its backend can, else through a device.

    To be made in the thread that calls the load, whose current device counts. Making it does not communicate.

    Raises ValueError if the ranks of a checkpointer with the process group ``outer`` can't share over the group.
    """

    def __init__(self, group: ProcessGroup, outer: ProcessGroupLike) -> None:
        distributed = torch.distributed
        if outer is None or isinstance(outer, Ranks):
            raise ValueError(
                "share= takes a process group only with a checkpointer whose process_group is one of "
                f"torch.distributed, not {outer!r}: pass share=True"
            )
        whole = distributed.group.WORLD if outer == "default" else outer
        try:
            name = distributed.distributed_c10d._world.pg_names[group]  # groups of Python's may have no other name
            around = distributed.get_process_group_ranks(whole)
            ranks = distributed.get_process_group_ranks(group)
        except (KeyError, ValueError) as exc:
            raise ValueError("torch.distributed does not know the group of share=: was it destroyed?") from exc
        if outside := [f"rank {rank}" for rank in ranks if rank not in around]:
            raise ValueError(
                f"the group of share= has ranks outside of the checkpointer's process group: {some_of(outside, 10)}"
            )
        if distributed.get_backend(group) == "fake":
            raise ValueError("the group of share= has the backend 'fake', which sends nothing: pass share=True")
        self.members: Members = name, tuple(around.index(rank) for rank in ranks)
        self._device = device_of(group)
        self._group = group

    @property
    def are_broken(self) -> bool:
        """Whether one has failed in this process, so that the next ones would fail too, or wait."""
        return self._group in _broken

    def run(self, message: torch.Tensor, sender: int, timeout_s: float) -> None:
        """Send bytes from a rank of the checkpointer's, or receive them. Blocks; raises LinkBrokenError."""
        from torch._C import _distributed_c10d as c10d  # a torch without distributed lacks it

        options = c10d.BroadcastOptions()
        options.rootRank = self.members[1].index(sender)
        try:
            if is_host(self._device):
                options.timeout = timedelta(seconds=min(timeout_s, MOST_STALL_S))
                self._group.broadcast([message], options).wait(options.timeout + _GRACE)
            else:  # the timeout stays that of the group: NCCL ends the process when it is over
                self._run_through_device(message, options, timeout_s)
        except Warning:  # an error only because the program turns warnings into errors
            raise
        except Exception as exc:  # each backend has its own
            _broken.add(self._group)
            raise LinkBrokenError(str(exc).partition("\n")[0]) from exc

    def _run_through_device(self, message: torch.Tensor, options: BroadcastOptions, timeout_s: float) -> None:
        runtime = runtime_of(self._device)
        try:
            runtime.enter()
            with runtime.stream():
                is_sender = options.rootRank == self._group.rank()
                there = message.to(self._device) if is_sender else torch.empty_like(message, device=self._device)
                work, until = self._group.broadcast([there], options), time.monotonic() + timeout_s
                # Its wait would only order the stream behind it, and then a copy waits for a rank that may be dead.
                while not work.is_completed():
                    if time.monotonic() > until:
                        raise TimeoutError(f"it has not ended within {timeout_s:.3g} s")
                    time.sleep(_POLL_S)
                work.wait()
                if not is_sender:
                    message.copy_(there)
        finally:
            runtime.close()


class GroupReads(ReadsTogether):
    """Shared reads over a process group."""

    def __init__(
        self, rank: int, what: str, group: Broadcasts, source: DecodedSource, workers: Workers, timeout_s: float
    ) -> None:
        self._rank = rank
        self._named = f"{what}: over the process group {group.members[0]!r}"
        self._group = group
        self._source = source
        self._workers = workers
        self._timeout_s = timeout_s
        self._left: deque[Share] = deque()  # the broadcasts that are not made yet, in the order of all ranks
        self._cells: frozenset[Cell] = frozenset()
        self._is_wrong = False  # a message was, which is logged once
        self._most_read = min(source.most_reads or workers.count, MOST_READ)

    def begin(self, shares: Sequence[Share]) -> None:
        """Begin with all shares of the group, which all of its ranks have agreed on."""
        self._left = deque(shares)
        self._cells = frozenset(cell for share in shares for cell in share.cells)

    def has(self, cell: Cell) -> bool:
        return bool(self._left) and cell in self._cells

    def close(self) -> None:
        """Do nothing: a broadcast that has failed may still use its buffer, and `leave` comes after this."""

    async def run(self, phase: int, jobs: SharedJobs, executor: ReadExecutor) -> None:
        """Take part in all broadcasts up to a phase; see `ReadsTogether.run`."""
        turns = list(itertools.takewhile(lambda share: share.cells[0].phase <= phase, self._left))
        if not turns:
            return
        mine = [share for share in turns if share.reader == self._rank]
        buffers = CellBuffers(self._most_read + MOST_RECEIVED)
        may_read, may_receive = anyio.Semaphore(self._most_read), anyio.Semaphore(MOST_RECEIVED)
        lent: dict[int, Lent] = {}
        is_read = {share.number: anyio.Event() for share in mine}
        last = {share.cells[0].file: share for share in mine}
        # One rank reads all of a file that can only be read in order. Its lock is taken in the order of the shares.
        ordered = {file: (self._source.in_order(file), anyio.Lock()) for file in last if self._source.is_virtual(file)}

        async def read_ahead() -> None:
            for share in mine:  # buffers in this order, too: what the others wait for never waits for one
                await may_read.acquire()
                lent[share.number] = buffers.take(share.begin, share.end + _TRAILER.size)
                reading.start_soon(read, share)

        async def read(share: Share) -> None:
            message, file = lent[share.number].view, share.cells[0].file
            stream, lock = ordered.get(file, (None, anyio.Lock()))
            async with lock:
                await self._workers.run(self._read, share, message, stream, is_last=share is last[file])
            is_read[share.number].set()

        async def place(share: Share) -> None:
            if any(cell in jobs for cell in share.cells):
                message = lent[share.number].view
                await executor.place_on_devices(*await self._workers.run(self._place, share, message, jobs, executor))
            buffers.give_back(lent.pop(share.number))
            (may_read if share.reader == self._rank else may_receive).release()

        with self._workers.at_least(self._workers.count + self._most_read):
            async with anyio.create_task_group() as placing, anyio.create_task_group() as reading:
                reading.start_soon(read_ahead)
                for share in turns:
                    if share.reader == self._rank:
                        await is_read[share.number].wait()
                    else:
                        await may_receive.acquire()
                        lent[share.number] = buffers.take(share.begin, share.end + _TRAILER.size)
                    if not await self._workers.run(self._broadcast, share, lent[share.number].view):
                        reading.cancel_scope.cancel()
                        break
                    placing.start_soon(place, share)

    async def leave(self, phase: int) -> None:
        """Take part in what other ranks may wait for up to a phase, until this rank's next turn, and end it then."""
        if self._left:
            await self._workers.run(self._leave, phase)

    # --- in threads -----------------------------------------------------------------------------------------

    def _leave(self, phase: int) -> None:
        buffers = CellBuffers(1)
        while self._left and self._left[0].cells[0].phase <= phase:
            share = self._left[0]
            lent = buffers.take(share.begin, share.end + _TRAILER.size)
            if share.reader == self._rank:
                _TRAILER.pack_into(lent.view, share.end - share.begin, share.number, _IS_OVER, 0)
            self._broadcast(share, lent.view)
            buffers.give_back(lent)

    def _read(self, share: Share, message: memoryview, stream: DecodedStream | None, *, is_last: bool) -> None:
        """Read a share into a message."""
        view = message[: -_TRAILER.size]
        if stream is None:
            self._source.read(share.cells[0].file, share.begin, view)
        else:
            stream.fill(share.begin, view)
            if is_last:
                stream.finish()
        _TRAILER.pack_into(message, len(view), share.number, _HAS_BYTES, crc32(view))

    def _broadcast(self, share: Share, message: memoryview) -> bool:
        """Send or receive a share in its turn; return whether the sharing goes on."""
        self._left.popleft()
        try:
            self._group.run(torch.frombuffer(message, dtype=torch.uint8), share.reader, self._timeout_s)
        except LinkBrokenError as exc:
            self._end(f"a broadcast of rank {share.reader} has failed, and the group may be of no more use: {exc}")
            return False
        number, state, _ = _TRAILER.unpack_from(message, share.end - share.begin)
        if (number, state) != (share.number, _IS_OVER):
            return True
        self._end("" if share.reader == self._rank else f"rank {share.reader} has failed, or was cancelled")
        return False

    def _place(
        self, share: Share, message: memoryview, jobs: SharedJobs, executor: ReadExecutor
    ) -> tuple[Held, list[DeviceJob]]:
        """Put a message into place; return what is for devices."""
        view = message[: -_TRAILER.size]
        held = Held(share.cells[0].file, share.begin, view)
        is_mine = share.reader == self._rank
        if is_mine or _TRAILER.unpack_from(message, len(view)) == (share.number, _HAS_BYTES, crc32(view)):
            return held, executor.place(held, jobs_of(share, jobs))
        if not self._is_wrong:
            logger.warning("%s: what rank %d has sent came changed; is the group in use?", self._named, share.reader)
        self._is_wrong = True
        return held, []

    def _end(self, reason: str) -> None:
        """End the sharing of this rank; without a reason if it does not read the rest."""
        self._left.clear()
        if reason:
            logger.warning("%s: this rank, %d, reads the rest alone: %s", self._named, self._rank, reason)
