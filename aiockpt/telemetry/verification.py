"""The report of a verification, and the problems that it lists."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.wording import plural
from aiockpt.errors import CorruptCheckpointError, printable, printable_key
from aiockpt.telemetry.card import size_text
from aiockpt.telemetry.timeline import Timed

_ADVICE = re.compile(r" If you trust it, pass .*$")  # of errors of a load: a verification takes no such option

ProblemKind = Literal[
    "missing file",
    "unreadable",
    "unsafe path",
    "size",
    "file crc",
    "manifest",
    "metadata",
    "disagreement",
    "structure",
    "coverage",
    "place",
    "overlap",
    "framing",
    "item crc",
    "mismatch",
    "unreferenced file",
    "leftover",
]
Severity = Literal["error", "warning"]

_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a checkpoint.

    Attributes:
        kind: the kind of problem:

            - ``missing file``: a file does not exist; reported once more for each key that it held.
            - ``unreadable``: the file system failed to read it.
            - ``unsafe path``: a file name leads out of the checkpoint; the file was not read.
            - ``size``: a file was truncated, or has grown, since it was written.
            - ``file crc``: the bytes of a file changed since it was written.
            - ``manifest``, ``metadata``: the document is damaged.
            - ``disagreement``: manifest and metadata contradict each other.
            - ``structure``: the keys do not form a state dict.
            - ``coverage``: the chunks of a tensor overlap or leave gaps.
            - ``place``: an item lies beyond the end of its file.
            - ``overlap``: two items share bytes of a file.
            - ``framing``: the zip structure around the bytes of a tensor or an object is damaged.
            - ``item crc``: the bytes of a tensor or an object changed since they were written.
            - ``mismatch``: an item is intact, but its dtype or shape is not what the metadata says.
            - ``unreferenced file``: a file that no key needs; a warning.
            - ``leftover``: temporary files of an interrupted save; a warning.
        file: the file, relative to the checkpoint.
        message: the details, with numbers.
        key: the key of the state dict that is affected; None if there is none or it is unknown.
        offset: the byte offset in the file; None if the whole file is affected.
        severity: "error": something can't be loaded, or differs from what was saved. "warning": everything loads.
    """

    kind: ProblemKind
    file: str
    message: str
    key: str | None = None
    offset: int | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        key = "" if self.key is None else f", key {printable_key(self.key)}"
        return f"{self.severity}: {self.kind}: {printable_key(self.file)}{at}{key}: {printable(self.message)}"


@dataclasses.dataclass(frozen=True)
class VerifyReport(Timed):
    """The result of `AsyncCheckpointer.verify`.

    Attributes:
        path: the checkpoint.
        format: its format; "unknown" if it is too damaged to tell.
        problems: all problems, ordered by file and offset.
        files: the number of files that were checked.
        items: the number of stored tensors, chunks of tensors and objects that were checked.
        checked_bytes: the number of bytes that were read.
        unverifiable: the number of items without a CRC, of their own or of their file: their framing and size are
            checked, their bytes can't be.
        unverifiable_keys: the keys of the first of these.
        elapsed_s: the duration in seconds.

    `timeline` returns what each thread did, `chrome_trace` writes it to a file, and a notebook shows it.
    """

    path: str
    format: str
    problems: tuple[Problem, ...] = field(repr=False)
    files: int
    items: int
    checked_bytes: int
    unverifiable: int
    unverifiable_keys: tuple[str, ...]
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """Whether there are no errors. There may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that are errors."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def damaged_keys(self) -> tuple[str, ...]:
        """The keys named by errors, each once; all other keys can be loaded if `.metadata` can be read."""
        return tuple(dict.fromkeys(problem.key for problem in self.errors if problem.key is not None))

    def raise_if_bad(self) -> None:
        """Raise if there are errors.

        Raises:
            CorruptCheckpointError: with the number of errors and the first of them.
        """
        errors = self.errors
        if errors:
            first = "; ".join(map(str, errors[:3])) + ("; ..." if len(errors) > 3 else "")
            raise CorruptCheckpointError(f"{self.path} has {plural(len(errors), 'error')}: {first}. Use an older one.")

    def __str__(self) -> str:
        return self._text(len(self.problems))

    def __repr__(self) -> str:
        return self._text(_SHOWN)

    def _repr_html_(self) -> str:
        from aiockpt.telemetry.card import card, time_text

        speed = self.checked_bytes / self.elapsed_s if self.elapsed_s else 0.0
        facts = {
            "format": self.format,
            "checked": f"{plural(self.files, 'file')}, {plural(self.items, 'item')}, {size_text(self.checked_bytes)}",
            "without CRC": plural(self.unverifiable, "item"),
            "took": f"{time_text(self.elapsed_s)} ({size_text(speed)}/s)",
        }
        title = "sound" if self.ok else plural(len(self.errors), "error")
        notes = self._text(_SHOWN).partition("\n")[2]
        return card(f"verified: {title}", self.path, facts, self.timeline(), notes)

    def _text(self, most: int) -> str:
        lines = [self._summary(), *(f"  {problem}" for problem in self.problems[:most])]
        if len(self.problems) > most:
            lines.append(f"  and {len(self.problems) - most} more")
        return "\n".join(lines)

    def _summary(self) -> str:
        warnings = len(self.problems) - len(self.errors)
        state = plural(len(self.errors), "error") if self.errors else "sound"
        if warnings:
            state += f", {plural(warnings, 'warning')}"
        if self.unverifiable:
            state += f", {plural(self.unverifiable, 'item')} without CRC"
        return (
            f"{printable_key(self.path)}: {state} ({self.format}; {plural(self.files, 'file')}, "
            f"{plural(self.items, 'item')}, {size_text(self.checked_bytes)} in {self.elapsed_s:.2f} s)"
        )


@dataclass(eq=False)
class Findings:
    """Collects problems from several threads; list.append is atomic."""

    problems: list[Problem] = field(default_factory=list)

    def add(
        self,
        kind: ProblemKind,
        file: str,
        message: str,
        *,
        key: str | None = None,
        offset: int | None = None,
        severity: Severity = "error",
    ) -> None:
        """Add a problem; control characters in its message are escaped."""
        message = printable(_ADVICE.sub("", message))
        self.problems.append(Problem(kind, file, message, key, offset, severity))

    def ordered(self) -> tuple[Problem, ...]:
        """Return the distinct problems by file, offset and key."""

        def order(problem: Problem) -> tuple[str, int, str, str]:
            offset = -1 if problem.offset is None else problem.offset
            return problem.file, offset, problem.key or "", problem.kind

        return tuple(sorted(dict.fromkeys(self.problems), key=order))
