"""Write checkpoints with torch alone: ``python tests/golden/stock.py FOLDER``, once with each version of torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.states import training  # it needs nothing but torch and NumPy


def flattened() -> dict[str, Any]:
    """Return the training state without empty containers, some of which stock DCP loses."""
    return {key: value for key, value in training().items() if key != "empty"}


def main(folder: Path) -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    warnings.simplefilter("ignore")
    dcp.save(flattened(), checkpoint_id=folder / f"stock-{version}")
    torch.save(training(), folder / f"torch-save-{version}.pt")
    torch.save(training(), folder / f"torch-save-legacy-{version}.pt", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
