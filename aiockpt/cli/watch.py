"""``aiockpt watch``: runs a command for each new version of a run."""

from __future__ import annotations

import os
import subprocess

import typer

from aiockpt.cli.app import Code
from aiockpt.following.watch import watch_sync
from aiockpt.manager.scan import StepNames


def watch(run: str, command: str | None, *, names: StepNames, once: bool) -> Code:
    """Print each version, and run the command in a shell; a version is read as long as the command runs.

    Step and path are in its environment alone, so that no name becomes part of the command.
    """
    failed = False
    with watch_sync(run, names=names.template) as versions:
        for version in versions:
            typer.echo(f"{version.step}  {version.path}")
            if command is not None:
                facts = {"AIOCKPT_STEP": str(version.step), "AIOCKPT_PATH": version.path}
                code = subprocess.run(command, shell=True, env={**os.environ, **facts}, check=False).returncode
                if failed := code != 0:
                    typer.echo(f"the command has failed for step {version.step}: exit code {code}", err=True)
            if once:
                break
    return Code.PROBLEMS if failed else Code.FINE
