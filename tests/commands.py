"""The program `aiockpt`: its console script, called in this process."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

from click.testing import Result
from typer.testing import CliRunner


@functools.cache
def program() -> Any:
    """Return what the console script that is installed calls."""
    script, *_ = entry_points(group="console_scripts", name="aiockpt")
    return script.load()


def invoke(*arguments: object, **options: Any) -> Result:
    """Run a command; ``options`` are those of the runner, such as ``env``."""
    return CliRunner().invoke(program(), [*map(str, arguments)], **options)


def succeed(*arguments: object, code: int = 0) -> str:
    """Run a command that ends with this exit code; return all that it prints."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output
