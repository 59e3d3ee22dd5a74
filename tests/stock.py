"""Differences between the allowed versions of torch: options of stock DCP, and the layout of a torch.save file."""

from __future__ import annotations

import inspect
import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

# torch 2.6 has no option for a program without a process group: it looks for one itself, and warns if it finds none.
ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def _bytes_before_payload() -> int:
    values = torch.arange(1000, 1032)
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue().index(values.numpy().tobytes())


PAYLOAD_OFFSET = _bytes_before_payload()
"""Offset in bytes of the values in a torch.save file of one tensor: 704, or 448 with torch 2.6."""
