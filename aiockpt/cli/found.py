"""The checkpoints in a directory, of any program, as far as they are known without torch and without their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from aiockpt.core.wording import naturally
from aiockpt.format.layouts import Format, Recognised
from aiockpt.format.names import HIDDEN
from aiockpt.format.recognise import is_mark
from aiockpt.manager.scan import DEFAULT_NAMES, NO_STEP, StepInfo, StepNames, examine, is_set_aside
from aiockpt.storage.base import Directories, Listing, LookBudget
from aiockpt.storage.registry import directories_for

_MOST_LEVELS = 8  # of directories that are walked


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, or what a save has left of one.

    Attributes:
        name: its name in the directory.
        info: its facts, as those of a step. Its ``step`` is `NO_STEP` if it is none of a manager's run; its state is
            "unfinished" as well for what a save has left.
        format: its format; empty if that is not known.
        shared_bytes: those of its files that others have too, by links: its deletion does not free them.
    """

    name: str
    info: StepInfo
    format: Format = ""
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The checkpoints in a directory.

    Attributes:
        found: in the order of the numbers in their names; if the directory is a checkpoint itself, that comes first,
            named as the directory.
        below: the subdirectories that hold checkpoints but are none themselves, each with their number.
        folders: the other subdirectories.
        problem: what the directory is if it holds files of a checkpoint that is not supported.
        is_checkpoint: the directory is one itself, to which nothing in its subdirectories belongs.
        is_cut: there is more than was looked at.
    """

    found: list[Found]
    below: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    problem: str = ""
    is_checkpoint: bool = False
    is_cut: bool = False


def find(directory: str) -> list[Found]:
    """Return `Contents.found` of a directory, or of one file."""
    return look_into(directory).found


def look_into(directory: str, budget: LookBudget | None = None, names: StepNames = DEFAULT_NAMES) -> Contents:
    """Return the checkpoints in a directory, or the one that a file is; ``names`` are those of a run's steps.

    Raises:
        OSError: the directory can't be read.
    """
    budget = budget or LookBudget()
    place, directory = directories_for(directory)
    with place.look(directory, budget) as listing:
        about, itself = _examined(place.split(directory)[1] or directory, listing, names)
        if listing.is_file or (about.is_described and not about.index):
            return Contents(found=[] if itself is None else [itself], problem="" if itself else about.problem)
        if itself is not None and not about.is_described and not about.files[1:]:
            itself = None  # it is listed by the name of its only file
        inside = listing.folders if itself else [*listing.folders, *listing.others, *listing.top]
    found, below, folders = [] if itself is None else [itself], {}, []
    for name in sorted(inside, key=lambda name: (name.startswith(HIDDEN), naturally(name))):
        try:
            each, count = _look_at(place, name, place.below(directory, name), budget, names)
        except FileNotFoundError:  # it was removed or renamed meanwhile
            continue
        except OSError as exc:  # it belongs to another user, or is a link to itself
            each, count = (
                _unreadable_step(names.step_of(name), name, place.below(directory, name), listing.changed_s, exc),
                0,
            )
        if each is not None:
            # Beside a checkpoint, what is neither named as one nor whole is left of a download or a copy.
            if not about.is_checkpoint or each.info.state == "complete" or name in listing.folders or is_mark(name):
                found.append(each)
        elif count:
            below[name] = count
        elif name in listing.folders and not name.startswith("."):
            folders.append(name)
    problem = about.problem
    if (
        found
        and not (about.is_checkpoint or about.choices or problem)
        and all(each.name in listing.top for each in found)
    ):
        problem = "none of its files has the name of a checkpoint's: name the file"
    whole, is_cut = about.is_checkpoint, budget.is_spent
    return Contents(found=found, below=below, folders=folders, problem=problem, is_checkpoint=whole, is_cut=is_cut)


def walk(directory: str, budget: LookBudget | None = None, levels: int = _MOST_LEVELS) -> Iterator[Found]:
    """Yield the checkpoints in a directory and its subdirectories; leftovers are none.

    Of a directory that is a checkpoint itself, that, and what lies beside it: nothing in its subdirectories.

    Raises:
        OSError: a directory can't be read, or there is more than is looked at.
    """
    budget = budget or LookBudget()
    place, directory = directories_for(directory)
    contents = look_into(directory, budget)
    if contents.problem:
        return
    known = [found for found in contents.found if found.format]
    if contents.is_checkpoint:
        yield from [found for found in known if found.info.path == directory] or known
        return
    yield from known
    below = [place.below(directory, name) for name in (*contents.below, *contents.folders)]
    below = [path for path in below if place.link(path) is None]
    if contents.is_cut or (below and not levels):
        raise OSError(f"{directory} holds more than is looked at; name its subdirectories")
    for path in below:
        yield from walk(path, budget, levels - 1)


def _look_at(
    place: Directories, name: str, path: str, budget: LookBudget, names: StepNames
) -> tuple[Found | None, int]:
    """Return the checkpoint of a name, and how many are in a directory that is none."""
    leftover = place.leftover(name)
    if leftover is None and name.startswith("."):
        return None, 0
    with place.look(path, budget) as listing:
        if leftover is not None:
            return None if listing.is_file else _leftover(leftover, name, listing), 0
        about, found = _examined(name, listing, names, counts=True)
        return found, len(about.choices)


def _examined(
    name: str, listing: Listing, names: StepNames, *, counts: bool = False
) -> tuple[Recognised, Found | None]:
    step = names.step_of(name)
    about, info = examine(listing, NO_STEP if step is None else step, counts=counts)
    if not about.is_checkpoint and (step is None or listing.is_file or listing.folders):
        return about, None
    if is_set_aside(name):
        info = replace(info, state="damaged", problem=info.problem or "a manager has set it aside as damaged")
    return about, Found(name=name, info=info, format=about.format, shared_bytes=listing.shared_bytes)


def _unreadable_step(step: int | None, name: str, path: str, changed_s: float, error: OSError) -> Found | None:
    if step is None:
        return None
    problem = f"it can't be read: {error.strerror}"
    return Found(name=name, info=StepInfo(step, path, "damaged", time=changed_s, problem=problem))


# --- leftovers ------------------------------------------------------------------------------------------


def _leftover(problem: str, name: str, listing: Listing) -> Found:
    """Return a temporary directory of a save or a deletion."""
    listing.list_below()
    nbytes = sum(listing.files.values())
    return Found(
        name=name,
        info=StepInfo(NO_STEP, listing.path, "unfinished", nbytes, listing.changed_s, problem=problem),
        shared_bytes=listing.shared_bytes,
    )
