"""Small tensors that are read in bulk: the same values, memory, errors and reports as one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from aiockpt.reading import bulk
from tests.examples import examples
from tests.states import assert_same, random_tensor, raw_bytes, storable_dtypes

PLAIN = [dtype for dtype in storable_dtypes() if not str(dtype).startswith(("torch.q", "torch.bits"))]
CONJUGATED = [torch.complex64, torch.complex128]  # of the newer ones torch can't make the values, nor print them
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0), (1, 1), (5, 1), (64, 7)]


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer(io_threads=1) as checkpointer:
        yield checkpointer


class Limits:
    """Sets how many rows are the least to be read in bulk, and counts those that are."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.rows = 0

        def jobs(small: bulk.SmallRows, *args: Any, **options: Any) -> list[bulk.BulkRead]:
            self.rows += len(small)
            return real(small, *args, **options)

        real = bulk.SmallRows.jobs
        patch.setattr(bulk.SmallRows, "jobs", jobs)

    def least(self, rows: int) -> None:
        self.patch.setattr(bulk, "LEAST_ROWS", rows)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    found = Limits(monkeypatch)
    found.least(1)
    return found


def many(count: int = 300) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.arange(16.0) + number for number in range(count)}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    made = random_tensor(draw(st.sampled_from(PLAIN)), draw(st.sampled_from(SHAPES)), draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(["plain", "plain", "transposed", "gaps", "part", "conjugated"]))
    if kind == "transposed":
        return made.t() if made.dim() == 2 else made
    if kind == "gaps":
        return made[..., ::2] if made.dim() else made
    if kind == "part":
        return made[1:] if made.dim() else made
    return made.conj() if kind == "conjugated" and made.dtype in CONJUGATED else made


def strides(tree: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: value.stride() for name, value in tree.items()}


