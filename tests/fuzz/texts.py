"""Mutations of JSON documents, value by value, and sometimes byte by byte."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 15, 255, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 1.5, 1e308)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/../../b",
    "\0",
    "\x1b[31m",
    "\udc80",
    "a\\b",
    "C:x",
    "<img onerror=1>",
    "model.w",
)
_RAW = (
    *(b"NaN", b"Infinity", b"1e999", b"-0", b"0e1", b"9" * 5000, b'"\\ud800"', b"[" * 3000, b'{"a":' * 3000),
    *(b'{"a":1,"a":2}', b"null", b"tru", b'"\x00"', b"\xff", b",", b"{}", b"[]", b"//x"),
)


def changed(data: bytes, rng: Random, other: bytes) -> bytes:
    """Return a mutation of a document, changed in one to four places."""
    if rng.random() < 0.1:
        return _raw(data, rng)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _raw(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        document = _one_change(document, rng, other)
    try:
        return json.dumps(document).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def _raw(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    roll = rng.random()
    if roll < 0.4:
        return data[:at] + rng.choice(_RAW) + data[at + rng.choice((0, 1, 4)) :]
    if roll < 0.6:
        return data[:at]
    if roll < 0.8 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data[:at] + data[rng.randrange(len(data) + 1) :]


def _places(value: Any, found: list[tuple[Any, Any]], room: int = 2000) -> None:
    """Append the container and the key of each value to ``found``, up to a limit."""
    pending = [value]
    while pending and len(found) < room:
        at = pending.pop()
        pairs = list(at.items()) if isinstance(at, dict) else list(enumerate(at)) if isinstance(at, list) else []
        for key, inner in pairs:
            found.append((at, key))
            if isinstance(inner, dict | list):
                pending.append(inner)


def _value(rng: Random) -> Any:
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(NUMBERS)
    if roll < 0.75:
        return rng.choice(TEXTS)
    return rng.choice((None, True, [], {}, [1], [[1]], {"a": 1}, ["a"], [0] * 70, [2**60] * 100, "F32", "float64"))


def _one_change(document: Any, rng: Random, other: bytes) -> Any:
    found: list[tuple[Any, Any]] = []
    _places(document, found)
    if not found:
        return _value(rng)
    holder, key = rng.choice(found)
    roll = rng.random()
    if roll < 0.4:
        holder[key] = _value(rng)
    elif roll < 0.5 and isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
        holder[key] += rng.choice((1, -1, 4, -4, 64, 4096))
    elif roll < 0.6:
        del holder[key]
    elif roll < 0.7:
        giver, given = rng.choice(found)
        holder[key] = json.loads(json.dumps(giver[given]))
    elif roll < 0.8 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif roll < 0.85 and isinstance(holder, list):
        del holder[key:]
    elif roll < 0.95 and isinstance(holder, dict):
        name = rng.choice(TEXTS) if rng.random() < 0.5 else rng.choice(list(holder))
        holder[name] = holder.pop(key)
    else:
        try:
            strange: list[tuple[Any, Any]] = []
            _places(json.loads(other), strange)
            giver, given = rng.choice(strange)
            holder[key] = giver[given]
        except (ValueError, IndexError, RecursionError):
            holder[key] = _value(rng)
    return document
