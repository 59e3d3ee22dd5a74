"""A link between two ranks: a gloo group of its own, so that what happens to it happens to no other."""

from __future__ import annotations

import os
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed import Work

_Gloo: Any = ProcessGroupGloo  # its type stubs lack most of it
_LENGTH = struct.Struct("<Q")
_SHORTEST_WAIT_S = 0.01  # gloo takes 0 for "no limit"
TRANSFER_S = 60.0
"""How long bytes may take whose sender and receiver are both there."""


class LinkTimeoutError(Exception):
    """The other side did nothing in time. Gloo has closed the link."""


class LinkBrokenError(Exception):
    """The other side has closed the link or is gone."""


def make_device() -> Any:
    """Make what gloo listens and connects with, on the interface that the user chose as for any gloo group."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _Gloo.create_device(interface=interface)
    return _Gloo.create_default_device()


class Sending(NamedTuple):
    """A message on its way.

    Attributes:
        works: one for the length, one for the bytes.
    """

    works: Sequence[Work]

    def wait(self, taken_s: float) -> None:
        """Wait until the other side has it.

        Args:
            taken_s: how long the other side may take to begin with it.

        Raises:
            LinkTimeoutError: it has not taken it.
            LinkBrokenError: it is gone.
        """
        length, body = self.works
        _wait(length, taken_s)
        _wait(body, TRANSFER_S)


class Link:
    """Messages to and from one other rank, in order.

    A timeout in gloo closes every connection of its group, and so does a group's end. With a group of two for each
    link, rank 0 can give up on one rank and still talk to the others.

    Args:
        store: where the two find each other; used for this link alone.
        side: 0 or 1, the other side has the other.
        device: from `make_device`.
        timeout_s: how long the other side may take to make the link too.

    Raises:
        LinkBrokenError: the link could not be made.
    """

    def __init__(self, store: Store, side: int, device: Any, *, timeout_s: float) -> None:
        options = _Gloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 0  # they run collectives; sends and receives need none
        try:
            self._group = _Gloo(store, side, 2, options)
        except RuntimeError as exc:
            raise LinkBrokenError(str(exc)) from exc
        self._peer = 1 - side
        self._header = torch.empty(_LENGTH.size, dtype=torch.uint8)
        self._expected: Work | None = None

    def _receive(self, buffer: torch.Tensor) -> Work:
        try:
            work: Work = self._group.recv([buffer], self._peer, 0)
        except RuntimeError as exc:
            raise LinkBrokenError(str(exc)) from exc
        return work

    def post(self, message: bytes) -> Sending:
        """Begin to send; `Sending.wait` ends it.

        Raises:
            LinkBrokenError: the other side is gone.
        """
        length = torch.frombuffer(bytearray(_LENGTH.pack(len(message))), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        try:
            return Sending([self._group.send([part], self._peer, 0) for part in (length, body)])
        except RuntimeError as exc:
            raise LinkBrokenError(str(exc)) from exc

    def expect(self) -> None:
        """Be ready for a message, so that the other side sees that this one is there. `take` gives it."""
        if self._expected is None:
            self._expected = self._receive(self._header)

    def take(self, timeout_s: float) -> bytes:
        """Receive a message.

        Args:
            timeout_s: how long the other side may take to begin with it.

        Raises:
            LinkTimeoutError: no message came.
            LinkBrokenError: the other side is gone.
        """
        work = self._expected or self._receive(self._header)
        self._expected = None
        _wait(work, timeout_s)
        (length,) = _LENGTH.unpack(bytes(self._header.numpy()))
        body = torch.empty(length, dtype=torch.uint8)
        _wait(self._receive(body), TRANSFER_S)
        return body.numpy().tobytes()


def _wait(work: Work, timeout_s: float) -> None:
    timeout_s = max(timeout_s, _SHORTEST_WAIT_S)
    begun = time.monotonic()
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        # Gloo tells the two apart in its text alone; the clock is surer. It counts whole milliseconds.
        if time.monotonic() - begun >= timeout_s - 0.001:
            raise LinkTimeoutError(str(exc)) from exc
        raise LinkBrokenError(str(exc)) from exc
