"""Changes between `save()` and `staged`: detected by version counters, by samples of the bytes, or harmless."""

from __future__ import annotations

import os
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.core.extent import strided_parts
from aiockpt.options import Validation
from aiockpt.snapshot.sampling import DISTANCE_BYTES, LINE_BYTES, SamplePoint, Samples, sample_point_of
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.snapshot.ways_to_change import KEPT, SEEN, UNSEEN
from tests.states import assert_same, random_tensor, storable_dtypes

CHUNK = 64 << 10


def _copied(state: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), state)


def _save_and_change(way, path: Path, validate: Validation) -> tuple[Any, BaseException | Any]:
    """Change a state when little of it is staged; return its old values, and the error or the stored values."""
    victim, change = way()
    state = {"first": torch.arange(90_000), "victim": victim}
    expected = _copied(state)
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, fsync=False) as ckpt:
        save = ckpt.submit(state, path, storage=storage, validate=validate)
        try:
            storage.reached["create"].result(60)  # one chunk is filled, and there is no other
            change()
        finally:
            storage.open("create")
        error = save.written.exception(60)
        if error is not None:
            assert save.staged.exception(60) is error
            assert not path.exists()
            return expected, error
        return expected, ckpt.load(path, trust=True)


def _is_same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", SEEN)
def test_version_counters_detect_the_change(name: str, tmp_path: Path) -> None:
    _, error = _save_and_change(SEEN[name], tmp_path / "c", "versions")
    assert isinstance(error, aiockpt.TornSnapshotError)
    assert "victim" in str(error)
    assert "first" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_only_samples_detect_the_change(name: str, tmp_path: Path) -> None:
    """Without samples the checkpoint is published, though it mixes two states."""
    expected, stored = _save_and_change(UNSEEN[name], tmp_path / "c", "versions")
    assert not _is_same(expected, stored)
    _, error = _save_and_change(UNSEEN[name], tmp_path / "d", "hash")
    assert isinstance(error, aiockpt.TornSnapshotError)
    assert str(error).startswith("victim changed between save() and staged, as their bytes show")


@pytest.mark.slow
@pytest.mark.parametrize("validate", ["versions", "hash"])
@pytest.mark.parametrize("name", KEPT)
def test_the_change_does_not_reach_the_save(name: str, validate, tmp_path: Path) -> None:
    expected, stored = _save_and_change(KEPT[name], tmp_path / "c", validate)
    assert_same(expected, stored)


# --- samples --------------------------------------------------------------------------------------

UNITS = 5 * DISTANCE_BYTES // 4  # elements of 4 bytes: a tensor of five sampling distances


def _rows_of(point: SamplePoint) -> list[int]:
    """Return the elements of a contiguous tensor that are sampled."""
    begin, step = point.view.storage_offset(), point.view.stride(0)
    return [begin + row * step + column for row in range(point.number) for column in range(point.length)]


@pytest.mark.parametrize("chance", [0.0, 0.37, 0.999999])
def test_any_64_kib_in_one_piece_are_sampled(chance: float) -> None:
    values = torch.zeros(UNITS)
    seen = sorted(_rows_of(sample_point_of("x", 0, values, values, chance)))
    assert seen[-1] < UNITS
    longest = max(after - before for before, after in pairwise([-1, *seen, UNITS])) - 1
    assert longest < DISTANCE_BYTES // 4
    assert len(seen) == 8 * LINE_BYTES // 4


def test_every_element_can_be_sampled() -> None:
    for count in (1, 3, 15, 16, 17, 500, 3000):
        values = torch.zeros(count)
        met = set()
        for number in range(count):
            met.update(_rows_of(sample_point_of("x", 0, values, values, number / count)))
        assert met == set(range(count))


