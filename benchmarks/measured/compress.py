"""Compressed checkpoints: their size and speed, for several kinds of data.

For each kind of data, each contender saves a state and loads it from the page cache. The peer is DCP with its
ZStandard extension, which compresses at level 3.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import aiockpt
from benchmarks.harness.measure import Runs, Sample, interleave
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, random_tensor, same_bits, size_of
from benchmarks.limits import machine
from benchmarks.report.bars import Bar, by_name, compare
from benchmarks.report.report import Report, Table, median_time, number, speed

OPTIONS = ("gib", "rounds", "only", "part")
GIB = 0.25
ROUNDS = 2

_TENSORS = 8
_ROW = 256
_PLAIN, _ZSTD, _FAST = "aiockpt, plain", "aiockpt, zstd", "aiockpt, zstd level 1"
_DCP, _DCP_ZSTD = "dcp.save, plain", "dcp.save, ZStandard, thread_count=4"


def fp32_weights(elements: int) -> torch.Tensor:
    """Return weights like trained ones: normally distributed around zero, with random mantissas."""
    return torch.randn(elements) * 0.02


def bf16_weights(elements: int) -> torch.Tensor:
    """Return weights like trained ones in bfloat16, where exponents are half of the bits."""
    return fp32_weights(2 * elements).bfloat16()


def adam_moments(elements: int) -> torch.Tensor:
    """Return the second moments of an embedding of which only a few rows were ever used."""
    rows = torch.randn(-(-elements // _ROW), _ROW).square() * 1e-6
    used = torch.rand(len(rows), 1) < 0.2
    return (rows * used).flatten()[:elements]


def tokens(elements: int) -> torch.Tensor:
    """Return int64 tokens of a vocabulary in which few are frequent."""
    ranks = torch.rand(elements // 2).mul_(10.8).exp_()  # log-uniform up to 50,000
    return ranks.long()


def random_bytes(elements: int) -> torch.Tensor:
    """Return random bits, which cannot be compressed."""
    return random_tensor(elements)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "fp32 weights": fp32_weights,
    "bf16 weights": bf16_weights,
    "Adam moments, mostly zeros": adam_moments,
    "int64 tokens": tokens,
    "random bytes": random_bytes,
}


@dataclass(slots=True)
class Contender:
    """A way to save and load a state.

    Attributes:
        save: called with a state and a path.
        load: called with a path and a target.
    """

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, State], object]
    note: str = ""


def contenders(ckpt: aiockpt.SyncCheckpointer) -> list[Contender]:
    """Return all contenders."""

    def ours(name: str, compress: Any, note: str = "") -> Contender:
        return Contender(
            name, lambda state, path: ckpt.save(state, path, compress=compress), lambda p, s: ckpt.load(p, s), note
        )

    def torchs(name: str, note: str = "", **options: Any) -> Contender:
        def save(state: State, path: Path) -> None:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)

        def load(path: Path, target: State) -> None:
            dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)

        return Contender(name, save, load, note)

    return [
        ours(_PLAIN, None),
        ours(_ZSTD, "zstd", "level 3, what gains nothing is plain"),
        ours(_FAST, aiockpt.Zstd(level=1)),
        torchs(_DCP),
        torchs(_DCP_ZSTD, "level 3", _extensions=[ZStandard()], thread_count=4),
    ]


async def measure(selected: Sequence[Contender], state: State, directory: Path, rounds: int) -> list[Runs]:
    """Save the state and load it again with each contender, in rounds."""
    target = empty_like(state)
    nbytes = size_of(state)

    async def once(contender: Contender, number: int) -> Sample:
        path = directory / f"{selected.index(contender)}-{number}"
        machine.settle()
        try:
            begin = time.perf_counter()
            contender.save(state, path)
            saved = time.perf_counter()
            stored = sum(file.stat().st_size for file in machine.files_under(path))
            machine.bring_into_cache(machine.files_under(path))
            for tensor in target.values():
                tensor.zero_()
            before = time.perf_counter()
            contender.load(path, target)
            loaded = time.perf_counter()
            if not same_bits(target, state):
                raise ValueError("what was loaded differs from what was saved")
            return {"save_s": saved - begin, "load_s": loaded - before, "ratio": stored / nbytes}
        finally:
            machine.remove(path)

    return await interleave(selected, rounds, once)


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    nbytes = int((options.gib or GIB) * 2**30)
    tables: list[Table] = []
    bars: list[Bar] = []
    parts = [part.strip().lower() for part in options.part.split(",")] if options.part else [""]
    with warnings.catch_warnings(), aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        warnings.simplefilter("ignore", UserWarning)  # torch says that it runs without a process group
        for kind, draw in KINDS.items():
            if not any(part in kind.lower() for part in parts):
                continue
            state = {f"layers.{n}": draw(nbytes // 4 // _TENSORS) for n in range(_TENSORS)}
            runs = await measure(chosen(contenders(ckpt), options.only), state, directory, options.rounds or ROUNDS)
            tables.append(_table(kind, state, runs))
            bars += _bars(kind, runs)
    remarks = ["stored: the bytes of all files, of those of the tensors; GiB/s: of tensors, whatever is stored"]
    return Report("compress", vars(options), machine.facts(directory), tables, bars, remarks)


def _table(kind: str, state: State, runs: list[Runs]) -> Table:
    nbytes = size_of(state)
    columns = {
        "stored": lambda run: number(run.median("ratio"), digits=3),
        "save": median_time("save_s"),
        "save, GiB/s": speed("save_s", nbytes),
        "load": median_time("load_s"),
        "load, GiB/s": speed("load_s", nbytes),
    }
    return Table(f"compress: {kind}, {nbytes / 2**30:.2f} GiB in {len(state)} tensors", columns, runs, "save_s")


def _bars(kind: str, runs: list[Runs]) -> list[Bar]:
    ours, peer = by_name(runs, _ZSTD), by_name(runs, _DCP_ZSTD)
    return [
        Bar(f"{kind}: stored, aiockpt : dcp.save", ours.median("ratio") / peer.median("ratio"), 1.01, at_most=True),
        compare(f"{kind}: saving, aiockpt : dcp.save, both compressed", [peer], ours, "save_s", 0.8),
        compare(f"{kind}: loading, aiockpt : dcp.load, both compressed", [peer], ours, "load_s", 1.0),
    ]
