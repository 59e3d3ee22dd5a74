"""Errors of saves, and how they are sent from one process to another, with causes and notes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence

from aiockpt.errors import AiockptError, SaveError, unwrapped

_MAX_CAUSES = 8


def as_save_error(error: BaseException) -> BaseException:
    """Return the first error in a group; wrap it in a SaveError unless it is an AiockptError."""
    error = unwrapped(error)
    if isinstance(error, AiockptError):
        return error
    wrapped = SaveError(f"the save failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def dump_error(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, each in a form that can be pickled."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < _MAX_CAUSES:
        chain.append(_picklable(link))
        link = link.__cause__
    return chain


def load_error(chain: Sequence[BaseException]) -> BaseException:
    """Chain the errors from `dump_error`; return the first."""
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _picklable(error: BaseException) -> BaseException:
    """Return a copy without cause and traceback; if it can't be pickled, a plain error with the same text."""
    notes = list(getattr(error, "__notes__", ()))
    try:  # both ways: many classes can be pickled, but not unpickled, since their __init__ has other arguments
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        kind = SaveError if isinstance(error, AiockptError) else RuntimeError
        copy = kind(str(error) if isinstance(error, AiockptError) else f"{type(error).__name__}: {error}")
    if not hasattr(copy, "__notes__"):
        for note in notes:
            copy.add_note(note)
    return copy
