"""The files of a checkpoint that inputs replace, with seeds and mutations for each."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint.metadata import MetadataIndex

import aiockpt
from tests.fuzz import archives, pickled, texts
from tests.hostile_inputs import METADATA_BOMBS, OBJECT_BOMBS, pickle_of, zipped
from tests.stock import ALONE

STATE = {
    "model": {"w": torch.arange(15.0).reshape(3, 5), "tied": [torch.ones(2, 2), (torch.zeros(3), {})]},
    "optim": {"state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}}},
    "step": {"n": 7, "s": {5, (1, "x")}},
}
_SEAL = ',\n  "manifest_crc32": "'
_TENSORS = {"0": torch.arange(6.0).view(2, 3), "1": torch.arange(12).view(3, 4).t(), "2": torch.tensor(2j).conj()}

Mutator = Callable[[bytes, Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input.

    Attributes:
        name: the name of the target.
        mutate: returns a mutation of an input; its last argument is another input to take parts from.
        seeds: valid inputs, and some known hostile ones.
        put: writes an input to its place in the checkpoint.
        path: the checkpoint to open, load and verify.
    """

    name: str
    mutate: Mutator
    seeds: tuple[bytes, ...]
    put: Callable[[bytes], None]
    path: Path


def make_targets(top: Path) -> dict[str, Target]:
    """Create checkpoints below a directory, and return the targets in them, by name."""
    ours, stock = top / "ours", top / "stock"
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, ours, metadata={"a": [1, "x"]})
        ckpt.save(STATE, top / "zstd", compress=lambda name, tensor: aiockpt.Zstd(), metadata={})
    dcp.save(STATE, checkpoint_id=stock, **ALONE)
    made = [
        _metadata(stock, top / "metadata"),
        _rank_metadata(top),
        _manifest("manifest", ours, top / "manifest"),
        _manifest("transformed", top / "zstd", top / "transformed"),
        *_items(top),
        *_torch_files(top),
        *_safetensors(top),
        _frames(top),
    ]
    return {target.name: target for target in made}


def _writer(path: Path) -> Callable[[bytes], None]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def put(data: bytes) -> None:
        path.write_bytes(data)

    return put


def _metadata(stock: Path, path: Path) -> Target:
    shutil.copytree(stock, path)
    whole = (path / ".metadata").read_bytes()
    loaded = pickle.loads(whole)
    small = tuple(bomb for bomb in METADATA_BOMBS.values() if len(bomb) < 1000)
    seeds = (whole, *(pickle.dumps(loaded, protocol) for protocol in (2, 3, 5)), *small)
    return Target("metadata", pickled.changed, seeds, _writer(path / ".metadata"), path)


def _rank_metadata(top: Path) -> Target:
    """Return the target of one rank's metadata; each rank has saved its rows of a tensor alone."""
    path = top / "ranks"
    path.mkdir()
    for rank, rows in enumerate((STATE["model"]["w"][:2], STATE["model"]["w"][2:])):
        own = top / f"rank{rank}"
        dcp.save(STATE | {"model": STATE["model"] | {"w": rows.clone()}}, checkpoint_id=own, **ALONE)
        loaded = pickle.loads((own / ".metadata").read_bytes())
        entry, begin = loaded.state_dict_metadata["model.w"], torch.Size((2 * rank, 0))
        entry.size, entry.chunks[0].offsets = torch.Size((3, 5)), begin
        loaded.storage_data = {
            replace(key, offset=begin) if key.fqn == "model.w" else key: replace(
                info, relative_path=f"__{rank}_0.distcp"
            )
            for key, info in loaded.storage_data.items()
        }
        (path / f"__{rank}.metadata").write_bytes(pickle.dumps(loaded))
        (own / "__0_0.distcp").rename(path / f"__{rank}_0.distcp")
    seeds = tuple(pickle.dumps(loaded, protocol) for protocol in (4, 2, 3, 5))
    return Target("rank metadata", pickled.changed, seeds, _writer(path / "__1.metadata"), path)


