"""``aiockpt mirror``: copies the steps of a run that its mirror lacks."""

from __future__ import annotations

from typing import Any

import aiockpt
from aiockpt.cli.app import Code, CommandError
from aiockpt.cli.output import console, print_json, shown, size_text, time_text
from aiockpt.engine.facade import EngineAccess
from aiockpt.manager.mirror import MirrorCopier
from aiockpt.manager.scan import StepNames
from aiockpt.manager.tiers import Tier
from aiockpt.storage.registry import storage_for


class _Copied(aiockpt.Observer):
    """Prints each copy, and keeps the records."""

    def __init__(self, *, quiet: bool) -> None:
        self.records: list[dict[str, Any]] = []
        self._is_quiet = quiet

    def mirrored(
        self, event: aiockpt.CallEvent, result: aiockpt.MirrorResult | None, backlog: aiockpt.MirrorBacklog
    ) -> None:
        facts = {} if result is None else {"bytes": result.nbytes, "sent_bytes": result.sent_bytes}
        error = None if event.error is None else str(event.error)
        self.records.append({"path": event.path, "seconds": event.elapsed_s, **facts, "error": error})
        if result is not None and not self._is_quiet:
            sent = f"{size_text(result.sent_bytes)} in {time_text(result.mirrored_s)}"
            console().print(f"{shown(result.path)}  {size_text(result.nbytes)}, sent {sent}")


def mirror(
    directory: str, url: str, *, names: StepNames, bytes_per_s: float | None = None, as_json: bool = False
) -> Code:
    """Copy what is missing, and print it.

    Raises:
        CommandError: the directory has no steps, one of the two is in the other, the mirror can't be written, or it
            lacks a step all the same.
        OSError: the directory can't be read.
    """
    storage, path = storage_for(directory)
    with storage.look(path) as listing:
        if all(names.step_of(name) is None for name in listing.folders):
            raise CommandError(
                f"{path} has no steps to copy: name a run, with steps such as {names.name_of(100)}, or pass --names"
            )
    there = Tier(*storage_for(url), names)
    if f"{there.directory}/".startswith(f"{path}/") or f"{path}/".startswith(f"{there.directory}/"):
        raise CommandError(f"the mirror is {there.directory}, and the run {path}: one must not be in the other")
    copied = _Copied(quiet=as_json)
    with aiockpt.SyncCheckpointer(process_group=None, observers=[copied]) as ckpt:
        options = aiockpt.Mirror(url, bandwidth=bytes_per_s)
        work = MirrorCopier(Tier(storage, path, names), there, options, EngineAccess(ckpt).reports)
        try:
            work.poke()
            if (ended := work.finish()) is not None:
                ended.result()
            backlog = work.backlog
        finally:
            work.close()
    failed = [record for record in copied.records if record["error"]]
    if as_json:
        print_json(copied.records)
    elif not copied.records and backlog.error is None:
        console().print("The mirror has everything.")
    if backlog.error is not None:
        raise CommandError(f"{there.directory} can't be completed: {backlog.error}")
    if failed:
        raise CommandError(failed[-1]["error"])
    return Code.FINE
