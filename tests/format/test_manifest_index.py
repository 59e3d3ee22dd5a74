"""The manifest's index: it agrees with `.metadata` and the items, or is refused."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from isal.isal_zlib import crc32

import aiockpt
from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.index import Division, ItemRange, ObjectEntry, TensorEntry
from aiockpt.format.item.tensor_item import parse_tensor_item
from aiockpt.format.manifest.columnar_index import IndexedEntries, ItemForm
from aiockpt.format.manifest.index_writer import IndexDraft, ItemRows, encode_index
from aiockpt.format.manifest.manifest import DIVIDED_KEY, Manifest, encode_manifest
from aiockpt.format.manifest.reader import decode_manifest
from tests.states import training_state


def rich_state() -> dict[str, Any]:
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        **training_state(),
        "a.b": {"c.d": torch.arange(5), "": torch.tensor(7)},
        "tied": {"one": tied, "two": tied, "other view": tied.t()},
        "list": [torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0, 3), {"x": [torch.full((1,), 3)]}]],
        "numbers": {0: torch.tensor([0.5]), 10: {1: torch.tensor([1.5])}},
        "ordered": OrderedDict(z=torch.arange(3), y="text"),
        "ümlaut \ud800": torch.arange(4, dtype=torch.uint8),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "strided": torch.arange(30).reshape(5, 6)[:, ::2],
        "large": torch.arange(400_000, dtype=torch.int32),
    }


def save(state: dict[str, Any], path: Path) -> bytes:
    with aiockpt.SyncCheckpointer(chunk_bytes=64 << 10, staging_bytes=1 << 20) as ckpt:
        ckpt.save(state, path, metadata={"step": 3})
    return (path / ".aiockpt.json").read_bytes()


def sealed(document: dict[str, Any]) -> bytes:
    """Return a manifest with this content and a matching CRC."""
    document.pop("manifest_crc32", None)
    body = json.dumps(document, indent=2).removesuffix("\n}")
    return f'{body},\n  "manifest_crc32": "{crc32(body.encode()):08x}"\n}}\n'.encode()


def entries_of(manifest: Manifest) -> IndexedEntries:
    assert manifest.index is not None
    assert isinstance(manifest.index.entries, IndexedEntries)
    return manifest.index.entries


@pytest.mark.parametrize("saves", [1, 2])
def test_the_index_agrees_with_metadata_and_items(saves: int, tmp_path: Path) -> None:
    """The second save has other objects, places and bytes."""
    state = rich_state()
    with aiockpt.SyncCheckpointer(chunk_bytes=64 << 10, staging_bytes=1 << 20) as ckpt:
        for number in range(saves):
            state["large"] += number
            state["step"] = 10**number
            path = tmp_path / str(number)
            ckpt.save(state, path, metadata={"step": number})
    manifest = decode_manifest((path / ".aiockpt.json").read_bytes())
    theirs = decode_metadata((path / ".metadata").read_bytes())
    mine = manifest.index
    assert mine is not None
    assert mine.format == "aiockpt"
    assert mine.metadata == {"step": saves - 1}
    assert mine.containers == manifest.containers != []
    assert dict(mine.paths) == theirs.paths
    assert list(mine.entries) == list(theirs.entries)
    for name, entry in theirs.entries.items():
        found = mine.entries[name]
        if isinstance(entry, ObjectEntry):
            assert found == entry
            continue
        assert isinstance(found, TensorEntry)
        (one,), (other,) = found.chunks, entry.chunks
        assert (found.dtype, found.shape, one.place, one.offsets, one.sizes) == (
            entry.dtype, entry.shape, other.place, other.offsets, other.sizes,
        )  # fmt: skip
        data = (path / one.place.file).read_bytes()[one.place.offset :][: one.place.length]
        parsed = parse_tensor_item(len(data), lambda offset, size, data=data: data[offset : offset + size])
        assert one.item == parsed, name
        assert crc32(data[parsed.payload_offset :][: parsed.nbytes]) == parsed.crc
    assert mine.entries["tied.one"] == mine.entries["tied.two"] != mine.entries["tied.other view"]
    entries_of(manifest).check({p.name: p.stat().st_size for p in path.iterdir()}, str(path))


def test_the_views_are_mappings(tmp_path: Path) -> None:
    manifest = decode_manifest(save({"a": torch.ones(2), "b": {"c": 1}}, tmp_path / "c"))
    index = manifest.index
    assert index is not None
    for view in (index.entries, index.paths):
        assert len(view) == 2
        assert "b.c" in view
        assert "c" not in view
        with pytest.raises(KeyError):
            view["c"]
        assert "2 leaves" in repr(view)
    assert index.paths["b.c"] == ("b", "c")


def test_an_empty_state(tmp_path: Path) -> None:
    manifest = decode_manifest(save({}, tmp_path / "c"))
    assert list(entries_of(manifest)) == []
    entries_of(manifest).check({"__0_0.distcp": 0}, "c")


def test_a_manifest_without_an_index(tmp_path: Path) -> None:
    assert decode_manifest(encode_manifest(Manifest("w", "now"))).index is None


def test_paths_that_names_do_not_determine_have_no_index() -> None:
    places = ItemRows([0], [0], [0])
    assert encode_index(["a.b"], [("a", "b")], ["f"], [], places) is not None
    assert encode_index(["a.b"], [("a", "c")], ["f"], [], places) is None
    assert encode_index(["a.0", "a.x"], [("a", 0), ("a", "x")], ["f"], [], ItemRows([0, 0], [0, 0], [0, 0])) is None


def test_the_manifests_crc_covers_the_index(tmp_path: Path) -> None:
    data = save({"weight": torch.ones(3)}, tmp_path / "c")
    at = data.index(b'"offset": [') + len(b'"offset": [')
    changed = data[:at] + b"1" + data[at + 1 :]
    assert changed != data
    with pytest.raises(CorruptCheckpointError, match="does not match its CRC"):
        decode_manifest(changed)


def _set(index: dict[str, Any], column: str, value: Any, row: int | None = None) -> None:
    if row is None:
        index[column] = value
    else:
        index[column][row] = value


@pytest.mark.parametrize(
    "change",
    [
        ("names", "text"),
        ("names", 5, 0),
        ("names", "b", 0),
        ("files", ["f", "f"]),
        ("form", [0]),
        ("form", 99, 0),
        ("form", -2, 0),
        ("form", -1, 0),
        ("file", 99, 0),
        ("file", -1, 0),
        ("offset", -1, 0),
        ("offset", 2**62, 0),
        ("offset", 2**70, 0),
        ("offset", 0.5, 0),
        ("offset", "0", 0),
        ("offset", None, 0),
        ("offset", [0], 0),
        ("crc32", 2**32, 0),
        ("crc32", {}),
        ("parent", 99, 0),
        ("parents", [5, []]),
        ("parents", [[], [0.5]]),
        ("parents", [[], ["x"]]),
        ("sequences", ["0"]),
        ("sequences", [[0]]),
        ("sequences", [0]),
        ("objects", []),
        ("objects", [[0, 0, 5]]),
        ("objects", [[2, -1, 5]]),
        ("objects", [[2, 0]]),
        ("objects", 7),
        ("forms", [["float32", [2], [1], 97, 90, 8]]),
        ("forms", [["nothing", [2], [1], 1000, 90, 8]]),
        ("forms", [["Tensor", [2], [1], 1000, 90, 8]]),
        ("forms", [["quint8", [8], [1], 1000, 90, 8]]),
        ("forms", [["float32", [3], [1], 1000, 90, 8]]),
        ("forms", [["float32", [2], [2], 1000, 90, 8]]),
        ("forms", [["float32", [2], [], 1000, 90, 8]]),
        ("forms", [["float32", [-2], [1], 1000, 90, -8]]),
        ("forms", [["float32", [2], [1], 1000, -90, 8]]),
        ("forms", [["float32", [True], [1], 1000, 90, 4]]),
        ("forms", [["float32", 2, 1, 1000, 90, 8]]),
        ("forms", [[]]),
        ("forms", {}),
    ],
    ids=str,
)
def test_damaged_columns_are_refused(change: tuple[Any, ...], tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(2), "o": "object", "deep": {"er": torch.ones(2)}}
    document = json.loads(save(state, tmp_path / "c"))
    assert decode_manifest(sealed(json.loads(json.dumps(document)))).index is not None
    _set(document["index"], *change)
    with pytest.raises(CorruptCheckpointError, match="damaged or was edited"):
        decode_manifest(sealed(document))


@pytest.mark.parametrize("missing", ["files", "forms", "names", "crc32", "objects", "parents", "sequences", "parent"])
def test_missing_columns_are_refused(missing: str, tmp_path: Path) -> None:
    document = json.loads(save({"a": torch.ones(2)}, tmp_path / "c"))
    del document["index"][missing]
    with pytest.raises(CorruptCheckpointError, match=missing):
        decode_manifest(sealed(document))


@pytest.mark.parametrize("position", ["x", "-1", "007", "²", ""])
def test_invalid_positions_in_lists_are_refused(position: str, tmp_path: Path) -> None:
    document = json.loads(save({"l": [torch.ones(1), torch.zeros(1)]}, tmp_path / "c"))
    assert document["index"]["names"] == ["l.0", "l.1"]
    document["index"]["names"][1] = f"l.{position}"
    with pytest.raises(CorruptCheckpointError, match="damaged or was edited"):
        decode_manifest(sealed(document))


def test_impossible_places_are_refused_by_open(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(2), "same": None, "o": ["object"]}
    state["same"] = state["b"]
    document = json.loads(save(state, tmp_path / "c"))
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "c").iterdir()}

    def check(**columns: list[Any]) -> None:
        changed = {**document, "index": {**document["index"], **columns}}
        (tmp_path / "c" / ".aiockpt.json").write_bytes(sealed(changed))
        with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(tmp_path / "c"):
            pass

    check()
    one, two, *_ = offsets = document["index"]["offset"]
    size = sizes["__0_0.distcp"]
    with pytest.raises(CorruptCheckpointError, match=rf"c/__0_0.distcp ends at byte {size}, but a is at bytes"):
        check(offset=[size - 5, *offsets[1:]])
    with pytest.raises(CorruptCheckpointError, match=r"but a is at bytes 1000000000000000 to"):
        check(offset=[10**15, *offsets[1:]])
    with pytest.raises(CorruptCheckpointError, match=rf"the item of b at offset {one + 8} lies partly on that of a"):
        check(offset=[one, one + 8, *offsets[2:]])
    with pytest.raises(CorruptCheckpointError, match="lies partly on"):
        check(offset=[two, *offsets[1:]], crc32=[1, 2, 2, 0])
    with pytest.raises(CorruptCheckpointError, match=r"the item of a at offset \d+ lies partly on that of o"):
        check(objects=[[3, one - 10, 50]])
    with pytest.raises(CorruptCheckpointError, match=r"c lacks the file other.distcp, which holds a"):
        check(files=["other.distcp"])


def test_an_index_written_by_hand() -> None:
    """Compare the text with a literal, so that a change of the format is noticed."""
    form = ItemForm(torch.float16, (2, 3), (3, 1), 100, 64, 12)
    names, paths = ["x.0", "x.1", "o"], [("x", 0), ("x", 1), ("o",)]
    head = encode_index(names, paths, ["f", "g"], [form], ItemRows([0, 0, -1], [1, 1, 0], [64, 192, 0]))
    assert head is not None
    text = IndexDraft(head, [1, 0, -1], [(2, 16, 30)]).finish([8, 7])
    assert json.loads(text) == {
        "files": ["f", "g"],
        "forms": [["float16", [2, 3], [3, 1], 100, 64, 12]],
        "names": ["x.0", "x.1", "o"],
        "parents": [["x"], []],
        "sequences": [0],
        "parent": [0, 0, 1],
        "form": [0, 0, -1],
        "file": [1, 1, 0],
        "offset": [64, 192, 0],
        "crc32": [7, 8, 0],
        "objects": [[2, 16, 30]],
    }
    index = decode_manifest(encode_manifest(Manifest("w", "now"), text)).index
    assert index is not None
    item = index.entries["x.1"].chunks[0]  # type: ignore[union-attr]
    assert (item.place.file, item.place.offset, item.place.length) == ("g", 192, 100)
    assert (item.item.payload_offset, item.item.nbytes, item.item.crc) == (64, 12, 8)
    assert index.paths["x.1"] == ("x", 1)
    assert index.entries["o"] == ObjectEntry(ItemRange("f", 16, 30))


def test_long_columns_are_complete(tmp_path: Path) -> None:
    """Columns are encoded in batches: no row is lost or doubled where two batches meet."""
    state = {f"w{i}": torch.full((3,), i) for i in range(20_000)}
    index = decode_manifest(save(state, tmp_path / "c")).index
    assert index is not None
    entries = index.entries
    assert list(entries) == list(state)
    data = {name: (tmp_path / "c" / name).read_bytes() for name in os.listdir(tmp_path / "c")}
    for i in (0, 1, 8191, 8192, 8193, 16_383, 16_384, 19_999):
        (chunk,) = entries[f"w{i}"].chunks  # type: ignore[union-attr]
        begin = chunk.place.offset + chunk.item.payload_offset
        payload = data[chunk.place.file][begin : begin + 24]
        assert torch.frombuffer(bytearray(payload), dtype=torch.int64).tolist() == [i, i, i]
        assert chunk.item.crc == crc32(payload)


def sharded(**change: Any) -> bytes:
    """Return a manifest of two tensors, the first in three parts, and an object between them; ``change`` its index."""
    forms = [ItemForm(torch.float16, (n, 3), (3, 1), 100 + n, 64, 6 * n) for n in (2, 1)]
    division = Division((5, 3), [(0, 0), (2, 0), (4, 0)])
    rows = ItemRows([0, 0, 1, -1, 1], [0, 1, 1, 0, 0], [64, 0, 256, 0, 512], [division], [0, -1, -1])
    head = encode_index(["w", "o", "v"], [("w",), ("o",), ("v",)], ["f", "g"], forms, rows)
    assert head is not None
    index = json.loads(IndexDraft(head, [3, 0, 2, -1, 1], [(3, 16, 30)]).finish([10, 11, 12, 13]))
    return encode_manifest(Manifest("w", "now"), json.dumps({**index, **change}), index_key=DIVIDED_KEY)


def test_a_tensor_in_parts() -> None:
    entries = entries_of(decode_manifest(sharded()))
    entries.check({"f": 1000, "g": 1000}, "c")
    whole = entries["w"]
    assert isinstance(whole, TensorEntry)
    assert (whole.dtype, whole.shape) == (torch.float16, (5, 3))
    assert [(each.offsets, each.sizes, each.place, each.item and each.item.crc) for each in whole.chunks] == [
        ((0, 0), (2, 3), ("f", 64, 102, ()), 13),
        ((2, 0), (2, 3), ("g", 0, 102, ()), 10),
        ((4, 0), (1, 3), ("g", 256, 101, ()), 12),
    ]
    assert entries["o"] == ObjectEntry(ItemRange("f", 16, 30))
    other = entries["v"]
    assert isinstance(other, TensorEntry)
    assert (other.shape, other.chunks[0].place, other.chunks[0].item.crc) == ((1, 3), ("f", 512, 101, ()), 11)  # type: ignore[union-attr]
    assert dict(entries.items()) == {name: entries[name] for name in entries}


def test_entries_that_begin_with_the_same_bytes() -> None:
    assert entries_of(decode_manifest(sharded())).sharing() == []
    assert entries_of(decode_manifest(sharded(offset=[64, 0, 256, 0, 64]))).sharing() == ["w", "v"]
    # The second part of w is where v begins, which is no matter.
    assert entries_of(decode_manifest(sharded(offset=[64, 0, 256, 0, 0], file=[0, 1, 1, 0, 1]))).sharing() == []


@pytest.mark.parametrize(
    "change",
    [
        {"divisions": [[[6, 3], [[0, 0], [2, 0], [4, 0]]]]},  # a row of it is missing
        {"divisions": [[[5, 3], [[0, 0], [1, 0], [4, 0]]]]},  # two parts overlap
        {"divisions": [[[5, 3], [[0, 0], [2, 0], [4, 1]]]]},  # a part reaches beyond it
        {"divisions": [[[5], [[0], [2], [4]]]]},
        {"divisions": [[[5, 3], [[0, 0], [2, 0]]]]},  # rows are left over
        {"divisions": [[[5, 3], []]]},
        {"divisions": [[[5, "3"], [[0, 0], [2, 0], [4, 0]]]]},
        {"divisions": [[[0, 1 << 60, 1 << 60], [[0, 0], [2, 0], [4, 0]]]]},
        {"division": [0, -1]},
        {"division": [1, -1, -1]},
        {"division": [-1, 0, -1]},  # the object would be a part
        {"form": [0, 0, -1, -1, 1]},
        {"forms": [["float16", [2, 3], [3, 1], 102, 64, 12], ["bfloat16", [1, 3], [3, 1], 101, 64, 6]]},
        {"objects": [[2, 16, 30]]},
    ],
)
def test_parts_that_are_not_all_of_a_tensor_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(sharded(**change))


def test_overlapping_parts_of_two_tensors_are_named() -> None:
    entries = entries_of(decode_manifest(sharded(offset=[64, 0, 256, 0, 100])))
    with pytest.raises(CorruptCheckpointError, match="the item of v at offset 100 lies partly on that of w, 102 bytes"):
        entries.check({"f": 1000, "g": 1000}, "c")
    with pytest.raises(CorruptCheckpointError, match="c/g ends at byte 300, but w is at bytes 256 to 357"):
        entries_of(decode_manifest(sharded())).check({"f": 1000, "g": 300}, "c")


def test_two_parts_of_a_tensor_are_never_one_item() -> None:
    """Else a small file could claim to hold a tensor of any size."""
    form = ["float16", [2, 3], [3, 1], 102, 64, 12]
    both = {"form": [0, 0, 0, -1, 0], "file": [0, 0, 0, 0, 0], "offset": [0, 0, 0, 0, 0], "crc32": [7, 7, 7, 0, 7]}
    change = {**both, "forms": [form], "divisions": [[[6, 3], [[0, 0], [2, 0], [4, 0]]]], "objects": [[3, 500, 30]]}
    entries = entries_of(decode_manifest(sharded(**change)))
    with pytest.raises(CorruptCheckpointError, match="the item of w at offset 0 lies partly on that of w"):
        entries.check({"f": 1000, "g": 1000}, "c")
