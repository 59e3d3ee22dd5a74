"""Safetensors of a sharded state: files that all ranks write together, compared with shards consolidated afterwards.

Every process is a rank of a gloo group on this machine. Times are from the start of the first rank to the end of the
last. DCP's writer for Hugging Face syncs nothing; aiockpt's time is that of the durable checkpoint.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from benchmarks.harness.measure import Sample, interleave
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State
from benchmarks.limits import machine
from benchmarks.ranks import savers
from benchmarks.ranks.savers import AiockptRanks, RankSaver, RawRanks, local, sharded_state, size_of
from benchmarks.ranks.sharded import slowest_of
from benchmarks.ranks.world import Rank, World
from benchmarks.report.bars import by_name, by_prefix, compare, shortest
from benchmarks.report.report import Report, Table, median_time, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "ranks", "rounds", "only")
DEFAULTS = {"ranks": "2"}
ROUNDS = 5

_BAR = 3.0


class HuggingFaceRanks(RankSaver):
    """``dcp.save`` with its writer for Hugging Face, which consolidates the shards of all ranks.

    Args:
        rank: this rank.
        threads: the number of threads that write, and that consolidate.
    """

    loads = False

    def __init__(self, rank: Rank, threads: int) -> None:
        super().__init__(rank)
        self.name = f"dcp.save, HuggingFaceStorageWriter, {threads} thread{'s' * (threads > 1)}"
        self.note = "consolidated, not synced"
        self._threads = threads

    def save(self, state: State, path: Path) -> Sample:
        writer = HuggingFaceStorageWriter(
            str(path),
            thread_count=self._threads,
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=self._threads,
        )
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the writer's warnings about itself
            dcp.save(state, storage_writer=writer)
        return {"blocked_s": time.perf_counter() - started}


def prepare(rank: Rank, nbytes: int, tensors: int) -> list[tuple[str, str, bool]]:
    """Create the state and the contenders; return what `introduce` returns."""
    rank.kept["state"] = state = sharded_state(nbytes, tensors, rank.size)
    contenders = [
        RawRanks(rank, 1, size_of(local(state))),
        AiockptRanks(rank, format="safetensors"),
        HuggingFaceRanks(rank, 1),
        HuggingFaceRanks(rank, 4),
    ]
    return savers.introduce(rank, contenders)


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    tables, bars = [], []
    rounds, nbytes = options.rounds or ROUNDS, int(options.gib * 2**30)
    for size in [int(part) for part in str(options.ranks).split(",")]:
        with World(size) as world:
            members = chosen(
                [savers.Member(*each) for each in world.call(prepare, nbytes // size * size, options.tensors)[0]],
                options.only,
            )

            async def save(member: savers.Member, number: int, world: World = world) -> Sample:
                machine.settle()
                path = directory / f"save-{number}"
                try:
                    sample = slowest_of(world.call(savers.save_once, member.name, path))
                    world.call(savers.check, member.name, path)
                    return sample
                finally:
                    machine.remove(path)

            runs = await interleave(members, rounds, save)
            world.call(savers.close_all)
        shown = {
            "caller blocked": median_time("blocked_s"),
            "complete (min..max)": spread("all_s"),
            "GiB/s": speed("all_s", nbytes),
            "of limit": of_limit("all_s", shortest(runs, "raw", "all_s")),
        }
        title = f"{size} ranks, {options.gib:.3g} GiB in all, medians of {rounds} rounds"
        tables.append(Table(f"save as safetensors: {title}", shown, runs, "all_s", "raw"))
        ours, text = by_name(runs, "aiockpt"), f"{size} ranks, aiockpt : "
        bars.append(compare(f"{text}raw O_DIRECT, speed", by_prefix(runs, "raw"), ours, "all_s"))
        bars += [
            compare(f"{text}{run.name}, speed", [run], ours, "all_s", _BAR)
            for run in runs
            if run.name.startswith("dcp")
        ]
    return Report("safetensors-ranks", vars(options), machine.facts(directory), tables, bars, [])
