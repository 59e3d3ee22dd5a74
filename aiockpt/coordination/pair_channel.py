"""A link between two ranks: a gloo group of its own, so that its failure affects no other."""

from __future__ import annotations

import os
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo, Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_Gloo: Any = ProcessGroupGloo  # its type stubs lack most of it
_LENGTH = struct.Struct("<Q")
_SHORTEST_WAIT_S = 0.01  # gloo takes 0 for "no limit"
TRANSFER_S = 60.0
"""Limit for a transfer once both sides take part in it."""


class LinkTimeoutError(Exception):
    """The other side did nothing in time. Gloo has closed the link."""


class LinkBrokenError(Exception):
    """The other side has closed the link or is dead."""


def make_device() -> Any:
    """Return the device that gloo listens and connects with, on the interface that the user chose for gloo groups."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _Gloo.create_device(interface=interface)
    return _Gloo.create_default_device()


class Sending(NamedTuple):
    """A message on its way."""

    length: Work
    body: Work

    def wait(self, timeout_s: float) -> None:
        """Wait until the other side has the message; raise LinkTimeoutError if it does not begin to take it in time."""
        _wait(self.length, timeout_s)
        _wait(self.body, TRANSFER_S)


class Link:
    """Messages to and from one other rank, in order. All methods raise LinkBrokenError if the other side is dead.

    A timeout in gloo closes every connection of its group, and so does a group's end. With a group of two for each
    link, rank 0 can give up on one rank and still talk to the others.
    """

    def __init__(self, store: Store, side: int, device: Any, *, timeout_s: float) -> None:
        """Connect, together with the other side: side 0 and side 1, with a store that is used for this link alone."""
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
        self._receiving: Work | None = None

    def start_send(self, message: bytes) -> Sending:
        """Begin to send; `Sending.wait` completes it."""
        # Of bytearrays: torch warns about memory that is read-only.
        length = torch.frombuffer(bytearray(_LENGTH.pack(len(message))), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        try:
            return Sending(*(self._group.send([data], self._peer, 0) for data in (length, body)))
        except RuntimeError as exc:
            raise LinkBrokenError(str(exc)) from exc

    def start_receive(self) -> None:
        """Begin to receive; until then the other side's send waits, and takes this side for absent at its limit."""
        if self._receiving is None:
            self._receiving = self._receive_into(self._header)

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message; raise LinkTimeoutError if the other side does not begin to send in time."""
        work = self._receiving or self._receive_into(self._header)
        self._receiving = None
        _wait(work, timeout_s)
        (length,) = _LENGTH.unpack(bytes(self._header.numpy()))
        body = torch.empty(length, dtype=torch.uint8)
        _wait(self._receive_into(body), TRANSFER_S)
        return body.numpy().tobytes()

    def _receive_into(self, buffer: torch.Tensor) -> Work:
        try:
            work: Work = self._group.recv([buffer], self._peer, 0)
        except RuntimeError as exc:
            raise LinkBrokenError(str(exc)) from exc
        return work


def _wait(work: Work, timeout_s: float) -> None:
    timeout_s = max(timeout_s, _SHORTEST_WAIT_S)
    begun = time.monotonic()
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        # Gloo tells a timeout from a broken connection in its text alone; the clock is surer. It counts whole ms.
        if time.monotonic() - begun >= timeout_s - 0.001:
            raise LinkTimeoutError(str(exc)) from exc
        raise LinkBrokenError(str(exc)) from exc
