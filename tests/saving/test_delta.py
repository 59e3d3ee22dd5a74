"""Delta saves: what is shared with the base, what is written, and that it is never a stale byte."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.errors import SaveCancelledError, SaveError, TornSnapshotError
from aiockpt.planning import layout
from aiockpt.storage.objects.client import RefusedError
from tests.places import ServerPath
from tests.saving.deltas import (
    BUCKET_BYTES,
    OPTIONS,
    History,
    Interrupted,
    State,
    as_user,
    check,
    copied,
    load_by_stock,
    shared_files,
)
from tests.server_storage import ServerClient
from tests.stock import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_BUCKET_BYTES", BUCKET_BYTES)


def checkpointer(**options: Any) -> aiockpt.SyncCheckpointer:
    return aiockpt.SyncCheckpointer(**{**OPTIONS, **options})


def state_of(count: int = 20, numel: int = 5_000) -> State:
    return {f"w{number:02}": torch.arange(numel, dtype=torch.int32) * (number + 1) for number in range(count)}


def change(state: State, *numbers: int) -> None:
    for number in numbers:
        state[f"w{number:02}"] += 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_each_checkpoint_of_a_random_history_is_what_was_saved(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "run", seed)
    try:
        for _ in range(50):
            history.step()
    finally:
        history.close()
    assert history.reused > 1_000_000


def test_files_that_have_not_changed_are_shared(tmp_path: Path) -> None:
    state = state_of()
    with checkpointer() as ckpt:
        full = ckpt.save(state, tmp_path / "a", base="auto")
        assert (full.bytes_written, full.bytes_reused) == (full.nbytes, 0)
        change(state, 3)
        delta = ckpt.save(state, tmp_path / "b", base="auto")
        assert delta.bytes_written < 0.1 * full.nbytes
        assert delta.bytes_reused == full.nbytes
        shared = shared_files(tmp_path / "b")
        assert len(shared) == len(shared_files(tmp_path / "a")) == 2
        assert sum((tmp_path / "b" / name).stat().st_size for name in shared) == delta.bytes_reused
        check(tmp_path / "b", state, ckpt)
        ckpt.delete(tmp_path / "a")
        assert not shared_files(tmp_path / "b")
        check(tmp_path / "b", state, ckpt)
        assert ckpt.verify(tmp_path / "b").ok


def test_a_restarted_program_goes_on_from_what_it_has_loaded(tmp_path: Path) -> None:
    state = state_of()
    with checkpointer() as ckpt:
        full = ckpt.save(state, tmp_path / "a", hashes=True)
    with checkpointer() as ckpt:
        assert ckpt.save(state, tmp_path / "b", base="auto").bytes_reused == 0
    with checkpointer() as ckpt:
        ckpt.load(tmp_path / "a")
        delta = ckpt.save(state, tmp_path / "c", base="auto")
        assert (delta.bytes_reused, delta.bytes_written) == (full.nbytes, 0)
        check(tmp_path / "c", state, ckpt)


def test_what_changes_goes_to_other_files_than_what_does_not(tmp_path: Path) -> None:
    state, hot = state_of(), range(12)
    with checkpointer() as ckpt:
        full = ckpt.save(state, tmp_path / "0", base="auto")
        written = []
        for number in range(1, 6):
            change(state, *hot)
            result = ckpt.save(state, tmp_path / str(number), base="auto")
            written.append(result.bytes_written / full.nbytes)
            check(tmp_path / str(number), state, ckpt)
    assert written[0] == pytest.approx(1, abs=0.01)  # more than half of each file has changed
    assert all(share == pytest.approx(0.6, abs=0.02) for share in written[1:])


def test_dead_bytes_are_at_most_half_of_a_file_and_files_stay_few(tmp_path: Path) -> None:
    """Tensors freeze one after the other, each of them in a file of its own at first."""
    state, live_bytes = state_of(40, 2_000), 40 * 8_000
    with checkpointer() as ckpt:
        for number in range(40):
            change(state, *range(number, 40))
            result = ckpt.save(state, tmp_path / str(number), base="auto")
            check(tmp_path / str(number), state, ckpt)
            assert len(result.files) - 1 <= 4 * 2 + 4  # those that are adopted, and cold and hot ones that are written
            assert result.nbytes <= 2.3 * live_bytes
    assert result.bytes_reused > 0


def test_everything_is_written_anew_each_so_many_saves(tmp_path: Path) -> None:
    state, base = state_of(), aiockpt.Base(full_every=3)
    with checkpointer() as ckpt:
        reused = [ckpt.save(state, tmp_path / str(n), base=base).bytes_reused > 0 for n in range(7)]
        assert reused == [False, True, True, False, True, True, False]
        check(tmp_path / "6", state, ckpt)
    for number in range(7):  # never more than three have one file in common
        assert {each.stat().st_nlink for each in (tmp_path / str(number)).glob("*.distcp")} <= {1, 2, 3}


def test_what_always_changes_has_no_hash_and_is_hashed_again_when_it_does_not(tmp_path: Path) -> None:
    from tests.saving.test_hashes import column

    state = state_of(4)
    with checkpointer() as ckpt:
        hashed, reused = [], []
        for number in range(8):
            if 1 <= number <= 3:
                change(state, 2)
            reused.append(ckpt.save(state, tmp_path / str(number), base="auto").bytes_written)
            hashed.append(column(tmp_path / str(number))["w02"] is not None)
            check(tmp_path / str(number), state, ckpt)
    # It is written twice more when it has stopped: once it has the same CRC, and then it gets a hash.
    assert hashed == [True, False, False, False, False, True, True, True]
    assert reused[5] > 0
    assert reused[6:] == [0, 0]


# --- what goes wrong: then everything is written ----------------------------------------------------------


def _deleted(base: Path) -> None:
    with checkpointer() as other:
        other.delete(base)


def _replaced(base: Path) -> None:
    with checkpointer() as other:
        other.save({"w00": torch.zeros(5)}, base, overwrite=True)


def _replaced_alike(base: Path) -> None:
    with checkpointer() as other:
        other.save({name: tensor + 7 for name, tensor in state_of().items()}, base, overwrite=True, hashes=True)


def _flipped(base: Path) -> None:
    for file in base.glob("*.distcp"):
        with file.open("r+b") as opened:
            opened.seek(50_000)
            byte = opened.read(1)
            opened.seek(50_000)
            opened.write(bytes([byte[0] ^ 1]))


def _truncated(base: Path) -> None:
    for file in base.glob("*.distcp"):
        os.truncate(file, 1000)


def _linked_elsewhere(base: Path) -> None:
    for file in base.glob("*.distcp"):
        file.rename(f"{base}-{file.name}")
        file.symlink_to(f"{base}-{file.name}")


WRONGS = [_deleted, _replaced, _replaced_alike, _flipped, _truncated, _linked_elsewhere]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("harm", WRONGS)
def test_a_base_that_is_harmed_during_the_save_is_not_shared(
    tmp_path: Path, harm: Callable[[Path], None], is_known: bool
) -> None:
    """Right before files are linked; ``is_known``: by the checkpointer that has written the base."""
    state, storage = state_of(), Interrupted("adopt", partial(harm, tmp_path / "a"))
    with checkpointer() as ckpt, checkpointer() as other:
        (ckpt if is_known else other).save(state, tmp_path / "a", hashes=True, storage=storage)
        change(state, 1)
        result = ckpt.save(state, tmp_path / "b", base=tmp_path / "a", storage=storage)
        assert storage.calls == 1
        assert (result.bytes_written, result.bytes_reused) == (result.nbytes, 0)
        assert not shared_files(tmp_path / "b")
        check(tmp_path / "b", state, ckpt)
        assert ckpt.verify(tmp_path / "b").ok


@pytest.mark.parametrize("harm", [*WRONGS, lambda base: (base / ".aiockpt.json").unlink()])
def test_a_base_that_was_harmed_before_is_not_shared(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    state = state_of()
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a", base="auto")
        harm(tmp_path / "a")
        assert ckpt.save(state, tmp_path / "b", base="auto").bytes_reused == 0
        check(tmp_path / "b", state, ckpt)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EIO, errno.ENOSYS])
@pytest.mark.parametrize("call", ["link", "fchmod"])
def test_a_file_that_cannot_be_linked_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    state, refused = state_of(), []

    def refuse(*args: Any, **_: Any) -> None:
        refused.append(args)
        if call == "fchmod" or "__0_0" in str(args[0]):
            raise OSError(number, os.strerror(number))
        link(*args)

    link = os.link
    with checkpointer() as ckpt:
        full = ckpt.save(state, tmp_path / "a", base="auto")
        monkeypatch.setattr(os, call, refuse)
        result = ckpt.save(state, tmp_path / "b", base="auto")
        assert refused
        assert result.bytes_reused == (0 if call == "fchmod" else full.files["__0_1.distcp"])
        check(tmp_path / "b", state, ckpt)
        assert ckpt.verify(tmp_path / "b").ok


def test_a_base_of_an_earlier_version_has_no_hashes(tmp_path: Path) -> None:
    state = state_of()
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a")
        assert ckpt.save(state, tmp_path / "b", base=tmp_path / "a").bytes_reused == 0
        assert ckpt.save(state, tmp_path / "c", base="auto").bytes_written == 0


def test_two_equal_tensors_that_were_tied_are_not_tied_again(tmp_path: Path) -> None:
    state = state_of(3)
    state["tied"] = state["w00"]
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a", base="auto")
        state["tied"] = state["w00"].clone()
        ckpt.save(state, tmp_path / "b", base="auto")
        check(tmp_path / "b", state, ckpt)
        state["tied"] = state["w00"]
        ckpt.save(state, tmp_path / "c", base="auto")
        check(tmp_path / "c", state, ckpt)


def test_a_checkpoint_replaces_its_own_base(tmp_path: Path) -> None:
    state = state_of()
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a", base="auto")
        for _ in range(3):
            change(state, 4)
            result = ckpt.save(state, tmp_path / "a", base="auto", overwrite=True)
            assert result.bytes_reused > 0
            check(tmp_path / "a", state, ckpt)
    assert not shared_files(tmp_path / "a")


def test_a_tensor_that_changes_while_it_is_hashed_fails_the_save(tmp_path: Path) -> None:
    state = state_of(4, 50_000)
    storage = Interrupted("adopt", partial(change, state, 2))
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a", base="auto")
        with pytest.raises(TornSnapshotError, match="w02"):
            ckpt.save(state, tmp_path / "b", base="auto", storage=storage)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]
        assert not shared_files(tmp_path / "a")
        assert ckpt.save(state, tmp_path / "b", base="auto").bytes_reused > 0
        check(tmp_path / "b", state, ckpt)


@pytest.mark.parametrize("step", ["open", "begin", "adopt", "create", "write", "finish"])
def test_a_cancelled_save_leaves_the_base_alone(tmp_path: Path, step: str) -> None:
    state, saves = state_of(), list[aiockpt.SaveHandle]()
    begun = threading.Event()

    def cancel() -> None:
        assert begun.wait(30)
        saves[0].cancel()

    storage = Interrupted(step, cancel)
    with checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "a", hashes=True)
        old = copied(state)
        change(state, 1)
        saves.append(ckpt.submit(state, tmp_path / "b", base=tmp_path / "a", storage=storage))
        begun.set()
        with pytest.raises(SaveCancelledError):
            saves[0].written.result(30)
        assert storage.calls == 1
        assert [each.name for each in tmp_path.iterdir()] == ["a"]
        assert not shared_files(tmp_path / "a")
        check(tmp_path / "a", old, ckpt)


# --- who writes in place ------------------------------------------------------------------------------------


def test_shared_files_are_read_only_and_stay_private(tmp_path: Path) -> None:
    state = state_of()
    mask = os.umask(0o027)
    try:
        with checkpointer() as ckpt:
            ckpt.save(state, tmp_path / "a", base="auto")
            ckpt.save(state, tmp_path / "b", base="auto")
    finally:
        os.umask(mask)
    for path in (tmp_path / "a", tmp_path / "b"):
        for name in shared_files(path):
            assert stat.S_IMODE((path / name).stat().st_mode) == 0o440


def test_a_stock_save_into_a_checkpoint_cannot_change_its_siblings() -> None:
    state, others = state_of(), {name: tensor + 1 for name, tensor in state_of().items()}
    with tempfile.TemporaryDirectory() as name:  # where another user gets to
        folder = Path(name)
        folder.chmod(0o777)

        def save() -> None:
            with checkpointer() as ckpt:
                ckpt.save(state, folder / "a", base="auto")
                assert ckpt.save(state, folder / "b", base="auto").bytes_written == 0
            warnings.simplefilter("ignore")  # of stock, that it overwrites
            with pytest.raises(BaseException, match="Permission denied"):
                dcp.save(others, checkpoint_id=folder / "a", **ALONE)

        assert as_user(save) == 0
        with checkpointer() as ckpt:
            check(folder / "b", state, ckpt)
            assert ckpt.verify(folder / "b").ok


# --- reflinks ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["xfs -q -m reflink=1", "btrfs -q"], ids=["xfs", "btrfs"])
def with_reflinks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a directory of a file system that has reflinks, where one can be mounted."""
    kind, *options = request.param.split()
    image, folder = tmp_path / "image", tmp_path / "mounted"
    if os.getuid() or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs root and mkfs.{kind}")
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([f"mkfs.{kind}", *options, image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("needs loop mounts")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_where_there_are_reflinks_who_writes_in_place_changes_one_checkpoint_alone(with_reflinks: Path) -> None:
    state, others = state_of(40), {name: tensor + 1 for name, tensor in state_of(40).items()}
    a, b, c = (with_reflinks / name for name in "abc")
    with checkpointer() as ckpt:
        full = ckpt.save(state, a, base="auto")
        assert ckpt.save(state, b, base="auto").bytes_reused == full.nbytes
        (a / "__0_0.distcp").chmod(0o444)  # nor does its mode matter
        assert ckpt.save(state, c, base="auto").bytes_reused == full.nbytes
        for path in (a, b, c):
            assert not shared_files(path)  # no links
            assert all(each.stat().st_mode & stat.S_IWUSR for each in path.iterdir() if each.name != "__0_0.distcp")
        with warnings.catch_warnings(action="ignore"):
            dcp.save(others, checkpoint_id=b, **ALONE)  # as root, too
        check(a, state, ckpt)
        check(c, state, ckpt)
        assert ckpt.verify(a).ok
        assert ckpt.verify(c).ok
        assert all(torch.equal(tensor, others[name]) for name, tensor in load_by_stock(b, others).items())
        ckpt.delete(a)
        check(c, state, ckpt)


# --- object stores ------------------------------------------------------------------------------------------------


def test_in_an_object_store_what_has_not_changed_is_copied_within(
    server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state, sent = ServerPath(f"{server_url}/{tmp_path.name}"), state_of(), []
    ask, copy = ServerClient.ask, ServerClient.copy

    def counted(self: ServerClient, op: str, key: str, body: Any = b"", **given: Any) -> Any:
        sent.append(len(body))
        return ask(self, op, key, body, **given)

    def within(self: ServerClient, key: str, other: str) -> None:
        copy(self, key, other)
        sent.append(-self.facts(other).size)  # this client's copy gets the object and puts it

    monkeypatch.setattr(ServerClient, "ask", counted)
    monkeypatch.setattr(ServerClient, "copy", within)
    with checkpointer() as ckpt:
        full = ckpt.save(state, run / "a", base="auto")
        change(state, 3)
        sent.clear()
        delta = ckpt.save(state, run / "b", base="auto")
        assert sum(sent) < 0.2 * full.nbytes
        assert delta.bytes_reused == full.nbytes
        ckpt.delete(run / "a")
        assert all(torch.equal(ckpt.load(run / "b")[name], tensor) for name, tensor in state.items())
        assert ckpt.verify(run / "b").ok


@pytest.mark.parametrize("harm", ["refused", "gone", "short", "replaced"])
def test_in_an_object_store_what_cannot_be_copied_is_written(
    server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    run, state, copy = ServerPath(f"{server_url}/{tmp_path.name}"), state_of(), ServerClient.copy

    def harmed(self: ServerClient, key: str, other: str) -> None:
        if harm == "refused":
            raise RefusedError("larger than 5 GB")
        if harm == "gone":
            self.delete([key])
        if harm == "short":
            self.put(other, b"short")
        else:
            copy(self, key, other)

    with checkpointer() as ckpt:
        ckpt.save(state, run / "a", base="auto")
        if harm == "replaced":
            with checkpointer() as another:
                another.save({name: tensor + 1 for name, tensor in state.items()}, run / "a", overwrite=True)
        monkeypatch.setattr(ServerClient, "copy", harmed)
        assert ckpt.save(state, run / "b", base="auto").bytes_reused == 0
        assert all(torch.equal(ckpt.load(run / "b")[name], tensor) for name, tensor in state.items())
        assert ckpt.verify(run / "b").ok


# --- where there is none --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "c.safetensors", "format='safetensors'"),
        ({}, "c.pt", "format='torch'"),
        ({"compress": "zstd"}, "c", "compress="),
        ({"separation_hint": "optim"}, "c", "separation_hint="),
    ],
)
def test_a_base_is_refused_where_nothing_can_be_shared(tmp_path: Path, options: Any, name: str, message: str) -> None:
    with checkpointer() as ckpt, pytest.raises(SaveError, match=f"base= can't be used with {message}"):
        ckpt.save(state_of(), tmp_path / name, base="auto", **options)


@pytest.mark.parametrize("options", [{"writer": "process"}, {"fallback_path": "elsewhere"}])
def test_a_base_is_refused_by_checkpointers_that_cannot_share(tmp_path: Path, options: Any) -> None:
    with checkpointer(**options) as ckpt, pytest.raises(SaveError, match=f"{next(iter(options))}"):
        ckpt.save(state_of(), tmp_path / "c", base="auto")


def test_wrong_bases_are_refused() -> None:
    with pytest.raises(TypeError, match="path of a Base"):
        aiockpt.Base(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="full_every"):
        aiockpt.Base(full_every=0)
