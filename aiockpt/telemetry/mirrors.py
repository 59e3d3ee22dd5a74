"""The result of mirroring a step, and what is left to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """A step that is durable in the mirror.

    Attributes:
        path: its path there.
        nbytes: the bytes of its files.
        sent_bytes: those that were sent now; the others were there, from an attempt that was interrupted.
        mirrored_s: how long that took, in seconds; 0 if it was there already.
    """

    path: str
    nbytes: int
    sent_bytes: int
    mirrored_s: float


@dataclass(frozen=True, slots=True)
class MirrorBacklog:
    """The steps that a mirror lacks, as it was seen last.

    Attributes:
        steps: the steps that will be mirrored, in this order.
        nbytes: the bytes of their files.
        newest: the newest step that the mirror has; None if it has none, or was not reached yet.
        newest_time: when that was saved, in seconds as in `time.time`; 0 if there is none.
        error: why the last attempt has failed; None if it has not.
    """

    steps: tuple[int, ...] = ()
    nbytes: int = 0
    newest: int | None = None
    newest_time: float = 0.0
    error: BaseException | None = None
