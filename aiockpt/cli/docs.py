"""``aiockpt docs``: the documentation that ships with the package, in the terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from aiockpt.cli.app import CommandError
from aiockpt.cli.output import console

_FOLDER = files("aiockpt") / "docs"
TUTORIAL = "tutorial"
"""The topic that is a notebook: it is written to a file."""


def show_topics() -> None:
    """Print the topics with their summaries: of a page the first paragraph after the title, which is one line."""
    listed = {name: text.split("\n\n", 2)[1] for name, text in _pages().items()}
    listed[TUTORIAL] = "A notebook: a save beside training, its pictures, and a run that is interrupted."
    width, out = max(map(len, listed)) + 2, console()
    print("aiockpt docs TOPIC shows one of these pages:\n")
    room = out.width if out.is_terminal else sys.maxsize
    for name, summary in sorted(listed.items()):
        print(textwrap.fill(f"{name:{width}}{summary}", room, subsequent_indent=" " * width))


def show_topic(topic: str) -> None:
    """Print a page: rendered on a terminal, as its Markdown source elsewhere.

    Raises:
        typer.BadParameter: there is no such topic; the message names those there are.
    """
    pages, out = _pages(), console()
    if topic not in pages:
        known = ", ".join(sorted([*pages, TUTORIAL]))
        raise typer.BadParameter(f"there is no topic {topic!r}; the topics are {known}", param_hint="TOPIC")
    if not out.is_terminal:
        print(pages[topic], end="")
        return
    os.environ.setdefault("LESS", "-FRX")  # no paging of what fits; colors; the page stays on the screen
    with out.pager(styles=True):
        out.print(_rendered(pages[topic]))


def export_tutorial(file: Path) -> None:
    """Write the notebook to a new file; raise CommandError if there is one already."""
    try:
        with file.open("xb") as target:
            target.write((_FOLDER / f"{TUTORIAL}.ipynb").read_bytes())
    except FileExistsError:
        raise CommandError(f"{file} exists already: name another file, as in `aiockpt docs {TUTORIAL} FILE`") from None
    console().print(f"{file}: open it with Jupyter; pip install 'aiockpt[notebook]' has what it needs")


def _pages() -> dict[str, str]:
    """Return the text of each page by its name, which is unique: also of those in folders below."""
    found = (page for folder in (_FOLDER, _FOLDER / "integrations") for page in folder.iterdir())
    return {page.name[:-3]: page.read_text(encoding="utf-8") for page in found if page.name.endswith(".md")}


def _rendered(text: str) -> Any:
    """Return Markdown for a terminal, of which nothing is cut: in narrow cells rich would end a long word with "…"."""
    from rich.markdown import Markdown, TableElement  # takes longer to import than everything else

    class Table(TableElement):
        def __rich_console__(self, *where: Any) -> Iterator[Any]:
            for table in super().__rich_console__(*where):
                for column in table.columns:  # type: ignore[union-attr]
                    column.overflow = "fold"
                yield table

    page = Markdown(text)
    page.elements = {**page.elements, "table_open": Table}  # type: ignore[misc] # of this page alone
    return page
