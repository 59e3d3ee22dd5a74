"""The steps of a run, read from its directory. Without torch; reads no tensors; blocks.

A step is a directory whose name is ``step-`` and its number with at least eight digits. Its facts are in the manifest
that the save has sealed; no pointer file is consulted.

==============  ========================================================================================
state           what is in the directory
==============  ========================================================================================
``complete``    a manifest that matches its CRC, and every file that it lists, of the size that it lists;
                or, without a manifest, another checkpoint that `aiockpt.format.recognise` takes for whole
``damaged``     a manifest that does not match its CRC, or a file that is missing or of another size
``unfinished``  no checkpoint
==============  ========================================================================================
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.format.manifest.manifest import read_user_metadata
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.format.recognise import assess, depends_on_below, recognise
from aiockpt.storage.registry import Storages

if TYPE_CHECKING:
    from typing import TypeGuard

    from aiockpt.format.layouts import Recognised
    from aiockpt.storage.base import Listing, Stamp, Storage

StepState = Literal["complete", "unfinished", "damaged"]

RUN_KEY = "run"
"""The key of the manager's own facts in the metadata of a checkpoint."""

_FACTS = frozenset({"step", "metrics", "time"})  # a manager writes all of them
_MOST_S = 250e9  # in the year 9892; `datetime` ends with 9999
_MOST_DIGITS = 18
_LOOKS = 32  # at once, at a storage that is asked by requests
_MOST_NAMES = 1 << 16  # of which the numbers are kept
_MOST_LISTS = 20  # of a directory whose steps are deleted while they are looked at

NO_STEP = -1
"""The number of what is looked at as steps are, and is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepInfo:
    """A step of a run, as its directory shows it.

    Attributes:
        step: its number; `NO_STEP` of what is looked at likewise, and is no step.
        path: its directory.
        state: "complete", "unfinished" or "damaged", by what is known without reading tensors: whether the manifest
            is intact, and whether every file is there with its size.
        nbytes: the bytes of its files.
        time: when it was saved, in seconds as in `time.time`.
        metrics: the metrics that were saved with it.
        metadata: the other metadata that was saved with it.
        problem: why it is not complete; empty if it is.
        save_id: the same for all copies of it, and for nothing else; empty if it has no manifest, or a damaged one.
        run_id: the same for all steps of a run, wherever it went on; empty if nothing says whose it is.
        filters: the ``include`` and ``exclude`` that it was saved with: patterns, or True for a function.
    """

    step: int
    path: str
    state: StepState
    nbytes: int = 0
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    problem: str = ""
    save_id: str = field(default="", repr=False)
    run_id: str = field(default="", repr=False)
    filters: Mapping[str, list[str] | bool] = field(default_factory=dict, repr=False)


def is_unreadable(info: StepInfo) -> bool:
    """Return whether a lenient scan could not read a step, which may be whole."""
    return info.state == "damaged" and not info.nbytes


@dataclass(frozen=True, slots=True)
class StepNames:
    """The names of steps in a run's directory: a format such as ``checkpoint-{}``, for the number of the step."""

    template: str

    def __post_init__(self) -> None:
        try:
            is_valid = self.step_of(name := self.template.format(12)) == 12 and self.template.format(13) != name
        except (LookupError, ValueError, AttributeError, TypeError):
            is_valid = False
        if not is_valid or "/" in self.template or self.template.startswith("."):
            raise ValueError(
                f"names is {self.template!r}; it must be the name of a step with one field, 'checkpoint-{{}}'"
            )

    def name_of(self, step: int) -> str:
        """Return the name of a step."""
        return self.template.format(step)

    def step_of(self, name: str) -> int | None:
        """Return the number of a step by the name of its directory; None if it is not the name of a step."""
        begin, field_, end = self.template.partition("{")
        end = end.partition("}")[2] if field_ else ""
        digits = name.removeprefix(begin).removesuffix(end)
        if len(begin) + len(digits) + len(end) != len(name) or not (digits.isascii() and digits.isdecimal()):
            return None
        # A name with more zeros would be a second directory of the same step.
        return step if len(digits) <= _MOST_DIGITS and self.template.format(step := int(digits)) == name else None


DEFAULT_NAMES = StepNames("step-{:08d}")
step_of = DEFAULT_NAMES.step_of


def is_set_aside(name: str) -> bool:
    """Return whether a manager has given a directory this name, as its step was damaged."""
    stem, _, rest = name.partition(".")
    return step_of(stem) is not None and rest.partition("-")[0] == "damaged"


class _Known(NamedTuple):
    """What was found at a path, and what says that it is still so: a stamp, and that of a list of all."""

    pulse: Stamp | None
    stamp: Stamp
    listed: Stamp | None
    info: StepInfo


