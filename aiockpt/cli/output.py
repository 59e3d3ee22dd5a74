"""Output of the commands: tables, JSON, sizes and times."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from aiockpt.errors import printable_key
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    from aiockpt.reading.info import ObjectInfo, TensorInfo

__all__ = [
    "Column",
    "console",
    "dtype_text",
    "duration_text",
    "facts_of",
    "padded",
    "print_json",
    "print_table",
    "rate_text",
    "shape_text",
    "shown",
    "size_text",
    "time_text",
]


class _Console(Console):
    def on_broken_pipe(self) -> None:  # rich would exit with the code for problems
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps nothing where there is no terminal, and takes no text for markup."""
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(AttributeError):  # a name in a checkpoint may have what the terminal has not
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty())


# --- tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        right: align it to the right, as numbers are.
        style: its style, one that can be read on dark and on light.
        wraps: whether long text is continued on the next line of a terminal.
    """

    title: str
    right: bool = False
    style: str = ""
    wraps: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table: fitted to a terminal, with all of each text on a line elsewhere."""
    out = console()
    if out.is_terminal:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                style=column.style,
                overflow="fold",
                no_wrap=not column.wraps,
            )
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        out.print(table)
        return
    texts = [[column.title for column in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*texts, strict=True)]
    for line in texts:
        cells = zip(columns, widths, line, strict=True)
        print("  ".join(padded(text, width, right=column.right) for column, width, text in cells).rstrip())


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return a text with spaces after it, or before it, to a width in cells of a terminal."""
    gap = " " * (width - cell_len(text))
    return gap + text if right else text + gap


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


# --- numbers --------------------------------------------------------------------------------------------


def duration_text(seconds: float) -> str:
    """Return a duration in the largest unit that fits, with the next smaller one."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def time_text(time_s: float) -> str:
    """Return a time in seconds as in `time.time` as text, to the minute, in the zone of this machine."""
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M")


def rate_text(bytes_per_s: float) -> str:
    """Return a speed."""
    return f"{size_text(bytes_per_s)}/s"


def dtype_text(info: TensorInfo) -> str:
    """Return the dtype of a tensor."""
    return str(info.dtype).removeprefix("torch.")


def facts_of(info: TensorInfo | ObjectInfo) -> dict[str, Any]:
    """Return what JSON says of a tensor or an object."""
    from aiockpt.reading.info import TensorInfo  # not above: it imports torch

    if not isinstance(info, TensorInfo):
        return {"kind": "object", "bytes": info.nbytes}
    return {"kind": "tensor", "dtype": dtype_text(info), "shape": info.shape, "bytes": info.nbytes}


def shape_text(info: TensorInfo) -> str:
    """Return the shape of a tensor."""
    return "x".join(map(str, info.shape)) or "scalar"


def shown(name: str) -> str:
    """Return a key, a path or another text of a checkpoint as it may be shown on one line."""
    return printable_key(name)
