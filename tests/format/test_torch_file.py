"""Files of ``torch.save``: each tensor that is cut out by its place equals that of ``torch.load``."""

from __future__ import annotations

import fractions
import io
import random
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import TensorEntry
from aiockpt.format.item.ziparchive import data_offset, read_directory
from aiockpt.format.torch_file.torch_file import TorchFile, holds_tensors, open_archive, read_torch_file
from tests.examples import examples
from tests.states import assert_same, random_tensor, raw_bytes, storable_dtypes, training_state

RAN: list[str] = []


class Plain:
    """Class of a user."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


def run(word: str) -> None:
    RAN.append(word)


class Evil:
    def __reduce__(self):
        return (run, ("ran",))


class Bomb:
    def __reduce__(self):
        return (list, (range(1 << 40),))


class Sub(torch.Tensor):
    """A tensor subclass."""


class Summing:
    """Class that needs the values of its tensor while it is unpickled."""

    def __init__(self) -> None:
        self.values = torch.ones(3)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.total = state["values"].sum().item()


def saved(value: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink, **options)
    return sink.getvalue()


def read(blob: bytes, **options: Any) -> TorchFile:
    return read_torch_file("model.pt", len(blob), lambda offset, size: blob[offset : offset + size], **options)


def cut_out(blob: bytes, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor, made from the bytes of the file alone."""
    (chunk,) = entry.chunks
    item, place = chunk.item, chunk.place
    assert item is not None
    assert (place.file, chunk.offsets, chunk.sizes) == ("model.pt", (0,) * len(entry.shape), entry.shape)
    assert (entry.dtype, entry.shape, place.length) == (item.dtype, item.shape, item.nbytes)
    payload = bytearray(blob[place.offset : place.offset + place.length])
    assert len(payload) == item.nbytes
    if item.crc is not None:
        assert item.crc == zlib.crc32(payload)
    raw = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    tensor = torch.empty(0, dtype=item.dtype)
    tensor.set_(raw.untyped_storage(), item.storage_offset, item.shape, item.stride)
    tensor = tensor.conj() if item.conj else tensor
    return torch._neg_view(tensor) if item.neg else tensor


def filled(blob: bytes, file: TorchFile, value: Any) -> Any:
    """Return a copy of a structure with real tensors in place of meta tensors."""
    if isinstance(value, torch.Tensor):
        assert value.is_meta
        return cut_out(blob, file.entry(value))
    if isinstance(value, dict):
        copy = OrderedDict() if isinstance(value, OrderedDict) else {}
        copy.update((key, filled(blob, file, each)) for key, each in value.items())
        return copy
    if isinstance(value, list | tuple):
        return type(value)(filled(blob, file, each) for each in value)
    return value


def check(value: Any, **options: Any) -> TorchFile:
    """Check that a value is read from its file as by ``torch.load``."""
    blob = saved(value)
    file = read(blob, **options)
    ours = filled(blob, file, file.value)
    assert_same(torch.load(io.BytesIO(blob), weights_only=not options), ours)
    assert_same(value, ours)
    return file


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


def test_a_training_state() -> None:
    state = training_state()
    file = check(state)
    assert type(file.value["model"]) is OrderedDict
    assert file.value["model"]._metadata == state["model"]._metadata
    assert file.value["nested"]["c"].keys() == {1, 2}
    assert repr(file).startswith("TorchFile(name='model.pt'")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", storable_dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 0, 4)], ids=str)
def test_every_dtype_and_a_bare_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(random_tensor(dtype, shape, 3))
    check([{"a": random_tensor(dtype, shape, 4)}, random_tensor(dtype, (9,), 5)])


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, [1, [2.5, ()]], b"bytes", {1, 2}, torch.Size([2, 3])])
def test_files_without_tensors(value: Any) -> None:
    assert read(saved(value)).value == value


