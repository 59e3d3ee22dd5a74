"""The application around the commands: exit codes, errors on one line, interrupts and closed pipes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

T = TypeVar("T")


class Code(IntEnum):
    """Exit codes of all commands; `aiockpt/docs/cli.md` and ``aiockpt --help`` list them."""

    FINE = 0
    PROBLEMS = 1
    """The command worked, and found problems or differences."""
    USAGE = 2
    FAILED = 3
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class CommandError(Exception):
    """A command can't do what was asked for; the message is shown on one line."""


class _ClosedPipeError(Exception):
    """The reader of standard output has closed the pipe."""


_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it
_DEBUG = "--debug"


class Commands(TyperGroup):
    """A group of commands whose errors become one line on standard error and an exit code.

    ``--debug`` may stand anywhere before ``--``.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command and exit with its code."""
        given, debug = _without_debug(sys.argv[1:] if args is None else args)
        if not given or {"-h", "--help"} & set(given):
            _choose_help_styles()
        with _interruptible() as interrupts:
            try:
                result = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
                code = result if isinstance(result, int) else int(Code.FINE)
            except (KeyboardInterrupt, typer.Abort):
                code = Code.INTERRUPTED
            except Exception as exc:
                code = _reported(exc, debug=debug)
        if code == Code.INTERRUPTED and interrupts:
            code = 128 + interrupts[-1]
        if not _flushed():
            code = Code.CLOSED_PIPE
        sys.exit(int(code))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer would exit with the code for problems where a pipe is closed."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as exc:
            raise _ClosedPipeError from exc


def run(command: Coroutine[Any, Any, T]) -> T:
    """Run a command that awaits."""
    import asyncio  # takes longer to import than help takes to show

    return asyncio.run(command)


_FLAGS = {
    r"choose the tensors with keys=": "choose the tensors by their keys (--keys of convert), such as model",
    r"with keys=": "by naming their keys",
    r"\bkeys=": "the keys to name",
    r"safe_globals=\[.*\].*, or trust=True": "--trust",
    r"trust=True": "--trust",
    r"overwrite=True": "--overwrite",
    r", (or pass|choose another directory, or only read with) read_only=True": "",
    r", or register one by aiockpt\.storage\.register\(.*\)": "",
    r"see what it holds with aiockpt\.open\(path\), or pass strict=False": "aiockpt inspect shows what it holds",
}
"""Patterns of what messages for programs advise, and the same for the command line."""


def report(message: str) -> None:
    """Write a message to standard error: on one line, or wrapped at words on a terminal."""
    for advice, flag in _FLAGS.items():
        message = re.sub(advice, flag, message)
    line = f"aiockpt: {' '.join(message.split())}"
    with contextlib.suppress(OSError):
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        from aiockpt.cli.output import console

        console(stderr=True).print(line)


def _choose_help_styles() -> None:
    """Replace typer's cyan and yellow, which can't be read on a light background."""
    from typer import rich_utils

    for name in ("OPTION", "SWITCH", "USAGE", "COMMANDS_TABLE_FIRST_COLUMN"):
        setattr(rich_utils, f"STYLE_{name}", "bold")
    for name in ("TYPES", "METAVAR", "REQUIRED_SHORT", "REQUIRED_LONG"):
        setattr(rich_utils, f"STYLE_{name}", "magenta")
    for name in ("HELPTEXT", "USAGE_COMMAND"):
        setattr(rich_utils, f"STYLE_{name}", "")
    # typer would put <bool> behind a flag, and <list[str]> behind KEY.
    TyperOption.display_type_rich = _value_type  # type: ignore[assignment,method-assign]
    TyperArgument.display_type_rich = lambda *_, **__: None  # type: ignore[method-assign]


def _value_type(option: Any, ctx: Any) -> str | None:
    """Return the type of an option's value, which a flag has not."""
    return None if option.is_flag else option.metavar or option.display_type(ctx)


def _without_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    end = list(args).index("--") if "--" in args else len(args)
    given = [arg for number, arg in enumerate(args) if arg != _DEBUG or number > end]
    return given, len(given) < len(args)


def _reported(exc: Exception, *, debug: bool) -> int:
    """Report an error and return its exit code."""
    from aiockpt.errors import AiockptError, printable

    if isinstance(exc, _ClosedPipeError):
        return Code.CLOSED_PIPE
    if debug:
        traceback.print_exception(exc)
    if isinstance(exc, _UsageError):
        where = exc.ctx.command_path if exc.ctx is not None else "aiockpt"
        message = exc.format_message().replace(": Value error, ", ": ")  # pydantic, in newer versions of typer
        report(f"{printable(message)} ({where} --help shows the usage)")
        return Code.USAGE
    is_missing = isinstance(exc, ImportError) and "pip install" in str(exc)  # an extra
    known = is_missing or isinstance(exc, CommandError | AiockptError | OSError)
    message = str(exc) if known else f"{type(exc).__name__}: {exc}"
    if isinstance(exc, OSError) and not isinstance(exc, AiockptError) and exc.filename is not None:
        message = f"{exc.filename}: {exc.strerror}"
    hint = "" if known or debug else f" ({_DEBUG} shows the trace)"
    report(f"{printable(message)}{hint}")
    return Code.FAILED


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Turn SIGTERM and SIGHUP into an interrupt, so that commands clean up; yield the signals that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def interrupt(number: int, _: object) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # handled by the current handler of interrupts, which may be asyncio's

    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _flushed() -> bool:
    """Flush standard output; return False, and drop what is left, if its reader has closed the pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # Python flushes once more when it ends
        os.close(null)
        return False
    return True