class StepScanner:
    """Scans a run's directory again and again, in any thread; the documents of an unchanged step are read once.

    ``known``: another scanner of it, in a thread that may hang; what one has read, the other does not read again.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        names: StepNames = DEFAULT_NAMES,
        *,
        known: StepScanner | None = None,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._step_of = functools.lru_cache(_MOST_NAMES)(names.step_of)
        self._cache: dict[str, _Known] = {} if known is None else known._cache
        self._names: list[str] = []  # of the directory's directories, as they were listed last
        self._paths: dict[int, str] = {}  # those of steps among them, by their numbers, in order
        self._lock = threading.Lock()
        self.has_seen_all = False

    def scan(self, *, lenient: bool = False, newest: int = 0) -> tuple[StepInfo, ...]:
        """Return the steps of the directory; see `scan`.

        Args:
            lenient: a step that can't be read counts as damaged.
            newest: if not 0, leave out the steps before the newest complete ones, when there are so many of these.
        """
        infos: list[StepInfo | None] = []
        gone: set[int] = set()
        with self._lock:
            for _ in range(_MOST_LISTS):
                steps = self._steps()
                if newest:
                    steps, infos = self._look_at_newest(steps, newest, lenient=lenient)
                else:
                    infos = self._look_at_all(steps, lenient=lenient)
                last, gone = gone, {step for step, info in zip(steps, infos, strict=True) if info is None}
                if gone <= last:  # else the list may lack what its owner has written before deleting that one
                    break
            there = tuple(info for info in infos if info is not None)
            if not newest:
                for path in self._cache.keys() - {info.path for info in there}:
                    self._cache.pop(path, None)
                self.has_seen_all = True
        return there

    def latest(self) -> StepInfo | None:
        """Return the complete step with the highest number; None if there is none. Looks at no more than it must."""
        return next((info for info in self.scan(newest=1) if info.state == "complete"), None)

    def look(self, step: int, path: str) -> StepInfo | None:
        """Return what is known of one step, by its path; None if it is not there."""
        with self._lock:
            return self._look(path, step, lenient=True)

    def stamp(self, path: str) -> Stamp | None:
        """Return a text that changes if a step is replaced after it was scanned; None if that is not known."""
        known = self._cache.get(path)
        return self._storage.stamp(path) if known is None else known.stamp

    def _steps(self) -> dict[int, str]:
        """Return the paths of the steps by their numbers, in order."""
        try:
            with self._storage.look(self._directory) as listing:
                if listing.is_file:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._directory)
                names = listing.folders
        except FileNotFoundError:
            return {}
        if names != self._names:
            steps = {step: name for name in names if (step := self._step_of(name)) is not None}
            self._paths = {step: self._storage.below(self._directory, steps[step]) for step in sorted(steps)}
            self._names = names
        return dict(self._paths)

    def _look_at_newest(
        self, steps: Mapping[int, str], count: int, *, lenient: bool
    ) -> tuple[dict[int, str], list[StepInfo | None]]:
        looked: dict[int, str] = {}
        infos: list[StepInfo | None] = []
        for step, path in sorted(steps.items(), reverse=True):
            looked[step] = path
            infos.append(self._look(path, step, lenient=lenient))
            count -= (info := infos[-1]) is not None and info.state == "complete"
            if not count:
                break
        return dict(reversed(looked.items())), infos[::-1]

    def _look_at_all(self, steps: Mapping[int, str], *, lenient: bool) -> list[StepInfo | None]:
        look = partial(self._look, lenient=lenient)
        stamps = self._storage.stamps(self._directory, len(steps)) if steps else None
        if stamps is None:
            return [look(path, step) for step, path in steps.items()]
        listed = [stamps.get(self._storage.split(path)[1]) for path in steps.values()]
        from aiockpt.core.threads import DaemonThreads  # needs anyio, which looking at directories does not

        with DaemonThreads(_LOOKS, "aiockpt-scan") as threads:
            return list(threads.map(look, steps.values(), steps, listed))

    def _look(self, path: str, step: int, listed: Stamp | None = None, *, lenient: bool = False) -> StepInfo | None:
        """Return what is known of a step; None if it has been deleted meanwhile.

        ``listed``: its stamp in the list of all, which was made before.
        """
        try:
            return self._examined(path, step, listed)
        except (FileNotFoundError, NotADirectoryError):
            if self._storage.stamp(path) is not None:  # a file of it was removed just now
                return StepInfo(step, path, "unfinished", problem="its files are being removed")
            return None
        except OSError as exc:
            if not lenient:
                raise
            return StepInfo(step, path, "damaged", problem=f"it can't be read: {exc}")

    def _examined(self, path: str, step: int, listed: Stamp | None) -> StepInfo:
        known = self._cache.get(path)
        if known is None or not self._is_current(known, path, listed):
            pulse = self._storage.pulse(path)  # before the look, so that it shows what changes meanwhile
            with self._storage.look(path) as listing:
                is_same = known is not None and known.stamp == listing.stamp
                info = known.info if known is not None and is_same else examine(listing, step)[1]
                known = self._cache[path] = _Known(pulse, listing.stamp, listed, info)
        return known.info if known.info.step == step else replace(known.info, step=step)

    def _is_current(self, known: _Known, path: str, listed: Stamp | None) -> bool:
        """Return whether a step is as it was looked at last, as far as that is known without a look."""
        if listed is not None:
            return known.listed == listed
        storage, is_whole = self._storage, known.info.state == "complete"
        has_pulse = is_whole and known.pulse is not None and known.pulse == storage.pulse(path)
        return has_pulse and storage.is_unchanged(path, known.stamp)


def examine(listing: Listing, step: int = NO_STEP, *, counts: bool = False) -> tuple[Recognised, StepInfo]:
    """Return what a directory or a file is, and its facts as those of a step.

    ``counts``: the choices in one that is no checkpoint matter as well.
    """
    files, fetch = listing.files, listing.fetch
    found = recognise(files, fetch, alone=listing.is_file)
    if listing.folders and ((counts and not found.is_checkpoint) or depends_on_below(found, files, listing.folders)):
        listing.list_below()
        found = recognise(files, fetch)
    state, problem, head, save_id = assess(found, files, fetch)
    if not found.is_checkpoint:
        state, problem = "unfinished", problem or f"it has neither {MANIFEST_NAME} nor {METADATA_NAME}"
    facts: dict[str, Any] = {"time": listing.changed_s}
    try:
        facts |= {} if head is None else _facts_in(head)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        state, problem = "damaged", f"{MANIFEST_NAME} is damaged"
    nbytes = sum(files.values())
    return found, StepInfo(step, listing.path, state, nbytes, problem=problem, save_id=save_id, **facts)


def scan(
    directory: str | os.PathLike[str],
    storage: Storage | None = None,
    names: StepNames = DEFAULT_NAMES,
) -> tuple[StepInfo, ...]:
    """Return the steps in a run's directory, in the order of their numbers. Reads no tensors, and needs no torch.

    Args:
        directory: the run's directory, or a URL; ``~`` is the home directory.
        storage: where it is; None: by the path, see `aiockpt.storage`.
        names: those of its steps.

    Returns:
        A `StepInfo` for each directory with the name of a step; none if the run's directory does not exist.

    Raises:
        OSError: the directory, or a manifest, can't be read.
    """
    from aiockpt.storage.local.storage import LocalStorage  # which needs what `examine` does without

    return StepScanner(*Storages(storage, LocalStorage()).of(directory), names).scan()


# --- one step -----------------------------------------------------------------------------------------


def _facts_in(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the head of a manifest says of a step; raise an error if it is damaged."""
    metadata = read_user_metadata(head["metadata"])
    run = metadata.get(RUN_KEY)
    if isinstance(run, dict) and not _FACTS.isdisjoint(run):
        del metadata[RUN_KEY]
    else:  # of a program that saves without a manager
        run = {}
    return {
        "time": _time_of(run.get("time"), head["created"]),
        "run_id": str(run.get("id", "")),
        "metrics": _metrics_of(run.get("metrics")),
        "filters": _filters_of(run.get("filters")),
        "metadata": metadata,
    }


def _time_of(time_s: object, created: str) -> float:
    """Return when a step was saved: ``time_s``, which its manager wrote, if it is a valid time, else ``created``."""
    if is_number(time_s) and 0 <= time_s < _MOST_S:
        return float(time_s)
    return datetime.fromisoformat(created).timestamp()


def _filters_of(value: object) -> dict[str, list[str] | bool]:
    """Return filters of a save as they were recorded; what is none is left out, so that a load asks for all keys."""
    found = value if isinstance(value, dict) else {}
    lists = {name: rule for name, rule in found.items() if isinstance(rule, list)}
    known = {name: rule for name, rule in lists.items() if all(isinstance(each, str) for each in rule)}
    return known | {name: True for name, rule in found.items() if rule is True}


def _metrics_of(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {str(name): float(number) for name, number in value.items() if is_number(number)}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_usable(value: float | None) -> bool:
    """Return whether a metric can be compared: it is there, and is no NaN."""
    return value is not None and not math.isnan(value)
