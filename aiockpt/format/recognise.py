"""The one recogniser of checkpoints: what a directory or a file is, by its names and a few bytes. Without torch.

Opening, listing, verifying, converting, replacing and deleting all ask it, so that they agree.

==================================  =======================================================================
at the top of the directory         it is
==================================  =======================================================================
`.metadata` or `.aiockpt.json`      a DCP checkpoint, or one of ours in safetensors
`__N.metadata`                      a DCP checkpoint of ranks that saved alone
numbered directories alone          the same, if each has a `.metadata` and lacks parts of tensors
`*.distcp` without any of these     a DCP checkpoint whose save was never finished
one index, `*.safetensors.index.json` or `*.bin.index.json`  the set of files that it names
one *thing* and nothing below       that: a file, or all parts of a set, by their names (`-00001-of-00002`)
anything else                       no checkpoint; `Recognised.choices` are those in it
==================================  =======================================================================

A *thing* is a safetensors or torch.save file, or a set of them. Companions, such as an optimizer's file beside a model,
are none. If there is a checkpoint in a directory below as well, both are choices: a part is never taken for the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from aiockpt.core.wording import naturally, some_of
from aiockpt.errors import LoadError, printable_key
from aiockpt.format.item.ziparchive import LEGACY_MAGIC, ZIP_MAGIC
from aiockpt.format.layouts import (
    SHARD_ALONE,
    DcpFiles,
    Fetch,
    RankFiles,
    Recognised,
    SafetensorsFiles,
    State,
    TorchFiles,
    UnfinishedFiles,
    document,
    has_common,
    is_safetensors,
    leads_out,
    plain_name,
    recognise_file,
)
from aiockpt.format.manifest.manifest import (
    DiskFacts,
    FileFacts,
    decode_head,
    disks_in,
    facts_in,
    is_of_another_save,
    is_pickled,
    parts_in,
    save_id_of,
)
from aiockpt.format.names import COMMON_NAME, MANIFEST_NAME, METADATA_NAME, SUFFIX

SHARD_INDEX = (".safetensors.index.json", ".bin.index.json")
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar", ".pt.tar", ".th", ".pkl")
"""How names of files of torch.save end, in lower case; those with the last one are often other pickles."""
_HOLDING_STATE = (SUFFIX, *TORCH_SUFFIXES, ".pkl", ".npz", ".npy", ".h5", ".msgpack", ".gguf", ".onnx")

_MOST_SHOWN = 10

_RANK_METADATA = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata")
_RANK_DATA = re.compile(r"__(0|[1-9][0-9]{0,8})_[0-9]+\.distcp")
_RANK_FOLDER = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)
_NO_RANKS = re.compile(r"epoch|step|iter|checkpoint|ckpt", re.IGNORECASE)  # numbers that count something else
_PART_OF = r"[-_. ]?([0-9]{1,9})[-_ ]?of[-_ ]?([0-9]{1,9})(?![0-9])"
_ENDING = r"([^/]*\.(?:safetensors|bin|pt|pth|ckpt|pth\.tar|pt\.tar|th|pkl))"
PART = re.compile(rf"(?:shard-([0-9]{{1,9}})-)?(.*?){_PART_OF}{_ENDING}", re.IGNORECASE | re.DOTALL)
"""The name of a file of a set: the rank of a shard, the stem, the number and the count of files, the suffix.

