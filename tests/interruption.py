"""A second party that acts between two system calls of the first, at every place in turn."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest

from aiockpt.storage import syscalls

_OF_OS = (
    *("open", "stat", "lstat", "fstat", "listdir", "scandir", "read", "pread", "write", "pwrite", "ftruncate"),
    *("fsync", "mkdir", "rmdir", "link", "rename", "replace", "unlink"),
)


class Interruption:
    """Calls a function once, before the Nth system call of what runs; system calls of the function do not count.

    ::

        for number in itertools.count():
            with monkeypatch.context() as patch:
                interruption = Interruption(patch, number, second)
                first()
            if not interruption.is_over:  # the first party makes fewer calls than that
                break
    """

    def __init__(self, patch: pytest.MonkeyPatch, number: int, function: Callable[[], object]) -> None:
        self.is_over = False
        self._left, self._function, self._runs = number, function, False
        for module, names in ((os, _OF_OS), (fcntl, ("flock",)), (syscalls, ("_call",))):
            for name in names:
                patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not (self._runs or self.is_over):
                self._left -= 1
                if self._left < 0:
                    self._runs = True
                    self._function()
                    self._runs, self.is_over = False, True
            return call(*args, **kwargs)

        return counted
