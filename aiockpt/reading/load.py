"""The load pipeline: what is wanted, is it there and does it fit, read it, put the state dict together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from aiockpt.errors import MissingKeysError
from aiockpt.format.keys import hint, matching
from aiockpt.reading.apply_live import Filled
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.into_target import TargetLoad
from aiockpt.reading.open import read_index
from aiockpt.reading.whole import WholeLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from aiockpt.format.index import Entry, Index
    from aiockpt.options import LoadOptions
    from aiockpt.reading.collective import Gathering
    from aiockpt.reading.executor import LoadTools
    from aiockpt.snapshot.live import ResolvedState
    from aiockpt.storage.base import Storage


async def load_checkpoint(
    storage: Storage,
    path: str,
    state_dict: Any,
    target: ResolvedState | None,
    options: LoadOptions,
    tools: LoadTools,
    ready: Mapping[torch.device, torch.Event],
    gathering: Gathering | None = None,
) -> Filled:
    """Load a checkpoint, but for what is left to the caller's thread; see `aiockpt.AsyncCheckpointer.load`.

    Args:
        storage: where it is kept.
        path: where it is there.
        state_dict: what to load into, as the caller has it.
        target: the same without live objects; None to load everything.
        options: how.
        tools: what the engine lends.
        ready: for each accelerator, the moment in the caller's stream from which on targets may be filled.
        gathering: the other ranks, if they load as well, and all are to succeed or fail.
    """
    source = DecodedSource(await storage.open(path, workers=tools.workers), path, tools.transforms)
    try:
        index, _ = await tools.workers.run(
            read_index, source, path, safe_globals=options.safe_globals, trust=options.trust
        )
        for device, event in ready.items():
            await tools.placer_for(device).begin(event)
        if target is None:
            wanted, unmatched = chosen(path, index, options)
            return Filled(
                path, await WholeLoad(source, path, index, options, tools).run(wanted), missing=unmatched, strict=False
            )
        load = TargetLoad(source, path, index, options, tools)
        # Everything that can be wrong is looked at before the first byte is placed.
        await load.prepare(target, state_dict)
        if gathering is not None and await gathering.agree(reads=await tools.workers.run(load.number)):
            source.share()
        filled = await load.fill(target, state_dict)
        if gathering is not None:
            gathering.filled = load.names
        return filled
    finally:
        with anyio.CancelScope(shield=True):
            await tools.workers.run(source.close)


def chosen(path: str, index: Index, options: LoadOptions) -> tuple[Mapping[str, Entry], tuple[str, ...]]:
    """Return the entries that the options ask for, and the keys and patterns that mean nothing.

    Raises:
        MissingKeysError: a key or pattern means nothing in this checkpoint.
    """
    if options.keys is None:
        return index.entries, ()
    names, unmatched = matching(index.entries.keys(), options.keys)
    if unmatched and options.strict:
        raise MissingKeysError(
            f"{path} holds nothing that is meant by {', '.join(map(repr, unmatched[:10]))}; see what it holds with "
            f"open(path), or pass strict=False.{hint(unmatched, index.entries, names)}",
            unmatched,
        )
    return {name: index.entries[name] for name in index.entries if name in names}, unmatched
