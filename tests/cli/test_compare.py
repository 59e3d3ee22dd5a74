import math
from collections import OrderedDict
from decimal import Decimal

import numpy as np
import pytest
import torch

from aiockpt.cli import statistics
from aiockpt.cli.diff import TensorDifference, Tolerance, same_objects

NAN, INF = math.nan, math.inf
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def compared(a, b, relative=0.0, absolute=0.0, dtypes=(None, None)):
    found = TensorDifference(Tolerance(relative, absolute))
    found.add(
        *(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=t) for x, t in zip((a, b), dtypes, strict=True))
    )
    return found.differing, found.max_abs, found.max_rel, found.nan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared(dtype):
    a = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype)
    b = torch.tensor([0, 1, 0, 0, 1, 1]).to(dtype)
    assert compared(a, a.clone()) == (0, None, None, 0)
    assert compared(a, b) == (2, 1, 1, 0)


def test_dtypes_without_arithmetic_are_compared_by_bits():
    a = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.arange(8, dtype=torch.uint8).flip(0).view(torch.float4_e2m1fn_x2)
    assert compared(a, a.clone()) == (0, None, None, 0)
    assert compared(a, b) == (8, None, None, 0)


def test_values_are_compared_by_bits_without_tolerance():
    assert compared([NAN, 0.0], [NAN, 0.0])[0] == 0
    assert compared([NAN, 2.0], [1.0, 3.0]) == (2, 1.0, 1 / 3, 1)
    assert compared([0.0], [-0.0]) == (1, 0.0, 0.0, 0)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)  # a NaN with another payload
    assert compared(torch.tensor([NAN]), other) == (1, None, None, 1)
    assert compared(torch.tensor([NAN]), other, absolute=1e-9)[0] == 0


def test_infinities():
    assert compared([INF, -INF], [INF, -INF])[0] == 0
    assert compared([INF, 1.0], [-INF, INF]) == (2, INF, INF, 0)
    assert compared([INF], [1.0], relative=0.5)[0] == 1


def test_tolerances_are_those_of_math_isclose():
    numbers = [0.0, 1e-9, 1.0, 1.001, -1.0, 100.0, 101.0, 1e300, NAN]
    for relative, absolute in [(0.005, 0.0), (0.0, 0.01), (0.02, 1.5), (1e-12, 0.0)]:
        for x in numbers:
            for y in numbers:
                close = math.isclose(x, y, rel_tol=relative, abs_tol=absolute) or (x != x and y != y)
                found = compared([x], [y], relative, absolute, (torch.float64,) * 2)
                assert (found[0] == 0) == close, (x, y, relative, absolute)


def test_values_of_different_dtypes_are_compared():
    assert compared([1.0, NAN, INF], [1.0, NAN, INF], dtypes=(torch.float32, torch.bfloat16))[0] == 0
    assert compared([1, 2], [1.0, 2.5], dtypes=(torch.int64, torch.float16)) == (1, 0.5, 0.2, 0)
    assert compared([1.0], [1 + 2j], dtypes=(torch.float32, torch.complex64))[:2] == (1, 2.0)
    assert compared([True, False], [1, 1], dtypes=(torch.bool, torch.uint8))[0] == 1


def test_large_integers_differ_exactly():
    assert compared([2**62 + 1], [2**62]) == (1, 1.0, pytest.approx(2**-62), 0)
    assert compared([-(2**63)], [2**63 - 1])[:2] == (1, 2.0**64)


def test_layouts_and_shapes(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 7)
    a = torch.arange(60.0).reshape(3, 4, 5)
    assert compared(a, a.permute(2, 1, 0).contiguous().permute(2, 1, 0))[0] == 0
    b = a.clone()
    b[2, 3, 4] = b[0, 0, 1] = 9
    assert compared(a, b) == (2, 50.0, 8 / 9, 0)
    assert compared(torch.tensor(3.0), torch.tensor(4.0))[0] == 1
    assert compared(torch.zeros(0, 3), torch.zeros(0, 3))[0] == 0
    z = torch.tensor([1 + 2j])
    assert compared(z.conj(), torch.tensor([1 - 2j]))[0] == 0


