"""Start checkpointers again and again, each interrupted at a later place; print what went wrong.

Usage: python interrupted_starts.py WRITER FOLDER
"""

from __future__ import annotations

import dis
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


class Interrupter:
    """Raises SIGINT at the nth of the places in this package's functions where Python calls handlers of signals.

    These are the beginning of a function, a jump back, and the end of a call. At any other bytecode, such as between
    the body of a with block and its end, no handler is called.
    """

    def __init__(self, nth: int) -> None:
        self._left, self.has_struck = nth, False
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        before, self._last[frame] = self._last.get(frame, ""), name
        is_place = name in ("RESUME", "JUMP_BACKWARD") or before.startswith("CALL")
        if event == "opcode" and is_place and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                signal.raise_signal(signal.SIGINT)
        return self._step


def left() -> list[str]:
    """Return the threads and the children that there are; Python forgets a thread that it has not started late."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    threads = [each.name for each in others if not isinstance(each, threading._DummyThread)]
    return threads + [f"child {each.pid}" for each in psutil.Process().children()]


def interrupted(writer: Any, nth: int, folder: str) -> bool:
    """Interrupt a start at the nth place; return whether it has so many."""
    checkpointer = aiockpt.SyncCheckpointer(writer=writer)
    interrupter, outcome = Interrupter(nth), "returned"
    sys.settrace(interrupter.trace)
    try:
        checkpointer._engine.start()
    except KeyboardInterrupt:
        outcome = "interrupted"
    except BaseException as exc:  # shown
        outcome = repr(exc)
    finally:
        sys.settrace(None)
    expected = "interrupted" if interrupter.has_struck else "returned"
    if outcome != expected:
        sys.stdout.write(f"{nth} outcome: {outcome}\n")
    if nth % 2:  # else it is closed as it is
        checkpointer.save(STATE, f"{folder}/{nth}")
    checkpointer.close()
    if found := left():
        sys.stdout.write(f"{nth} left: {found}\n")
    return interrupter.has_struck


if __name__ == "__main__":
    with aiockpt.SyncCheckpointer(writer=sys.argv[1]) as first:  # type: ignore[arg-type]
        first.save(STATE, f"{sys.argv[2]}/first")
    assert not left(), left()
    nth = 0
    while interrupted(sys.argv[1], nth, sys.argv[2]):
        nth += 1
    sys.stdout.write(f"places {nth}\n")
