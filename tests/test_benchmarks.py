"""Every benchmark runs at small size, and its report has its rows and bars; the measured values are not judged."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
import benchmarks.__main__ as command
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import rounds as gpu_rounds
from benchmarks.gpu import training as gpu_training
from benchmarks.gpu import whole as gpu_whole
from benchmarks.harness.measure import Transfers
from benchmarks.harness.states import State, checksums, empty_like, random_tensor, same_bits, small_state
from benchmarks.limits import machine
from benchmarks.measured import load, new_process, slice, training
from benchmarks.measured import open as opening
from benchmarks.measured.new_process import NewProcess
from benchmarks.measured.pace import Pace, compared
from benchmarks.measured.work import Loader as LoadingThreads
from benchmarks.peers import checkpoints, openers, slicers
from benchmarks.peers.loaders import Aiockpt, Loader
from benchmarks.ranks.imagined import Imagined
from benchmarks.ranks.imagined_ours import Coordinator
from benchmarks.ranks.imagined_torch import TorchCoordinator
from tests.stock import ALONE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ALONE, reason="benchmarks use options of stock DCP that this torch lacks"),
]

ROOT = Path(command.__file__).parents[1]
SMALL = ("--gib=0.004", "--tensors=8", "--rounds=1")
# One row with a writer process is enough: that with a fence.
ON_DEVICE = "plain,no save,thread,await,fence,guard,neither"
ARGUMENTS = {
    "save": (*SMALL, "--only=raw,memmove,aiockpt,dcp.save,torch.save"),
    "load": SMALL,
    "new-process": (*SMALL, "--only=small pages,aiockpt"),
    "startup": ("--rounds=1", "--only=aiockpt"),
    "models": ("--gib=0.004", "--rounds=1", "--only=raw,aiockpt,dcp,torch.save"),
    "live": ("--gib=0.004", "--rounds=1"),
    "sweep": ("--gib=0.004", "--rounds=1", "--only=raw,aiockpt"),
    "rows": ("--gib=0.002", "--rounds=1", "--part=small-load,save-16,ls"),
    "growth": ("--gib=0.002", "--count=100", "--rounds=1", "--only=0.002,tensors"),
    "slice": SMALL,
    "open": ("--count=300", "--rounds=1", "--load"),
    "small": ("--count=300", "--rounds=1"),
    "blocked-loop": (*SMALL, "--hold=sleep"),
    "lag": SMALL,
    "ranks": (*SMALL, "--ranks=2", "--count=20", "--only=raw,aiockpt,count=1"),
    "safetensors-ranks": SMALL,
    "share": (*SMALL, "--ranks=2"),
    "compress": ("--gib=0.004", "--rounds=1"),
    "delta": ("--gib=0.004", "--rounds=1"),
    "scale": ("--ranks=4,8", "--items=50", "--world=2", "--rounds=1", "--limit=300"),
    "writers": (*SMALL, "--count=300", "--alone=0.05", "--work=small", "--only=no save,aiockpt"),
    "objects": (*SMALL, "--only=obstore,aiockpt"),
    "tiers": ("--gib=0.004", "--rounds=1", "--alone=0.05"),
    "training": ("--gib=0.01", "--steps=2", "--every=1", "--rounds=1", "--only=no checkpoints,aiockpt,torch.save"),
    "gpu": ("--device=cpu", "--gib=0.004", "--rounds=1", "--alone=0.05", f"--only={ON_DEVICE}"),
    "crash": ("--part=kill", "--only=one safetensors file (overwrite)"),
    "soak": ("--seconds=0",),
}
SLOW = ("blocked-loop", "models", "sweep", "new-process", "compress", "ranks", "soak")  # run with --full
SHOWN_ONLY = ("models", "live", "sweep", "scale", "rows", "growth")  # no bars, or none at this size
OPTIONAL = (
    "safetensors",
    "torchsnapshot",
    "orbax",
    "Run:ai",
    "fastsafetensors",
    "torch_checkpointing",
    "aiockpt, a file of safetensors",
)

RUN_ALL = """
import gc, os, sys, traceback
from pathlib import Path
from benchmarks.limits import machine
from benchmarks.__main__ import main, parser
machine.DROP_CACHES = Path(os.devnull)
parser()  # imports everything, so that later collections skip it
gc.freeze()
failed = 0
for line in sys.stdin.read().splitlines():
    sys.argv = ["benchmarks", *line.split("\\t")]
    try:
        failed |= main()
    except BaseException:
        traceback.print_exc()
        failed = 1
