"""Loads into a module: of torch's own layers, with one layer that loads in its own way, and with all of them so."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of
from benchmarks.limits import machine
from benchmarks.measured import load
from benchmarks.peers.loaders import Aiockpt, Blocking, Loader
from benchmarks.report.bars import by_name, compare
from benchmarks.report.report import Report, Table, most_mib, speed, spread

OPTIONS = ("gib", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 5
_LAYERS = 16


class Odd(nn.Linear):
    """A layer that could have renamed keys."""

    def _load_from_state_dict(self, state: Any, *rest: Any) -> None:
        super()._load_from_state_dict(state, *rest)


def network(nbytes: int, odd: int) -> nn.Sequential:
    """Return layers of about ``nbytes`` in all, of which the first ``odd`` load in their own way."""
    width = int(math.sqrt(nbytes / 4 / _LAYERS))
    return nn.Sequential(*((Odd if n < odd else nn.Linear)(width, width) for n in range(_LAYERS)))


class IntoModule(Aiockpt):
    """This package, into a module."""

    def __init__(self, path: Path, module: nn.Module, name: str) -> None:
        super().__init__(path, module, name=name)  # type: ignore[arg-type]
        self._module = module

    def matches(self, loaded: State | None, state: State) -> bool:
        return super().matches(self._module.state_dict(), state)


def loaders(directory: Path, nbytes: int) -> list[Loader]:
    """Return the contenders; the state of all is that of the same layers."""
    own, plain = directory / "aiockpt", network(nbytes, 0)

    def with_dcp(path: Path) -> State:
        state = plain.state_dict()
        dcp.load(state, checkpoint_id=path)
        plain.load_state_dict(state)
        return plain.state_dict()

    def with_torch(path: Path) -> State:
        plain.load_state_dict(torch.load(path, mmap=True))
        return plain.state_dict()

    return [
        IntoModule(own, plain, "aiockpt, plain layers"),
        IntoModule(own, network(nbytes, 1), f"aiockpt, one of {_LAYERS} layers odd"),
        IntoModule(own, network(nbytes, _LAYERS), "aiockpt, all layers odd"),
        Blocking("dcp.load and load_state_dict", directory / "dcp", with_dcp),
        Blocking("torch.load, mapped, and load_state_dict", directory / "state.pt", with_torch),
    ]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    nbytes = int(options.gib * 2**30)
    state = {name: value.clone() for name, value in network(nbytes, 0).state_dict().items()}
    rounds = options.rounds or ROUNDS
    candidates = chosen(loaders(directory, nbytes), options.only)
    runs, _ = await load.measure(candidates, state, {}, rounds, cold=False)
    columns = {
        "loaded (min..max)": spread("loaded_s"),
        "GiB/s": speed("loaded_s", size_of(state)),
        "extra memory, MiB": most_mib("extra_bytes"),
    }
    what = f"{size_of(state) / 2**30:.2f} GiB in {len(state)} tensors, medians of {rounds} rounds"
    table = Table(f"load into a module, cached: {what}", columns, runs, "loaded_s", "raw")
    bars = [
        compare(
            f"into a module: aiockpt, plain layers : {peer.name}, speed",
            [peer],
            by_name(runs, candidates[0].name),
            "loaded_s",
        )
        for peer in runs[1:]
    ]
    return Report("live", vars(options), machine.facts(directory), [table], bars)
