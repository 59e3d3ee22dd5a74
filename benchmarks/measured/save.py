"""Saves of a large state, each loaded back; the limits are raw writes and plain copies."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measure import Lag, PeakMemory, Runs, Sample, close, interleave, resident_bytes
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of, transformer_state
from benchmarks.limits import machine, raw
from benchmarks.peers import checkpoints
from benchmarks.peers.contenders import (
    Aiockpt,
    DcpAsyncSave,
    Memmove,
    PrewarmedAiockpt,
    RawWrite,
    Saver,
    TorchCheckpointing,
    dcp_save,
    safetensors_save,
    torch_save,
)
from benchmarks.peers.extras import more_savers
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, first_of, shortest
from benchmarks.report.report import Report, Table, median_time, most_mib, of_limit, speed, spread

OPTIONS = ("gib", "tensors", "rounds", "only")
ROUNDS = 5

_COPIES = ("stage", "seal")
_SMALL_POOL = "aiockpt, 256 MiB pool"


def savers(state: State) -> list[Saver]:
    """Return all contenders for a state of large tensors."""
    arena = raw.Arena(size_of(state))
    return [
        *(RawWrite(threads, arena) for threads in (1, 2, 4)),
        RawWrite(4, arena, staged=True),
        *(Memmove(threads, arena) for threads in (1, 2)),
        Aiockpt(),
        PrewarmedAiockpt(),
        Aiockpt(_SMALL_POOL, staging_bytes=256 << 20),
        Aiockpt("aiockpt, writer process", writer="process"),
        dcp_save(1),
        dcp_save(2),
        DcpAsyncSave("blocking"),
        DcpAsyncSave("blocking", "process"),
        DcpAsyncSave("async"),
        DcpAsyncSave("async", "process"),
        torch_save(),
        torch_save(crc=False),
        safetensors_save(),
        TorchCheckpointing(),
        *more_savers(),
    ]


async def measure(selected: Sequence[Saver], state: State, directory: Path, rounds: int) -> list[Runs]:
    """Save in rounds, and measure the lag of the loop and the memory; load each checkpoint back."""
    kept: dict[str, float] = defaultdict(float)  # memory that each contender keeps from earlier rounds

    async def save_once(saver: Saver, number: int) -> Sample:
        path = directory / f"{selected.index(saver)}-{number}"
        machine.settle()
        before = resident_bytes()
        try:
            with PeakMemory() as memory:
                if number < 0:
                    await saver.open(state)
                async with Lag() as lag:
                    sample = await saver.save(state, path)
            extra = memory.extra_bytes + kept[saver.name]
            machine.settle()
            kept[saver.name] += resident_bytes() - before
            if saver.format is not None:
                checkpoints.check(saver.format, path, state)
        finally:
            machine.remove(path)
        return {**sample, **lag.sample(), "extra_bytes": max(0, extra)}

    runs = await interleave(selected, rounds, save_once)
    for saver, run in zip(selected, runs, strict=True):
        await close(saver, run)
    return runs


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    state = transformer_state(int(options.gib * 2**30), options.tensors)
    nbytes = size_of(state)
    selected = chosen(savers(state), options.only)
    runs = await measure(selected, state, directory, options.rounds or ROUNDS)
    limit_s = shortest(runs, "raw", "durable_s")
    columns = {
        "caller blocked": median_time("blocked_s"),
        "staged (min..max)": spread("staged_s"),
        "durable (min..max)": spread("durable_s"),
        "GiB/s": speed("durable_s", nbytes),
        "of limit": of_limit("durable_s", limit_s),
        "extra memory, MiB": most_mib("extra_bytes"),
        "longest stall": lambda run: "-" if run.name.startswith(("raw", "copy")) else median_time("stall_s")(run),
        "p99 lag": lambda run: median_time("lag_p99_s")(run) if _is_async(run) else "-",
    }
    title = f"save: {nbytes / 2**30:.2f} GiB in {len(state)} tensors, medians of {options.rounds or ROUNDS} rounds"
    return Report(
        "save",
        vars(options),
        machine.facts(directory),
        [Table(title, columns, runs, "durable_s", "raw")],
        bars(runs),
        [
            "extra memory: the most of all rounds, the first included, with what lives from save to save",
            "longest stall: of the caller's loop; blocking calls hold it as long as they take",
            "every save was loaded back and compared bit for bit: aiockpt's by stock dcp.load, DCP's by aiockpt",
        ],
        details={"timeline": next((timeline(saver) for saver in selected if isinstance(saver, Aiockpt)), [])},
    )


def timeline(saver: Aiockpt) -> list[dict[str, object]]:
    """Return the events of each thread and each file in the last save, in seconds since the call."""
    result = saver.last
    if result is None:
        return []
    return [
        {
            "lane": f"file {event.file}" if event.file and event.name not in _COPIES else event.thread,
            "kind": event.name,
            "begin_s": event.start_s,
            "end_s": event.end_s,
        }
        for event in result.timeline()
    ]


def _is_async(run: Runs) -> bool:
    return "async" in run.name or run.name.startswith(("aiockpt", "torch_checkpointing"))


def bars(runs: Sequence[Runs]) -> list[Bar]:
    """Compare the figures with the project's targets."""
    ours, small, what = by_name(runs, "aiockpt"), by_name(runs, _SMALL_POOL), "durable_s"
    prewarmed = by_name(runs, PrewarmedAiockpt.name)
    limits, default = by_prefix(runs, "raw"), by_prefix(runs, "dcp.save, thread_count=1")
    plain, either = by_prefix(runs, "memmove, 1 thread"), by_prefix(runs, "memmove")
    peers = by_prefix(runs, "dcp.save, thread_count=2", "torch", "safetensors")
    return [
        compare("aiockpt : raw O_DIRECT, speed", limits, ours, what, 0.95),
        compare("aiockpt : raw O_DIRECT with a copy and its CRC, speed", by_prefix(runs, "copy"), ours, what),
        compare("aiockpt : dcp.save with its defaults, speed", default, ours, what, 4),
        compare("aiockpt : best dcp.async_save, speed", by_prefix(runs, "dcp.async_save"), ours, what, 2),
        compare("aiockpt with 256 MiB of pool : with all it wants, speed", [ours], small, what, 0.95),
        Bar("aiockpt with 256 MiB of pool: extra memory", small.most("extra_bytes") / 2**20, 256 + 64, True, "MiB"),
        compare("aiockpt, staged : memmove in one thread, speed", plain, prewarmed, "staged_s", 0.9),
        compare("aiockpt, staged : memmove in the better number of threads, speed", either, prewarmed, "staged_s"),
        compare("aiockpt, prewarmed : raw O_DIRECT, speed", limits, prewarmed, what),
        compare("aiockpt, first save : raw O_DIRECT, speed", limits, first_of(ours), what),
        *(compare(f"aiockpt : {peer.name}, speed", [peer], ours, what) for peer in peers),
    ]
