"""Imports at the first use of what they are for, so that a process imports only what it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import AiockptError


@contextmanager
def importing() -> Iterator[None]:
    """Import in this context, in the caller's thread.

    A process that is forked while another thread imports would hang at its own next import.

    Raises:
        AiockptError: a file can't be opened, such as for lack of descriptors. A later call tries again.
    """
    try:
        with gc_pause():  # what is imported is no garbage: a collection would walk all of torch, and find nothing
            yield
    except (OSError, ImportError) as exc:
        raise AiockptError(
            f"the code for this call can't be imported: {exc}. Close files, or raise the limits (see ulimit), and call "
            "again"
        ) from exc