def _manifest(name: str, source: Path, path: Path) -> Target:
    """Return the target of a manifest's text; it is sealed with a valid CRC, so that any text reaches the parser."""
    shutil.copytree(source, path)
    body, _, _ = (path / ".aiockpt.json").read_text().rpartition(_SEAL)
    document = json.loads(body + "}")
    without = {key: value for key, value in document.items() if key != "index"}
    seeds = tuple(json.dumps(each).encode() for each in (document, without))
    write = _writer(path / ".aiockpt.json")

    def put(data: bytes) -> None:
        sealed = data.rstrip()[:-1]
        write(sealed + f'{_SEAL}{zlib.crc32(sealed):08x}"\n}}\n'.encode())

    return Target(name, texts.changed, seeds, put, path)


def place_item(path: Path, blob: bytes, *, is_tensor: bool) -> None:
    """Create a checkpoint in torch's format whose only item is ``blob``."""
    meta = torch.distributed.checkpoint.metadata
    described = (
        meta.TensorStorageMetadata(
            meta.TensorProperties(dtype=torch.complex64 if b"ComplexFloatStorage" in blob else torch.float32),
            torch.Size([2, 3]),
            [meta.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))],
        )
        if is_tensor
        else meta.BytesStorageMetadata()
    )
    index = MetadataIndex("x", torch.Size([0, 0])) if is_tensor else MetadataIndex("x")
    place = torch.distributed.checkpoint.filesystem._StorageInfo("__0_0.distcp", 0, len(blob))
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(pickle.dumps(meta.Metadata({"x": described}, {"x": ("x",)}, {index: place})))
    (path / "__0_0.distcp").write_bytes(blob)


def _saved(value: object) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def framed_pickle(data: bytes) -> bytes:
    """Return a file as ``torch.save`` writes it, with this pickle and a few storages."""
    records = [("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")]
    records += [(f"data/{number}", bytes(range(96))) for number in range(3)]
    return archives.written([(f"archive/{name}", content) for name, content in records])


def _values() -> list[object]:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8)
    plain = [{5, (1, "x")}, {"a": (1, 2.5, None, True), 3: b"ab"}, 2j, [torch.ones(2, 3)], {2**70: frozenset({1})}]
    return [*plain, _TENSORS, sparse, nested, quantized, torch.nn.Parameter(torch.ones(2))]


def _items(top: Path) -> list[Target]:
    floats = torch.ones(2, 3).numpy().tobytes()
    plain = torch.ones(2, 3)
    conjugated = torch.ones(2, 3, dtype=torch.complex64).conj()
    views = (torch.ones(4)[1:].expand(2, 3), torch.ones(3, 2).t(), torch.nn.Parameter(plain), conjugated)
    tensors = [pickle_of(each) for each in (plain, *views, conjugated[:1].expand(2, 3), conjugated.imag)]
    objects = [pickle_of(value) for value in _values()]
    bombs = [b"\x80\x02" + bomb + b"." for bomb in OBJECT_BOMBS.values() if len(bomb) < 1000]

    def place(name: str, *, is_tensor: bool, framed: bool) -> Callable[[bytes], None]:
        def put(data: bytes) -> None:
            place_item(top / name, framed_pickle(data) if framed else data, is_tensor=is_tensor)

        return put

    def item(name: str, mutate: Mutator, seeds: list[bytes], *, is_tensor: bool, framed: bool) -> Target:
        put = place(name, is_tensor=is_tensor, framed=framed)
        return Target(name, mutate, tuple(seeds), put, top / name)

    return [
        item("tensor pickle", pickled.changed, tensors, is_tensor=True, framed=True),
        item("tensor zip", archives.changed, [_saved(plain), zipped(tensors[0], floats)], is_tensor=True, framed=False),
        item("object pickle", pickled.changed, [*objects, *bombs], is_tensor=False, framed=True),
        item("object zip", archives.changed, [*map(_saved, _values())], is_tensor=False, framed=False),
    ]


