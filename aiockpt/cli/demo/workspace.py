"""The directories that the demo works in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiockpt.format.names import HIDDEN
from aiockpt.storage.local.storage import absolute

MADE = ("interrupted", "uninterrupted", "measure")
"""The directories that the demo makes in its own."""


@contextmanager
def workspace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    """Give an empty directory to work in.

    Args:
        directory: which; made if it doesn't exist. None: a temporary one.
        keep: leave it, and what is in it, as it is afterwards.

    Raises:
        ValueError: it is not empty.
    """
    directory = None if directory is None else Path(absolute(directory))
    made = directory is None or not directory.exists()
    root = Path(tempfile.mkdtemp(prefix="aiockpt-demo-")) if directory is None else directory
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise ValueError(f"{root} is not empty; name a directory that is, or that doesn't exist yet")
    try:
        yield root
    finally:
        if not keep:
            for name in MADE:
                if (root / name).exists():
                    shutil.rmtree(root / name)
            if made and not any(root.iterdir()):  # somebody may have put something there
                root.rmdir()


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Make a directory, and remove it afterwards with what it holds."""
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def remove_leftovers(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Remove what unfinished saves left in a directory; give each one's name and its files' names."""
    for leftover in sorted(directory.glob(f"{HIDDEN}*")):
        files = sorted(file.name for file in leftover.iterdir())
        shutil.rmtree(leftover)
        yield leftover.name, files
