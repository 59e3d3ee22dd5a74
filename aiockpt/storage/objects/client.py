"""The requests that the protocol needs of an object store. They block, and raise OSError."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.storage.base import Document, FileSink, Seen, Stamp

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

_ATTEMPTS = 8
LONGEST_S = 60.0  # until the last of them begins
_DENIALS = 3  # a store may deny one request by mistake; more often is a lack of rights
_PAUSE_S = 0.05


class ConditionError(OSError):
    """An object has another stamp than a request asks for."""


class RefusedError(OSError):
    """A store has answered that it has not done what it was asked for."""


class NoBucketError(NotADirectoryError):
    """There is no such bucket; no FileNotFoundError, which says that an object is missing."""


REFUSALS = (RefusedError, PermissionError)
"""A request that was answered so has done nothing, and will do nothing later."""


class NotSentError(OSError):
    """Not all of an object was sent, so it does not appear."""


def _attempts(error: OSError) -> int:
    """Return how often a request that fails so is sent at most."""
    return 1 if isinstance(error, NoBucketError) else _DENIALS if isinstance(error, PermissionError) else _ATTEMPTS


class ObjectFacts(NamedTuple):
    """What a store says of an object."""

    size: int  # in bytes
    stamp: Stamp
    modified: float  # in seconds, by the clock of the store


class ObjectSink(FileSink):
    """An object that is being written; it appears when it is finished."""

    nbytes: int = 0  # how much was written
    # `appear` sends one request, which fails if the object is not the one that was expected
    is_conditional: bool = False

    @abstractmethod
    async def stop(self) -> None:
        """Give it up unless it is finished; no view is in use afterwards. Idempotent."""

    @abstractmethod
    async def appear(self, only_if: Stamp) -> None:
        """Make an object appear whose sink was made with ``held``; after `finish`, which then only sends everything.

        Args:
            only_if: as of `ObjectClient.put`. Not every store has this condition for an upload in parts: the caller
                sees to it that nobody else writes the object meanwhile.

        Raises:
            NotSentError: it does not appear.
            OSError: it may have appeared all the same, or may appear yet.
        """


class ObjectClient(ABC):
    """Requests to one bucket, by many threads at once. Prefixes end with "/", or are empty."""

    longest_s: float = LONGEST_S  # how long `put_surely` begins new attempts
    copies = False  # whether `copy` can be had

    @property
    def hasty(self) -> ObjectClient:
        """A client that soon gives up, for what may be left undone."""
        return self

    @abstractmethod
    def put(self, key: str, data: Document, only_if: Stamp | None = None) -> Stamp:
        """Write an object in one request; return its stamp.

        Args:
            key: its name.
            data: its contents.
            only_if: the stamp that the object must have, "" if there must be none; None if it does not matter.

        Raises:
            ConditionError: it has another stamp; or this very request was repeated, since its answer was lost.
        """

    @abstractmethod
    def get(self, key: str) -> tuple[ObjectFacts, bytes] | None:
        """Return an object; None if there is none."""

    @abstractmethod
    def tail(self, key: str, nbytes: int) -> tuple[ObjectFacts, bytes] | None:
        """Return the facts and the last bytes of an object, all if it is shorter; None if there is none."""

    @abstractmethod
    def read(
        self,
        key: str,
        runs: Sequence[tuple[int, int]],
        view: memoryview,
        seen: Seen | None = None,
        stamp: Stamp | None = None,
    ) -> int:
        """Fill ``view`` with runs of bytes as in `Source.read_runs`; return how many there are.

        Raises:
            FileNotFoundError: the object does not exist.
            ConditionError: it has not the ``stamp``.
        """

    @abstractmethod
    def below(self, prefix: str, most: float = math.inf) -> dict[str, ObjectFacts]:
        """Return the facts of the objects below a prefix, by the rest of their keys; few more than ``most`` of them."""

    @abstractmethod
    def tops(self, prefix: str) -> tuple[dict[str, ObjectFacts], list[str]]:
        """Return the objects directly below a prefix, by the rest of their keys, and the names of prefixes there."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, if they exist."""

    def delete_once(self, key: str) -> None:
        """Delete an object, if it exists, by a request that is not repeated.

        Raises:
            RefusedError: it was not deleted.
            OSError: it may have been deleted all the same, or may be yet.
        """
        self.delete([key])

    @abstractmethod
    def now(self, near: str) -> float:
        """Return the time of the store's clock, in seconds; an object below ``near`` may be written to find it."""

    @abstractmethod
    def sink(self, key: str, nbytes: int | None, workers: Workers, *, held: bool = False) -> ObjectSink:
        """Return a sink for an object of this size, None if it is not known; ``held``: see `ObjectSink.appear`."""

    def copy(self, key: str, other: str) -> None:
        """Copy an object to another name, within the store.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it was not copied; some stores can't, or not one of this size.
        """
        raise RefusedError(f"{type(self).__name__} does not copy objects")

    # --- made of these ----------------------------------------------------------------------------------

    def facts(self, key: str) -> ObjectFacts | None:
        """Return the facts of an object; None if there is none."""
        found = self.tail(key, 0)
        return None if found is None else found[0]

    def put_surely(self, key: str, data: Document, only_if: Stamp) -> Stamp:
        """Do as `put`, whatever happens to the answers; no other writer has the same ``data``."""
        begun = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                return self.put(key, data, only_if)
            except OSError as exc:
                facts, found = self.get(key) or (None, b"")
                if facts is not None and found == data:
                    return facts.stamp
                # Otherwise nobody has won: some stores say so to all that try at once.
                is_taken = (facts.stamp if facts else "") != only_if
                is_last = attempt + 1 >= _attempts(exc) or time.monotonic() - begun > self.longest_s
                if is_last or (isinstance(exc, ConditionError) and is_taken):
                    raise
                time.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    def drop(self, key: str, stamp: Stamp) -> None:
        """Delete an object that has this stamp, and that no other process replaces before it is gone.

        A deletion that is repeated since its answer was lost would remove what another process has put there since. So
        it is asked for again only if the store has refused it: with one of `REFUSALS`.
        """
        begun = time.monotonic()
        for attempt in itertools.count():
            try:
                self.delete_once(key)
            except OSError as exc:
                found = self.facts(key)
                if found is None or found.stamp != stamp:
                    return
                is_last = attempt + 1 >= _attempts(exc) or time.monotonic() - begun > self.longest_s
                if is_last or not isinstance(exc, REFUSALS):
                    raise
                time.sleep(_PAUSE_S * 2**attempt)
            else:
                return

    def remove(self, prefix: str, last: str = "state") -> None:
        """Delete everything below a prefix, one object as the last."""
        names = self.below(prefix)
        self.delete(prefix + name for name in names if name != last)
        self.delete([prefix + last] if last in names else [])
