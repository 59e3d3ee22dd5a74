"""Output of the commands: tables, JSON, and the facts of tensors as text."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.control import strip_control_codes
from rich.text import Text

from aiockpt.errors import printable_key
from aiockpt.telemetry.card import size_text as size_text
from aiockpt.telemetry.card import time_text as time_text

if TYPE_CHECKING:
    from aiockpt.reading.info import ObjectInfo, TensorInfo

_GAP = 2  # cells between columns
_INDENT = 4  # cells before what is continued


class _Console(Console):
    def on_broken_pipe(self) -> None:  # rich would exit with the code for problems
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps at words on a terminal and nothing elsewhere, and takes no text for markup."""
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(AttributeError):  # a name in a checkpoint may have what the terminal has not
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty())


# --- tables ---------------------------------------------------------------------------------------------


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table, without the columns that are empty. A title with ">" in front is that of a column of numbers.

    What a terminal is too narrow for is continued on a second line, or a third; nothing is cut.
    """
    out = console()
    filled = [at for at, cells in enumerate(zip(*rows, strict=True)) if any(map(str, cells))]
    right = [titles[at].startswith(">") for at in filled]
    if not out.is_terminal:  # there is one band; rich would take half of the time of a long list
        heads = [titles[at].removeprefix(">") for at in filled]
        texts_of = ([str(row[at]) for at in filled] for row in rows)
        table = [
            heads,
            *([cell if cell.isprintable() else strip_control_codes(cell) for cell in texts] for texts in texts_of),
        ]
        sizes = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        for texts in table:
            gaps = [" " * (size - cell_len(text)) for text, size in zip(texts, sizes, strict=True)]
            plain = (gap + text if at else text + gap for text, gap, at in zip(texts, gaps, right, strict=True))
            print((" " * _GAP).join(plain).rstrip())
        return
    lines = [[Text(titles[at].removeprefix(">"), style="bold") for at in filled]]
    lines += [[cell if isinstance(cell, Text) else Text(cell) for cell in (row[at] for at in filled)] for row in rows]
    widths = [max(cell.cell_len for cell in cells) for cells in zip(*lines, strict=True)]
    bands = _bands(widths, out.width)
    for cells in lines:
        for number, band in enumerate(bands):
            padded = [(cells[at], " " * (widths[at] - cells[at].cell_len), right[at]) for at in band]
            line = Text(" " * _INDENT if number else "")
            for cell, gap, is_right in padded:
                line += Text.assemble(*((gap, cell) if is_right else (cell, gap)), " " * _GAP)
            line.rstrip()
            if line.plain or not number:
                for each in line.wrap(out, out.width - _INDENT) if line.cell_len > out.width else [line]:
                    out.print(each)


def _bands(widths: Sequence[int], room: int) -> list[list[int]]:
    """Divide columns, by their numbers, among as many lines as they need."""
    bands: list[list[int]] = [[]]
    used = 0
    for at, width in enumerate(widths):
        if bands[-1] and used + width > room:
            bands.append([])
            used = _INDENT
        bands[-1].append(at)
        used += width + _GAP
    return bands


# --- JSON -----------------------------------------------------------------------------------------------


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a document of JSON, with a line for each key or item, and for each item of a list under a key.

    Nan and infinities become texts: JSON has no such numbers.
    """
    if isinstance(document, Mapping):
        ends, items = "{}", [(f"{json.dumps(key)}: ", value) for key, value in document.items()]
    else:
        ends, items = "[]", [("", item) for item in document]
    sys.stdout.write(ends[0])
    for number, (name, value) in enumerate(items):
        sys.stdout.write(f"{',' if number else ''}\n  {name}")
        sys.stdout.writelines(_laid_out(value))
    sys.stdout.write(f"\n{ends[1]}\n" if items else f"{ends[1]}\n")


def _laid_out(value: Any) -> Iterator[str]:
    """Yield the text in parts: a closed pipe is not noticed within one."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, item in enumerate(value):
            yield f"{',' if number else '['}\n    {_encoded(item)}"
        yield "\n  ]"
    else:
        yield _encoded(value)


def _encoded(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


# --- facts --------------------------------------------------------------------------------------------


def dtype_text(info: TensorInfo) -> str:
    """Return the dtype of a tensor."""
    return str(info.dtype).removeprefix("torch.")


def facts_of(info: TensorInfo | ObjectInfo) -> dict[str, Any]:
    """Return what JSON says of a tensor or an object."""
    from aiockpt.reading.info import TensorInfo  # not above: it imports torch

    if not isinstance(info, TensorInfo):
        return {"kind": "object", "bytes": info.nbytes}
    return {"kind": "tensor", "dtype": dtype_text(info), "shape": info.shape, "bytes": info.nbytes}


def shape_text(info: TensorInfo, value: str = "") -> str:
    """Return the shape of a tensor; of a scalar its value, if that is known."""
    return "x".join(map(str, info.shape)) or f"scalar {value}".rstrip()


def shown(name: str) -> str:
    """Return a key, a path or another text of a checkpoint as it may be shown on one line."""
    return printable_key(name)
