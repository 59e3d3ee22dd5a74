"""Dict keys that are not strings: round trips through JSON, and refusal of any other JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from aiockpt.format.keys import check_hashes, decode_key, encode_key, is_key
from aiockpt.format.manifest.reader import containers

KEYS = [1.5, -0.0, 1e300, math.inf, -math.inf, True, None, 7, (), (1, "x"), (1.5, (None, (True, "a.b"))), (math.inf,)]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_keys_survive_json(key: Any) -> None:
    assert is_key(key)
    text = json.dumps(encode_key(key), allow_nan=False)
    again = decode_key(json.loads(text))
    assert repr(again) == repr(key)
    record = {"path": ["d"], "type": "dict", "at": 0, "keys": {str(key): json.loads(text)}}
    assert containers([record])[0]["keys"] == record["keys"]


def test_nan_survives_json() -> None:
    assert math.isnan(decode_key(json.loads(json.dumps(encode_key(math.nan), allow_nan=False))))


@pytest.mark.parametrize("key", [b"x", 2**5000, (1, {2}), object(), [1], (2j,)], ids=lambda key: type(key).__name__)
def test_other_values_are_no_keys(key: Any) -> None:
    assert not is_key(key)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [{"float": "1.5"}, {"float": "nan", "x": 1}, {}, [{"a": 1}], _nested(40), {"float": [1]}], ids=str
)
def test_json_of_no_key_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_key(value)


@pytest.mark.parametrize(
    "keys", [{"1": 1.0}, {"x": True}, {"(1,)": [2]}, {"1.5": [1.5]}, {"nan": None}, [1.5]], ids=str
)
def test_a_key_that_contradicts_its_name_is_refused(keys: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        containers([{"path": ["d"], "type": "dict", "at": 0, "keys": keys}])


def test_keys_with_colliding_hashes_are_refused() -> None:
    check_hashes([*range(-1000, 1000), *(n + 0.5 for n in range(1000)), *((n, n) for n in range(1000))])
    with pytest.raises(ValueError, match="one hash"):
        check_hashes([n * (2**61 - 1) for n in range(1, 1000)])


@pytest.mark.parametrize("factory", ["eval", "", 5, ["list"], "range"], ids=str)
def test_an_unknown_factory_is_refused(factory: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        containers([{"path": ["d"], "type": "defaultdict", "at": 0, "factory": factory}])
