"""Mutations of pickles, opcode by opcode, so that most results still run for a while."""

from __future__ import annotations

import pickletools
import struct
from random import Random

NUMBERS = (0, 1, 2, 3, 6, 7, 24, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -1)
ALLOWED = (
    *("__builtin__ set", "__builtin__ list", "__builtin__ xrange", "__builtin__ bytes", "__builtin__ bytearray"),
    *("__builtin__ int", "__builtin__ str", "__builtin__ complex", "__builtin__ tuple", "__builtin__ frozenset"),
    *("collections OrderedDict", "collections Counter", "collections defaultdict", "collections deque"),
    *("_codecs encode", "datetime datetime", "datetime timedelta", "torch Size", "torch device", "torch float32"),
    *("torch FloatStorage", "torch.storage UntypedStorage", "torch Tensor", "torch FloatTensor", "torch uint8"),
    *("torch.serialization _get_layout", "torch._tensor _rebuild_from_type_v2", "torch.nn.parameter Parameter"),
    *(f"torch._utils _rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter", "sparse_tensor", "qtensor")),
    *(f"torch._utils _rebuild_{name}" for name in ("nested_tensor", "wrapper_subclass", "parameter_with_state")),
    "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_device_tensor_from_numpy",
    *(f"torch.distributed.checkpoint.metadata {name}" for name in ("Metadata", "MetadataIndex", "TensorProperties")),
    *(f"torch.distributed.checkpoint.metadata {name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    *("torch.distributed.checkpoint.metadata BytesStorageMetadata", "pathlib PosixPath"),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
)
DANGEROUS = (
    *("os system", "posix system", "builtins eval", "builtins exec", "builtins getattr", "builtins __import__"),
    *("subprocess Popen", "runpy run_path", "torch.hub load", "torch load", "numpy.core.multiarray _reconstruct"),
    *("builtins open", "operator attrgetter", "functools partial", "torch os.system", "torch.serialization os.system"),
)
_SINGLE = b"(.012NIJKMLGFSTUXVtdleasu)]}pqrghjcioRbQP" + bytes(range(0x80, 0x99))
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")


def _global(name: str, rng: Random) -> bytes:
    module, _, attribute = name.partition(" ")
    if rng.random() < 0.7:
        return f"c{module}\n{attribute}\n".encode()
    return _text(module) + _text(attribute) + b"\x93"


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Return opcodes that push a number."""
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"K" + data[:1] if 0 <= value < 256 else b"\x8a" + bytes([len(data)]) + data


TEXTS = (
    "storage",
    "0",
    "cpu",
    "../x",
    "/etc/passwd",
    "\0",
    "\x1b[2J",
    "\udc80",
    "<b>",
    "model.w",
    "latin1",
    "punycode",
)


def fragment(rng: Random) -> bytes:
    """Return a few random opcodes."""
    roll = rng.random()
    if roll < 0.2:
        return number(rng.choice(NUMBERS))
    if roll < 0.3:
        return _text(rng.choice(TEXTS))
    if roll < 0.5:
        return _global(rng.choice(ALLOWED), rng)
    if roll < 0.55:
        return _global(rng.choice(DANGEROUS), rng)
    if roll < 0.7:
        return rng.choice((b"h", b"q")) + bytes([rng.choice((0, 1, 2, 5, 20, 255))])
    if roll < 0.8:
        return rng.choice((b"\x85R", b"\x86R", b"(tR", b")R", b")\x81", b"}b", b"]", b"}", b")", b"\x8f", b"0"))
    return bytes([rng.choice(_SINGLE)])


def opcodes(data: bytes) -> list[bytes]:
    """Split a pickle into its opcodes; the last piece is the part that can't be parsed."""
    cuts: list[int] = []
    try:
        cuts.extend(at for _, _, at in pickletools.genops(data) if at is not None)
    except Exception:  # pickletools raises errors of many types for damaged pickles
        cuts.append(len(data) if not cuts else cuts[-1])
    return [data[a:b] for a, b in zip(cuts, [*cuts[1:], len(data)], strict=True) if a < b]


def _numbered_again(pieces: list[bytes]) -> list[bytes]:
    """Renumber the memo entries in order, as every pickler does."""
    count = 0
    for at, piece in enumerate(pieces):
        name = pickletools.code2op[chr(piece[0])].name if chr(piece[0]) in pickletools.code2op else ""
        if name in _PUTS:
            if name != "MEMOIZE":
                pieces[at] = b"q" + bytes([count]) if count < 256 else b"r" + struct.pack("<I", count)
            count += 1
    return pieces


def changed(data: bytes, rng: Random, other: bytes) -> bytes:
    """Return a mutation of a pickle, changed in one to four places."""
    pieces = opcodes(data) or [b"."]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        at, roll = rng.randrange(len(pieces)), rng.random()
        if roll < 0.3:
            pieces[at:at] = [fragment(rng)]
        elif roll < 0.5:
            pieces[at] = fragment(rng)
        elif roll < 0.6:
            del pieces[at : at + rng.choice((1, 1, 2, 8))]
        elif roll < 0.7:
            end = at + rng.choice((1, 2, 5, 20))
            pieces[at:at] = pieces[at:end] * rng.choice((1, 1, 2, 50))
        elif roll < 0.8:
            given = opcodes(other) or [b"."]
            begin = rng.randrange(len(given))
            pieces[at : at + rng.choice((0, 1, 5))] = given[begin : begin + rng.choice((1, 3, 10, 40))]
        elif roll < 0.9:
            to = rng.randrange(len(pieces))
            pieces[at], pieces[to] = pieces[to], pieces[at]
        else:
            pieces[at] = _argument_changed(pieces[at], rng)
        pieces = [piece for piece in pieces if piece] or [b"."]
    return b"".join(_numbered_again(pieces) if rng.random() < 0.7 else pieces)


def _argument_changed(piece: bytes, rng: Random) -> bytes:
    if len(piece) < 2:
        return piece
    at = rng.randrange(1, len(piece))
    return piece[:at] + bytes([piece[at] ^ 1 << rng.randrange(8)]) + piece[at + 1 :]
