"""What is wrong with a checkpoint: problems, and the report that lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aiockpt.errors import CorruptCheckpointError, printable, printable_key

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


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        kind: what kind of thing:

            - ``missing file``: a file is not there; with a key, for each key that it held.
            - ``unreadable``: the file system failed to read it.
            - ``unsafe path``: a file name leads out of the checkpoint; it was not read.
            - ``size``: a file was cut short, or has grown, since it was written.
            - ``file crc``: the bytes of a file changed since it was written.
            - ``manifest``, ``metadata``: what describes the checkpoint can't be read.
            - ``disagreement``: manifest and metadata say different things.
            - ``structure``: the keys do not make up a state dict.
            - ``coverage``: the chunks of a tensor overlap, or do not make up all of it.
            - ``place``: an item should be where its file has ended.
            - ``overlap``: two items share bytes of a file.
            - ``framing``: what stands around a tensor's or an object's bytes is damaged.
            - ``item crc``: the bytes of a tensor or an object changed since they were written.
            - ``mismatch``: an item is sound, but not what the metadata says.
            - ``unreferenced file``: a file that no key needs; a warning.
            - ``leftover``: what an interrupted program of ours left; a warning.
        file: the file, relative to the checkpoint.
        message: what is wrong, with numbers.
        key: the key of the state dict that can't be trusted; None where it is not known or there is none.
        offset: where in the file, in bytes; None where it is all of it.
        severity: "error": something can't be loaded, or not as it was saved. "warning": it loads all the same.
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


@dataclass(frozen=True)
class VerifyReport:
    """What `AsyncCheckpointer.verify` found.

    Attributes:
        path: the checkpoint.
        format: its format; "unknown" where the damage hides it.
        problems: everything that is wrong, ordered by file and offset.
        files: how many files were looked at.
        items: how many stored tensors, chunks of tensors and objects were looked at.
        checked_bytes: how many bytes were read.
        unverifiable: how many items carry no CRC and are in no file that has one: their framing and size are
            checked, their bytes can't be.
        unverifiable_keys: the keys of the first of these.
        elapsed_s: how long it took, in seconds.
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
        """Whether there are no errors; warnings may be there."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that are errors."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def damaged_keys(self) -> tuple[str, ...]:
        """The keys that errors name, each once; the others can be loaded, if `.metadata` can be read."""
        return tuple(dict.fromkeys(problem.key for problem in self.errors if problem.key is not None))

    def raise_if_bad(self) -> None:
        """Raise the errors, if there are any.

        Raises:
            CorruptCheckpointError: counting them, and telling the first.
        """
        errors = self.errors
        if errors:
            first = "; ".join(map(str, errors[:3])) + ("; ..." if len(errors) > 3 else "")
            raise CorruptCheckpointError(f"{self.path} has {_count(len(errors), 'error')}: {first}. Use an older one.")

    def __str__(self) -> str:
        return self._text(len(self.problems))

    def __repr__(self) -> str:
        return self._text(_SHOWN)

    def _text(self, most: int) -> str:
        lines = [self._verdict(), *(f"  {problem}" for problem in self.problems[:most])]
        if len(self.problems) > most:
            lines.append(f"  and {len(self.problems) - most} more")
        return "\n".join(lines)

    def _verdict(self) -> str:
        warnings = len(self.problems) - len(self.errors)
        verdict = _count(len(self.errors), "error") if self.errors else "sound"
        if warnings:
            verdict += f", {_count(warnings, 'warning')}"
        if self.unverifiable:
            verdict += f", {_count(self.unverifiable, 'item')} without CRC"
        return (
            f"{printable_key(self.path)}: {verdict} ({self.format}; {_count(self.files, 'file')}, "
            f"{_count(self.items, 'item')}, {self.checked_bytes / 2**20:.1f} MiB in {self.elapsed_s:.2f} s)"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(eq=False)
class Findings:
    """Collects what is found, from several threads."""

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
        """Add a problem."""
        self.problems.append(Problem(kind, file, printable(message), key, offset, severity))

    def ordered(self) -> tuple[Problem, ...]:
        """Give all problems by file, offset and key, each once."""

        def order(problem: Problem) -> tuple[str, int, str, str]:
            offset = -1 if problem.offset is None else problem.offset
            return problem.file, offset, problem.key or "", problem.kind

        return tuple(sorted(dict.fromkeys(self.problems), key=order))
