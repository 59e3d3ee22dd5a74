"""``aiockpt diff``: the keys and values in which two checkpoints differ."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from rich.text import Text

import aiockpt
from aiockpt.cli.app import Code, CommandError
from aiockpt.cli.output import (
    ByteBar,
    bar,
    console,
    dtype_text,
    facts_of,
    print_json,
    print_table,
    shape_text,
    shown,
    size_text,
)
from aiockpt.cli.statistics import blocks, distinct_index, numbers, part_indices, small_values, times_of
from aiockpt.core.extent import strided_parts
from aiockpt.format.keys import hint, matching
from aiockpt.reading.info import ObjectInfo, TensorInfo, value_text
from aiockpt.reading.reader import CheckpointReader

# --- values -------------------------------------------------------------------------------------------


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = float(1 << 62)  # differences of integers below it don't overflow


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that count as none, as in `math.isclose`."""

    relative: float = 0.0  # to the larger of both absolute values
    absolute: float = 0.0  # of the difference

    def __bool__(self) -> bool:
        return bool(self.relative or self.absolute)


class TensorDifference:
    """The difference of two tensors of one shape, summed up part by part.

    Attributes:
        elements: the number of elements that were compared.
        differing: the number of those that differ in a bit, and by more than is tolerated.
        max_abs: the largest difference of these; None if none is a number.
        max_rel: the largest ratio of a difference to the larger of both absolute values.
        nan: the number of differing elements that are nan in one of them or in both, with other bits.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self.elements = self.differing = self.nan = 0
        self.max_abs: float | None = None
        self.max_rel: float | None = None

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two parts of shapes that broadcast; of different dtypes the values are compared, else the bits."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        self.elements += math.prod(shape)
        for one, other in zip(blocks(a.expand(shape)), blocks(b.expand(shape)), strict=True):
            self._add(one, other)

    def repeat(self, times: int) -> None:
        """Count every element that was compared so often."""
        self.elements, self.differing, self.nan = (n * times for n in (self.elements, self.differing, self.nan))

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype is b.dtype:
            where = _bits(a).ne(_bits(b))
            where = where if where.dim() == 1 else where.any(1)
            if not where.any():
                return
            a, b = (_bits(each)[where].view(each.dtype).view(-1) for each in (a, b))
        try:
            one, other = numbers(a), numbers(b)
        except (RuntimeError, NotImplementedError):  # a dtype that torch can't compute with
            self.differing += a.numel()
            return
        gap, size = _gap(one, other), torch.maximum(_magnitude(one), _magnitude(other))
        is_nan, is_other = gap.isnan(), a.dtype is not b.dtype
        same = one.eq(other) if is_other else torch.zeros_like(is_nan)
        if is_other or self._tolerance:  # nan is nan in any dtype, and with any bits
            same |= _magnitude(one).isnan() & _magnitude(other).isnan()
        if self._tolerance:
            most = (size * self._tolerance.relative).clamp(min=self._tolerance.absolute)
            same |= gap.isfinite() & (gap <= most)
        apart = ~same
        self.differing += int(apart.sum())
        self.nan += int((apart & is_nan).sum())
        known = apart & ~is_nan
        if known.any():
            gap, size = gap[known], size[known]
            ratio = torch.where(size > 0, gap / size, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
            self.max_abs = max(self.max_abs or 0.0, gap.max().item())
            self.max_rel = max(self.max_rel or 0.0, ratio.max().item())


def _bits(values: torch.Tensor) -> torch.Tensor:
    size = values.dtype.itemsize
    if size in _BITS:
        return values.view(_BITS[size])
    return values.contiguous().view(torch.uint8).view(-1, size)


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences as float64; equal infinities differ by 0."""
    if a.dtype is torch.int64 and b.dtype is torch.int64:
        about = (a.to(torch.float64) - b.to(torch.float64)).abs()
        return torch.where(about < _EXACT, (a - b).abs().to(torch.float64), about)
    return torch.where(a == b, 0.0, (a - b).abs())


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    return values.abs() if values.is_complex() else values.to(torch.float64).abs()


# --- objects --------------------------------------------------------------------------------------------