def test_views_of_one_storage_share_its_place() -> None:
    base = torch.arange(60, dtype=torch.int32)
    views = {
        "base": base,
        "rows": base.view(6, 10)[2:4],
        "columns": base.view(6, 10)[:, 3:7:2],
        "turned": base.view(6, 10).T,
        "scalar": base[17],
        "nothing": base[5:5],
        "repeated": base[3].expand(4, 5),
    }
    file = check(views)
    places = {file.entry(view).chunks[0].place for view in file.value.values()}
    assert len(places) == 1
    assert places.pop().length == 240
    entry = file.entry(file.value["columns"])
    assert entry.chunks[0].item.stride == (10, 2)
    assert entry.chunks[0].item.storage_offset == 3
    assert file.entry(file.value["repeated"]).nbytes == 80


def test_tied_and_equal_tensors() -> None:
    tied = torch.nn.Parameter(torch.randn(4, 3))
    file = check({"a": tied, "b": tied, "c": tied.detach().clone()})
    a, b, c = (file.entry(file.value[key]).chunks[0].place for key in "abc")
    assert a == b != c


def test_parameters_buffers_and_attributes() -> None:
    attributed = torch.arange(3.0)
    attributed.note = "kept"
    parameter = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)
    parameter.hint = 5
    check([parameter, torch.nn.Parameter(torch.randn(3)), attributed, torch.nn.Buffer(torch.randn(4))])


def test_a_whole_optimizer_with_integer_keys() -> None:
    model = torch.nn.Linear(5, 4)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    file = check(optimizer.state_dict())
    assert list(file.value["state"]) == [0, 1]


def test_conjugated_and_negated_tensors() -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    file = check({"plain": values, "conj": values.conj(), "both": values.T.conj()[1:]})
    assert file.entry(file.value["conj"]).chunks[0].item.conj
    file = check({"neg": values.conj().imag, "turned": values.conj().imag.T, "plain": values.real})
    neg = file.entry(file.value["neg"])
    assert (neg.dtype, neg.chunks[0].item.neg, neg.chunks[0].item.conj) == (torch.float32, True, False)


def test_nothing_but_the_directory_and_small_records_is_read() -> None:
    """Few reads suffice: the places of payloads are computed, not read from their headers."""
    blob = saved({f"w{i}": random_tensor(torch.int16, (1000 + i,), i) for i in range(100)})
    archive = open_archive("model.pt", len(blob), lambda offset, size: blob[offset : offset + size])
    payloads = [
        (archive.payload_offset(record), archive.payload_offset(record) + record.size)
        for name, record in archive.records.items()
        if name.startswith("data/")
    ]
    reads: list[tuple[int, int]] = []

    def fetch(offset: int, size: int) -> bytes:
        reads.append((offset, offset + size))
        return blob[offset : offset + size]

    file = read_torch_file("model.pt", len(blob), fetch)
    entries = [file.entry(tensor) for tensor in file.value.values()]
    assert len(entries) == len(payloads) == 100
    touched = [
        (read, payload) for read in reads for payload in payloads if read[0] < payload[1] and payload[0] < read[1]
    ]
    assert touched == []
    assert len(reads) < 20


@pytest.mark.parametrize("alignment", [64, 4096])
def test_computed_offsets_equal_those_of_the_headers(alignment: int) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this version of torch always aligns to 64")
    with config.patch({"save.storage_alignment": alignment}):
        blob = saved({"ä" * i: random_tensor(torch.uint8, (i * 7,), i) for i in range(40)})

    def fetch(offset: int, size: int) -> bytes:
        return blob[offset : offset + size]

    archive = open_archive("model.pt", len(blob), fetch)
    assert archive.alignment == alignment
    for record in archive.records.values():
        assert archive._usual_offset(record) in (data_offset(record, fetch), None)
        assert archive.payload_offset(record) == data_offset(record, fetch)
    assert archive._usual_offset(archive.records["data/39"]) is not None


