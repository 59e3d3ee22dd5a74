"""States like those of real models, dense and mixture of experts: bf16 weights, AdamW's moments in fp32, steps."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, empty_like, random_tensor, size_of
from benchmarks.limits import machine, raw
from benchmarks.measured import load, save
from benchmarks.peers.loaders import Aiockpt, Loader, dcp_load, limits, safetensors_load, torch_load
from benchmarks.peers.streamers import runai_load
from benchmarks.report.bars import Bar, by_name, by_prefix, compare, shortest
from benchmarks.report.report import Report, Table, median_time, most_mib, of_limit, speed, spread

OPTIONS = ("gib", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 3

# With a process, dcp.async_save needs a file descriptor for each tensor: more than the limit of open files.
_LEFT_OUT = ("memmove", "dcp.save, thread_count=1", "dcp.async_save, blocking", "dcp.async_save, async stager, process")
_PARAMETER_BYTES = 2 + 4 + 4
_VOCABULARY = 16  # as a multiple of the width, as the other sizes are
_LLAMA_LAYERS, _LLAMA_HIDDEN = 16, 2.75
_MOE_LAYERS, _EXPERTS, _EXPERT_HIDDEN = 8, 16, 0.5


def llama(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a dense model: grouped attention, gated MLP, RMS norms."""
    yield "embed.weight", (_VOCABULARY * width, width)
    for layer in range(_LLAMA_LAYERS):
        yield from _attention(f"layers.{layer}", width)
        hidden = int(_LLAMA_HIDDEN * width)
        yield f"layers.{layer}.mlp.gate.weight", (hidden, width)
        yield f"layers.{layer}.mlp.up.weight", (hidden, width)
        yield f"layers.{layer}.mlp.down.weight", (width, hidden)
    yield "norm.weight", (width,)
    yield "head.weight", (_VOCABULARY * width, width)


def mixture(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a mixture of experts: every expert has tensors of its own."""
    yield "embed.weight", (_VOCABULARY * width, width)
    hidden = int(_EXPERT_HIDDEN * width)
    for layer in range(_MOE_LAYERS):
        yield from _attention(f"layers.{layer}", width)
        yield f"layers.{layer}.router.weight", (_EXPERTS, width)
        for expert in range(_EXPERTS):
            yield f"layers.{layer}.experts.{expert}.gate.weight", (hidden, width)
            yield f"layers.{layer}.experts.{expert}.up.weight", (hidden, width)
            yield f"layers.{layer}.experts.{expert}.down.weight", (width, hidden)
    yield "norm.weight", (width,)
    yield "head.weight", (_VOCABULARY * width, width)


def _attention(layer: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in (("q", width), ("k", width // 4), ("v", width // 4), ("o", width)):
        yield f"{layer}.attention.{name}.weight", (rows, width)
    yield f"{layer}.attention_norm.weight", (width,)
    yield f"{layer}.mlp_norm.weight", (width,)


MODELS = {"Llama-like": llama, "MoE-like": mixture}


def state_of(model: str, nbytes: int) -> State:
    """Return a training state of about ``nbytes``: weights, both moments and the step of each, and the RNG's state."""
    per_square = sum(math.prod(shape) for _, shape in MODELS[model](256)) / 256**2
    width = max(16, round(math.sqrt(nbytes / _PARAMETER_BYTES / per_square) / 16) * 16)
    state: State = {}
    for name, shape in MODELS[model](width):
        state[f"model.{name}"] = (
            random_tensor(-(-math.prod(shape) // 2)).view(torch.bfloat16)[: math.prod(shape)].view(shape)
        )
        state[f"optim.exp_avg.{name}"] = random_tensor(*shape)
        state[f"optim.exp_avg_sq.{name}"] = random_tensor(*shape)
        state[f"optim.step.{name}"] = torch.tensor(100.0)
    state["rng"] = torch.get_rng_state()
    state["positions"] = torch.arange(4 * width)
    return state


def loaders(directory: Path, arena: raw.Arena, target: State) -> list[Loader]:
    """Return the contenders that load, from the page cache."""
    return [
        *limits(directory / "raw", arena, direct=False),
        Aiockpt(directory / "aiockpt", name="aiockpt, new tensors"),
        Aiockpt(directory / "aiockpt", target, name="aiockpt, into a target"),
        dcp_load(directory / "dcp", target),
        torch_load(directory / "state.pt"),
        safetensors_load(directory / "state.safetensors")[2],
        runai_load(directory / "state.safetensors"),
    ]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    rounds = options.rounds or ROUNDS
    report = Report("models", vars(options), machine.facts(directory), [], [])
    for model in MODELS:
        state = state_of(model, int(options.gib * 2**30))
        nbytes, what = size_of(state), f"{model}, {size_of(state) / 2**30:.2f} GiB in {len(state)} tensors of 4 dtypes"
        savers = [
            each for each in save.savers(state) if not each.name.startswith((*_LEFT_OUT, "orbax"))
        ]  # Orbax gets NumPy arrays, which have no bf16
        runs = await save.measure(chosen(savers, options.only), state, directory, rounds)
        columns = {
            "caller blocked": median_time("blocked_s"),
            "staged": median_time("staged_s"),
            "durable (min..max)": spread("durable_s"),
            "GiB/s": speed("durable_s", nbytes),
            "of limit": of_limit("durable_s", shortest(runs, "raw", "durable_s")),
            "extra memory, MiB": most_mib("extra_bytes"),
        }
        title = f"save: {what}, medians of {rounds} rounds"
        report.tables.append(Table(title, columns, runs, "durable_s", "raw"))
        report.bars += bars(f"{model}, save", runs, "aiockpt", "durable_s")
        folder, target = directory / model, empty_like(state)
        folder.mkdir()
        candidates = chosen(loaders(folder, raw.Arena(nbytes), target), options.only)
        runs, _ = await load.measure(candidates, state, target, rounds, cold=False)
        shown = {
            "loaded (min..max)": spread("loaded_s"),
            "GiB/s": speed("loaded_s", nbytes),
            "of limit": of_limit("loaded_s", shortest(runs, "raw", "loaded_s")),
        }
        title = f"load, cached: {what}, medians of {rounds} rounds"
        report.tables.append(Table(title, shown, runs, "loaded_s", "raw"))
        report.bars += bars(f"{model}, load", runs, "aiockpt, into a target", "loaded_s")
        machine.remove(folder)
    return report


def bars(text: str, runs: list, name: str, what: str) -> list[Bar]:
    """Compare aiockpt with every peer."""
    peers = [run for run in runs if not run.name.startswith(("aiockpt", "raw", "copy", "CRC", "fresh"))]
    return [
        compare(f"{text}: aiockpt : {peer.name}, speed", [peer], by_name(runs, name), what)
        for peer in [*peers, *by_prefix(runs, "raw O_DIRECT, 1")]
    ]