sys.exit(failed)
"""


@pytest.fixture(autouse=True)
def page_cache_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the page cache of other programs; the files of a benchmark are still evicted one by one."""
    monkeypatch.setattr(machine, "DROP_CACHES", Path(os.devnull))


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all benchmarks in one process, by their command lines."""
    directory = tmp_path_factory.mktemp("benchmarks")
    wanted = [name for name in ARGUMENTS if name not in SLOW or request.config.getoption("full")]
    files = {name: directory / f"{name}.json" for name in wanted}
    lines = [
        "\t".join((name, *ARGUMENTS[name], f"--dir={directory}", f"--json={file}")) for name, file in files.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input="\n".join(lines), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    left = [path.name for path in directory.iterdir() if path not in files.values()]
    assert not left, f"temporary files left: {left}"
    return {name: json.loads(file.read_text()) for name, file in files.items()}


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for table in report["tables"] for run in table["runs"]]


def test_every_benchmark_is_run_here() -> None:
    assert {*ARGUMENTS, "integrations"} == set(command.MODULES)  # whose frameworks have an environment of their own


def _named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", _named(ARGUMENTS))
def test_every_row_was_measured(name: str, reports: dict[str, dict[str, Any]]) -> None:
    for run in rows(reports[name]):
        if run["error"] is not None and run["name"].startswith(OPTIONAL):
            assert "No module named" in run["error"], run["name"]
            continue
        assert run["error"] is None, f"{run['name']}: {run['error']}"
        assert len(run["samples"]) == 1
        assert all(value is None or value >= 0 for value in run["samples"][0].values())


@pytest.mark.parametrize("name", _named(name for name in ARGUMENTS if name not in SHOWN_ONLY))
def test_every_bar_was_measured(name: str, reports: dict[str, dict[str, Any]]) -> None:
    judged = [bar for bar in reports[name]["bars"] if bar["bound"] is not None]
    assert judged
    missing = [bar["text"] for bar in judged if bar["measured"] is None]
    peers = ("dcp.async_save", "asynchronous peer", "safetensors", "best of")  # left out above; may not be installed
    peers += ("aiockpt, process",) * (name == "gpu") + ("Fsspec", "s3torchconnector") * (name == "objects")
    assert not [text for text in missing if not any(peer in text for peer in peers)]


def test_the_report_of_save_has_a_timeline(reports: dict[str, dict[str, Any]]) -> None:
    events = reports["save"]["details"]["timeline"]
    assert {"capture", "stage", "write", "commit"} <= {event["kind"] for event in events}
    assert all(0 <= event["begin_s"] <= event["end_s"] for event in events)
    lanes = {event["lane"] for event in events if event["kind"] == "write"}
    assert {lane[:9] for lane in lanes} == {"file __0_"}


def test_the_report_of_load(reports: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    cold, cached = (table["runs"] for table in reports["load"]["tables"])
    contenders = load.loaders(tmp_path, None, {}, cold=True)
    assert [run["name"] for run in cold] == [each.name for each in contenders]
    assert len(cached) == len(cold) - 1, "one of the raw rows is for the disk only"
    bounds = [bar["bound"] for bar in reports["load"]["bars"] if bar["bound"] is not None]
    assert bounds == [0.95, 0.95, 2.5, 1, 5, 2]


def test_the_report_of_slice_counts_bytes(reports: dict[str, dict[str, Any]]) -> None:
    tables = reports["slice"]["tables"]
    assert [table["title"].partition(":")[0] for table in tables] == [f"slice, {part}" for part in slice.parts(64, 64)]
    judged = [bar for bar in reports["slice"]["bars"] if bar["bound"] is not None]
    assert len(judged) == 2 * (len(tables) - 1), "narrow columns are read with the gaps between them"
    assert {(bar["bound"], bar["at_most"]) for bar in judged} == {(1.1, True)}
    whole = 8 * 64 * 4096 * 4
    for table, (part, columns) in zip(tables, slice.parts(64, 4096).values(), strict=True):
        own = 8 * (part.stop - part.start) * (columns.stop - columns.start) * 4
        asked = {run["name"]: run["samples"][0].get("asked_bytes") for run in table["runs"]}
        assert own <= asked["raw, each run of bytes"] <= own + (64 << 10)
        assert asked["dcp.load, a plan of the part"] >= whole
        assert asked["torch.load mmap, part cloned"] is None, "mapped reads can't be counted this way"


def test_the_report_of_open(reports: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    cold, cached, loaded = (table["runs"] for table in reports["open"]["tables"])
    names = [each.name for each in opening.openers(tmp_path)]
    assert [run["name"] for run in cold] == [run["name"] for run in cached] == names
    assert [run["name"] for run in loaded] == [each.name for each in opening.loaders(tmp_path, {})]
    assert [bar["bound"] for bar in reports["open"]["bars"] if bar["bound"] is not None] == [3, 0.9] * 2


@pytest.mark.full
def test_the_report_of_ranks(reports: dict[str, dict[str, Any]]) -> None:
    saved, loaded, later = (table["runs"] for table in reports["ranks"]["tables"])
    assert [run["name"] for run in loaded] == ["raw O_DIRECT, 1 thread each", "aiockpt", "dcp.save, thread_count=1"]
    assert {run["name"] for run in saved} > {run["name"] for run in loaded}
    assert [run["name"] for run in later if run["name"].endswith("alone")] == [
        "aiockpt, alone",
        "dcp.save, thread_count=1, alone",
    ]
    judged = [bar for bar in reports["ranks"]["bars"] if bar["bound"] is not None]
    assert [(bar["bound"], bar["unit"]) for bar in judged] == [(0.95, "x"), (0.95, "x"), (50, "ms"), (50, "ms")]


def test_the_report_of_safetensors_ranks(reports: dict[str, dict[str, Any]]) -> None:
    (table,) = reports["safetensors-ranks"]["tables"]
    raw, ours, *theirs = [run["name"] for run in table["runs"]]
    assert (raw, ours) == ("raw O_DIRECT, 1 thread each", "aiockpt")
    assert [name.rpartition(", ")[2] for name in theirs] == ["1 thread", "4 threads"]
    assert [bar["bound"] for bar in reports["safetensors-ranks"]["bars"]] == [None, 3, 3]


@pytest.mark.full
def test_the_report_of_new_processes(reports: dict[str, dict[str, Any]]) -> None:
    cold, cached = ([run["name"] for run in table["runs"]] for table in reports["new-process"]["tables"])
    assert (
        cold
        == cached
        == ["raw, fresh memory in small pages, 2 threads", new_process.NEW, new_process.UNCHECKED, new_process.TARGET]
    )


@pytest.mark.full
def test_the_report_of_model_states(reports: dict[str, dict[str, Any]]) -> None:
    titles = [table["title"] for table in reports["models"]["tables"]]
    assert [title.partition(", 0.")[0] for title in titles] == [
        f"{what}: {model}" for model in ("Llama-like", "MoE-like") for what in ("save", "load, cached")
    ]


@pytest.mark.full
def test_the_report_of_sizes_and_numbers(reports: dict[str, dict[str, Any]]) -> None:
    curves = reports["sweep"]["details"]
    assert [number for number, _ in curves["number"]["aiockpt"]] == [10, 100, 1_000, 10_000]
    assert len(curves["size"]["aiockpt"]) == 4
    assert curves["size"].keys() == curves["number"].keys() == {"raw O_DIRECT, 2 threads", "aiockpt"}


def test_the_report_of_scale(reports: dict[str, dict[str, Any]]) -> None:
    measured, simulated = (table["runs"] for table in reports["scale"]["tables"])
    assert [run["name"] for run in measured] == ["2 processes"]
    kinds = ("aiockpt", "dcp.save, plans cached")
    assert [run["name"] for run in simulated] == [f"{kind}: {n} ranks, 50 items each" for kind in kinds for n in (4, 8)]
    few, many, *_ = simulated
    assert many["samples"][0]["index_bytes"] > 1.5 * few["samples"][0]["index_bytes"]
    assert few["first"]["plan"] > 0
    points = reports["scale"]["details"]["extrapolated"]
    assert [(point["ranks"], point["items"]) for point in points] == [(4, 50), (8, 50)]
    assert points[1]["index_bytes"] == pytest.approx(many["samples"][0]["index_bytes"], rel=0.05)


def test_the_report_of_writers(reports: dict[str, dict[str, Any]]) -> None:
    (table,) = reports["writers"]["tables"]
    nothing, *ours = table["runs"]
    assert [run["name"] for run in ours] == ["aiockpt, thread", "aiockpt, process", "aiockpt, process, nice 19"]
    assert nothing["name"] == "no save"
    for run in ours:
        assert {"kept", "lost_s", "blocked_s", "longest_s", "staged_s", "durable_s"} <= run["samples"][0].keys()


def test_the_report_of_training(reports: dict[str, dict[str, Any]]) -> None:
    (table,) = reports["training"]["tables"]
    names = ["no checkpoints", "aiockpt, thread", "aiockpt, process", "aiockpt, guard", "torch.save + fsync"]
    assert [run["name"] for run in table["runs"]] == names
    for run in table["runs"]:
        assert run["error"] is None
        (sample,) = run["samples"]
        assert 0 < sample["step_p50_s"] <= sample["step_max_s"] <= sample["train_s"] <= 2 * sample["step_max_s"]


def test_a_checkpoint_that_differs_ends_the_training(tmp_path: Path) -> None:
    state = {"a": torch.arange(4.0), "b": torch.arange(3)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
    training.check(tmp_path / "c", state)
    with pytest.raises(RuntimeError, match=r"does not hold what was saved: \['b'\]"):
        training.check(tmp_path / "c", {**state, "b": torch.arange(1, 4)})
    with pytest.raises(RuntimeError, match="'c'"):
        training.check(tmp_path / "c", {**state, "c": torch.ones(1)})


def test_the_report_of_gpu(reports: dict[str, dict[str, Any]]) -> None:
    staged, held, trained, whole = ({run["name"]: run for run in table["runs"]} for table in reports["gpu"]["tables"])
    assert list(staged) == ["plain pinned copy", "aiockpt, thread"]
    ways = ["no save", "await", "fence", "guard", "neither", "fence, process"]
    assert list(held) == [*ways, *(f"{way}, host ahead" for way in ways)]
    refused = [name for name, run in held.items() if run["samples"][0]["refused"]]
    assert not [name for name in refused if not name.startswith("neither")]
    assert list(trained) == ["no save", "aiockpt, thread", "dcp.async_save, thread"]
    assert all(run["samples"][0]["steps"] >= 1 for run in trained.values())
    assert set(whole) > {"raw O_DIRECT, 4 threads", "aiockpt, thread", "dcp.save, thread_count=1"}
    judged = [(bar["bound"], bar["unit"]) for bar in reports["gpu"]["bars"] if bar["bound"] is not None]
    assert judged == [(0.9, "x")] * 2 + [(2, "ms")] * 6 + [(0.97, "x")] * 2


def test_both_coordinators_index_the_same(tmp_path: Path) -> None:
    """The benchmark compares like with like: torch's planner and ours make the same index."""
    world = Imagined(4, 10, each=True)
    ours, stock = Coordinator(world), TorchCoordinator(world, tmp_path)
    for step in range(2):
        ours.save(step)
        stock.save(step)
    plan_cache = ours.plan_cache
    drafts = plan_cache.drafts([written.objects for written in ours.results])
    mine = pickle.loads(bytes(drafts.documents[".metadata"]))
    theirs = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.storage_data.keys() == theirs.storage_data.keys()