def test_a_file_beyond_four_gib() -> None:
    """Read a sparse file, which needs no memory, whose directory has 64-bit fields."""

    class Sparse(io.RawIOBase):
        def __init__(self) -> None:
            self.parts: dict[int, bytes] = {}
            self.at = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.parts[self.at] = bytes(data)
            self.at += len(bytes(data))
            return len(bytes(data))

        def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
            assert whence == io.SEEK_CUR
            self.at += offset
            return self.at

        def fetch(self, offset: int, size: int) -> bytes:
            data = bytearray(size)
            for at, part in self.parts.items():
                begin, end = max(at, offset), min(at + len(part), offset + size)
                if begin < end:
                    data[begin - offset : end - offset] = part[begin - at : end - at]
            return bytes(data)

    from torch._subclasses import FakeTensorMode

    sink = Sparse()
    with FakeTensorMode():
        state = {"big": torch.empty(5 << 30, dtype=torch.uint8), "next": torch.empty(3), "last": torch.empty(5 << 28)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, sink)
    file = read_torch_file("model.pt", sink.at, sink.fetch)
    archive = open_archive("model.pt", sink.at, sink.fetch)
    offsets = {r.name.partition("/")[2]: data_offset(r, sink.fetch) for r in read_directory(sink.at, sink.fetch)}
    for number, key in enumerate(state):
        chunk = file.entry(file.value[key]).chunks[0]
        assert chunk.place.offset == offsets[f"data/{number}"]
        assert archive._usual_offset(archive.records[f"data/{number}"]) == chunk.place.offset
        assert chunk.place.length == state[key].nbytes
        assert chunk.item.crc is None


def repacked(blob: bytes, *, changed: dict[str, bytes] | None = None, left_out: str = "", **options: Any) -> bytes:
    """Return the records repacked by Python's zipfile, whose layout differs from torch's."""
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as archive, zipfile.ZipFile(sink, "w", **options) as copy:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if inner != left_out:
                copy.writestr(name, (changed or {}).get(inner, archive.read(name)))
        for inner in set(changed or {}) - {name.partition("/")[2] for name in archive.namelist()}:
            copy.writestr(f"archive/{inner}", (changed or {})[inner])
    return sink.getvalue()


def test_files_of_other_zip_writers() -> None:
    state = {"a": random_tensor(torch.float64, (31,), 1), "b": random_tensor(torch.int8, (5, 3), 2)}
    blob = repacked(saved(state))
    file = read(blob)
    assert_same(state, filled(blob, file, file.value))


def test_files_without_crcs() -> None:
    state = {"a": random_tensor(torch.float64, (31,), 1), "b": torch.empty(0)}
    torch.serialization.set_crc32_options(False)
    try:
        blob = saved(state)
    finally:
        torch.serialization.set_crc32_options(True)
    file = read(blob)
    assert file.entry(file.value["a"]).chunks[0].item.crc is None
    assert_same(state, filled(blob, file, file.value))


def loaded_from(state: dict[str, Any], **options: Any) -> Any:
    blob = saved(state)
    file = read(blob, **options)
    return filled(blob, file, file.value)


def test_numpy_needs_no_permission() -> None:
    """As in native checkpoints: what is plain data there is plain data here."""
    model = torch.nn.Linear(3, 2)
    state = {
        "model": model.state_dict(),
        "weight": model.weight,
        "tied": [model.weight, model.weight.t()],
        "loss": numpy.float64(0.5),
        "history": numpy.arange(6).reshape(2, 3),
        "when": numpy.datetime64("2020-02-03"),
        "dtype": numpy.dtype("float32"),
        "random": numpy.random.RandomState(3).get_state(),
        "strings": numpy.array(["a", "bcd"]),
        "half": torch.arange(3, dtype=torch.bfloat16),
    }
    loaded = loaded_from(state)
    for name in ("loss", "when", "dtype"):
        assert loaded[name] == state[name]
        assert type(loaded[name]) is type(state[name])
    for name in ("history", "strings"):
        assert loaded[name].dtype == state[name].dtype
        assert loaded[name].tolist() == state[name].tolist()
    assert loaded["random"][1].tolist() == state["random"][1].tolist()
    for name in ("model", "weight", "tied", "half"):
        assert_same(state[name], loaded[name])
    assert read(saved(state)).value["model"]._metadata == state["model"]._metadata


def test_numpy_beside_a_class_that_needs_permission() -> None:
    state = {"a": fractions.Fraction(1, 3), "n": numpy.arange(3), "t": torch.ones(2)}
    with pytest.raises(
        UnsafeCheckpointError, match=r"needs fractions\.Fraction, .*safe_globals=\[fractions\.Fraction\]"
    ) as caught:
        loaded_from(state)
    assert "add_safe_globals" not in str(caught.value)
    loaded = loaded_from(state, safe_globals=[fractions.Fraction])
    assert (loaded["a"], loaded["n"].tolist()) == (state["a"], [0, 1, 2])
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert loaded_from(state)["a"] == state["a"]


