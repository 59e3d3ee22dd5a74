"""The random number generators of a program as one object with a state dict."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from aiockpt.coordination.choose import is_distributed
from aiockpt.coordination.ranks import Ranks, calling_ranks


class RngState:
    """The global random number generators of this process, as a part of a state.

    ::

        state = {"model": model, "optim": optim, "rng": aiockpt.RngState()}

    These are Python's `random`, NumPy's ``numpy.random``, torch's on the CPU, and those of every accelerator that the
    process has used. Generators that a program makes itself are not part of it.

    Each rank has generators of its own: the state dict has one key for each rank of ``torch.distributed``, or of the
    checkpointer's `Ranks`, and a rank loads what it saved itself. A rank that finds nothing of its own, because fewer
    ranks have saved, keeps its generators as they are and warns. The states of ranks and of devices that no longer
    exist are ignored.
    """

    _loaded: Mapping[str, Any] | None = None
    _ranks: Ranks | None = None  # of the last checkpointer that asked for the state; it asks before it loads, too

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of this rank's generators, as ``{"rank0": {"python": ..., "numpy": ..., "cpu": ...}}``."""
        own = {"python": random.getstate(), "numpy": _numpy_text(), "cpu": torch.get_rng_state()}
        if torch.accelerator.is_available():
            kind, module, count = _accelerator()
            # Initialising a device in a process that does not use it costs time and memory, and forbids to fork it.
            if getattr(module, "is_initialized", lambda: True)():
                own |= {f"{kind}:{index}": module.get_rng_state(index) for index in range(count)}
        self._ranks = calling_ranks.get() or self._ranks
        return {self._key: own}

    @property
    def _key(self) -> str:
        if self._ranks is not None:
            return f"rank{self._ranks.rank}"
        return f"rank{torch.distributed.get_rank() if is_distributed() else 0}"

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        """Set this rank's generators to the states that it has saved; warn if there are none."""
        own = state_dict.get(self._key)
        if own is None:
            warnings.warn(
                f"the random states of {', '.join(state_dict) or 'no rank'} were saved, but none of {self._key}, "
                "whose generators stay as they are: seed them, if they are to differ from those of other ranks",
                stacklevel=2,
            )
            return
        self._loaded = own
        self.rewind()

    def rewind(self) -> None:
        """Set the generators once more to what was loaded last; if nothing was loaded, leave them as they are.

        Call it after what draws numbers only because a program resumes, such as ``iter(loader)``, which draws a seed.
        """
        own = self._loaded
        if own is None:
            return
        if "python" in own:
            random.setstate(own["python"])
        if "numpy" in own:
            _set_numpy(own["numpy"])
        # With map_location, states may be loaded to an accelerator; torch takes them only in host memory.
        if "cpu" in own:
            torch.set_rng_state(own["cpu"].cpu())
        if torch.accelerator.is_available():
            kind, module, count = _accelerator()
            for index in range(count):
                if f"{kind}:{index}" in own:
                    module.set_rng_state(own[f"{kind}:{index}"].cpu(), index)


def _accelerator() -> tuple[str, Any, int]:
    """Return the kind of this machine's accelerator, its module of torch, and how many devices there are."""
    device = torch.accelerator.current_accelerator()
    assert device is not None  # the caller has asked whether there is one
    return device.type, torch.get_device_module(device), torch.accelerator.device_count()


def _numpy_text() -> str:
    """Return the state of NumPy's global generator, whichever it is, as JSON."""
    # JSON, because weights_only unpickling refuses NumPy arrays. Not the legacy tuple, which only MT19937 has.
    state = np.random.get_state(legacy=False)
    return json.dumps(state, default=lambda array: {"dtype": array.dtype.str, "values": array.tolist()})


def _set_numpy(text: str) -> None:
    def array_of(part: dict[str, Any]) -> Any:
        return np.array(part["values"], part["dtype"]) if part.keys() == {"dtype", "values"} else part

    np.random.set_state(json.loads(text, object_hook=array_of))