# --- parts of the benchmarks ---------------------------------------------------------------------------


def state_of(*shapes: tuple[int, ...]) -> State:
    return {f"layer.{number}": random_tensor(*shape) for number, shape in enumerate(shapes)}


class Swapped(Loader):
    """Returns the tensors in reversed order."""

    name = "swapped"

    def __init__(self, path: Path, state: State) -> None:
        super().__init__(path)
        self._state = state

    async def load(self) -> State:
        return dict(zip(self._state, reversed(self._state.values()), strict=True))


def test_a_loader_that_returns_other_values_is_detected(tmp_path: Path) -> None:
    state = state_of((3, 5), (3, 5))
    right = Aiockpt(tmp_path / "aiockpt", name="right")
    runs, _ = asyncio.run(load.measure([Swapped(tmp_path / "raw", state), right], state, {}, 1, cold=False))
    assert [run.error for run in runs] == ["ValueError: what was loaded differs from what was saved", None]


class Shifted(slicers.RawRead):
    """Returns rows shifted by one."""

    async def read(self, index: slicers.Index) -> State:
        part, columns = index
        return {
            name: tensor[type(part)(part.start - 1, part.stop - 1), columns] for name, tensor in self._state.items()
        }


def test_a_slicer_that_returns_other_rows_is_detected(tmp_path: Path) -> None:
    state = slice.wide_state(0, 2)
    index = slice.parts(64, 4096)["rows in the middle"]
    shifted, right = Shifted(tmp_path / "raw", state, None, span=False), slicers.DcpLoad(tmp_path / "dcp", state)
    with pytest.warns(UserWarning, match="single process"):
        runs, _ = asyncio.run(slice.measure([shifted, right], state, index, 1))
    assert [run.error for run in runs] == ["ValueError: what was read differs from what was saved", None]