def test_custom_classes_are_refused_until_allowed() -> None:
    value = {"config": Plain("x"), "w": torch.arange(3)}
    with pytest.raises(UnsafeCheckpointError, match=r"model\.pt needs .*Plain.*safe_globals=\[.*Plain\].*trust=True"):
        read(saved(value))
    check(value, safe_globals=[Plain])
    check(value, trust=True)
    with torch.serialization.safe_globals([Plain]):
        assert read(saved(value)).value["config"] == Plain("x")
        assert read(saved(value), safe_globals=[Plain]).value["config"] == Plain("x")
        assert Plain in torch.serialization.get_safe_globals()
    assert Plain not in torch.serialization.get_safe_globals()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol: int) -> None:
    state = {"w": torch.nn.Parameter(torch.randn(3, 2)), "s": torch.arange(4), "n": [1, 2.5, "x"]}
    blob = saved(state, pickle_protocol=protocol)
    file = read(blob, trust=True)
    assert_same(state, filled(blob, file, file.value))
    if protocol < 4:
        file = read(blob)
        assert_same(state, filled(blob, file, file.value))
    else:
        with pytest.raises(UnsafeCheckpointError, match=r"restricted unpickler can't read.*trust=True"):
            read(blob)


def test_evil_pickles_never_run() -> None:
    for value in (Evil(), {"w": torch.ones(2), "x": [Evil()]}):
        with pytest.raises(UnsafeCheckpointError, match="could run code"):
            read(saved(value))
        with pytest.raises(UnsafeCheckpointError):
            read(saved(value), safe_globals=[Plain])
    assert RAN == []
    read(saved(Evil()), trust=True)
    assert RAN == ["ran"]
    RAN.clear()


class Keyed:
    """Is pickled as a call with containers, and gets items, entries and a state."""

    def __reduce__(self):
        evil = Evil()
        return (fractions.Fraction, ([evil, (evil,)], {1: evil}), {"x": evil}, iter([evil]), iter([("k", evil)]))


def test_what_is_not_permitted_is_opaque() -> None:
    """Nothing of it runs, whatever the pickle does with it, and what is beside it is read."""
    evil = Evil()
    value = {"w": torch.ones(2), "keyed": Keyed(), "set": {1, 2}, "deep": [evil, {evil: 1, (1, evil): 2, "t": [3]}]}
    file = read(saved(value), lenient=True)
    assert RAN == []
    assert file.object(file.value["set"], "set").value == {1, 2}
    assert file.value["deep"][1].pop("t") == [3]
    for key in ("keyed", "deep"):
        with pytest.raises(UnsafeCheckpointError, match=rf"^{key} can't be read.*Fraction.*run"):
            file.object(file.value[key], key)
    with pytest.raises(UnsafeCheckpointError, match="not unpickled"):
        read(saved({"w": torch.ones(2), "x": Bomb(), "y": evil}), lenient=True)
    assert RAN == []


def test_pickles_that_would_fill_the_memory_are_not_run() -> None:
    with pytest.raises(
        UnsafeCheckpointError, match=r"model\.pt was not unpickled: .*damaged, or was changed.*trust=True"
    ):
        read(saved({"w": torch.ones(2), "x": Bomb()}))


@pytest.mark.parametrize(
    "deep",
    [b")" + b"\x85" * 10_001, b"]" * 10_002 + b"a" * 10_001, b"}" + b"K\x01}" * 10_001 + b"s" * 10_001],
    ids=["tuples", "lists", "dicts"],
)
def test_containers_nested_too_deep_are_refused_by_name(deep: bytes) -> None:
    blob = repacked(saved({}), changed={"data.pkl": b"\x80\x02" + deep + b"."})
    with pytest.raises(UnsafeCheckpointError, match=r"in model\.pt was not unpickled: it nests containers deeper"):
        read(blob)
    with pytest.raises(LoadError, match=r"model\.pt nests its containers too deep"):
        read(blob, trust=True)


