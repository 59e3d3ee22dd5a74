"""Start checkpointers, or save, again and again, each time disturbed at a later place; print what went wrong.

Usage: python interrupted_starts.py WAY WRITER FOLDER

``raises``: an interrupt of a start, at every bytecode. ``saves``: a signal whose handler saves with the same
checkpointer, at every third one. ``within``: such a signal while a save is submitted and awaited, at every fifth of the
places where Python calls handlers.
"""

from __future__ import annotations

import dis
import faulthandler
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import psutil
import torch

import aiockpt

PACKAGE = os.path.dirname(aiockpt.__file__) + os.sep
STATE = {"x": torch.arange(10)}


class Disturber:
    """Raises a signal at the nth of the bytecodes that this package's functions run in the main thread.

    Python calls handlers at fewer places, those that count if it ``is_python``: at the beginning of a function, at a
    jump back, and at the end of a call.
    """

    def __init__(self, number: signal.Signals, nth: int, *, is_python: bool) -> None:
        self._number, self._left, self._is_python, self.has_struck = number, nth, is_python, False
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.has_struck or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace = self._step  # before the next line: since Python 3.13 that one needs it
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        before, self._last[frame] = self._last.get(frame, ""), name
        is_place = not self._is_python or name in ("RESUME", "JUMP_BACKWARD") or before.startswith("CALL")
        if event == "opcode" and is_place and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                signal.raise_signal(self._number)
        return self._step


def left() -> list[str]:
    """Return the threads and the children that there are; Python forgets a thread that it has not started late."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    threads = [each.name for each in others if not isinstance(each, threading._DummyThread)]
    return threads + [f"child {each.pid}" for each in psutil.Process().children()]


def disturbed(way: str, writer: Any, nth: int, folder: str) -> bool:
    """Disturb a start, or a save, at the nth place; return whether it has so many."""
    checkpointer = aiockpt.SyncCheckpointer(writer=writer)
    number = signal.SIGINT if way == "raises" else signal.SIGUSR1
    signal.signal(signal.SIGUSR1, lambda *_: checkpointer.save(STATE, f"{folder}/{nth}-in-handler"))
    disturber, outcome = Disturber(number, nth, is_python=way == "within"), "returned"
    if way == "within":
        checkpointer.save(STATE, f"{folder}/{nth}-before")
    faulthandler.dump_traceback_later(60, exit=True)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at this only when a trace is set
    sys.settrace(disturber.trace)
    try:
        if way == "within":
            checkpointer.save(STATE, f"{folder}/{nth}-within")
        else:
            checkpointer._engine.start()
    except KeyboardInterrupt:
        outcome = "interrupted"
    except BaseException as exc:  # shown
        outcome = repr(exc)
    finally:
        sys.settrace(None)
    expected = "interrupted" if disturber.has_struck and way == "raises" else "returned"
    if outcome != expected:
        sys.stdout.write(f"{nth} outcome: {outcome}\n")
    if nth % 2:  # else it is closed as it is
        checkpointer.save(STATE, f"{folder}/{nth}")
    checkpointer.close()
    if found := left():
        sys.stdout.write(f"{nth} left: {found}\n")
    return disturber.has_struck


if __name__ == "__main__":
    way, writer, folder = sys.argv[1:]
    with aiockpt.SyncCheckpointer(writer=writer) as first:  # type: ignore[arg-type]
        first.save(STATE, f"{folder}/first")
    assert not left(), left()
    nth, pace = 0, {"raises": 1, "saves": 3, "within": 5}[way]
    while disturbed(way, writer, nth, folder):
        nth += pace
    sys.stdout.write(f"places {nth // pace}\n")