Sources: ``save_pretrained`` of transformers; for shards ``torch/distributed/checkpoint/_hf_utils.py``.
"""

_PART_BEHIND = re.compile(rf"{_ENDING}{_PART_OF}", re.IGNORECASE | re.DOTALL)
# Names that ranks give their parts, which do not say how many there are.
_MAYBE_PART = re.compile(
    r"(^|[-_.])(rank|shard|part)[-_]?[0-9]+(?![0-9])|world_size_[0-9]|^mp_rank_|^consolidated\.(?!00)[0-9]",
    re.IGNORECASE,
)
_CONSOLIDATED_FROM = "sharded"  # beside the files that HuggingFaceStorageWriter has consolidated from it
# What Trainer, accelerate, the Hub and Lightning keep beside a model.
_MODEL = re.compile(r"pytorch_model[^/]*\.bin|consolidated\.[0-9]+\.pth")
_COMPANION = re.compile(
    r"(?i:(optimizer|optim(?![a-z])|(lr_)?scheduler|(grad_)?scaler|sampler|dl_state_dict|training_args|rng_state|"
    rf"random_states|custom_checkpoint)[^/]*\.(pt|pth|bin|pkl|safetensors))|meta\.pt|{_MODEL.pattern}"
)
# See `_get_ckpt_name`, `_get_zero_ckpt_name` and `ckpt_layer_path` of DeepSpeed, and its `ds_to_universal.py`.
_DEEPSPEED = re.compile(
    r"([^/]+/)?([^/]+[-_](model|optim)_states|(?<![^/])zero/.+/(fp32|exp_avg|exp_avg_sq|step))\.pt(?![^/])"
)


def recognise(files: Mapping[str, int], fetch: Fetch, *, alone: bool = False, index: str = "") -> Recognised:
    """Return what a directory is, or a file.

    Args:
        files: the size of each regular file by its relative name; those of directories below, as far as they are
            known: one level decides.
        fetch: reads a few bytes; what it raises is passed on.
        alone: it is not a directory, but the one file in ``files``, or a pipe or device if that is empty.
        index: the index to read, where a directory has several.
    """
    if alone:
        for name, size in files.items():
            found = recognise_file(name, size, fetch)
            is_shard = isinstance(found, SafetensorsFiles) and (part := PART.fullmatch(name)) and part[1]
            return replace(found, problem=SHARD_ALONE) if is_shard else found
        return Recognised(problem="it is no regular file")
    top = [name for name in files if not name.startswith(".") and "/" not in name]  # others are copies and litter
    if METADATA_NAME in files:
        is_ours = MANIFEST_NAME in files
        common = not is_ours and has_common(files, fetch)
        problem = f"it lacks its file {COMMON_NAME}" if common and COMMON_NAME not in files else ""
        beside = _beside(files, [COMMON_NAME] if common else [])
        return DcpFiles(format="aiockpt" if is_ours else "dcp", problem=problem, beside=beside)
    if MANIFEST_NAME in files and not any(name.endswith(SUFFIX) for name in top):
        return _lacking_all(files, fetch)
    ranks, problem = rank_metadata(top), ""
    if not ranks:
        ranks, problem = _rank_directories(files, fetch)
    if ranks:
        missing = list(islice((rank for rank in range(known_ranks(ranks, files)) if rank not in ranks), _MOST_SHOWN))
        problem = f"it lacks the part of rank {', '.join(map(str, missing))}" if missing else problem
        return RankFiles(format="dcp", ranks=ranks, problem=problem)
    if any(name.endswith(".distcp") for name in top):
        problem = f"it has no {METADATA_NAME}: its save was never finished, or the file was not copied with it"
        return UnfinishedFiles(format="dcp", problem=problem)
    return _recognise_loose(files, top, fetch, index)


def depends_on_below(found: Recognised, files: Collection[str], folders: Iterable[str]) -> bool:
    """Return whether the names right below decide what a directory is, which was recognised without them."""
    if found.is_checkpoint:
        return not found.is_described or bool(found.problem)
    matches = [_RANK_FOLDER.fullmatch(name) for name in folders] if not files else []
    return all(matches) and not all(match and _NO_RANKS.search(match[1]) for match in matches)


def _lacking_all(files: Mapping[str, int], fetch: Fetch) -> Recognised:
    """Return what a directory is that has our manifest, but neither metadata nor tensors."""
    head = decode_head(document(MANIFEST_NAME, files, fetch)) or {}
    if parts := parts_in(head):
        return Recognised(format="aiockpt", choices=tuple(sorted(parts)))
    listed = facts_in(head)
    problem = f"{MANIFEST_NAME} is damaged" if listed is None else wrong_file(listed, files)
    problem = problem or f"it lacks its file {METADATA_NAME}"
    if listed is None or METADATA_NAME in listed:
        return DcpFiles(format="aiockpt", problem=problem)
    return SafetensorsFiles(problem=problem)


def _recognise_loose(files: Mapping[str, int], top: Sequence[str], fetch: Fetch, index: str) -> Recognised:
    """Return what a directory is whose files have no metadata of DCP."""
    indexes = [name for name in top if name.endswith(SHARD_INDEX)] if not index else [index]
    if len({name.endswith(SHARD_INDEX[0]) for name in indexes}) == 2:  # one model in two formats
        indexes = [name for name in indexes if name.endswith(SHARD_INDEX[0])]
    if len(indexes) == 1:
        return _indexed(indexes[0], files, fetch)
    filled = [name for name in top if files[name] or not name.lower().endswith(TORCH_SUFFIXES) or PART.fullmatch(name)]
    # What is empty counts if it is alone.
    things = {} if indexes else _things(filled, files, fetch) or _things(top, files, fetch)
    sizes, files = files, {name: size for name, size in files.items() if not _is_other_program(name, size, fetch)}
    below, parts = _folders_with_checkpoints(files), frozenset[str]()
    if MANIFEST_NAME in files and (below or len(things) > 1):
        parts = parts_in(decode_head(document(MANIFEST_NAME, files, fetch)))  # that were published together
        if "" in parts:
            things = {kind: names for kind, names in things.items() if parts.isdisjoint(names)}
        if "" in parts or parts.issuperset(below):
            below = set()
    if len(things) == 1:
        (members,) = things.values()
        alone = recognise_file(members[0], files[members[0]], fetch)
        if not alone.is_checkpoint:  # by its contents
            return Recognised(problem=f"{printable_key(members[0])}: {alone.problem}")
        if not below:
            kind = SafetensorsFiles if isinstance(alone, SafetensorsFiles) else TorchFiles
            problem = _problem_of_set(members)
            if not problem and f"{members[0]}.aria2" in files:
                name = printable_key(members[0])
                problem = f"{name} is not downloaded to its end: {members[0]}.aria2 is beside it"
            return kind(problem=problem, files=members, beside=_beside(files, members))
    if parts:
        return Recognised(format="aiockpt", choices=tuple(sorted(parts)))
    choices = tuple(_checkpoints_in(files))
    return Recognised(choices=choices, problem="" if choices else _what_else(files, sizes, top, fetch))


def _indexed(index: str, files: Mapping[str, int], fetch: Fetch) -> Recognised:
    kind = SafetensorsFiles if index.endswith(SHARD_INDEX[0]) else TorchFiles
    try:
        names = json.loads(document(index, files, fetch))["weight_map"].values()
        members = tuple(dict.fromkeys(plain_name(str(name)) for name in names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return kind(problem=f"{printable_key(index)} is damaged", index=index)
    if (out := next(filter(leads_out, members), None)) is not None:
        return kind(problem=f"{printable_key(index)} names {printable_key(out)}, which is not below it", index=index)
    missing = [name for name in members if name not in files]
    problem = f"it lacks its file {printable_key(missing[0])}" if missing else ""
    return kind(problem=problem, files=members, index=index, beside=_beside(files, [*members, index]))


def _beside(files: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return the files that may hold other parts of the state, and are not read.

    Other directories below are other checkpoints, but those of DeepSpeed, which it takes for a part of this one.
    """
    candidates = (
        name for name in files if (not name.startswith(".") and "/" not in name) or _DEEPSPEED.fullmatch(name)
    )
    return tuple(sorted(name for name in candidates if name.endswith(_HOLDING_STATE) and name not in read))


