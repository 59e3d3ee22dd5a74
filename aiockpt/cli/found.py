"""The checkpoints in a directory, of any program, as far as they are known without torch and without their tensors."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiockpt.errors import printable_key
from aiockpt.format.dcp.joined import rank_directories, rank_metadata
from aiockpt.format.item.ziparchive import LEGACY_MAGIC, ZIP_MAGIC, FramingError, read_directory
from aiockpt.format.names import HIDDEN, MANIFEST_NAME, METADATA_NAME, SUFFIX
from aiockpt.manager.scan import look, step_of
from aiockpt.storage.local.temp_dir import REPLACED, SWEPT, Ticket, liveness, read_ticket, this_process

Format = Literal["aiockpt", "dcp", "safetensors", "torch", ""]
State = Literal["complete", "unfinished", "damaged"]

_SHARD_INDEX = ".safetensors.index.json"
_DOCUMENT_BYTES = 1 << 28
_HEADER_BYTES = 100_000_000
_BEGIN_BYTES = 1024  # enough for the name of the first record of an archive
_LENGTH_BYTES = 8  # of the header's length in a safetensors file


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, or what a save has left of one.

    Attributes:
        name: its name in the directory.
        path: its path.
        format: its format; empty if that is not known.
        state: "complete" as far as that is known without reading tensors, "unfinished" or "damaged".
        nbytes: the bytes of its files.
        time: when it was saved, in seconds as in `time.time`.
        step: the number of the step if it is one of a manager's run.
        metrics: the metrics saved with a step.
        metadata: the metadata saved with it.
        problem: why it is not complete.
        kept_by: the policies that keep the step.
    """

    name: str
    path: str
    format: Format
    state: State
    nbytes: int
    time: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    kept_by: tuple[str, ...] = ()


def find(directory: str) -> list[Found]:
    """Return the checkpoints in a directory, in the order of the numbers in their names; if it is one itself, only it.

    Raises:
        OSError: the directory can't be read.
    """
    if not os.path.isdir(directory):
        os.stat(directory)  # raises if nothing is there
        found = _look_at_file(os.path.basename(directory), directory)
        return [] if found is None else [found]
    if any(map(_is_mark, os.listdir(directory))):
        itself = _look_at_directory(os.path.basename(directory) or directory, directory)
        return [] if itself is None else [itself]
    return sorted(_find_in(directory), key=lambda found: (found.name.startswith(HIDDEN), _naturally(found.name)))


def checkpoints_below(directory: str) -> dict[str, int]:
    """Return the subdirectories that hold checkpoints but are none themselves, each with their number."""
    if not os.path.isdir(directory) or any(map(_is_mark, os.listdir(directory))):
        return {}
    below: dict[str, int] = {}
    for name in sorted(os.listdir(directory), key=_naturally):
        path = os.path.join(directory, name)
        try:
            if name.startswith(".") or not os.path.isdir(path) or _look_at_directory(name, path) is not None:
                continue
            count = len([found for found in _find_in(path) if found.format])
        except OSError:  # it was removed meanwhile, or belongs to another user
            continue
        if count:
            below[name] = count
    return below


def _is_mark(name: str) -> bool:
    """Return whether a directory with a file of this name is a checkpoint."""
    return name in (MANIFEST_NAME, METADATA_NAME) or name.endswith((_SHARD_INDEX, ".distcp"))


def _find_in(directory: str) -> Iterator[Found]:
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        ticket = read_ticket(name)
        try:
            if ticket is not None:
                found = _look_at_leftover(ticket, name, path)
            elif name.startswith("."):
                continue
            elif os.path.isdir(path):
                found = _look_at_directory(name, path)
            else:
                found = _look_at_file(name, path)
        except FileNotFoundError:  # it was removed or renamed meanwhile
            continue
        except OSError as exc:  # it belongs to another user, or is a link to itself
            found = None if step_of(name) is None else _unreadable_step(name, path, exc)
        if found is not None:
            yield found


def _unreadable_step(name: str, path: str, error: OSError) -> Found:
    return Found(
        name=name,
        path=path,
        format="",
        state="damaged",
        nbytes=0,
        time=os.lstat(path).st_mtime,
        step=step_of(name),
        problem=f"it can't be read: {error.strerror}",
    )


