"""The files of a directory that are proven to be of one checkpoint, and so may be removed with it. Pure, without torch.

| file | is proven by |
| --- | --- |
| `.aiockpt.json`, and all that it lists | its CRC |
| without one, the files of a layout | what `aiockpt.format.layouts` says of it |
| all other files, and directories in which a file is not listed by an intact `.aiockpt.json` | nothing |

If one document that counts can't be read, or the directory is several checkpoints for `recognise`, nothing is proven.
Files of a model repository (`config.json`, `tokenizer*`, ...) stay where safetensors replace others beside them.

In a temporary directory, where a save or a deletion may have been killed at any point, the names of files are enough
if nothing describes them. Files of a model repository there are those that a save was about to keep.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.layouts import DATA_NAMES, Fetch, document, named_by
from aiockpt.format.manifest.manifest import decode_head, facts_in, is_of_another_save
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME, OPEN_MARK, SINGLE_NAME, SUFFIX
from aiockpt.format.recognise import SHARD_INDEX, rank_metadata, recognise

_STILL_OPEN = re.compile(r"\.nfs[0-9a-f]{24}|\.fuse_hidden[0-9a-f]{16,}")
_LEFT = (SINGLE_NAME, ".__*_results.json", ".__*_results.json.new")  # the last ones are of Megatron
_REPOSITORY = (  # beside the safetensors of a model, as the Hugging Face Hub has them
    *("*config.json", "configuration_*.py", "modeling_*.py", "tokenizer*", "*tokens*.json", "vocab*", "merges.txt"),
    *("sentencepiece*.model", "spiece.model", "chat_template.*", "README.md", "LICENSE*", ".gitattributes"),
)


def describes(name: str) -> bool:
    """Return whether a file of this name describes others."""
    return name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(SHARD_INDEX) or bool(rank_metadata([name]))


def proven_files(files: Mapping[str, int], fetch: Fetch) -> set[str]:
    """Return the names that are proven to be of the one checkpoint of a directory; those below have "/" in them.

    Raises:
        LoadError: why nothing is proven, as the end of a sentence; what ``fetch`` raises is passed on.
    """
    if MANIFEST_NAME in files:
        listed = facts_in(decode_head(document(MANIFEST_NAME, files, fetch)) or {})
        if listed is None:
            raise CorruptCheckpointError(f"{MANIFEST_NAME} is damaged, so nothing tells which files are its own")
        own = {MANIFEST_NAME, *listed}
        if METADATA_NAME in files and is_of_another_save(listed, data := document(METADATA_NAME, files, fetch)):
            own |= {METADATA_NAME, *named_by(METADATA_NAME, data)}
        return own
    return recognise(files, fetch).own_files(files, fetch)


def left_files(files: Mapping[str, int], fetch: Fetch) -> set[str]:
    """Return the files that a killed save, or a deletion, has left in a temporary directory."""
    try:
        own = proven_files(files, fetch)
    except (LoadError, OSError):
        own = set()
    tensors = {name for name in files if name.endswith(SUFFIX) or fnmatchcase(name, DATA_NAMES)}
    left = {name for name in files if describes(name) or any(fnmatchcase(name, known) for known in _LEFT)}
    left |= set(filter(is_still_open, files))
    return own | left | set(filter(is_of_repository, files)) | (tensors if own <= left else set())


def is_of_repository(name: str) -> bool:
    """Return whether a file is one of a model repository that no checkpoint consists of; directories end with "/"."""
    return not name.endswith("/") and any(fnmatchcase(name, each) for each in _REPOSITORY)


def is_safetensors(names: Collection[str]) -> bool:
    """Return whether a directory with these files holds safetensors and no checkpoint of DCP."""
    return any(name.endswith(SUFFIX) for name in names) and not any(
        name == METADATA_NAME or fnmatchcase(name, DATA_NAMES) or rank_metadata([name]) for name in names
    )


def order_of_removal(own: Collection[str]) -> list[str]:
    """Order files so that what describes the others goes last: after an interruption it still tells what belongs."""
    return sorted(own, key=lambda name: (name == OPEN_MARK, describes(name), name == METADATA_NAME, name))


def is_still_open(name: str) -> bool:
    """Return whether a network file system made this of a file that was removed while it is open: it goes by itself."""
    return bool(_STILL_OPEN.fullmatch(name))


def is_one_checkpoint(names: Collection[str]) -> bool:
    """Return whether everything in a directory with these files is replaced and deleted as one checkpoint."""
    # Other programs have directories with a `.metadata` of their own.
    return MANIFEST_NAME in names or (METADATA_NAME in names and any(fnmatchcase(name, DATA_NAMES) for name in names))


def finished_in(names: Collection[str]) -> str | None:
    """Return what is complete in a temporary directory: "" for itself, or a file in it; None if nothing is."""
    if SINGLE_NAME in names:
        return SINGLE_NAME
    if METADATA_NAME in names or any(name.endswith(SUFFIX) for name in names):
        return ""
    # Of several checkpoints in one, all of them in directories below, the manifest is the last file.
    return "" if MANIFEST_NAME in names and not any(fnmatchcase(name, DATA_NAMES) for name in names) else None
