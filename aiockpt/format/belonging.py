"""The files of a directory that belong to a checkpoint, and may be removed with it. Pure, and without torch.

| file | belongs |
| --- | --- |
| `.metadata`, `__N.metadata`, `.aiockpt.json`, `*.safetensors.index.json`, `*.bin.index.json` | always |
| any file that an intact `.aiockpt.json` lists | yes |
| `*.distcp`, `*.safetensors` and `*.bin` that one of these names | yes |
| other `*.distcp` and `*.safetensors` | if one of these is damaged, or, for `*.distcp`, if there is none |
| a `*.safetensors` that is alone, and the parts of one set by their names | yes |
| `common.pt` and `metadata.json` of Megatron, and `meta.pt` of Lightning, beside `.metadata` | yes |
| files of a model repository (`config.json`, `tokenizer*`, ...) | never; safetensors may replace others beside them |
| directories below | if all that is in them belongs, as an intact `.aiockpt.json` lists it |
| all other files | never |

In a temporary directory, where a save may have been killed at any point, files of these names belong if nothing
describes them. Files of a model repository there are those that a save was about to keep.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from aiockpt.errors import LoadError
from aiockpt.format.manifest.manifest import files_listed
from aiockpt.format.names import COMMON_NAME, CONFIG_NAME, MANIFEST_NAME, METADATA_NAME, OPEN_MARK, SINGLE_NAME, SUFFIX
from aiockpt.format.recognise import SHARD_INDEX, rank_metadata, set_of

_DCP = "*.distcp"
_STILL_OPEN = (".nfs*", ".fuse_hidden*")  # what NFS and FUSE keep of files that were removed while they are open
_LEFT = (SINGLE_NAME, *_STILL_OPEN, ".__*_results.json", ".__*_results.json.new")  # the last ones are of Megatron
_REPOSITORY = (  # beside the safetensors of a model, as the Hugging Face Hub has them
    *("*config.json", "configuration_*.py", "modeling_*.py", "tokenizer*", "*tokens*.json", "vocab*", "merges.txt"),
    *("sentencepiece*.model", "spiece.model", "chat_template.*", "README.md", "LICENSE*", ".gitattributes"),
)
_MEGATRON = (COMMON_NAME, CONFIG_NAME)
_MEGATRON_KEY = b'"sharded_backend"'
_LIGHTNING = "meta.pt"


def describes(name: str) -> bool:
    """Return whether a file of this name describes others."""
    return name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(SHARD_INDEX) or bool(rank_metadata([name]))


def documents_in(names: Collection[str]) -> list[str]:
    """Return the files whose contents `own_files` needs."""
    megatron = _MEGATRON[1:] if METADATA_NAME in names and set(_MEGATRON) <= set(names) else ()
    return [name for name in names if describes(name) or name in megatron]


def own_files(files: Collection[str], documents: Mapping[str, bytes | None], *, unfinished: bool) -> set[str]:
    """Choose the files of the checkpoint.

    Args:
        files: the names of all that is no directory.
        documents: the contents of `documents_in`, None where one can't be read.
        unfinished: it is a temporary directory, where a save may have been killed at any point.
    """
    described = {name: data for name, data in documents.items() if describes(name)}
    own = set(described)
    if _MEGATRON_KEY in (documents.get(_MEGATRON[1]) or b""):
        own.update(_MEGATRON)
    if METADATA_NAME in described and _LIGHTNING in files:
        own.add(_LIGHTNING)
    manifest = described.get(MANIFEST_NAME)
    listed = None if manifest is None else files_listed(manifest)
    own.update(name for name in files if name in (listed or ()))
    own.update(name for name in files if unfinished and any(fnmatchcase(name, known) for known in _LEFT))
    own.update(name for name in files if unfinished and is_of_repository(name))
    tensors = [name for name in files if name.endswith(SUFFIX)]
    shaped = [name for name in (*tensors, *(name for name in files if fnmatchcase(name, _DCP))) if name not in own]
    spelling = [data for name, data in described.items() if data is not None and name != MANIFEST_NAME]
    nameable = [*shaped, *(name for name in files if name.endswith(".bin"))]
    own.update(name for name in nameable if any(is_named(name, data) for data in spelling))
    describing = [name for name in described if name != MANIFEST_NAME]
    if len({set_of(name) for name in tensors}) == 1 and len(tensors) == len(shaped) and not describing:
        own.update(tensors)
    rest = [name for name in shaped if name not in own]
    if rest:
        if not describing and listed is None:
            own.update(name for name in rest if unfinished or MANIFEST_NAME in described or fnmatchcase(name, _DCP))
        elif any(map(is_damaged, described, described.values())):
            own.update(rest)
    return own


def listed_in(documents: Mapping[str, bytes | None]) -> frozenset[str]:
    """Return the names that an intact manifest lists, also of files in directories below."""
    manifest = documents.get(MANIFEST_NAME)
    return (None if manifest is None else files_listed(manifest)) or frozenset()


def is_of_repository(name: str) -> bool:
    """Return whether a file is one of a model repository that no checkpoint consists of; directories end with "/"."""
    return not name.endswith("/") and any(fnmatchcase(name, each) for each in _REPOSITORY)


def is_safetensors(names: Collection[str]) -> bool:
    """Return whether a directory with these files holds safetensors and no checkpoint of DCP."""
    return any(name.endswith(SUFFIX) for name in names) and not any(
        name == METADATA_NAME or fnmatchcase(name, _DCP) or rank_metadata([name]) for name in names
    )


def order_of_removal(own: Collection[str]) -> list[str]:
    """Order files so that what describes the others goes last: after an interruption it still tells what belongs."""
    return sorted(own, key=lambda name: (name == OPEN_MARK, describes(name), name == METADATA_NAME, name))


def is_still_open(name: str) -> bool:
    """Return whether a network file system made this of a file that was removed while it is open: it goes by itself."""
    return any(fnmatchcase(name, each) for each in _STILL_OPEN)


def has_marks(names: Collection[str]) -> bool:
    """Return whether a directory with these files looks like a checkpoint, whatever is in it besides."""
    return any(describes(name) or name.endswith((".metadata", ".distcp", SUFFIX)) for name in names)


def is_named(name: str, document: bytes) -> bool:
    """Return whether a pickle or a JSON text names a file."""
    data = name.encode(errors="surrogateescape")  # after the opcodes SHORT_BINUNICODE and BINUNICODE, and in quotes
    pickled = b"\x8c%c" % (len(data) & 255) + data, b"X" + len(data).to_bytes(4, "little") + data
    return any(each in document for each in (*pickled, b'"' + data + b'"'))


def is_damaged(name: str, data: bytes | None) -> bool:
    """Return whether a document can't be decoded; None if it can't even be read."""
    if data is None:
        return True
    if name == MANIFEST_NAME:
        return files_listed(data) is None
    try:
        if name.endswith(SHARD_INDEX):
            return type(json.loads(data)["weight_map"]) is not dict
        from aiockpt.format.dcp.metadata import decode_metadata  # imports torch, which the writer process lacks

        decode_metadata(data)
    except (ValueError, KeyError, TypeError, RecursionError, LoadError):
        return True
    return False


def data_files_of(document: str, data: Collection[str], documents: Mapping[str, bytes | None]) -> list[str]:
    """Return those of the ``data`` files that belong to one `.metadata` or `__N.metadata` of a directory.

    They are those that it names; if it is damaged, those that no other document there names.
    """
    data = [name for name in data if fnmatchcase(name, _DCP)]
    own = documents[document]
    if own is not None and not is_damaged(document, own):
        return [name for name in data if is_named(name, own)]
    others = [each for name, each in documents.items() if each is not None and name not in (document, MANIFEST_NAME)]
    return [name for name in data if not any(is_named(name, other) for other in others)]


def is_one_checkpoint(names: Collection[str]) -> bool:
    """Return whether everything in a directory with these files is replaced and deleted as one checkpoint."""
    # Other programs have directories with a `.metadata` of their own.
    return MANIFEST_NAME in names or (METADATA_NAME in names and any(fnmatchcase(name, _DCP) for name in names))


def finished_in(names: Collection[str]) -> str | None:
    """Return what is complete in a temporary directory: "" for itself, or a file in it; None if nothing is."""
    if SINGLE_NAME in names:
        return SINGLE_NAME
    if METADATA_NAME in names or any(name.endswith(SUFFIX) for name in names):
        return ""
    # Of several checkpoints in one, all of them in directories below, the manifest is the last file.
    return "" if MANIFEST_NAME in names and not any(fnmatchcase(name, _DCP) for name in names) else None