def _naturally(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders step-90 before step-1000."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"([0-9]+)", name)]


# --- directories ----------------------------------------------------------------------------------------


def _look_at_directory(name: str, path: str) -> Found | None:
    with os.scandir(path) as entries:
        kinds = {entry.name: entry.is_dir() for entry in entries}
    files = [each for each, is_folder in kinds.items() if not is_folder]
    step = step_of(name)
    if MANIFEST_NAME in files or METADATA_NAME in files or (step is not None and kinds.keys() <= set(files)):
        info = look(path)
        if info is None:
            return None
        by_dcp = METADATA_NAME in files or not any(each.endswith(SUFFIX) for each in files)
        ours = MANIFEST_NAME in files
        return Found(
            name=name,
            path=path,
            format=("aiockpt" if ours else "dcp") if by_dcp else "safetensors",
            state=info.state,
            nbytes=info.nbytes,
            time=info.time,
            step=step,
            metrics=info.metrics,
            metadata=info.metadata,
            problem=info.problem,
        )
    return _look_at_others(name, path, kinds, files)


def _look_at_others(name: str, path: str, kinds: Mapping[str, bool], files: list[str]) -> Found | None:
    """Return what a directory without `.metadata` and manifest is."""
    nbytes, changed_s = _size_of(path)

    def found(form: Format, state: State = "complete", problem: str = "") -> Found:
        return Found(name=name, path=path, format=form, state=state, nbytes=nbytes, time=changed_s, problem=problem)

    if rank_metadata(files):
        return found("dcp")
    if any(each.endswith(".distcp") for each in files):
        return found("dcp", "unfinished", f"it has no {METADATA_NAME}: its save was never finished")
    indexes = [each for each in files if each.endswith(_SHARD_INDEX)]
    if len(indexes) == 1:
        problem = _missing_shards(os.path.join(path, indexes[0]), files)
        return found("safetensors", "damaged" if problem else "complete", problem)
    tensors = [each for each in files if each.endswith(SUFFIX)]
    if len(tensors) == 1 and not indexes:
        problem = _safetensors_problem(os.path.join(path, tensors[0]))
        return found("safetensors", "damaged" if problem else "complete", problem)
    if not files and all(kinds.values()) and kinds:
        below = [f"{folder}/{each}" for folder in kinds for each in os.listdir(os.path.join(path, folder))]
        if len(rank_directories(below)) == len(kinds):
            return found("dcp")
    return None


def _size_of(path: str) -> tuple[int, float]:
    """Return the bytes of all files below a directory, and when something was changed there last."""
    nbytes, changed_s = 0, os.stat(path).st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            at = os.lstat(os.path.join(folder, name))
            nbytes += at.st_size
            changed_s = max(changed_s, at.st_mtime)
    return nbytes, changed_s


def _missing_shards(path: str, files: list[str]) -> str:
    try:
        with open(path, "rb") as file:
            shards = sorted(set(json.loads(file.read(_DOCUMENT_BYTES))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{printable_key(os.path.basename(path))} is damaged"
    missing = [each for each in shards if each not in files]
    return f"it lacks its file {printable_key(str(missing[0]))}" if missing else ""


# --- files ----------------------------------------------------------------------------------------------


def _look_at_file(name: str, path: str) -> Found | None:
    at = os.stat(path)
    if not stat.S_ISREG(at.st_mode):
        return None
    with open(path, "rb") as file:
        begin = file.read(_BEGIN_BYTES)
    if begin[:4] == ZIP_MAGIC:
        form: Format = "torch"
        problem = _archive_problem(path, at.st_size, begin)
    elif LEGACY_MAGIC in begin[:64]:
        form, problem = "torch", ""
    elif begin[8:9] == b"{" and (name.endswith(SUFFIX) or int.from_bytes(begin[:8], "little") <= _HEADER_BYTES):
        form, problem = "safetensors", _safetensors_problem(path)
    else:
        return None
    if problem is None:
        return None
    return Found(
        name=name,
        path=path,
        format=form,
        state="damaged" if problem else "complete",
        nbytes=at.st_size,
        time=at.st_mtime,
        problem=problem,
    )


def _safetensors_problem(path: str) -> str:
    """Return why a file is no intact safetensors file, empty if it may be one."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _HEADER_BYTES or _LENGTH_BYTES + length > size:
            return "its header is cut short or damaged"
        try:
            header = json.loads(file.read(length))
            end = max((each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"), default=0)
            expected = _LENGTH_BYTES + length + end
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return "its header is damaged"
    return "" if expected == size else f"it has {size} bytes, but should have {expected}"


def _archive_problem(path: str, size: int, begin: bytes) -> str | None:
    """Return why a zip archive is no intact torch.save file, empty if it may be one; None if it is of another kind."""
    with open(path, "rb") as file:

        def fetch(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        try:
            names = {record.name.partition("/")[2] for record in read_directory(size, fetch)}
        except FramingError:
            return "it was cut short, or is damaged" if b"/data.pkl" in begin else None
    return "" if "data.pkl" in names and "constants.pkl" not in names else None  # the latter is of compiled programs


# --- leftovers ------------------------------------------------------------------------------------------


def _look_at_leftover(ticket: Ticket, name: str, path: str) -> Found | None:
    """Return a temporary directory of a save or a deletion; None for a sidecar file."""
    if not os.path.isdir(path):
        return None
    nbytes, changed_s = _size_of(path)
    return Found(
        name=name,
        path=path,
        format="",
        state="unfinished",
        nbytes=nbytes,
        time=changed_s,
        problem=_describe_leftover(ticket),
    )


def _describe_leftover(ticket: Ticket) -> str:
    owner = ticket.owner
    doing, done = ("removing it", "was removing it") if ticket.suffix == SWEPT else ("saving", "was saving")
    if ticket.suffix == REPLACED:
        doing, done = "replacing it", "was replacing it"
    if owner is None:
        return "its process is not known here; remove it with aiockpt clean --older-than"
    match liveness(owner, this_process()):
        case "alive":
            return f"process {owner.pid} is {doing}"
        case "dead":
            return f"process {owner.pid}, which {done}, is dead; aiockpt clean removes it"
        case _:
            return f"process {owner.pid} of another machine or container; aiockpt clean --older-than removes it"
