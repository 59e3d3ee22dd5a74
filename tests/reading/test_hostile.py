"""Damaged and hostile checkpoints: refused or harmless. None runs code, allocates much memory or hangs."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

import aiockpt
from tests.examples import examples
from tests.hostile_inputs import METADATA_BOMBS, OBJECT_BOMBS, pickle_of, zipped
from tests.states import assert_same, random_tensor, raw_bytes
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STATE = {"model": {"w": random_tensor(torch.float32, (3, 5), 1)}, "step": frozenset({7, "x"})}
SLOW = examples(60, HealthCheck)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of ours, a copy without its manifest, and a stock one. Only item CRCs protect the last two."""
    top = tmp_path_factory.mktemp("hostile")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, top / "ours")
    shutil.copytree(top / "ours", top / "plain")
    (top / "plain" / ".aiockpt.json").unlink()
    dcp.save(STATE, checkpoint_id=top / "stock", **ALONE)
    return {path.name: path for path in top.iterdir()}


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


def leaves(value: Any) -> list[str]:
    """Return the values of a state without their keys, sorted, as text."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return sorted(leaf for each in value.values() for leaf in leaves(each))
    if isinstance(value, torch.Tensor):
        return [f"{value.dtype} {tuple(value.shape)} {raw_bytes(value).hex()}"]
    if isinstance(value, frozenset):  # has no fixed order
        return [f"frozenset {sorted(map(repr, value))}"]
    return [repr(value)]


def is_harmless(ckpt: aiockpt.SyncCheckpointer, path: Path, *, renamed: bool) -> bool:
    """Return whether a checkpoint loads, or False if it is refused. Fail if it loads with other values.

    If ``renamed``, keys may differ: without a manifest, nothing protects the names in `.metadata`.
    """
    try:
        loaded = ckpt.load(path)
    except (aiockpt.CorruptCheckpointError, aiockpt.UnsafeCheckpointError):
        return False
    if renamed:
        assert leaves(loaded) == leaves(STATE)
    else:
        assert_same(STATE, loaded)
    return True


def files_to_damage(places: dict[str, Path]) -> Iterator[tuple[Path, bool, int]]:
    """Yield each file to damage, whether its names are unprotected, and the step between positions to damage."""
    for kind, path in places.items():
        for file in sorted(path.iterdir()):
            # A large step suffices where our items have torch's layout, or our manifest has the CRC of the file.
            known = file.name != ".aiockpt.json" if kind == "ours" else file.name != ".metadata" and kind == "plain"
            step = 37 if known else 3
            yield file, file.name == ".metadata" and kind != "ours", step


@pytest.mark.slow
def test_flipped_bit_anywhere(places, ckpt, record_property) -> None:
    tried = refused = 0
    for file, renamed, step in files_to_damage(places):
        whole = file.read_bytes()
        with open(file, "r+b", buffering=0) as handle:
            for at in range(0, len(whole), step):
                os.pwrite(handle.fileno(), bytes([whole[at] ^ 1 << at % 8]), at)
                tried += 1
                refused += not is_harmless(ckpt, file.parent, renamed=renamed)
                os.pwrite(handle.fileno(), whole[at : at + 1], at)
        assert is_harmless(ckpt, file.parent, renamed=False)
    record_property("inputs", tried)
    assert tried > 1500
    assert refused > tried // 3


@pytest.mark.slow
def test_truncated_and_grown_files(places, ckpt, record_property) -> None:
    tried = refused = 0
    for file, renamed, step in files_to_damage(places):
        whole = file.read_bytes()
        sizes = [*range(0, len(whole), step), *(len(whole) + n for n in (1, 2, 30, 5000))]
        for size in reversed(sizes):
            os.truncate(file, size)
            tried += 1
            refused += not is_harmless(ckpt, file.parent, renamed=renamed)
        file.write_bytes(whole)
        assert is_harmless(ckpt, file.parent, renamed=False)
    record_property("inputs", tried)
    assert tried > 1500
    assert refused > tried * 9 // 10


# --- structure ------------------------------------------------------------------------------------


NUMBERS = st.one_of(
    st.integers(-2, 20),
    st.sampled_from([1261, 1577, 2838, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 2**200, -(2**70)]),
)
ODD = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([[], {}, (), (1,), [1, 2], torch.Size([3]), torch.float64, MetadataIndex("model.w")]),
    st.sampled_from(["__0_0.distcp", "../x", "/etc/passwd", "a/../../b", "", ".", ".metadata", "\0", "model.w"]),
)
SIZES = st.lists(NUMBERS, max_size=4).map(tuple)


def _set(target: Any, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)


def _mutate(draw: Callable[[Any], Any], metadata: Any) -> None:
    """Change one thing in a Metadata object of torch."""
    tensors = [each for each in metadata.state_dict_metadata.values() if hasattr(each, "chunks")]
    infos, indexes = list(metadata.storage_data.values()), list(metadata.storage_data)
    what = draw(
        st.sampled_from(["info", "index", "tensor", "chunk", "chunks", "path", "top", "same", "cycle", "copies"])
    )
    if what == "info":
        _set(draw(st.sampled_from(infos)), draw(st.sampled_from(["relative_path", "offset", "length"])), draw(ODD))
    elif what == "index":
        _set(draw(st.sampled_from(indexes)), draw(st.sampled_from(["fqn", "offset", "index"])), draw(ODD))
    elif what == "tensor":
        _set(draw(st.sampled_from(tensors)), draw(st.sampled_from(["size", "chunks", "properties"])), draw(ODD | SIZES))
    elif what == "chunk":
        sizes = draw(SIZES)
        value = draw(ODD) if min(sizes, default=0) < 0 or max(sizes, default=0) >= 2**63 else torch.Size(sizes)
        _set(draw(st.sampled_from(tensors)).chunks[0], draw(st.sampled_from(["offsets", "sizes"])), value)
    elif what == "chunks":
        chunks = draw(st.sampled_from(tensors)).chunks
        chunks *= draw(st.integers(0, 3))
    elif what == "path":
        metadata.planner_data[draw(st.sampled_from(list(metadata.state_dict_metadata)))] = draw(ODD | SIZES)
    elif what == "top":
        _set(metadata, draw(st.sampled_from(["state_dict_metadata", "planner_data", "storage_data"])), draw(ODD))
    elif what == "same":
        one, other = draw(st.sampled_from(infos)), draw(st.sampled_from(infos))
        one.offset, one.length = other.offset + draw(st.integers(-1, 1)), other.length + draw(st.integers(-1, 1))
    elif what == "cycle":
        metadata.planner_data["model.w"] = [metadata.planner_data]
    else:
        described = draw(st.sampled_from(tensors))
        for n in range(draw(st.integers(1, 50))):
            metadata.state_dict_metadata[f"copy{n}"] = described
            metadata.storage_data[MetadataIndex(f"copy{n}", described.chunks[0].offsets)] = infos[n % len(infos)]


def load_or_refuse(ckpt: aiockpt.SyncCheckpointer, path: Path) -> Any:
    """Return the loaded state, or None if the checkpoint is refused."""
    try:
        return ckpt.load(path)
    except (aiockpt.CorruptCheckpointError, aiockpt.UnsafeCheckpointError):
        return None


def test_mutated_metadata(places, ckpt, tmp_path: Path, record_property) -> None:
    shutil.copytree(places["stock"], tmp_path / "c")
    whole = (tmp_path / "c" / ".metadata").read_bytes()
    outcomes: list[bool] = []

    @SLOW
    @given(st.data())
    def run(data: st.DataObject) -> None:
        metadata = pickle.loads(whole)
        for _ in range(data.draw(st.integers(1, 2))):
            with contextlib.suppress(AttributeError, TypeError, IndexError):  # a replaced value may lack the field
                _mutate(data.draw, metadata)
        try:
            damaged = pickle.dumps(metadata, data.draw(st.integers(0, 5)))
        except (pickle.PicklingError, AttributeError, TypeError):
            return
        (tmp_path / "c" / ".metadata").write_bytes(damaged)
        state = load_or_refuse(ckpt, tmp_path / "c")
        outcomes.append(state is None)
        if state is not None:
            assert _distinct_bytes(state) < 10_000

    run()
    record_property("inputs", len(outcomes))
    assert len(outcomes) >= 40 * SLOW.max_examples // 60
    assert any(outcomes)


def _distinct_bytes(value: Any) -> int:
    storages: dict[int, int] = {}

    def walk(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        for inner in each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ():
            walk(inner)

    walk(value)
    return sum(storages.values())


FRAGMENTS = st.one_of(
    st.sampled_from([bytes([code]) for code in b"(.012NIJKMLGFSTUXVtdleasu)]}pqrghjcioRbQP"]),
    st.sampled_from([bytes([code]) for code in range(0x80, 0x99)]),
    st.binary(max_size=4),
    st.sampled_from([b"c__builtin__\n%s\n" % kind for kind in (b"set", b"list", b"xrange", b"bytearray")]),
    st.sampled_from([b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"cos\nsystem\n"]),
    st.sampled_from([b"ctorch\nSize\n", b"ccollections\nOrderedDict\n"]),
    st.sampled_from([b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"X\x01\x00\x00\x00a", b"K\x05", b"\x85R"]),
)


def make_with_object(path: Path, stock: Path, blob: bytes) -> None:
    """Make a stock checkpoint whose object `step` is ``blob``."""
    if not path.exists():
        shutil.copytree(stock, path)
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("step")]
    info.relative_path, info.offset, info.length = "object.distcp", 0, len(blob)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "object.distcp").write_bytes(blob)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["metadata", "object", "tensor"])
def test_arbitrary_pickle_programs(where: str, places, ckpt, tmp_path: Path, record_property) -> None:
    real = {
        "metadata": (places["stock"] / ".metadata").read_bytes(),
        "object": pickle_of(STATE["step"]),
        "tensor": pickle_of({"x": torch.ones(2, 3), "s": {1, 2}}),
    }[where]
    shutil.copytree(places["stock"], tmp_path / "c")
    tried = 0

    @SLOW
    @given(st.lists(FRAGMENTS, max_size=12).map(b"".join), st.integers(0, len(real)), st.integers(0, 20), st.booleans())
    def run(program: bytes, at: int, cut: int, alone: bool) -> None:
        nonlocal tried
        tried += 1
        program = b"\x80\x02" + program + b"." if alone else real[:at] + program + real[at + cut :]
        if where == "metadata":
            (tmp_path / "c" / ".metadata").write_bytes(program)
        else:
            make_with_object(tmp_path / "c", places["stock"], zipped(program, torch.ones(2, 3).numpy().tobytes()))
        load_or_refuse(ckpt, tmp_path / "c")

    run()
    make_with_object(tmp_path / "c", places["stock"], zipped(pickle_of([5, "abc"])))
    assert ckpt.load(tmp_path / "c")["step"] == [5, "abc"]  # `zipped` itself makes valid items
    record_property("inputs", tried)
    assert tried >= SLOW.max_examples


# --- bombs ----------------------------------------------------------------------------------------


def _metadata_bombs(stock: Path) -> Iterator[tuple[str, bytes]]:
    yield from METADATA_BOMBS.items()
    whole = (stock / ".metadata").read_bytes()

    def changed(change: Callable[[Any], None]) -> bytes:
        metadata = pickle.loads(whole)
        change(metadata)
        return pickle.dumps(metadata)

    def huge(metadata: Any) -> None:
        described = metadata.state_dict_metadata["model.w"]
        described.size = described.chunks[0].sizes = torch.Size([2**20, 2**20])

    def many_chunks(metadata: Any) -> None:
        described = metadata.state_dict_metadata["model.w"]
        described.chunks *= 50_000
        for n in range(5_000):
            metadata.state_dict_metadata[f"copy{n}"] = described

    def many_claims(metadata: Any) -> None:
        place = metadata.storage_data[MetadataIndex("model.w", torch.Size([0, 0]))]
        for n in range(5_000):
            metadata.state_dict_metadata[f"copy{n}"] = metadata.state_dict_metadata["step"]
            metadata.storage_data[MetadataIndex(f"copy{n}")] = place

    for change in (huge, many_chunks, many_claims):
        yield change.__name__, changed(change)
    for name, value in (("offset", 2**62), ("length", 2**62), ("length", 2**80)):
        info = {name: value}
        yield f"{name} {value}", changed(lambda m, info=info: vars(m.storage_data[MetadataIndex("step")]).update(info))


RUNNER = """
import resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch, aiockpt
with aiockpt.SyncCheckpointer() as ckpt:
    ckpt.load(sys.argv[1])
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in sys.argv[2:]:
        begin = time.process_time()
        try:
            ckpt.load(path)
            outcome = "loaded"
        except aiockpt.LoadError as exc:
            outcome = type(exc).__name__ if len(str(exc)) < 2000 else "an overlong message"
        except BaseException as exc:
            outcome = f"{type(exc).__name__}: {str(exc)[:200]}"
        print(outcome, round(time.process_time() - begin, 1), path, flush=True)
"""


@pytest.mark.slow
def test_bombs_cost_neither_memory_nor_time(places, python: list[str], tmp_path: Path, record_property) -> None:
    """One process loads all bombs, with a limit of 1 GiB above its memory after loading a good checkpoint."""
    paths = []
    for n, (name, program) in enumerate(OBJECT_BOMBS.items()):
        paths.append(tmp_path / f"object {n} {name}")
        make_with_object(paths[-1], places["stock"], zipped(b"\x80\x02" + program + b".", bytes(24)))
    for n, (name, data) in enumerate(_metadata_bombs(places["stock"])):
        paths.append(tmp_path / f"metadata {n} {name}")
        shutil.copytree(places["stock"], paths[-1])
        (paths[-1] / ".metadata").write_bytes(data)
    command = [*python, "-c", RUNNER, str(places["stock"]), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == len(paths), (outcomes[-1:], done.stderr[-2000:])
    wrong = [line for line in outcomes if line.split()[0] not in ("CorruptCheckpointError", "UnsafeCheckpointError")]
    assert not wrong, "\n".join(wrong)
    record_property("inputs", len(outcomes))
    assert len(outcomes) >= 40
