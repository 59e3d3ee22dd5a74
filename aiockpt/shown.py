"""Texts of a checkpoint where they are printed: cut short, and without what does to a terminal more than to be read."""

from __future__ import annotations

_MOST_LETTERS = 2000
_LAST_LETTERS = 400
_NAME_LETTERS = 300


def shown(text: str) -> str:
    """Give a text as it can be printed: control characters and halves of characters are escaped."""
    if len(text) > _MOST_LETTERS:  # its end says what to do
        text = f"{text[: _MOST_LETTERS - _LAST_LETTERS]} [...] {text[-_LAST_LETTERS:]}"
    return _escaped(text, "\n")


def shown_name(name: str) -> str:
    """Give a key, or the name of a file, as it can be printed: in one line, and not too long a one."""
    if len(name) > _NAME_LETTERS:
        name = f"{name[: _NAME_LETTERS // 2]}[...]{name[-_NAME_LETTERS // 2 :]}"
    return _escaped(name, "")


def _escaped(text: str, but: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def show_plainly(error: BaseException) -> None:
    """Make the messages of an error, and of what has led to it, ones that can be printed."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if at.args and type(at.args[0]) is str:
            at.args = (shown(at.args[0]), *at.args[1:])
        at = at.__cause__