def same_objects(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Return whether two objects are equal: of one type, tensors and arrays as `TensorDifference` compares them."""
    waiting = [(a, b)]
    seen: set[tuple[int, int]] = set()  # objects may contain themselves
    while waiting:
        one, other = waiting.pop()
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if type(one) is not type(other):
            return False
        if isinstance(one, Mapping):
            if one.keys() != other.keys():
                return False
            waiting += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            if len(one) != len(other):
                return False
            waiting += zip(one, other, strict=True)
        elif not _same_leaf(one, other, tolerance):
            return False
    return True


def _same_leaf(a: Any, b: Any, tolerance: Tolerance) -> bool:
    if isinstance(a, torch.Tensor):
        return _same_tensor(a, b, tolerance)
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return same_objects(a.tolist(), b.tolist(), tolerance) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (
            a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
        )
    try:
        if bool(a == b):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass
    return not isinstance(a, str | bytes | int | AbstractSet) and _saved(a) == _saved(b) is not None


def _same_tensor(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> bool:
    if (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
        return False
    if a.is_quantized and tolerance:
        a, b = a.dequantize(), b.dequantize()
    if a.layout is not torch.strided or a.is_quantized:
        (places, values), (other_places, other_values) = _parts(a), _parts(b)
        return same_objects(places, other_places, Tolerance()) and same_objects(values, other_values, tolerance)
    difference = TensorDifference(tolerance)
    difference.add(a, b)
    return not difference.differing


def _parts(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return what places or scales the values of a sparse or quantized tensor, and the values, all as plain objects."""
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            with contextlib.suppress(RuntimeError):  # torch can't add values of each dtype
                tensor = tensor.detach().coalesce()
        parts = list(strided_parts(tensor))
        return parts[:-1], parts[-1:]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [tensor.q_scale(), tensor.q_zero_point()], [tensor.int_repr()]
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [tensor.q_per_channel_axis(), scales, zero_points], [tensor.int_repr()]


def _saved(value: Any) -> bytes | None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:  # what an object of a foreign class raises
        return None
    return file.getvalue()


# --- differences --------------------------------------------------------------------------------------


_PART_BYTES = 16 << 20  # read at once of each checkpoint
_GROUP = 1000  # most keys read at once

Info = TensorInfo | ObjectInfo
Pair = TypeVar("Pair", bound=tuple[Info, Info])


@dataclass(frozen=True, slots=True)
class Changed:
    """A key that both checkpoints have, with other contents."""

    key: str
    a: Info
    b: Info
    what: str  # what differs: "kind", "dtype", "shape", "values", or "bytes" for objects that may not be unpickled
    values: TensorDifference | None = None  # the difference of the values, for tensors of one shape
    texts: tuple[str, str] | None = None  # both objects in short


@dataclass(slots=True)
class Differences:
    """The differences between two checkpoints, in the order of the keys."""

    added: list[Info] = field(default_factory=list)
    removed: list[Info] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    unchanged: int = 0
    texts: tuple[dict[str, str], dict[str, str]] = ({}, {})  # of scalars and small objects that differ, in each

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


async def diff(a: str, b: str, patterns: Sequence[str], *, tolerance: Tolerance, as_json: bool, trust: bool) -> Code:
    """Print the differences of two checkpoints, and return the exit code."""
    async with AsyncExitStack() as stack:
        old, new = [await stack.enter_async_context(aiockpt.open(path, trust=trust)) for path in (a, b)]
        found = await differences(old, new, patterns, tolerance)
        found.texts = (
            await _texts(old, [*found.removed, *(each.a for each in found.changed)]),
            await _texts(new, [*found.added, *(each.b for each in found.changed)]),
        )
        if as_json:
            print_json(_document(old, new, found))
        else:
            _print(old, new, found)
    return Code.PROBLEMS if found else Code.FINE


async def differences(
    a: CheckpointReader, b: CheckpointReader, patterns: Sequence[str] = (), tolerance: Tolerance | None = None
) -> Differences:
    """Compare two open checkpoints, reading both in parts of bounded size."""
    tolerance = tolerance or Tolerance()
    old, new = _chosen(a, b, patterns)
    found = Differences(
        added=[info for key, info in new.items() if key not in old],
        removed=[info for key, info in old.items() if key not in new],
    )
    common = [(info, new[key]) for key, info in old.items() if key in new]
    changed: dict[str, Changed] = {}
    tensors: list[tuple[TensorInfo, TensorInfo]] = []
    objects: list[tuple[ObjectInfo, ObjectInfo]] = []
    for one, other in common:
        if isinstance(one, ObjectInfo) and isinstance(other, ObjectInfo):
            objects.append((one, other))
        elif isinstance(one, ObjectInfo) or isinstance(other, ObjectInfo):
            changed[one.key] = Changed(one.key, one, other, "kind")
        elif one.shape == other.shape:
            tensors.append((one, other))
        else:
            changed[one.key] = Changed(one.key, one, other, "shape")
    for pairs in _groups(objects):
        changed |= {each.key: each async for each in _changed_objects(a, b, pairs, tolerance)}
    with bar("comparing", sum(one.nbytes + other.nbytes for one, other in tensors)) as shown_bar:
        async for one, other, values in _compared(a, b, tensors, tolerance, shown_bar):
            if one.dtype is not other.dtype or values.differing:
                what = "values" if one.dtype is other.dtype else "dtype"
                changed[one.key] = Changed(one.key, one, other, what, values)
    found.changed = [changed[one.key] for one, _ in common if one.key in changed]
    found.unchanged = len(common) - len(changed)
    return found


def _chosen(
    a: CheckpointReader, b: CheckpointReader, patterns: Sequence[str]
) -> tuple[dict[str, Info], dict[str, Info]]:
    if not patterns:
        return dict(a), dict(b)
    both = {**dict.fromkeys(a), **dict.fromkeys(b)}
    names, unmatched = matching(both.keys(), patterns)
    if unmatched:
        raise CommandError(
            f"neither {a.path} nor {b.path} has a key that matches {unmatched[0]}.{hint(unmatched, both)}"
        )
    return {key: a[key] for key in a if key in names}, {key: b[key] for key in b if key in names}


# --- tensors --------------------------------------------------------------------------------------------


async def _compared(
    a: CheckpointReader,
    b: CheckpointReader,
    pairs: Sequence[tuple[TensorInfo, TensorInfo]],
    tolerance: Tolerance,
    shown_bar: ByteBar,
) -> AsyncIterator[tuple[TensorInfo, TensorInfo, TensorDifference]]:
    """Yield each pair with the difference of its values: small ones read together, large ones part by part."""
    for group in _groups(pairs):
        found = [TensorDifference(tolerance) for _ in group]
        if len(group) == 1:
            one, other = group[0]
            parts: list[Any] = [None]
            times = 1
            if max(one.nbytes, other.nbytes) > _PART_BYTES and one.shape:
                _ = times_of(one), times_of(other)  # raises if one is stored in a way that can't be compared
                shape = tuple(map(max, one.distinct_shape, other.distinct_shape))
                times = math.prod(one.shape) // math.prod(shape)
                parts = part_indices(shape, _PART_BYTES // max(one.dtype.itemsize, other.dtype.itemsize))
            for part in parts:
                indices = (part if part is None else distinct_index(info, part) for info in (one, other))
                values = await _both(*(reader.read(one.key, i) for reader, i in zip((a, b), indices, strict=True)))
                await asyncio.to_thread(found[0].add, *values)
                shown_bar.advance(times * sum(value.nbytes for value in values))
            found[0].repeat(times)
        else:
            keys = [one.key for one, _ in group]
            whole = dict.fromkeys(keys)  # a mapping, whose keys are never taken for patterns
            old, new = await _both(a.read_many(whole), b.read_many(whole))
            for key, difference in zip(keys, found, strict=True):
                difference.add(old.pop(key), new.pop(key))
            shown_bar.advance(sum(one.nbytes + other.nbytes for one, other in group))
        for pair, difference in zip(group, found, strict=True):
            yield *pair, difference


async def _both(a: Any, b: Any) -> tuple[Any, Any]:
    """Await two reads at once; if one fails, wait for the other before raising."""
    values = await asyncio.gather(a, b, return_exceptions=True)
    for value in values:
        if isinstance(value, BaseException):
            raise value
    return values


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Group pairs so that each group has a bounded size, but for single ones that are larger."""
    group: list[Pair] = []
    total = 0
    for pair in pairs:
        nbytes = max(info.nbytes for info in pair)
        if group and (total + nbytes > _PART_BYTES or len(group) == _GROUP):
            yield group
            group, total = [], 0
        group.append(pair)
        total += nbytes
    if group:
        yield group


# --- objects --------------------------------------------------------------------------------------------


async def _changed_objects(
    a: CheckpointReader, b: CheckpointReader, pairs: Sequence[tuple[ObjectInfo, ObjectInfo]], tolerance: Tolerance
) -> AsyncIterator[Changed]:
    """Yield the objects that differ; if unpickling them would run code, their bytes are compared."""
    keys = dict.fromkeys(one.key for one, _ in pairs)
    try:
        old, new = await _both(a.read_many(keys), b.read_many(keys))
    except aiockpt.UnsafeCheckpointError:
        if len(pairs) > 1:
            for pair in pairs:
                async for each in _changed_objects(a, b, [pair], tolerance):
                    yield each
        elif not await asyncio.to_thread(_same_bytes, a, b, pairs[0][0].key):
            yield Changed(pairs[0][0].key, *pairs[0], "bytes")
        return
    for one, other in pairs:
        values = old[one.key], new[one.key]
        if not same_objects(*values, tolerance):
            yield Changed(one.key, one, other, "values", texts=(value_text(values[0]), value_text(values[1])))


def _same_bytes(a: CheckpointReader, b: CheckpointReader, key: str) -> bool:
    """Return whether an object is stored as the same bytes."""
    return all(one == other for one, other in zip_longest(a.stored_parts(key), b.stored_parts(key)))


async def _texts(reader: CheckpointReader, infos: Sequence[Info]) -> dict[str, str]:
    values, _ = await small_values(reader, infos)
    return {key: value_text(value) for key, value in values.items()}


# --- output ---------------------------------------------------------------------------------------------


_FIGURES = ("elements", "differing", "max_abs", "max_rel", "nan")


def _document(a: CheckpointReader, b: CheckpointReader, found: Differences) -> dict[str, Any]:
    return {
        "a": a.path,
        "b": b.path,
        "same": not found,
        "unchanged": found.unchanged,
        "added": [{"key": info.key, **facts_of(info)} for info in found.added],
        "removed": [{"key": info.key, **facts_of(info)} for info in found.removed],
        "changed": [
            {
                "key": each.key,
                "what": each.what,
                "a": facts_of(each.a),
                "b": facts_of(each.b),
                **({name: getattr(each.values, name) for name in _FIGURES} if each.values else {}),
                **({} if each.texts is None else {"before": each.texts[0], "after": each.texts[1]}),
            }
            for each in found.changed
        ],
    }


def _print(a: CheckpointReader, b: CheckpointReader, found: Differences) -> None:
    out = console()
    for sign, reader, style in (("-", a, "red"), ("+", b, "green")):
        out.print(Text.assemble((f"{sign} ", style), (shown(reader.path), "bold"), f"  {reader.format}"))
    if not found:
        keys = "key is" if found.unchanged == 1 else "keys are"
        out.print(f"\nno differences: {found.unchanged} {keys} the same")
        return
    old, new = found.texts
    rows: list[tuple[str | Text, ...]]
    rows = [(Text("-", "red"), shown(info.key), _described(info, old)) for info in found.removed]
    rows += [(Text("+", "green"), shown(info.key), _described(info, new)) for info in found.added]
    rows += [(Text("~", "yellow"), shown(each.key), *_cells(each, old, new)) for each in found.changed]
    out.print()
    print_table(("", "key", "what", ">differing", ">max abs", ">max rel"), rows)
    out.print(
        f"\n{len(found.removed)} removed, {len(found.added)} added, {len(found.changed)} changed, "
        f"{found.unchanged} the same"
    )


def _cells(each: Changed, old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    if each.what in ("kind", "dtype", "shape"):
        what = f"{_described(each.a, old)} -> {_described(each.b, new)}"
    elif each.what == "bytes":
        what = "object: other bytes, not unpickled"
    elif each.texts is not None:
        what = " -> ".join(map(shown, each.texts))
    else:
        what = _described(each.a, old) + (f" -> {shown(new[each.key])}" if each.key in new else "")
    if each.values is None:
        return (what,)
    values = each.values
    share = f"{values.differing} of {values.elements}" + (f" ({values.nan} nan)" if values.nan else "")
    return what, share, *("" if n is None else f"{n:.4g}" for n in (values.max_abs, values.max_rel))


def _described(info: Info, texts: Mapping[str, str]) -> str:
    text = shown(texts[info.key]) if info.key in texts else ""
    if isinstance(info, ObjectInfo):
        return text or (f"object of {size_text(info.nbytes)}" if info.file else "object")
    return f"{dtype_text(info)} {shape_text(info, text)}"