def test_a_class_that_needs_values_is_not_reported_as_damage() -> None:
    with pytest.raises(LoadError, match=r"without the values of its tensors.*torch\.load") as caught:
        read(saved({"a": Summing()}), trust=True)
    assert type(caught.value) is LoadError


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.ones(3).as_subclass(Sub), "Sub"),
        (lambda: torch.empty(3, device="meta"), "no bytes"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["coo", "csr", "subclass", "meta", "quantized", "nested"],
)
@pytest.mark.parametrize(
    ("protocol", "options"), [(2, {"safe_globals": [Sub]}), (2, {"trust": True}), (4, {"trust": True})], ids=str
)
@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|nested|Nested|quantize|TypedStorage).*")
def test_tensors_that_are_not_one_run_of_bytes(make: Any, kind: str, protocol: int, options: dict[str, Any]) -> None:
    blob = saved({"odd": make(), "plain": torch.arange(5)}, pickle_protocol=protocol)
    with pytest.raises(LoadError, match=rf"model\.pt: .*{kind}.*torch\.load"):
        file = read(blob, **options)
        assert torch.equal(cut_out(blob, file.entry(file.value["plain"])), torch.arange(5))
        file.entry(file.value["odd"], "odd")


def test_sparse_stand_ins_do_not_disturb_the_next_load() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blob = saved(torch.eye(3).to_sparse())
        read(blob)
        with torch.sparse.check_sparse_tensor_invariants():
            assert torch.equal(torch.load(io.BytesIO(blob)).to_dense(), torch.eye(3))


def test_objects_with_tensors_inside_are_found() -> None:
    box = Plain("x")
    box.weights = torch.ones(2)
    stored = {"box": box, "storage": torch.ones(2).untyped_storage(), "set": {1}, "text": Plain("y"), "lambda": None}
    value = read(saved(stored), trust=True).value
    assert holds_tensors(value["box"])
    assert holds_tensors(value["storage"])
    assert holds_tensors([(value["box"],)])
    assert holds_tensors(lambda: None)
    assert not holds_tensors(value["set"])
    assert not holds_tensors(value["text"])


def test_files_of_other_kinds_are_refused() -> None:
    legacy = saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(LoadError, match=r"before 1\.6.*torch\.load.*save it again"):
        read(legacy.replace(b"storage", b"storehs"))
    with pytest.raises(LoadError, match=r"without data\.pkl"):
        read(repacked(saved(torch.ones(2)), left_out="data.pkl"))
    with pytest.raises(LoadError, match="byte order b'big'"):
        read(repacked(saved(torch.ones(2)), changed={"byteorder": b"big"}))
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        read(repacked(saved(torch.ones(2)), compression=zipfile.ZIP_DEFLATED))
    for junk in (b"", b"P", b"x" * 1000, b"\x80\x04N.", b"PK\3\4" + b"x" * 100):
        with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
            read(junk)


def pickled_view(offset: int, size: tuple[int, ...], stride: tuple[int, ...], numel: int = 10) -> bytes:
    """Return a file of ten floats whose pickle has another view of them."""
    view = torch.arange(10.0)
    blob = saved(view)
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        pickle = archive.read("archive/data.pkl")

    def number(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    # The number of elements, the storage, then offset, size and stride.
    real = b"K\ntq\x05QK\x00K\n\x85q\x06K\x01\x85q\x07"
    assert real in pickle
    other = number(numel) + b"tq\x05Q" + number(offset) + numbers(size) + b"q\x06" + numbers(stride) + b"q\x07"
    return repacked(blob, changed={"data.pkl": pickle.replace(real, other)})


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (11,), (1,)), (1, (10,), (1,)), (0, (2, 5), (6, 1)), (10, (1,), (1,)), (9, (10,), (-1,)), (0, (5,), (3,))],
)
def test_views_beyond_their_storage_are_corrupt(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"model\.pt: w with sizes .* 40 bytes"):
        file = read(pickled_view(offset, size, stride), trust=True)
        file.entry(file.value, "w")
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match=r"model\.pt"):
        file = read(pickled_view(offset, size, stride))
        file.entry(file.value, "w")


