"""Pickles and files that no honest program writes."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch


def zipped(pickled: bytes, storage: bytes = b"") -> bytes:
    """Return a file like those of ``torch.save``, with valid CRCs, around any pickle."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("data/0", storage), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", data)
    return sink.getvalue()


def pickle_of(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    with zipfile.ZipFile(sink) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _calls(name: str, *args: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(args) + b"tR"


def _tensor(numel: int, size: bytes, stride: bytes, offset: bytes = b"K\x00") -> bytes:
    storage = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    pid = b"(" + storage + b"J" + numel.to_bytes(4, "little")
    return _calls("torch._utils._rebuild_tensor_v2", pid + b"tQ", offset, size, stride, b"\x89", b"N")


HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x01"  # 2**40
RANGE = _calls("__builtin__.xrange", HUGE)
NESTED = b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))
TEXT = b"X" + (200_000).to_bytes(4, "little") + b"a" * 200_000
OBJECT_BOMBS = {
    **{f"{kind} of a range": _calls(f"__builtin__.{kind}", RANGE) for kind in ("list", "tuple", "set", "frozenset")},
    **{f"{kind} of a number": _calls(f"__builtin__.{kind}", HUGE) for kind in ("bytes", "bytearray")},
    **{f"{kind} of a range": _calls(f"collections.{kind}", RANGE) for kind in ("deque", "Counter")},
    "torch.Size of a range": _calls("torch.Size", RANGE),
    "a new bytes": b"c__builtin__\nbytes\n" + HUGE + b"\x85\x81",
    "a number of digits": _calls("__builtin__.int", TEXT.replace(b"a", b"9")),
    "a text of nested tuples": _calls("__builtin__.str", NESTED),
    "nested tuples as a key": b"}(" + NESTED + b"Nu",
    "nested tuples in a set": _calls("__builtin__.set", b"](" + NESTED + b"e"),
    "nested frozensets": b"K\x01\x85q\x00"
    + b"".join(_calls("__builtin__.frozenset", b"(h%ch%ct" % (n, n)) + b"q%c" % (n + 1) for n in range(60)),
    "deep tuples as a key": b"}(" + b")" + b"\x85" * 50_000 + b"Nu",
    # Refused before the end, where an opcode is that torch refuses itself.
    "tuples in tuples": b")" + b"\x85" * 10_001 + b"\xff",
    "lists in lists": b"]" * 10_002 + b"a" * 10_001 + b"\xff",
    "dicts in dicts": b"}" + b"K\x01}" * 10_001 + b"s" * 10_001 + b"\xff",
    "one large text in many sets": b"](" + TEXT + b"q\x00" + (b"c__builtin__\nset\nh\x00\x85R" * 20_000) + b"e",
    "an odd encoding": _calls("_codecs.encode", TEXT.replace(b"aa", b"\xc3\xa9"), b"X\x08\x00\x00\x00punycode"),
    "a tensor from nothing": _calls("torch.FloatTensor", HUGE),
    "a storage from nothing": _calls("torch.storage.UntypedStorage", HUGE),
    "a tensor from nothing, of a type": _calls(
        "torch._tensor._rebuild_from_type_v2", b"ctorch\nFloatTensor\n", b"ctorch\nTensor\n", HUGE + b"\x85", b"N"
    ),
    "a storage that is longer than stored": _tensor(2**30, b"K\x01\x85", b"K\x01\x85"),
    "a view of more than is stored": _tensor(6, HUGE + b"\x85", b"K\x01\x85"),
    "a view that begins behind the end": _tensor(6, b"K\x01\x85", b"K\x01\x85", HUGE),
    "a view with strides beyond": _tensor(6, b"K\x02\x85", HUGE + b"\x85"),
    "a view before the beginning": _tensor(6, b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "a state for a tensor": _tensor(6, b"K\x06\x85", b"K\x01\x85") + b"(" + HUGE + b"tb",
    "a huge memo index": b"Nr\xff\xff\xff\x7f",
    "a text that is cut": b"X\xff\xff\xff\x7fabc",
}
METADATA_BOMBS = {
    "a huge memo index": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "huge bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00abc.",
    "a huge text": b"\x80\x04\x8d\x00\x00\x00\x00\x00\x01\x00\x00abc.",
    "a huge bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00abc.",
    "nested tuples as a key": b"\x80\x02}" + NESTED + b"Ns.",
    "nested tuples for a name": b"\x80\x02" + _calls("torch.Size", NESTED) + b".",
    "a number of digits": b"I" + b"9" * 500_000 + b"\n.",
    "deep nesting": b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
    "a size used a million times": b"\x80\x02]("
    + b"N" * 300_000
    + b"eq\x000]("
    + b"ctorch\nSize\nh\x00\x85R" * 30_000
    + b"e.",
}
