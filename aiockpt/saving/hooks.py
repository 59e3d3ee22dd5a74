"""Hooks of the caller, run right before and right after a checkpoint is published."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from aiockpt.core.threads import Duty, Origin
from aiockpt.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aiockpt.options import Hook


def run_hook(hook: Hook, path: str, what: str, origin: Origin) -> None:
    """Call a hook; await what it gives, in an event loop of its own. Blocks.

    Args:
        hook: is called.
        path: the checkpoint.
        what: what the hook is for.
        origin: the engine, whose saves can't be waited for meanwhile.

    Raises:
        SaveError: it has failed; the cause is chained.
    """
    try:
        with Duty(origin, "saves", f"the {what} hook of {path}"):
            value = hook(path)
            if inspect.isawaitable(value):
                asyncio.run(_awaited(value))
    except BaseException as exc:  # this is a worker thread: nothing of it is meant for the loop
        raise SaveError(f"the {what} hook of {path} failed: {type(exc).__name__}: {exc}") from exc


async def _awaited(value: Awaitable[Any]) -> None:
    await value
