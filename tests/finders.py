"""What is in a directory, and rules by which other programs find checkpoints there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

# The expressions are those of the programs. Some programs look at names only, and some delete what they find.
FINDERS: Mapping[str, Callable[[str], object]] = {
    "torchtitan": re.compile(r"step-(\d+)").search,
    "Lightning, all": lambda name: name.endswith(".ckpt"),
    "Lightning, last": lambda name: "last" in name,
    "Lightning, versions": re.compile(r"-v(\d+)").search,
    "transformers": re.compile(r"checkpoint-(\d+)").search,
    "Megatron": re.compile(r"iter_(\d+)").search,
    "safetensors": lambda name: name.endswith((".safetensors", ".safetensors.index.json")),
    "torch files": lambda name: name.endswith((".pt", ".pth", ".bin")),
    "TensorFlow": re.compile(r"ckpt-(\d+)").search,
}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wrongly_found(folder: Path) -> list[tuple[str, str]]:
    """Return each hidden name in a directory that a finder takes for a checkpoint, with that finder."""
    hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
    return [(path.name, finder) for path in hidden for finder, takes in FINDERS.items() if takes(path.name)]


def wrongly_found_files(folder: Path) -> list[tuple[str, str]]:
    """Return the same for files below hidden names, by the finders that look for single files."""
    below = [path for hidden in folder.glob(".*") for path in hidden.rglob("*")]
    finders = ("Lightning, all", "Lightning, last", "torch files")
    return [(path.name, finder) for path in below for finder in finders if FINDERS[finder](path.name)]
