"""The promises of a recorded program about its checkpoints, read from its marks. Pure.

Names are paths below the recorded directory; labels identify states. A mark is one line:

- ``begin NAME LABEL``: from now on the name may show this state.
- ``written NAME LABEL``: the state is durable; from now on the name shows it, or a state whose save began later.
- ``deleting NAME``: from now on the name may show nothing.
- ``deleted NAME``: the name shows nothing, or a state whose save began later.
- ``staged ...``, ``failed ...``: no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.crash.lab.calls import FileCall

GONE = "nothing"


class Promises:
    """The labels that each name may show.

    Args:
        before: the labels at the beginning, by name.
    """

    def __init__(self, before: Mapping[str, str] | None = None) -> None:
        self._names = {name: [label] for name, label in (before or {}).items()}

    @property
    def names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each name and the labels it may show, in the order of the saves; with `GONE` among them it may be missing."""
        return tuple((name, tuple(labels)) for name, labels in self._names.items())

    def apply(self, call: FileCall) -> None:
        """Update the promises from a call; only marks have an effect.

        Raises:
            ValueError: a mark has no meaning.
        """
        for line in call.data.decode().splitlines() if call.name == "mark" else ():
            match line.split():
                case ["begin", name, label]:
                    self._may_show(name, label)
                case ["written", name, label]:
                    self._shows(name, label)
                case ["deleting", name]:
                    self._may_show(name, GONE)
                case ["deleted", name]:
                    self._shows(name, GONE)
                case ["staged" | "failed", *_]:
                    pass
                case _:
                    raise ValueError(f"the mark {line!r} has no meaning")

    def _may_show(self, name: str, label: str) -> None:
        self._names.setdefault(name, [GONE]).append(label)

    def _shows(self, name: str, label: str) -> None:
        labels = self._names.get(name, [])
        if label not in labels:
            raise ValueError(f"{name} was promised to show {label}, but no mark has said before that it may")
        last = len(labels) - 1 - labels[::-1].index(label)
        del labels[:last]