# --- sets of files --------------------------------------------------------------------------------------


def set_of(name: str) -> tuple[str | bool, ...]:
    """Return what the parts of one set have in common in their names; for any other file its name."""
    part = PART.fullmatch(name)
    return (name,) if part is None else (part[1] is None, *part.group(2, 4, 5))


def _problem_of_set(members: Sequence[str]) -> str:
    """Return which files a set lacks by the names of the others; empty if it lacks none."""
    parts = [part for part in map(PART.fullmatch, members) if part]
    if not parts:
        maybe = "" if members[1:] else _MAYBE_PART.search(members[0])
        return f"{printable_key(members[0])} may be one of several parts by its name: load it by that" if maybe else ""
    count = int(parts[0][4])
    if strange := next((part for part in parts if not 0 < int(part[3]) <= count), None):
        return f"{printable_key(strange.string)} is not one of {count}"
    missing = _absent(parts, 3, count)
    if parts[0][1] is not None:
        ranks = max(int(part[1]) for part in parts)
        missing += _absent(parts, 1, ranks)
        if ranks == 1 and not missing:
            return (
                "it holds the shards of rank 1 alone, and they do not say how many ranks there are: add the files of "
                f"the others. If no other rank saved, rename {members[0]} to {members[0][parts[0].start(2) :]}"
            )
    if not missing:
        return ""
    lacks = f"it lacks {some_of([printable_key(name) for name in missing], _MOST_SHOWN)}"
    if parts[0][1] is not None and len({part[1] for part in parts}) < ranks:
        # torch's HuggingFaceStorageWriter returns at once on a rank with nothing to write.
        lacks += ". A rank without tensors writes no file: if that is the cause, add the name with save_file({}, name)"
    return lacks


def _absent(parts: Sequence[re.Match[str]], group: int, count: int) -> list[str]:
    """Return names with the numbers, from 1 to ``count``, that no file has in a group of its name."""
    known, (begin, end), name = {int(part[group]) for part in parts}, parts[0].span(group), parts[0].string
    absent = (number for number in range(1, count + 1) if number not in known)
    return [f"{name[:begin]}{number:0{end - begin}}{name[end:]}" for number in islice(absent, _MOST_SHOWN + 1)]


