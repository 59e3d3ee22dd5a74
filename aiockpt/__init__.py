"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format.

A public name is imported at its first use: a process that only writes files needs no torch. The names, and their homes,
are those in ``__init__.pyi``, which type checkers read too.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from aiockpt.core.gc_pause import gc_pause

with open(f"{os.path.splitext(__file__)[0]}.pyi", encoding="ascii") as _file:
    _HOME_OF = {words[3]: words[1] for words in map(str.split, _file) if words[:1] == ["from"]}

_MODULES = tuple(name for name, home in _HOME_OF.items() if home == __name__)  # `aiockpt.dcp.FileSystemWriter`

__all__ = sorted(_HOME_OF.keys() - {*_MODULES})


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == __name__:
        return importlib.import_module(f"{home}.{name}")
    with gc_pause():  # what is imported is no garbage: a collection would walk all of torch, and find nothing
        value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
