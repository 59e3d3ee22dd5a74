"""Texts of a checkpoint in messages: cut short, and without what does to a terminal more than to be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.errors import LoadError

_MOST_LETTERS = 2000
_LAST_LETTERS = 400


def shown(text: str) -> str:
    """Give a text as it can be printed: control characters and halves of characters are escaped."""
    if len(text) > _MOST_LETTERS:  # its end says what to do
        text = f"{text[: _MOST_LETTERS - _LAST_LETTERS]} [...] {text[-_LAST_LETTERS:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def show_plainly(error: LoadError) -> None:
    """Make the message of an error one that can be printed."""
    if error.args and type(error.args[0]) is str:
        error.args = (shown(error.args[0]), *error.args[1:])