def _things(
    top: Iterable[str], files: Mapping[str, int], fetch: Fetch
) -> dict[tuple[str | bool, ...], tuple[str, ...]]:
    """Return the loose files and sets of files, by what the names of each have in common.

    The files of companions are none, but those of a model where there is nothing else.
    """
    if any(map(_DEEPSPEED.fullmatch, top)):
        return {}
    kinds: tuple[dict[tuple[str | bool, ...], list[str]], ...] = ({}, {})
    for name in sorted(top):
        is_model = bool(_MODEL.fullmatch(name))
        if not name.lower().endswith((SUFFIX, *TORCH_SUFFIXES)) or _is_other_program(name, files[name], fetch):
            continue
        if is_model or not _COMPANION.fullmatch(name):
            kinds[is_model].setdefault(set_of(name), []).append(name)
    return {key: tuple(members) for key, members in next(filter(None, kinds), {}).items()}


def _is_other_program(name: str, size: int, fetch: Fetch) -> bool:
    """Return whether a file has the name of one of torch.save, but other bytes."""
    if not size or not name.lower().endswith(TORCH_SUFFIXES):
        return False
    try:
        begin = fetch(name, 0, min(size, 16))
    except (OSError, LoadError):  # it can't be read: its name has to do
        return False
    return begin[:4] != ZIP_MAGIC and LEGACY_MAGIC[:8] not in begin and not is_safetensors(begin)


def _folders_with_checkpoints(files: Iterable[str]) -> set[str]:
    """Return the directories right below that hold checkpoints, by the names of their files."""
    parts = [name.split("/") for name in files if not _DEEPSPEED.fullmatch(name)]
    found = {part[0] for part in parts if len(part) == 2 and not part[0].startswith(".") and is_mark(part[1])}
    # The same tensors as in the files at the top, in parts.
    return found - {_CONSOLIDATED_FROM}


def is_mark(name: str) -> bool:
    """Return whether a directory with a file of this name holds a checkpoint, or files of one."""
    if name.startswith("."):  # others are copies and litter
        return name in (METADATA_NAME, MANIFEST_NAME)
    return (
        name.lower().endswith((".distcp", *SHARD_INDEX))
        or bool(_RANK_METADATA.fullmatch(name))
        or (name.lower().endswith((SUFFIX, *TORCH_SUFFIXES[:-1])) and not _COMPANION.fullmatch(name))
    )


def _checkpoints_in(files: Iterable[str]) -> list[str]:
    """Return the relative paths of the checkpoints in a directory that is none, the highest number first."""
    by_folder: dict[str, list[str]] = {}
    for name in files:
        folder, _, rest = name.rpartition("/")
        if not any(part.startswith(".") for part in folder.split("/") if part):
            by_folder.setdefault(folder, []).append(rest)
    found: set[str] = set()
    for folder, names in by_folder.items():
        marks = [name for name in names if is_mark(name)]
        if folder and any(not name.lower().endswith(TORCH_SUFFIXES) for name in marks):
            found.add(folder)
        elif not folder and (indexes := [name for name in names if name.endswith(SHARD_INDEX)]):
            found.update(indexes)
        else:
            found.update(f"{folder}/{name}".lstrip("/") for name in marks)
    return sorted((name for name in found if not _DEEPSPEED.search(name)), key=naturally, reverse=True)


def _what_else(files: Collection[str], sizes: Mapping[str, int], top: Iterable[str], fetch: Fetch) -> str:
    """Return what a directory without a checkpoint is; empty if nothing tells. Only ``sizes`` has other programs'."""
    if any(map(_DEEPSPEED.fullmatch, files)):
        return (
            "it is a checkpoint of DeepSpeed, whose parts are not supported: load it with DeepSpeed, and save it, or "
            "convert it with zero_to_fp32.py, if DeepSpeed has put that there"
        )
    if any(name.rpartition("/")[2] in ("_CHECKPOINT_METADATA", "manifest.ocdbt") for name in files):
        return "it is a checkpoint of Orbax, which is not supported: restore it with Orbax, and save it"
    for name in sorted(name for name in sizes if "/" not in name and name not in files):
        if problem := recognise_file(name, sizes[name], fetch).problem:
            return f"{printable_key(name)}: {problem}"
    if names := [printable_key(name) for name in sorted(top) if _COMPANION.fullmatch(name)]:
        return f"it holds {some_of(names, _MOST_SHOWN)}, which is stored beside a model, but no model"
    if names := [printable_key(name) for name in sorted(top) if _PART_BEHIND.fullmatch(name)]:
        return f"{names[0]} is one of several parts by its name: put the numbers before the ending"
    return ""