@examples(60, [HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(tensors(), min_size=1, max_size=12),
    copies=st.integers(0, 5),
    is_tied=st.booleans(),
    choice=st.sampled_from(["", "verify", "dtype", "keys", "map_location"]),
)
def test_bulk_equals_one_by_one(
    drawn: list[torch.Tensor], copies: int, is_tied: bool, choice: str, ckpt, limits: Limits, tmp_path: Path
) -> None:
    state: dict[str, torch.Tensor] = {f"a.{number}": value for number, value in enumerate(drawn)}
    state |= {f"b.{number}": drawn[0].clone() for number in range(copies)}
    if is_tied:
        state["tied"] = drawn[-1]
    path = tmp_path / "c"
    ckpt.save(state, path, overwrite=True)
    values: dict[str, Any] = {"verify": False, "dtype": torch.float64, "keys": "a.*", "map_location": "cpu"}
    if any("float4" in str(value.dtype) for value in drawn):
        del values["dtype"]  # which torch can't cast
    options: dict[str, Any] = {choice: values[choice]} if choice in values else {}
    targets = []
    loaded = []
    for least in (1, 10**9):
        limits.least(least)
        loaded.append(ckpt.load(path, **options))
        target = {name: random_tensor(value.dtype, tuple(value.shape), 11) for name, value in state.items()}
        if "dtype" not in options:
            ckpt.load(path, target, **options)
        targets.append(target)
    in_bulk, one_by_one = loaded
    assert_same(one_by_one, in_bulk)
    assert strides(one_by_one) == strides(in_bulk)
    assert_same(targets[1], targets[0])
    assert [value.untyped_storage().nbytes() for value in in_bulk.values()] == [
        value.untyped_storage().nbytes() for value in one_by_one.values()
    ]


def test_rows_are_read_in_bulk_each_with_a_storage_of_its_own(ckpt, limits: Limits, tmp_path: Path) -> None:
    state = many()
    ckpt.save(state, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c")
    assert limits.rows == len(state)
    assert_same(state, loaded)
    assert len({value.untyped_storage().data_ptr() for value in loaded.values()}) == len(state)
    first = next(iter(loaded.values()))
    first.resize_(1000)
    first.fill_(1.0)
    assert_same({name: state[name] for name in ("t1", "t299")}, {name: loaded[name] for name in ("t1", "t299")})


def test_few_rows_are_read_one_by_one(ckpt, limits: Limits, tmp_path: Path) -> None:
    limits.least(301)
    ckpt.save(many(), tmp_path / "c")
    ckpt.load(tmp_path / "c")
    assert not limits.rows


def test_targets_are_filled_in_bulk_and_their_counters_change(ckpt, limits: Limits, tmp_path: Path) -> None:
    state = many()
    ckpt.save(state, tmp_path / "c")
    target: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()}
    target["t7"] = torch.nn.Parameter(target["t7"])
    target["t8"] = torch.zeros(32)[::2]  # no plain memory
    versions = {name: value._version for name, value in target.items()}
    ckpt.load(tmp_path / "c", target)
    assert limits.rows == len(state) - 1
    assert all(torch.equal(value, state[name]) for name, value in target.items())
    assert all(value._version > versions[name] for name, value in target.items())


def test_module_and_optimizer_are_filled_in_bulk(ckpt, limits: Limits, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    expected = [value.detach().clone() for value in model.parameters()]
    ckpt.save({"model": model, "optim": optimizer}, tmp_path / "c")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    ckpt.load(tmp_path / "c", {"model": model, "optim": optimizer})
    assert limits.rows >= 40
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


def test_tensors_of_one_memory_stay_tied_and_share_it(ckpt, limits: Limits, tmp_path: Path) -> None:
    state = many()
    state["again"] = state["t5"]
    ckpt.save(state, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c")
    assert limits.rows == 299
    assert loaded["again"].data_ptr() == loaded["t5"].data_ptr()


def test_targets_that_share_memory_must_be_stored_alike(ckpt, limits: Limits, tmp_path: Path) -> None:
    state = many()
    ckpt.save(state, tmp_path / "c")
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    target["t3"] = target["t4"]
    with pytest.raises(aiockpt.ShapeMismatchError, match="t3 and t4 are the same memory in the target, but differ"):
        ckpt.load(tmp_path / "c", target)
    memory = torch.zeros(24)
    target["t3"], target["t4"] = memory[:16], memory[8:]
    with pytest.raises(aiockpt.ShapeMismatchError, match="share memory in the target, but are not the same there"):
        ckpt.load(tmp_path / "c", target)
    target["t3"], target["t4"] = memory[:16], torch.zeros(32)[::2]
    target["t4"].set_(memory.untyped_storage(), 0, (16,), (1,))
    with pytest.raises(aiockpt.ShapeMismatchError):
        ckpt.load(tmp_path / "c", target)


def test_freed_memory_of_a_target_is_refused(ckpt, limits: Limits, tmp_path: Path) -> None:
    state = many()
    ckpt.save(state, tmp_path / "c")
    target = {name: torch.ones_like(value) for name, value in state.items()}
    target["t9"].untyped_storage().resize_(0)
    with pytest.raises(aiockpt.ShapeMismatchError, match="the memory of t9 in the target was freed"):
        ckpt.load(tmp_path / "c", target)
    assert all(bool((value == 1).all()) for name, value in target.items() if name != "t9")


def test_memory_that_is_freed_after_the_plan_is_refused(
    ckpt, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = many()
    ckpt.save(state, tmp_path / "c")
    target = {name: torch.ones_like(value) for name, value in state.items()}
    real = bulk.BulkRead._check

    def check(job: bulk.BulkRead, *args: Any) -> None:
        target["t9"].untyped_storage().resize_(0)
        real(job, *args)

    monkeypatch.setattr(bulk.BulkRead, "_check", check)
    with pytest.raises(aiockpt.LoadError, match="the memory of t9 in the target was freed"):
        ckpt.load(tmp_path / "c", target)
    assert all(bool((value == 1).all()) for name, value in target.items() if name != "t9")


@pytest.mark.parametrize("into_target", [False, True])
def test_flipped_bit_names_the_key_and_the_file(into_target: bool, ckpt, limits: Limits, tmp_path: Path) -> None:
    state, path = many(), tmp_path / "c"
    ckpt.save(state, path)
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(raw_bytes(state["t42"])) + 5] ^= 1
    file.write_bytes(content)
    target = {name: torch.ones_like(value) for name, value in state.items()} if into_target else None
    with pytest.raises(aiockpt.CorruptCheckpointError) as bulk_error:
        ckpt.load(path, target)
    assert "the bytes of t42 (at offset" in str(bulk_error.value)
    assert str(file) in str(bulk_error.value)
    limits.least(10**9)
    with pytest.raises(aiockpt.CorruptCheckpointError) as error:
        ckpt.load(path, target)
    assert str(bulk_error.value) == str(error.value)
    if target is not None:  # no tensor of the job was changed
        assert all(bool((value == 1).all()) for value in target.values())
        assert bulk_error.value.placed == error.value.placed == ()
    unchecked = ckpt.load(path, verify=False)
    assert not torch.equal(unchecked["t42"], state["t42"])


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_file_has_the_same_error(damage: str, ckpt, limits: Limits, tmp_path: Path) -> None:
    path, messages = tmp_path / "c", []
    ckpt.save(many(), path)
    (file,) = path.glob("*.distcp")
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    for least in (1, 10**9):
        limits.least(least)
        with pytest.raises(aiockpt.CorruptCheckpointError) as error:
            ckpt.load(path)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("into_target", [False, True])
def test_report_counts_what_is_read_in_bulk(into_target: bool, limits: Limits, tmp_path: Path) -> None:
    state = many() | {"large": torch.zeros(1 << 19), "note": "text"}
    seen: list[list[aiockpt.ProgressEvent]] = [[], []]
    for least, events in zip((1, 10**9), seen, strict=True):
        limits.least(least)
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, tmp_path / "c", overwrite=True)
            target = {name: torch.zeros_like(state[name]) for name in many()} if into_target else None
            ckpt.load(tmp_path / "c", target, progress=events.append)
    results = [events[-1].result for events in seen]
    assert all(isinstance(result, aiockpt.LoadResult) for result in results)
    counts = [(result.tensors, result.objects, result.nbytes) for result in results]  # type: ignore[union-attr]
    assert counts[0] == counts[1]
    assert limits.rows == 300


def test_keys_of_an_index_in_parts(limits: Limits) -> None:
    import numpy as np

    from aiockpt.format.index import Division
    from aiockpt.format.manifest.columnar_index import IndexedEntries, ItemForm, PartColumns

    form = ItemForm(torch.float32, (2,), (1,), 128, 64, 8)
    entries = IndexedEntries(
        names=["a", "b", "c"],
        numbers={"a": 0, "b": 1, "c": 2},
        files=["f"],
        forms=[form],
        form_of=np.zeros(4, np.int64),
        file_of=np.zeros(4, np.int64),
        offset_of=np.arange(4) * 128,
        length_of=np.full(4, 128),
        crc_of=np.arange(4),
        parts=PartColumns([Division((4,), [(0,), (2,)])], np.array([-1, 0, -1]), np.array([0, 1, 3])),
    )
    for numbers in ([0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2], []):
        some = entries.at(np.array(numbers, np.int64))
        assert dict(some.items()) == {entries.names[n]: entries[entries.names[n]] for n in numbers}
    rows = bulk.small_rows(entries, None)
    assert rows is not None
    assert rows.tolist() == [0, 2]
