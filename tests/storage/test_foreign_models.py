"""A user's own models stay, whatever lies beside them: what can't be read proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import aiockpt
from aiockpt.storage.objects.cleaning import split_token
from tests import commands
from tests.examples import examples
from tests.kinds import cut, save_ours, save_stock
from tests.places import ServerPath, remove, storage_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
INDEX = "alice.safetensors.index.json"
MODELS = ("alice.safetensors", "bob.safetensors", "carol.safetensors")

DOCUMENTS: dict[str, tuple[str, bytes]] = {
    "an empty index": (INDEX, b""),
    "an index without a map": (INDEX, b"{}"),
    "an index that is a pointer": (INDEX, POINTER),
    "a copy of an index by macOS": (f"._{INDEX}", b"\0\5\x16\7" + bytes(60)),
    "a cut manifest": (".aiockpt.json", b'{\n  "format": "aiockpt",\n  "files": {"alice.safeten'),
    "metadata of another program": (".metadata", b"author: alice\n"),
    # The names are within these, but say nothing of what is one checkpoint.
    "an index of names elsewhere": (INDEX, json.dumps({"metadata": list(MODELS), "weight_map": {}}).encode()),
    "an index of a file elsewhere": (INDEX, b'{"weight_map": {"a": "../src.safetensors"}}'),
    "an index with names as keys": (INDEX, json.dumps({"weight_map": dict.fromkeys(MODELS, "x")}).encode()),
    "a pickle of the names": (".metadata", b"\x80\x04" + b"".join(b"\x8c%c%b" % (len(n), n.encode()) for n in MODELS)),
}


def invoke(*arguments: object) -> None:
    assert commands.invoke(*arguments).exit_code != 0


def call(function: Callable[[], object]) -> None:
    with pytest.raises(aiockpt.AiockptError):
        function()


def delete(path: Path) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.delete(path)


DELETING: dict[str, Callable[[Path, Path], None]] = {
    "rm": lambda path, _: invoke("rm", "--yes", path),
    "delete": lambda path, _: call(lambda: delete(path)),
    "save": lambda path, _: call(lambda: aiockpt.save({"w": torch.ones(2)}, path, overwrite=True)),
    "save of safetensors": lambda path, _: call(
        lambda: aiockpt.save({"w": torch.ones(2)}, path, overwrite=True, format="safetensors")
    ),
    "convert": lambda path, source: invoke("convert", source, path, "--overwrite"),
}


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("deleting", DELETING)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_models_beside_a_bad_document_stay(document: str, deleting: str, tmp_path: Path) -> None:
    path, source = tmp_path / "d", tmp_path / "src.safetensors"
    path.mkdir()
    for number, name in enumerate((*MODELS, "../src.safetensors")):
        save_file({"w": torch.full((3,), float(number))}, path / name)
    name, data = DOCUMENTS[document]
    (path / name).write_bytes(data)
    before = contents(path)
    DELETING[deleting](path, source)
    assert contents(path) == before


# --- any directory --------------------------------------------------------------------------------------


def _shards(path: Path) -> None:
    path.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        save_file({name: torch.ones(3)}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))


OURS: dict[str, Callable[[Path], object]] = {
    "ours": save_ours,
    "ours in safetensors": lambda path: save_ours(path, format="safetensors", shard_bytes=30),
    "stock": save_stock,
    "a rank alone": lambda path: (save_stock(path), (path / ".metadata").rename(path / "__0.metadata")),
    "a set": _shards,
    "nothing": lambda path: path.mkdir(),
}
FOREIGN = (
    *(
        "alice.safetensors",
        "model-00003-of-00002.safetensors",
        "__7_0.distcp",
        "pytorch_model.bin",
        "last.pt",
        "meta.pt",
    ),
    *(
        "thesis.tex",
        ".nfs0001.safetensors",
        "._model.safetensors",
        ".DS_Store",
        "common.pt",
        "metadata.json",
        "README.md",
        "single",
        "sub/a.pt",
    ),
    *("__1.metadata", "lora.safetensors.index.json", "x.bin.index.json", ".metadata", ".aiockpt.json"),
)
DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: cut(path, min(7, path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "a pointer": lambda path: path.write_bytes(POINTER),
    "gone": lambda path: path.unlink(),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


def run(*arguments: object) -> None:
    """Run a command; raise AiockptError if it has failed, but not if it was called wrongly."""
    ended = commands.invoke(*arguments)
    assert ended.exit_code in (0, 1, 3), (arguments, ended.output)  # 2: called wrongly
    if ended.exit_code:
        raise aiockpt.AiockptError(ended.output)


CALLS: dict[str, Callable[[Path | ServerPath], object]] = {
    "delete": delete,
    "rm": lambda path: run("rm", "--yes", path),
    "save": lambda path: aiockpt.save({"w": torch.ones(2)}, path, overwrite=True),
    "safetensors": lambda path: aiockpt.save({"w": torch.ones(2)}, path, overwrite=True, format="safetensors"),
    "prune": lambda path: run("prune", path.parent, "--keep-latest", "1"),
    "clean": lambda path: run("clean", path.parent),
}


def upload(path: Path, url: ServerPath) -> None:
    """Copy a directory to a server, as programs do that know nothing of checkpoints."""
    storage = storage_of(url)
    for name, content in contents(path).items():
        storage.objects.put(storage.key(str(url)) + name, content)


def contents_of(url: ServerPath) -> dict[str, bytes]:
    storage = storage_of(url)
    start = storage.key(str(url))
    names = [name for name in storage.objects.below(start) if not split_token(start + name)[0]]
    return {name: storage.objects.get(start + name)[1] for name in names}


@examples(60, [HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_call_removes_what_is_not_proven(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, server_url: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "step-00000001"
    save_ours(path.with_name("step-00000002"))
    OURS[data.draw(st.sampled_from(sorted(OURS)))](path)
    own = sorted(each.name for each in path.iterdir())
    foreign = [
        name for name in data.draw(st.lists(st.sampled_from(FOREIGN), max_size=3, unique=True)) if name not in own
    ]
    for name in foreign:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"mine: " + name.encode())
    for name in data.draw(st.lists(st.sampled_from(own), max_size=2, unique=True)) if own else ():
        DAMAGE[data.draw(st.sampled_from(sorted(DAMAGE)))](path / name)
    mine = {name: (path / name).read_bytes() for name in foreign}
    place: Path | ServerPath = path
    calls = data.draw(st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=3))
    if data.draw(st.booleans()):
        place = ServerPath(f"{server_url}/{path.parent.name}/{path.name}")
        upload(path, place)

    def look() -> dict[str, bytes]:
        return contents_of(place) if isinstance(place, ServerPath) else contents(place)

    for name in calls:
        before = look()
        try:
            CALLS[name](place)
        except aiockpt.AiockptError:
            assert look() == before
        else:
            assert name != "rm" or not look().keys() & before.keys() - mine.keys()
        assert {name: content for name, content in look().items() if name in mine} == mine
    if isinstance(place, ServerPath):
        remove(place.parent)


@pytest.mark.parametrize("left", [[], ["model-00002-of-00002.safetensors"]], ids=["alone", "with a part"])
@pytest.mark.parametrize("foreign", [False, True])
def test_what_an_interrupted_deletion_leaves_is_deleted_by_its_index(
    tmp_path: Path, left: list[str], foreign: bool
) -> None:
    """The index goes last, so it proves what is left of its set, and nothing else."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    path = tmp_path / "c"
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    for name in left:
        save_file({name: torch.ones(1)}, path / name)
    if foreign:
        save_file({"x": torch.ones(1)}, path / "lora.safetensors")
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    with aiockpt.SyncCheckpointer() as ckpt:
        if not foreign:
            ckpt.delete(path)
            assert not path.exists()
            return
        with pytest.raises(aiockpt.DeleteError):
            ckpt.delete(path)
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
