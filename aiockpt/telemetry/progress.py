"""The progress of saves, loads, verifications and conversions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiockpt.errors import SaveCancelledError, SaveSkippedError

if TYPE_CHECKING:
    from aiockpt.telemetry.loads import LoadResult
    from aiockpt.telemetry.verification import VerifyReport

Reading = Literal["load", "verify", "convert"]
SavePhase = Literal["planned", "staging", "staged", "writing", "written", "committed"]
Outcome = Literal["written", "skipped", "failed", "cancelled"]
ReadPhase = Literal["reading", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """The progress of a save, a load, a verification or a conversion.

    Attributes:
        what: "save", "load", "verify" or "convert".
        path: the checkpoint.
        phase: of a save, what has just happened, or what is going on. Of the others, "reading"; the last event has
            "done", "failed" or "cancelled".
        done_bytes: the bytes that are written so far, or read by a load or a verification.
        total_bytes: all bytes to write or read, as far as that is known: of a load it is 0 until the metadata is read.
        elapsed_s: seconds since the call.
        staged_bytes: of a save, the bytes of the files that are copied into staging memory so far.
        result: in the last event of a load or a verification, if it succeeded: the `LoadResult` or `VerifyReport`.
    """

    what: Literal["save", Reading]
    path: str
    phase: SavePhase | ReadPhase
    done_bytes: int
    total_bytes: int
    elapsed_s: float
    staged_bytes: int = 0
    result: LoadResult | VerifyReport | None = None


def outcome_of(error: BaseException | None) -> Outcome:
    """Return the outcome of a save that ended with this error."""
    if error is None:
        return "written"
    if isinstance(error, SaveSkippedError):
        return "skipped"
    return "cancelled" if isinstance(error, SaveCancelledError) else "failed"


OnProgress = Callable[[ProgressEvent], object]
"""A function that receives events in a thread of its own; it may miss some, but never the last one."""
