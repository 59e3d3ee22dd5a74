"""Output of the commands: tables, JSON, the facts of tensors as text, and bars."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.control import strip_control_codes
from rich.segment import Segment, Segments
from rich.text import Text

from aiockpt.errors import NoThreadError, printable_key
from aiockpt.telemetry.card import size_text as size_text
from aiockpt.telemetry.card import time_text as time_text

if TYPE_CHECKING:
    from rich.progress import Progress

    from aiockpt.reading.info import ObjectInfo, TensorInfo
    from aiockpt.telemetry.progress import ProgressEvent

_GAP = 2  # cells between columns
_INDENT = 4  # cells before what is continued
_BATCH = 1000  # lines printed at once


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

    A row may be shorter; if it is one cell, that widens no column. What a terminal is too narrow for is continued on a
    second line, or a third; nothing is cut.
    """
    out = console()
    rows = [(*row, *[""] * (len(titles) - len(row))) for row in rows]
    filled = [at for at, cells in enumerate(zip(*rows, strict=True)) if any(map(str, cells))]
    right = [titles[at].startswith(">") for at in filled]
    heads = [titles[at].removeprefix(">") for at in filled]
    table: list[list[str | Text]] = [[Text(head, "bold") for head in heads]] if any(heads) else []
    table += [[row[at] for at in filled] for row in rows]
    sized = [cells for cells in table if len(cells) == 1 or any(map(str, cells[1:]))]
    widths = [max(cell_len(str(cell)) for cell in column) for column in zip(*sized, strict=True)]
    if not out.is_terminal:  # there is one band; rich would take half of the time of a long list
        for cells in table:
            texts = [text if text.isprintable() else strip_control_codes(text) for text in map(str, cells)]
            print("".join(_padded(texts, widths, right)).rstrip())
        return
    room = out.width
    bands = _bands(widths, room)
    for start in range(0, len(table), _BATCH):  # each call takes long
        segments: list[Segment] = []
        for cells in table[start : start + _BATCH]:
            for number, band in enumerate(bands):
                padded = _padded([cells[at] for at in band], [widths[at] for at in band], [right[at] for at in band])
                segments += _segments(out, room, [" " * _INDENT if number else "", *padded])
        out.print(Segments(segments), end="", soft_wrap=True)


def _segments(out: Console, room: int, parts: Sequence[str | Text]) -> list[Segment]:
    """Return what is printed for a line, wrapped if it has not enough room; nothing if it goes on with nothing.

    A part has one style, or spans that follow each other.
    """
    plain = "".join(map(str, parts)).rstrip()
    if not plain and parts[0]:
        return []
    if cell_len(plain) > room:
        line = Text.assemble(*parts)
        line.rstrip()
        return [segment for each in line.wrap(out, room - _INDENT) for segment in each.render(out, "\n")]
    found: list[Segment] = []  # rich, which wraps and sorts, would take most of the time of a long list
    begin = done = 0
    for part in parts:
        if isinstance(part, Text):
            for start, end, style in part.spans or ((0, len(part), part.style),):
                found.append(Segment(plain[done : begin + start]))
                found.append(Segment(plain[begin + start : begin + end], out.get_style(style)))
                done = begin + end
        begin += len(part)
    found.append(Segment(f"{plain[done:]}\n"))
    return found


def _padded(cells: Sequence[Any], widths: Sequence[int], right: Sequence[bool]) -> Iterator[Any]:
    """Yield the cells of a line, and the spaces around them."""
    for cell, width, is_right in zip(cells, widths, right, strict=True):
        gap = " " * (width - (cell_len(cell) if isinstance(cell, str) else cell.cell_len))
        yield from (gap, cell) if is_right else (cell, gap)
        yield " " * _GAP


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


# --- progress -----------------------------------------------------------------------------------------

_AFTER_S = 1.0


class ByteBar:
    """A bar of bytes with speed and time left; a function for ``progress=`` of loads, verifications and conversions."""

    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="")
        self.done_bytes = 0  # as of the last event

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done."""
        self._progress.advance(self._task, nbytes)

    def __call__(self, event: ProgressEvent) -> None:
        """Show an event."""
        self.done_bytes = event.done_bytes
        self._progress.update(self._task, completed=event.done_bytes, total=event.total_bytes or None)


@contextlib.contextmanager
def bar(title: str, total: int | None = None) -> Iterator[ByteBar]:
    """Show a bar within the context, on standard error, if that is a terminal and it takes longer than a second.

    ``total``: the bytes in all; None as long as that is not known.
    """
    from aiockpt.core.threads import start_thread  # these take long to import
    from aiockpt.progress.terminal import bars

    err = console(stderr=True)
    progress = bars(err, transient=True)
    timer = threading.Timer(_AFTER_S, progress.start)
    timer.daemon = True
    if err.is_terminal:
        with contextlib.suppress(NoThreadError):
            start_thread(timer)
    try:
        yield ByteBar(progress, title, total)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # it may be starting the display just now
        if progress.live.is_started:
            progress.stop()