def test_views_within_their_storage_are_read() -> None:
    for offset, size, stride in [
        (0, (10,), (1,)),
        (3, (7,), (1,)),
        (1, (3, 3), (3, 1)),
        (9, (4,), (0,)),
        (10, (0,), (1,)),
    ]:
        file = read(pickled_view(offset, size, stride))
        assert file.entry(file.value).chunks[0].item.storage_offset == offset
    with pytest.raises(CorruptCheckpointError, match="has 40 bytes, where a storage of 44 bytes"):
        read(pickled_view(0, (1,), (1,), numel=11), trust=True)
    with pytest.raises(LoadError, match="44 bytes"):
        read(pickled_view(0, (1,), (1,), numel=11))
    with pytest.raises(CorruptCheckpointError, match=r"record data/0 of model\.pt is missing"):
        read(repacked(saved(torch.ones(2)), left_out="data/0"), trust=True)


def test_one_storage_with_two_lengths_is_corrupt() -> None:
    base = torch.arange(10.0)
    blob = saved([base, base[2:]])
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        pickle = archive.read("archive/data.pkl")
    first, last, end = pickle.split(b"K\nt", 2)
    changed = repacked(blob, changed={"data.pkl": first + b"K\nt" + last + b"K\x09t" + end})
    with pytest.raises(CorruptCheckpointError, match=r"gives the storage 0 both 40 and 36 bytes"):
        read(changed, trust=True)
    with pytest.raises(LoadError, match=r"model\.pt"):
        read(changed)


def test_records_beyond_the_end_of_the_file_are_corrupt() -> None:
    blob = bytearray(repacked(saved(torch.arange(10.0))))
    entry = blob.rindex(b"archive/data/0") - 46
    assert blob[entry : entry + 4] == b"PK\1\2"
    struct.pack_into("<2I", blob, entry + 20, 10_000, 10_000)
    with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
        read(bytes(blob))


def test_two_records_of_one_name_are_corrupt() -> None:
    sink = io.BytesIO(repacked(saved(torch.arange(10.0))))
    with zipfile.ZipFile(sink, "a") as archive:
        archive.writestr("other/data/0", bytes(40))
    with pytest.raises(CorruptCheckpointError, match=r"model\.pt has two records of one name"):
        read(sink.getvalue())


def test_truncation_anywhere_is_found() -> None:
    blob = saved({"a": torch.arange(5), "b": torch.ones(3)})
    for length in range(len(blob)):
        with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
            read(blob[:length])


def test_a_flip_anywhere_is_found_or_harmless() -> None:
    """Each flipped bit is found by the read or by a tensor's CRC, or changes no tensor."""
    state = {"a": torch.arange(5), "b": torch.ones(3, 2).T}
    blob = saved(state)
    generator = random.Random(5)
    found = 0
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << generator.randrange(8)
        try:
            file = read(bytes(damaged))
            entries = {key: file.entry(value) for key, value in file.value.items()}
        except LoadError:
            found += 1
            continue
        for key, entry in entries.items():
            item, place = entry.chunks[0].item, entry.chunks[0].place
            payload = bytes(damaged[place.offset : place.offset + place.length])
            assert (item.dtype, item.shape, item.stride) == (state[key].dtype, state[key].shape, state[key].stride())
            if item.crc is None or zlib.crc32(payload) == item.crc:
                assert raw_bytes(torch.frombuffer(bytearray(payload), dtype=torch.uint8)) == payload
                assert payload == raw_bytes(torch.as_strided(state[key], (state[key].numel(),), (1,)))
    assert found > len(blob) // 4


@examples(200)
@given(data=st.binary(max_size=300), at=st.integers(0, 400), cut=st.integers(0, 400))
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_any_pickle_raises_our_errors_only(data: bytes, at: int, cut: int) -> None:
    with zipfile.ZipFile(io.BytesIO(FUZZED)) as archive:
        pickle = archive.read("archive/data.pkl")
    damaged = pickle[:at] + data + pickle[at + cut :]
    try:
        file = read(repacked(FUZZED, changed={"data.pkl": damaged}))
        if isinstance(file.value, torch.Tensor):
            file.entry(file.value)
    except LoadError:
        pass


FUZZED = saved(OrderedDict(a=torch.arange(4), b=[torch.ones(2, 2), {"x": 1}]))