def test_a_new_process_that_loads_other_values_is_detected(tmp_path: Path) -> None:
    state = state_of((300, 7), (2,))
    checkpoints.make(state, tmp_path / "aiockpt")
    right, wrong = (
        NewProcess(new_process.NEW, tmp_path, "cached", checksums(each)) for each in (state, state_of((300, 7), (2,)))
    )
    ready: list[bool] = []
    sample = asyncio.run(right.measure(lambda: ready.append(True)))
    assert {"loaded_s", "extra_bytes", "stall_s"} <= sample.keys()
    assert ready == [True]
    with pytest.raises(ValueError, match="differs"):
        asyncio.run(wrong.measure(lambda: None))


@pytest.mark.parametrize("name", ["aiockpt", "torch", "safetensors", "dcp"])
def test_a_checkpoint_of_each_format_is_compared_bit_for_bit(name: str, tmp_path: Path) -> None:
    if name == "safetensors":
        pytest.importorskip("safetensors")
    state = {**state_of((30, 7), (2,)), "bf16": random_tensor(6).view(torch.bfloat16), "step": torch.tensor(3.0)}
    path = tmp_path / {"torch": "state.pt", "safetensors": "state.safetensors"}.get(name, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about a single process
        checkpoints.make(state, path)
        checkpoints.check(name, path, state)
        changed = {**state, "step": torch.tensor(4.0)}
        with pytest.raises(ValueError, match="differs"):
            checkpoints.check(name, path, changed)


def test_checksums_are_of_the_bits() -> None:
    state = {"x": torch.tensor([[1.0, 2.0], [float("nan"), -0.0]]), "y": torch.ones(0)}
    assert checksums(state) == checksums({name: tensor.clone() for name, tensor in state.items()})
    assert checksums(state)["x"] != checksums({"x": state["x"].t()})["x"]
    assert checksums(state)["x"] != checksums({"x": state["x"].abs()})["x"]


@pytest.mark.parametrize("part", slice.parts(64, 4096))
def test_runs_are_the_bytes_of_the_part(part: str) -> None:
    tensor = slice.wide_state(0, 1)["layers.0.weight"]
    index = slice.parts(64, 4096)[part]
    content = b"before" + tensor.numpy().tobytes()
    found = b"".join(content[at : at + n] for at, n in slicers.runs_of(tensor, index, len("before")))
    assert found == tensor[index].contiguous().numpy().tobytes()


def test_transfers_counts_the_bytes_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    with Transfers() as transfers:
        file.read_bytes()
    assert 1 << 20 <= transfers.asked_bytes <= (1 << 20) + (64 << 10)


def test_the_stock_checkpoint_equals_that_of_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = small_state(20, 24)
    target = empty_like(state)
    checkpoints.make(state, tmp_path / "aiockpt")
    openers.make_stock(tmp_path / "aiockpt", tmp_path / "stock", state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert same_bits(target, state)
    with pytest.warns(UserWarning, match="single process"):
        checkpoints.make(state, tmp_path / "dcp")
    made, real = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("stock", "dcp"))
    assert made.state_dict_metadata == real.state_dict_metadata
    assert made.planner_data == real.planner_data
    assert made.storage_data.keys() == real.storage_data.keys()


async def one_value(contender: Any, count: int) -> dict[str, float]:
    return {"value": count}


def bench_of(directory: Path, seconds: float) -> gpu_rounds.Bench:
    device = gpu_device.Device("cpu")
    return gpu_rounds.Bench(device, gpu_device.Pinned(device), directory, gpu_rounds.Deadline(seconds))


@pytest.mark.parametrize(("share", "counts"), [(0, [0]), (0.5, [0, 1, 2])])
def test_rounds_end_in_time(share: float, counts: list[int], tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 3600)
    both = [Namespace(name=name, note="") for name in ("a", "b")]
    runs = asyncio.run(bench.rounds(both, 3, one_value, share=share, what="it"))
    assert [(run.name, run.first) for run in runs] == [("a", {"value": -1}), ("b", {"value": -1})]
    assert [run.values("value") for run in runs] == [counts, counts]
    assert bench.deadline.cut == (["it: 1 of 3 rounds, to end in time"] if len(counts) == 1 else [])


def test_a_contender_after_the_deadline_is_left_out(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, -1)
    (run,) = asyncio.run(bench.rounds([Namespace(name="a", note="")], 3, one_value, share=0.5, what="it"))
    assert run.error == f"TimeoutError: {gpu_rounds.Deadline.OVER}"
    assert (run.first, run.samples) == ({}, [])


def test_training_changes_every_saved_tensor() -> None:
    training = gpu_training.Training(gpu_device.Device("cpu"), 1 << 20)
    before = checksums(training.state)
    training.step()
    assert not [name for name, crc in checksums(training.state).items() if crc == before[name]]
    assert set(training.state) == set(training._state())
    assert len(training.state) == 4 * len(list(training.model.parameters()))


class Forgetful(gpu_whole.Whole):
    """Loads all but one tensor."""

    name = "forgetful"

    async def save(self, state: State, path: Path) -> None:
        path.write_bytes(b"")
        self._state = state

    async def load(self, target: State, path: Path) -> None:
        for name, tensor in list(self._state.items())[1:]:
            target[name].copy_(tensor)


def test_an_incomplete_load_on_the_device_is_detected(tmp_path: Path) -> None:
    state = state_of((3, 5), (4,))
    work = gpu_whole.save_and_load(
        Forgetful(), gpu_device.Device("cpu"), state, empty_like(state), tmp_path / "forgetful"
    )
    with pytest.raises(ValueError, match="differs"):
        asyncio.run(work)


def test_paces_are_compared() -> None:
    alone, saved = Pace([0.1] * 10, 1.0), Pace([0.5, 0.125, 0.125, 0.25], 1.0)
    found = compared(alone, saved, per_step=32)
    assert (found["alone_per_s"], found["saving_per_s"]) == (320, 128)
    assert (found["kept"], found["lost_s"], found["longest_s"]) == (0.4, 0.6, 0.5)


def test_threads_that_load_data_make_batches_and_end() -> None:
    work = LoadingThreads(threads=2, batch=4)
    with work.running():
        work.step()
        assert work._ready.get(timeout=60).shape == (64, 64, 3)


def test_each_benchmark_has_its_own_defaults() -> None:
    parse = command.parser().parse_args
    assert (parse(["slice"]).gib, parse(["slice"]).tensors) == (0.5, 8)
    assert (parse(["load"]).gib, parse(["load"]).tensors) == (2.0, 168)
    assert (parse(["open"]).count, parse(["open"]).load) == (100_000, False)
