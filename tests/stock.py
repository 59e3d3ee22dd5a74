"""Options of stock DCP that not every allowed torch has."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed.checkpoint as dcp

# Without a process group, torch 2.6 takes no such option: it looks for a group itself, and warns that there is none.
ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
