"""Durations and sizes as they are typed."""

from __future__ import annotations

import re

import typer

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as 90, 90s, 15m, 12h, 7d or 2w; raise typer.BadParameter for another."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is no duration: use a number with s, m, h, d or w, such as 12h")
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 4096, 512M or 2 GiB, in powers of 1024; raise BadParameter for another."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: use a number with K, M, G or T, such as 512M or 2GiB")
    return int(float(found[1]) * _UNITS_BYTES[found[2].lower()])
