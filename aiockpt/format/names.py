"""File names of the checkpoint formats."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

DCP_MODULE = "torch.distributed.checkpoint.metadata"  # where torch defines the classes in `.metadata`
DCP_VERSION = "1.0.0"  # the version of DCP's format
METADATA_NAME = ".metadata"  # the index of DCP's format; the last file to be written
MANIFEST_NAME = ".aiockpt.json"  # the manifest: everything that DCP's index has no room for
SUFFIX = ".safetensors"  # of safetensors files
INDEX_NAME = "model.safetensors.index.json"  # of a set of safetensors files
HIDDEN = ".aiockpt-"  # prefix of temporary directories and their sidecar files; see `aiockpt.storage.local.temp_dir`
# A single-file checkpoint in its temporary directory; without its name and suffix it is not mistaken for complete.
SINGLE_NAME = "single"
COMMON_NAME = "common.pt"  # what Megatron-Core stores beside `.metadata`: the rest of the state
CONFIG_NAME = "metadata.json"  # in which Megatron-Core says so

_STATE = re.compile(r"[^/.][^/]*\.(pt|pth|ckpt|bin|pkl|safetensors)", re.DOTALL)
_DEEPSPEED = re.compile(r"([^/]+/)?[^/]+_(model|optim)_states\.pt", re.DOTALL)


def files_beside(names: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return the files of a directory that look like states of the same program, except those that were read.

    Such as ``optimizer.pt`` beside ``model.safetensors``. Other directories below are other checkpoints, but those of
    DeepSpeed, which also its own loader takes for a part of this one.
    """
    return tuple(
        sorted(name for name in names if name not in read and (_STATE.fullmatch(name) or is_of_deepspeed(name)))
    )


def is_of_deepspeed(name: str) -> bool:
    """Return whether a file is one rank's part of a DeepSpeed checkpoint, here or in a directory such as global_step5.

    Source: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` in ``deepspeed/runtime/engine.py``.
    """
    return _DEEPSPEED.fullmatch(name) is not None