def test_small_writes_are_sampled_as_often_as_documented() -> None:
    """One in sixteen contiguous writes of 4 KiB is detected; the sampled places differ from save to save."""
    values = torch.zeros(32 * DISTANCE_BYTES // 4)
    tried = found = 0
    for number in range(20):
        seen = torch.zeros_like(values, dtype=torch.bool)
        seen[_rows_of(sample_point_of("x", 0, values, values, number / 20))] = True
        pieces = seen.view(-1, 1024).any(1)
        tried, found = tried + pieces.numel(), found + int(pieces.sum())
    assert 0.9 < found / tried * 16 < 1.1
    firsts = {Samples(["x"], [values])._left[0][0][2].view.storage_offset() for _ in range(20)}
    assert len(firsts) > 15


def _all_forms() -> dict[str, torch.Tensor]:
    forms = {str(dtype): random_tensor(dtype, (40, 30), 5) for dtype in storable_dtypes()}
    base = torch.randn(90, 70)
    forms |= {
        "transposed": base.clone().t(),
        "with holes": base.clone()[::2, 3:60:3],
        "channels last": torch.randn(2, 5, 8, 9).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(50, 40, dtype=torch.complex64).conj(),
        "negated": torch.randn(50, 40, dtype=torch.complex64).conj().imag,
        "one element": torch.tensor(3.0),
        "sparse": torch.eye(50).to_sparse(),
        "compressed": torch.eye(50).to_sparse_csr(),
        "by columns": torch.eye(50).to_sparse_csc(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantized tensors
        forms["quantized"] = torch.quantize_per_tensor(base, 0.1, 0, torch.quint8)
    return forms


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_every_layout_is_sampled_without_false_alarms() -> None:
    forms = _all_forms()
    names, tensors = list(forms), list(forms.values())
    same, changed = Samples(names, tensors), Samples(names, tensors)
    same.compare()
    assert same.changed() == []
    for tensor in tensors:
        for part in strided_parts(tensor):
            raw = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
            raw.bitwise_xor_(1)
    changed.compare()
    assert changed.changed() == names


def test_elements_outside_a_view_are_not_sampled() -> None:
    base = torch.zeros(500, 600)
    samples = Samples(["x"], [base[:, ::2]])
    base.data[:, 1::2] = 7
    samples.compare()
    assert samples.changed() == []


def test_expanded_tensors_are_sampled() -> None:
    base = torch.zeros(500, 1)
    samples = Samples(["other", "x"], [torch.zeros(3), base.expand(500, 600)])
    base.data.fill_(1)
    samples.compare()
    assert samples.changed() == ["x"]


def test_freed_memory_counts_as_a_change() -> None:
    tensors = [torch.ones(1000), torch.ones(1000)]
    samples = Samples(["kept", "freed"], tensors)
    tensors[1].untyped_storage().resize_(0)
    samples.compare()
    assert samples.changed() == ["freed"]


# --- with fences and guards -----------------------------------------------------------------------


def test_a_change_after_a_fence_does_not_tear_the_snapshot(tmp_path: Path) -> None:
    state = {"first": torch.arange(90_000), "victim": torch.zeros(300, 300)}
    expected = _copied(state)
    storage = GatedStorage(LocalStorage(), ["write"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, validate="hash") as ckpt:
        save = ckpt.submit(state, tmp_path / "c", storage=storage)
        ckpt.fence(60)
        state["victim"].data.add_(1)
        storage.open("write")
        save.written.result(60)
        assert_same(expected, ckpt.load(tmp_path / "c"))


# --- the option -----------------------------------------------------------------------------------


def test_a_save_may_override_validate(tmp_path: Path) -> None:
    state = {"first": torch.arange(90_000), "victim": torch.zeros(300, 300)}
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, validate="hash") as ckpt:
        storage = GatedStorage(LocalStorage(), ["create"])
        save = ckpt.submit(state, tmp_path / "c", storage=storage, validate="versions")
        storage.reached["create"].result(60)
        state["victim"].data.add_(1)
        storage.open("create")
        save.written.result(60)
        with pytest.raises(ValueError, match="validate is 'crc'; it must be 'versions' or 'hash'"):
            ckpt.save(state, tmp_path / "d", validate="crc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="validate is None"):
        aiockpt.AsyncCheckpointer(validate=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["written", "cancelled"])
def test_sampled_tensors_are_released(ending: str, tmp_path: Path) -> None:
    values = torch.zeros(300, 300)
    memory = weakref.ref(values)
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, validate="hash") as ckpt:
        save = ckpt.submit({"x": values}, tmp_path / "c", storage=storage)
        del values
        assert memory() is not None
        if ending == "cancelled":
            storage.reached["create"].result(60)
            cancelled = save.cancel()
            storage.open("create")
            assert cancelled.result(60)
        else:
            storage.open("create")
            save.written.result(60)
        assert memory() is None


# --- last: with a process group of one rank -------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    """Return a process group of one rank; its file descriptors stay open until the process ends."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_local_shards_of_distributed_tensors_are_sampled(mesh, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.randn(300_000)
    state = {"layer": {"w": DTensor.from_local(local, mesh, [Shard(0)])}}
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, validate="hash") as ckpt:
        save = ckpt.submit(state, tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        local.data.add_(1)
        storage.open("create")
        with pytest.raises(aiockpt.TornSnapshotError, match=r"^layer\.w changed .* as their bytes show"):
            save.written.result(60)


def test_a_running_operator_has_time_to_end_and_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator bumps the version counter when it ends, which may be after the copies were made."""
    monkeypatch.setattr("aiockpt.snapshot.consistency._OPERATOR_S", 600.0)
    value = torch.arange(100_000)
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit({"w": value}, tmp_path / "c")
        while (event := save._last) is None or event.staged_bytes < event.total_bytes:
            os.sched_yield()
        value.add_(0)
        with pytest.raises(aiockpt.TornSnapshotError, match="w changed between"):
            save.staged.result(60)
        for wait in ("staged", "written", "fence", "close"):  # none of them waits that long for an operator
            other = ckpt.submit({"w": value}, tmp_path / wait)
            other.fence(60) if wait == "fence" else None
            getattr(other, wait).result(60) if wait in ("staged", "written") else None
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("inside", ["save()", "the fence"])
def test_samples_are_taken_and_compared_within_autocast(inside: str, tmp_path: Path) -> None:
    """Autocast casts what torch.cat gets, or refuses it."""
    state = {f"w{i}": torch.full((300, 300), i + 0.1, dtype=torch.float16) for i in range(3)}
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside == "save()"):
            save = ckpt.submit(state, tmp_path / "c")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ckpt.fence()
        save.written.result(60)
        assert_same(state, ckpt.load(tmp_path / "c"))
