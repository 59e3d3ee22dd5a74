"""An audit hook that records forbidden events: running code or commands, and opening files outside a directory."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Imported here, because imports during the first load would be recorded as events.
import aiockpt.engine.loader
import aiockpt.reading.executor
import aiockpt.reading.info
import aiockpt.reading.reader
import aiockpt.reading.verify.verify  # noqa: F401

_FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "os.startfile",
        "subprocess.Popen",
    ),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.putenv", "os.kill", "shutil.", "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request"),
    *("ctypes.dlopen", "pty.spawn", "webbrowser.open", "code.__new__", "marshal.loads", "builtins.input", "exec"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_INTERPRETER = tuple(
    {os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"])}
)


class Watch:
    """A record of forbidden events.

    Attributes:
        seen: a line for each event.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._inside: str | None = None
        self._importing = 0
        sys.addaudithook(self._hook)  # an audit hook can't be removed; outside of `over` this one does nothing

    @contextmanager
    def over(self, directory: Path) -> Iterator[None]:
        """Record events during a with block that may read this directory."""
        self._inside = os.path.realpath(directory)
        try:
            yield
        finally:
            self._inside = None

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        inside = self._inside
        if inside is None:
            return
        if event == "open":
            self._opened(inside, *args)
        elif event.startswith(_FORBIDDEN) and not self._imports(event, args):
            caller = sys._getframe(1).f_code
            self.seen.append(f"{event} {str(args)[:200]} {caller.co_filename} {caller.co_name}")

    @staticmethod
    def _imports(event: str, args: tuple[Any, ...]) -> bool:
        """Return whether an event comes from an import."""
        if event == "marshal.loads":
            return True
        if event != "exec":
            return False
        # The importer runs modules with exec; dataclasses and named tuples make their methods with exec.
        maker = sys._getframe(2).f_code.co_filename
        return maker.startswith("<frozen importlib") or maker.endswith(("/dataclasses.py", "/collections/__init__.py"))

    def _opened(self, inside: str, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        writes = bool(isinstance(flags, int) and flags & _WRITING) or (
            isinstance(mode, str) and set(mode) & set("wax+")
        )
        # A relative name is opened below an open directory; the source has checked before where it leads.
        leads_out = name.startswith("/") or ".." in name.split("/")
        within = not leads_out or os.path.realpath(name).startswith(inside)
        if writes or not (within or name.startswith(("/proc/", "/sys/", *_INTERPRETER))):
            self.seen.append(f"open {name[:200]!r} {mode!r} {flags!r}")
