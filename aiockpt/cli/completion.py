"""Words that a shell completes: checkpoints, keys and topics. Without torch; empty where the shell knows better."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import typer

_DOCUMENT_BYTES = 1 << 26  # a larger index takes too long for the press of a key
_HEADER_BYTES = 1 << 24

Words = list[tuple[str, str]]  # each with its explanation, which some shells show


def checkpoints(incomplete: str) -> Words:
    """Return the checkpoints whose paths begin so; none if other directories do too: the shell completes all then."""
    from aiockpt.cli.found import find
    from aiockpt.cli.output import size_text

    folder, name = os.path.split(incomplete)
    try:
        fitting = {each for each in os.listdir(folder or ".") if each.startswith(name) and not each.startswith(".")}
        found = {each.name: each.info for each in find(folder or ".") if each.name in fitting}
    except OSError:
        return []
    if any(os.path.isdir(os.path.join(folder, each)) for each in fitting - found.keys()):
        return []
    return [(os.path.join(folder, name), f"{info.state}, {size_text(info.nbytes)}") for name, info in found.items()]


def keys(context: typer.Context, incomplete: str) -> Words:
    """Return the keys and containers whose names begin so, to the next dot."""
    path = context.params.get("path")
    if not isinstance(path, str):
        return []
    names: dict[str, None] = {}
    for name in _names(os.path.expanduser(path)):
        if name.startswith(incomplete):
            dot = name.find(".", len(incomplete))
            names[name if dot < 0 else name[:dot]] = None
    return [(name, "") for name in names]


def topics(incomplete: str) -> Words:
    """Return the pages of the documentation whose names begin so."""
    from aiockpt.cli.docs import topics

    return [(name, summary) for name, summary in topics().items() if name.startswith(incomplete)]


def _names(path: str) -> Iterable[str]:
    """Return the keys of a checkpoint of aiockpt or of a safetensors file, without checking it."""
    from aiockpt.storage.local.entries import open_regular, read_regular

    try:
        manifest = os.path.join(path, ".aiockpt.json")
        if os.path.isfile(manifest):
            return _texts(json.loads(read_regular(manifest, most=_DOCUMENT_BYTES))["index"]["names"])
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _HEADER_BYTES else {}
            return _texts([key for key in header if key != "__metadata__"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _texts(names: Any) -> list[str]:
    return [name for name in names if isinstance(name, str) and name.isprintable()]