CYCLE = []
CYCLE.append(CYCLE)
DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": [1, 2.5, NAN, None, "x"], "b": (True, b"x")},
        lambda: OrderedDict(a={1, 2}, b=Decimal("1.5")),
        lambda: np.array([1.0, NAN]),
        lambda: np.array([{"a": NAN}, "x"], dtype=object),
        lambda: [torch.tensor([1.0, NAN]), torch.eye(2).to_sparse(), slice(1, 2)],
        lambda: CYCLE,
        lambda: DEEP,
    ],
)
def test_equal_objects(make):
    assert same_objects(make(), make(), Tolerance())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ([1], (1,)),
        ([1, 2], [1]),
        (1, True),
        (1, 1.0),
        ([{"x": [1.0]}], [{"x": [1.5]}]),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([1, 2], dtype=np.int32)),
        (np.array(["a", [1]], dtype=object), np.array(["a", [2]], dtype=object)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.zeros(2)),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.eye(2).to_sparse(), torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse()),
        (slice(1), slice(2)),
        ({1, 2}, {1, 3}),
    ],
)
def test_unequal_objects(a, b):
    assert not same_objects(a, b, Tolerance())


def test_tolerance_applies_to_numbers_in_objects():
    assert same_objects({"lr": 0.1}, {"lr": 0.1 + 1e-12}, Tolerance(relative=1e-6))
    assert not same_objects({"lr": 0.1}, {"lr": 0.1 + 1e-12}, Tolerance())


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta", "ignore:.*quantiz")
def test_sparse_and_quantized_tensors():
    eye, other = torch.eye(4), torch.eye(4) * 2
    forms = [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.qint8),
        lambda x: torch.quantize_per_channel(x, torch.full((4,), 0.5), torch.zeros(4), 0, torch.qint8),
    ]
    for number, form in enumerate(forms):
        assert same_objects(form(eye), form(eye.clone()), Tolerance())
        assert not same_objects(form(eye), form(other), Tolerance())
        assert not same_objects(form(eye), forms[number - 1](eye), Tolerance())
    half = torch.quantize_per_tensor(eye, 0.25, 3, torch.qint8)
    assert not same_objects(torch.quantize_per_tensor(eye / 2, 0.125, 3, torch.qint8), half, Tolerance())


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta", "ignore:.*quantiz")
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: torch.quantize_per_tensor(x, x.max().item() / 100, 3, torch.qint8),
    ],
)
def test_tolerance_applies_to_values_of_sparse_and_quantized_tensors(form):
    a, b = form(torch.eye(4) * 2.0), form(torch.eye(4) * 2.0001)
    assert not same_objects([a], [b], Tolerance())
    assert not same_objects([a], [b], Tolerance(relative=1e-6))
    assert same_objects([a], [b], Tolerance(relative=0.01))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:.*quantiz")
def test_tolerance_applies_to_no_places_of_values_and_to_no_quantized_numbers():
    tolerance = Tolerance(relative=0.01)
    a, b = (torch.sparse_coo_tensor([[place]], [1.0], (300,)) for place in (200, 201))
    assert not same_objects(a, b, tolerance)
    a, b = (torch.quantize_per_tensor(torch.tensor([value]), 1.0, 100, torch.quint8) for value in (0.0, 1.0))
    assert not same_objects(a, b, tolerance)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_nan_of_sparse_tensors():
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    a, b = (torch.sparse_coo_tensor([[1]], value.reshape(1), (3,)) for value in bits)
    assert not same_objects(a, b, Tolerance())
    assert same_objects(a, b, Tolerance(absolute=1e-9))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_sparse_tensor_equals_itself_coalesced(dtype):
    whole = torch.sparse_coo_tensor([[2, 0, 2], [1, 0, 1]], torch.ones(3).to(dtype), (3, 3))
    assert same_objects({"x": whole}, {"x": whole.coalesce()}, Tolerance())
    assert same_objects(whole, torch.sparse_coo_tensor(whole._indices().flip(1), whole._values(), (3, 3)), Tolerance())
    assert not same_objects(whole, whole.to_dense().logical_not().to(dtype).to_sparse(), Tolerance())
