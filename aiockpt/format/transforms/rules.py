"""Compression rules: the values of `save(compress=)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from aiockpt.errors import SaveError
from aiockpt.format.keys import matching
from aiockpt.format.transforms.zstd import Zstd, require_zstd

if TYPE_CHECKING:
    import torch

    Compression = Literal["zstd"] | Zstd | None
    CompressRule = Compression | Mapping[str, Compression] | Callable[[str, torch.Tensor], Compression]


def compression_of(value: Any) -> Zstd | None:
    """Return the compression that one value stands for; raise ValueError if it is none."""
    if value is None or isinstance(value, Zstd):
        return value
    if isinstance(value, str) and value == "zstd":
        return Zstd()
    raise ValueError(f"compress is {value!r}; it must be None, 'zstd', or aiockpt.Zstd(level=...)")


def choose_compression(
    rule: CompressRule, names: Sequence[str], tensors: Sequence[torch.Tensor | None]
) -> list[Zstd | None] | None:
    """Return the compression of each leaf; None if no leaf is compressed.

    A rule is one value for all; or values by patterns of names, where the first match counts; or a function of name and
    tensor, which is called for tensors only, so that objects are not compressed.
    """
    if isinstance(rule, Mapping):
        chosen = _by_pattern(rule, names)
    elif callable(rule):
        chosen = [
            None if tensor is None else _asked(rule, name, tensor) for name, tensor in zip(names, tensors, strict=True)
        ]
    else:
        chosen = [compression_of(rule)] * len(names)
    if not any(chosen):
        return None
    require_zstd()
    return chosen


def _by_pattern(rule: Mapping[str, Compression], names: Sequence[str]) -> list[Zstd | None]:
    chosen: dict[str, Zstd | None] = {}
    known = dict.fromkeys(names)
    for pattern, value in rule.items():
        if not isinstance(pattern, str):
            raise TypeError(f"compress has the key {pattern!r}; the keys must be names and patterns such as 'model.*'")
        compression = compression_of(value)
        for name in matching(known.keys(), [pattern])[0]:
            chosen.setdefault(name, compression)
    return [chosen.get(name) for name in names]


def _asked(rule: Callable[[str, torch.Tensor], Compression], name: str, tensor: torch.Tensor) -> Zstd | None:
    try:
        value = rule(name, tensor)
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise SaveError(f"the function given as compress failed for {name}: {type(exc).__name__}: {exc}") from exc
    return compression_of(value)
