"""``aiockpt rm`` and ``aiockpt clean``: removing checkpoints, and what killed processes have left of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

import aiockpt
from aiockpt.cli.app import Code, report
from aiockpt.cli.found import find
from aiockpt.cli.output import console, print_json, shown, size_text
from aiockpt.format.names import HIDDEN


def rm(paths: Sequence[str], *, yes: bool = False) -> Code:
    """Delete checkpoints, each at once as a whole; unless ``yes``, ask on the terminal before."""
    out = console()
    if not yes:
        _ask(paths)
    code = Code.FINE
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in paths:
            try:
                ckpt.delete(path)
            except (aiockpt.DeleteError, aiockpt.CheckpointNotFoundError) as exc:
                report(str(exc))
                code = Code.FAILED
            else:
                out.print(f"removed {shown(path)}")
    return code


def _ask(paths: Sequence[str]) -> None:
    """Ask whether to delete; exit if not."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: pass --yes to remove without being asked")
    for path in paths:
        found = find(path) if os.path.lexists(path) else []
        nbytes = sum(each.nbytes for each in found)
        console(stderr=True).print(f"{shown(path)}  {size_text(nbytes) if found else 'no checkpoint'}")
    if not typer.confirm("Remove this?" if len(paths) == 1 else f"Remove these {len(paths)}?", err=True):
        console(stderr=True).print("Nothing was removed.")
        raise typer.Exit(Code.FINE)


# --- leftovers ------------------------------------------------------------------------------------------


def clean(directory: str, *, older_than_s: float | None, as_json: bool = False) -> None:
    """Remove what killed processes have left in a directory, and print what stays and why."""
    directory = os.path.expanduser(directory)
    os.stat(directory)
    with aiockpt.SyncCheckpointer() as ckpt:
        removed = ckpt.clean(directory, older_than_s=older_than_s)
    left = [found for found in find(directory) if found.name.startswith(HIDDEN)]
    if as_json:
        print_json({"removed": removed, "left": [{"path": each.path, "why": each.problem} for each in left]})
        return
    out = console()
    for path in removed:
        out.print(f"removed {shown(path)}")
    for each in left:
        out.print(f"left {shown(each.path)}: {shown(each.problem)}")
    if not removed and not left:
        out.print("There is nothing to remove.")
