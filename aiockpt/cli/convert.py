"""``aiockpt convert``: another format, another dtype, some keys."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aiockpt.cli.app import CommandError
from aiockpt.cli.output import bar, console, shown, size_text
from aiockpt.dcp.format_utils import DTYPES, convert_checkpoint_async
from aiockpt.engine.submit import format_for as format_for
from aiockpt.options import SaveFormat
from aiockpt.storage.registry import directories_for, scheme_of


async def convert(
    source: str,
    target: str,
    *,
    to: SaveFormat | None = None,
    keys: Sequence[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    trust: bool = False,
) -> None:
    """Write what is in a checkpoint, or some keys of it, as another checkpoint."""
    to = to or format_for(None, target)
    source, target = directories_for(source)[1], directories_for(target)[1]
    _check_target(source, target, overwrite=overwrite)
    with bar("writing") as shown_bar:
        await convert_checkpoint_async(
            source,
            target,
            to=to,
            keys=keys,
            dtype=None if dtype is None else DTYPES[dtype],
            overwrite=overwrite,
            trust=trust,
            progress=shown_bar,
        )
    console().print(f"{shown(target)}: {to}, {size_text(shown_bar.done_bytes)}")


def _check_target(source: str, target: str, *, overwrite: bool) -> None:
    """Refuse a path that is taken, or is a part of what is read. Other storages refuse what is taken themselves."""
    if not scheme_of(target) and os.path.lexists(target) and not overwrite:
        raise CommandError(f"{target} exists already: choose another name, or pass --overwrite")
    old, new = (path if scheme_of(path) else os.path.realpath(path) for path in (source, target))
    if new == old or new.startswith(f"{old.rstrip('/')}/") or old.startswith(f"{new.rstrip('/')}/"):
        raise CommandError(f"{target} and {source} are the same, or one lies in the other: choose another name")