def _torch_files(top: Path) -> list[Target]:
    values = [STATE, {"a": [1, (2, {"b": torch.ones(2)})], "b": 5}, *_values()]
    framed = _writer(top / "torch pickle" / "x.pt")

    def put(data: bytes) -> None:
        framed(framed_pickle(data))

    file = top / "torch zip" / "x.pt"
    sink, ends = io.BytesIO(), [0]
    torch.save(STATE, sink, _use_new_zipfile_serialization=False)
    whole = io.BytesIO(sink.getvalue())
    for _ in range(4):
        pickletools.dis(whole, io.StringIO())
        ends.append(whole.tell())
    head, structure, rest = whole.getvalue()[: ends[3]], whole.getvalue()[ends[3] : ends[4]], whole.read()
    old = _writer(top / "torch legacy" / "x.pt")

    def put_old(data: bytes) -> None:
        old(head + data + rest)

    return [
        Target("torch legacy", pickled.changed, (structure,), put_old, top / "torch legacy" / "x.pt"),
        Target("torch pickle", pickled.changed, tuple(map(pickle_of, values)), put, top / "torch pickle" / "x.pt"),
        Target("torch zip", archives.changed, tuple(map(_saved, values)), _writer(file), file),
    ]


def _safetensors(top: Path) -> list[Target]:
    tensors = {"a": torch.ones(2, 3), "b": torch.arange(4), "c": torch.zeros(()), "e": torch.empty(0, 3)}
    whole = safetensors.torch.save(tensors, {"format": "pt", "tied": "a"})
    (length,) = struct.unpack_from("<Q", whole)
    header, body = whole[8 : 8 + length], whole[8 + length :]
    write = _writer(top / "header" / "model.safetensors")

    def put(data: bytes) -> None:
        write(struct.pack("<Q", len(data)) + data + body)

    of_ranks = top / "offsets"
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    places = [json.dumps({"a": {"saved_offsets": [row, 0]}, "b": {"saved_offsets": [0]}}) for row in (0, 2)]
    of_ranks.mkdir()
    (of_ranks / names[0]).write_bytes(
        safetensors.torch.save({key: tensors[key] for key in "ab"}, {"DCP_SHARDING_INFO": places[0]})
    )
    write_second = _writer(of_ranks / names[1])

    def put_offsets(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        write_second(safetensors.torch.save({key: tensors[key] for key in "ab"}, {"DCP_SHARDING_INFO": text}))

    shards = top / "shards"
    shards.mkdir()
    (shards / "a.safetensors").write_bytes(whole)
    (shards / "b.safetensors").write_bytes(safetensors.torch.save({"d": torch.ones(3)}))
    index = {"metadata": {"total_size": 84}, "weight_map": {"a": "a.safetensors", "d": "b.safetensors"}}
    raw = top / "safetensors" / "model.safetensors"
    return [
        Target("header", texts.changed, (header,), put, top / "header"),
        Target("offsets", texts.changed, (places[1].encode(),), put_offsets, of_ranks),
        Target("safetensors", archives.bytes_changed, (whole,), _writer(raw), raw),
        Target(
            "shards",
            texts.changed,
            (json.dumps(index).encode(),),
            _writer(shards / "model.safetensors.index.json"),
            shards,
        ),
    ]


def _frames(top: Path) -> Target:
    """Return the target of a compressed tensor's bytes, whose CRC is not known from any file."""
    item = _saved(torch.ones(2, 3))
    seeds = tuple(
        zstandard.ZstdCompressor(level=3, write_checksum=check, write_content_size=size).compress(data)
        for data in (item, bytes(1 << 20), os.urandom(2000))
        for check, size in ((True, True), (False, True), (False, False))
    )
    path = top / "frames"

    def put(data: bytes) -> None:
        place_item(path, data, is_tensor=True)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return Target("frames", archives.bytes_changed, seeds, put, path)
