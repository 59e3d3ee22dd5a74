"""Errors of the system, or of a store, as those of aiockpt: with what could not be done, and the cause chained."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from aiockpt.errors import AiockptError
from aiockpt.telemetry.card import size_text


def described(fault: OSError, path: str) -> str:
    """Return the error's text with its notes, which say how often it was tried, and the free space on a full disk."""
    notes = [*getattr(fault, "__notes__", ())]
    if fault.errno == errno.ENOSPC:
        where = os.path.dirname(os.path.dirname(path))  # not the hidden directory
        with contextlib.suppress(OSError):  # a note, no more
            disk = os.statvfs(where)
            free = size_text(disk.f_bavail * disk.f_frsize) if disk.f_favail or not disk.f_files else "no inodes"
            notes.append(f"{free} are free in {where}")
    return " ".join([str(fault), *(f"({note})" for note in notes)])


@contextlib.contextmanager
def errors(kind: type[AiockptError], task: str, path: str = "", *, advice: str = "") -> Iterator[None]:
    """Raise ``kind`` instead of OSError, with what could not be done; for ``path`` see `described`."""
    try:
        yield
    except AiockptError:
        raise
    except OSError as exc:
        raise kind(f"can't {task}: {described(exc, path) if path else exc}{advice}") from exc