# --- ranks that saved alone -----------------------------------------------------------------------------


def rank_metadata(files: Iterable[str]) -> dict[int, str]:
    """Return the metadata files of ranks that saved alone, by rank."""
    return dict(sorted((int(match[1]), match[0]) for match in map(_RANK_METADATA.fullmatch, files) if match))


def known_ranks(ranks: Collection[int], files: Iterable[str]) -> int:
    """Return how many ranks have saved at least, by the numbers of their metadata and of the data files."""
    return 1 + max([*ranks, *(int(match[1]) for match in map(_RANK_DATA.fullmatch, files) if match)])


def _rank_directories(files: Mapping[str, int], fetch: Fetch) -> tuple[dict[int, str], str]:
    """Return the metadata files below a directory of nothing but numbered directories, such as rank0, by number.

    Directories of runs are numbered too, but only ranks store parts of tensors. The first metadata that can be decoded
    decides; if there is none, the second result is its problem.
    """
    found: dict[int, str] = {}
    stems = set()
    for name in files:
        folder, _, rest = name.partition("/")
        match = _RANK_FOLDER.fullmatch(folder)
        if match is None or not rest or _NO_RANKS.search(match[1]):
            return {}, ""
        stems.add(match[1])
        if rest == METADATA_NAME:
            found[int(match[2])] = name
    found = dict(sorted(found.items()))
    if len(stems) != 1 or not found:
        return {}, ""
    from aiockpt.format.dcp.metadata import decode_metadata  # imports torch, which only this case needs

    problem = ""
    for name in found.values():
        try:
            return (found, "") if decode_metadata(document(name, files, fetch)).is_part else ({}, "")
        except LoadError as exc:
            problem = problem or f"{name}: {exc}"
    return found, problem


# --- state ----------------------------------------------------------------------------------------------


class Assessment(NamedTuple):
    """The state of a checkpoint, as far as sizes and documents tell without tensors."""

    state: State
    problem: str  # what is wrong
    head: Mapping[str, Any] | None = None  # of its manifest; see `decode_head`
    save_id: str = ""  # of its manifest; see `save_id_of`


def assess(found: Recognised, files: Mapping[str, int], fetch: Fetch) -> Assessment:
    """Read the documents of a checkpoint, and look for the files that they name. A complete one can be opened."""
    problem = found.problem
    if MANIFEST_NAME in files and found.is_checkpoint:
        manifest = document(MANIFEST_NAME, files, fetch)
        head = decode_head(manifest)
        listed = None if head is None else facts_in(head)
        if listed is None:
            return Assessment("damaged", f"{MANIFEST_NAME} is damaged")
        if not problem and (problem := wrong_file(listed, files)):
            problem = absent_text(disks_in(head), files) or problem
        # Most are aiockpt's, as their first bytes tell; they may be large.
        is_foreign = METADATA_NAME in files and is_pickled(fetch(METADATA_NAME, 0, 3))
        replaced = is_foreign and is_of_another_save(listed, document(METADATA_NAME, files, fetch))
        if not problem or not replaced:
            return Assessment("damaged" if problem else "complete", problem, head, save_id_of(manifest))
        problem = ""
    if problem:
        return Assessment(found.broken, problem)
    problem = found.find_problem(files, fetch)
    return Assessment("damaged" if problem else "complete", problem)


def wrong_file(listed: Mapping[str, FileFacts], files: Mapping[str, int]) -> str:
    """Return which file is missing or of another size than the manifest lists; empty if none is.

    Directories of which ``files`` has nothing may not have been looked into.
    """
    folders = {name.partition("/")[0] for name in files if "/" in name}
    for name, facts in listed.items():
        if "/" in name and name.partition("/")[0] not in folders:
            continue
        if name not in files:
            return f"it lacks its file {printable_key(name)}"
        if files[name] != facts.nbytes:
            return f"{printable_key(name)} has {files[name]} bytes, but was written with {facts.nbytes}"
    return ""


def absent_text(disks: Collection[DiskFacts], files: Collection[str]) -> str:
    """Return which hosts have files that are not here, of a checkpoint on the own disks of several; empty if none."""
    away = [disk for disk in disks if disk.files and not disk.files & set(files)]
    total = sum(len(disk.files) for disk in disks)
    named = some_of([f"{disk} has {len(disk.files)}" for disk in away], _MOST_SHOWN)
    return f"{named} of its {total} files, which are on the own disks of several hosts" if away else ""
