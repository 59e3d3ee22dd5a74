"""Checks of a directory of checkpoints after a power cut."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError
from aiockpt.format.names import HIDDEN
from tests.crash.lab.disk_names import Folder, write_content
from tests.crash.lab.power_promises import GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.crash.lab.disk_names import Left

    Identify = Callable[[str, str], str]


class Judge:
    """A comparison of the checkpoints after a power cut with the expected labels.

    Attributes:
        checked: the number of contents that were loaded.

    Args:
        identify: see `tests.crash.lab.power`.
        scratch: a directory for copies of checkpoints.
        through_hidden: see `tests.crash.lab.power.Replay`.
    """

    def __init__(self, identify: Identify, scratch: str, *, through_hidden: bool = False) -> None:
        self._through_hidden = through_hidden
        self.checked = 0
        self._identify = identify
        self._scratch = scratch
        self._known: dict[tuple[str, bytes], str] = {}

    def wrong(self, content: Folder, expected: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
        """Return each name that shows an unexpected label, with this label."""
        shown = dict(_checkpoints(content, "", expected))
        labels = dict.fromkeys(expected, GONE) | self.labels(content, expected)
        return [
            *((name, "something that nobody has saved") for name in shown if name not in expected),
            *((name, label) for name, label in labels.items() if label not in expected[name]),
        ]

    def labels(self, content: Folder, names: Iterable[str]) -> dict[str, str]:
        """Return the label of each of these names, without the names that show nothing."""
        known = dict.fromkeys(names)
        labels = {name: self.label(entry, name) for name, entry in _checkpoints(content, "", known) if name in known}
        hidden = Folder({name: entry for name, entry in content.entries.items() if name.startswith(HIDDEN)})
        for name in known.keys() - labels.keys() if self._through_hidden and hidden.entries else ():
            labels[name] = self.label(hidden, name, beside=True)
        return labels

    def label(self, content: Left, name: str, *, beside: bool = False) -> str:
        """Return the label of a checkpoint, or why it can't be loaded.

        Args:
            content: the checkpoint, or the hidden names beside it.
            name: the name of the checkpoint.
            beside: True if ``content`` is the hidden names.
        """
        key = name, content.digest
        if key not in self._known:
            self.checked += 1
            folder = os.path.join(self._scratch, f"checked-{self.checked}")
            if beside:
                write_content(content, folder)
            else:
                os.makedirs(os.path.dirname(os.path.join(folder, name)))
                write_content(content, os.path.join(folder, name))
            try:
                self._known[key] = self._identify(os.path.join(folder, name), name)
            except CheckpointNotFoundError:
                self._known[key] = GONE
            except Exception as exc:
                self._known[key] = f"what can't be loaded ({type(exc).__name__}: {exc})".replace(folder, "")
            finally:
                shutil.rmtree(folder)
        return self._known[key]


def _checkpoints(content: Folder, above: str, known: Mapping[str, object]) -> Iterator[tuple[str, Left]]:
    """Yield what is shown: entries with a known name, and other visible ones that are not parents of a known name."""
    for name, entry in content.entries.items():
        path = f"{above}{name}"
        if path not in known and isinstance(entry, Folder) and any(other.startswith(f"{path}/") for other in known):
            yield from _checkpoints(entry, f"{path}/", known)
        elif path in known or not (name.startswith(".") or _shows_nothing(entry)):
            yield path, entry


def _shows_nothing(entry: Left) -> bool:
    """Return whether an entry is a directory without visible names, as made for the checkpoints to come."""
    return isinstance(entry, Folder) and all(name.startswith(HIDDEN) for name in entry.entries)
