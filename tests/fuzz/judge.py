"""Trials of inputs, and checks of their outcomes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

import aiockpt
from tests.fuzz.targets import Target
from tests.fuzz.watch import Watch

MOST_S = 2.0
MOST_BYTES = 256 << 20
_MOST_LETTERS = 5000


class Judge:
    """A judge that opens, loads and verifies checkpoints; one instance for a process.

    Attributes:
        outcomes: the number of each outcome of each operation.
    """

    def __init__(self, watch: Watch) -> None:
        self._ckpt = aiockpt.SyncCheckpointer(drain_timeout=60)
        self._watch = watch
        self.outcomes: dict[str, int] = {}

    def close(self) -> None:
        self._ckpt.close()

    def wrong_with(self, target: Target, data: bytes) -> str | None:
        """Try an input; return the problems, or None if the outcome is permitted."""
        target.put(data)
        folder = target.path if target.path.is_dir() else target.path.parent
        before = _facts(folder)
        cpu, peak = time.process_time(), _peak_bytes(afresh=True)
        with self._watch.over(folder):
            loaded = self.outcomes.get("load: done")
            found = [self._step(name, target.path) for name in ("load", "part", "open", "verify")]
            if self.outcomes.get("load: done") != loaded:
                found.append(self._step("map", target.path))
        cpu = time.process_time() - cpu
        grown = _peak_bytes() - peak
        if cpu > MOST_S:
            found.append(f"it takes {cpu:.1f} s")
        if grown > MOST_BYTES + 32 * len(data):
            found.append(f"it takes {grown >> 20} MiB")
        if _facts(folder) != before:
            found.append("files have changed")
        found += self._watch.seen
        self._watch.seen.clear()
        wrong = [each for each in found if each]
        return "; ".join(wrong) if wrong else None

    def _step(self, name: str, path: Path) -> str:
        try:
            getattr(self, f"_{name}")(path)
        except aiockpt.LoadError as exc:
            self._count(f"{name}: {type(exc).__name__}")
            return _wrong_message(name, exc)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            return f"{name} raises {type(exc).__name__}: {str(exc)[:300]} {_origin(exc)}"
        self._count(f"{name}: done")
        return ""

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _load(self, path: Path) -> None:
        touch(self._ckpt.load(path))

    def _part(self, path: Path) -> None:
        touch(self._ckpt.load(path, keys=["model", "*w*"], strict=False))

    def _map(self, path: Path) -> None:
        touch(self._ckpt.load(path, mmap=True))

    def _open(self, path: Path) -> None:
        with self._ckpt.open(path) as reader:
            for _ in reader.items():
                pass
            shown = f"{reader!r}{reader._repr_html_()}"
            if "<img" in shown.partition(">")[2].partition("<table>")[2]:
                raise AssertionError("a name is shown as HTML")
            _ = (reader.metadata, reader.nbytes, reader.format)

    def _verify(self, path: Path) -> None:
        report = self._ckpt.verify(path)
        _ = (report.ok, repr(report))


def touch(value: Any) -> None:
    """Read every tensor of a state, as the program that loaded it would."""
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor) and not each.is_meta:
            if each.numel() < 1 << 22 and each.layout is torch.strided and not each.is_nested:
                each.detach().clone()
            elif each.layout is not torch.strided and each.numel() < 1 << 22:
                each.to_dense()
        elif isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list | tuple):
            pending += each


def _facts(folder: Path) -> list[tuple[str, int, int]]:
    found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in found]


def _wrong_message(name: str, exc: aiockpt.LoadError) -> str:
    """Return why a message is bad: too long, or with control characters for a terminal; empty if it is good."""
    each: BaseException | None = exc
    while each is not None:  # a traceback prints the causes, too
        message = str(each)
        if isinstance(each, MemoryError):
            return f"{name} runs out of memory {_origin(each)}"
        if len(message) > _MOST_LETTERS:
            return f"{name} gives a message of {len(message)} letters: {message[:100]!r} {_origin(each)}"
        odd = [letter for letter in message if not letter.isprintable() and letter != "\n"]
        if odd:
            return f"{name} gives a message with {odd[:5]!r}: {message[:200]!r} {_origin(each)}"
        each = each.__cause__
    return ""


def _origin(exc: BaseException) -> str:
    """Return the innermost four frames of a traceback, the innermost first."""
    lines, at = [], exc.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        lines.append(f"{Path(code.co_filename).name}:{at.tb_lineno} {code.co_name}")
        at = at.tb_next
    return " < ".join(lines[:-5:-1])


def _peak_bytes(*, afresh: bool = False) -> int:
    """Return the peak memory of this process; with ``afresh`` reset it first, where the kernel permits it."""
    if afresh:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
