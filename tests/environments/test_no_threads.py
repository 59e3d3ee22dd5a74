"""Programs in which threads are greenlets, or can't start any more as the program exits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

USE = """
import torch, aiockpt

ckpt = aiockpt.SyncCheckpointer()
{late}
def use():
    for what in (lambda: ckpt.save({{"x": torch.ones(3)}}, "a"), lambda: ckpt.load("a")):
        try:
            what()
        except aiockpt.AiockptError as exc:
            print(type(exc).__name__, exc)
    ckpt.close()
"""

# As gevent and eventlet do. A thread that never starts stands for one that runs when the waiting one yields.
GREEN = {
    "threads": """
import _thread, threading

def start_new_thread(function, args=(), kwargs={}):
    return get_ident()

def get_ident():
    return 1

_thread.start_new_thread = threading._start_new_thread = start_new_thread
_thread.get_ident = threading.get_ident = get_ident
""",
    "queues": """
import queue

class SimpleQueue(queue.SimpleQueue):
    pass

queue.SimpleQueue = SimpleQueue
""",
}

DEBUGGER = """
import _thread, threading

def start_new_thread(function, args=(), kwargs={}, start=_thread.start_new_thread):
    return start(lambda: function(*args, **kwargs), ())

_thread.start_new_thread = threading._start_new_thread = start_new_thread
"""


def _printed(program: str, python: list[str], folder: Path) -> list[str]:
    command = [*python, "-c", program]
    ended = subprocess.run(command, cwd=folder, check=True, timeout=120, capture_output=True, text=True)
    return ended.stdout.splitlines()


@pytest.mark.parametrize("patched", GREEN)
def test_greenlets_in_place_of_threads(patched: str, python: list[str], tmp_path: Path) -> None:
    saved, loaded = _printed(USE.format(late=GREEN[patched]) + "use()", python, tmp_path)
    assert saved.startswith("AiockptError")
    assert "monkey-patch" in saved
    assert "thread=False" in saved
    assert loaded == saved
    assert not list(tmp_path.iterdir())


def test_threads_that_a_debugger_starts(python: list[str], tmp_path: Path) -> None:
    """It wraps the function that starts them; they are threads all the same."""
    assert _printed(USE.format(late=DEBUGGER) + "use()", python, tmp_path) == []
    assert (tmp_path / "a").is_dir()


def test_the_first_use_at_exit(python: list[str], tmp_path: Path) -> None:
    """A save that nobody waits for would be lost there, and since Python 3.12 threads can't start."""
    saved, loaded = _printed(USE.format(late="") + "import atexit\natexit.register(use)", python, tmp_path)
    assert saved.startswith("CheckpointerClosedError")
    assert "exit" in saved
    assert loaded == saved
    assert not list(tmp_path.iterdir())


def test_a_use_at_exit_after_earlier_ones(python: list[str], tmp_path: Path) -> None:
    program = USE.format(late="") + "ckpt.save({}, 'b')\nimport atexit\natexit.register(use)"
    saved, loaded = _printed(program, python, tmp_path)
    assert saved.startswith("CheckpointerClosedError")
    assert "exit" in saved
    assert loaded == saved
