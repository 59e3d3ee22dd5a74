"""The parts of a manifest other than its index, read as what they have to be."""

from __future__ import annotations

from typing import Any

from aiockpt.format.dict_keys import FACTORIES, decode_key
from aiockpt.format.item.arrays import ARRAY_RECORD
from aiockpt.format.manifest.manifest import FileFacts, JsonValue

_MAX_BYTES = 1 << 62
_CONTAINER_TYPES = ("dict", "OrderedDict", "Counter", "defaultdict", "list", "tuple", ARRAY_RECORD)


def file_facts(files: Any) -> dict[str, FileFacts]:
    """Read the sizes and CRCs of the files."""
    return {name: FileFacts(_count(facts["bytes"]), _crc(facts["crc32"])) for name, facts in mapping(files).items()}


def mapping(value: Any) -> dict[str, Any]:
    """Make sure that something is a mapping."""
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} stands where a mapping belongs")
    return value


def text(value: Any) -> str:
    """Make sure that something is a text."""
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} stands where a text belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise ValueError("something else stands where a number of bytes belongs")
    return value


def _crc(value: Any) -> int:
    crc = int(text(value)[:9], 16)
    if not 0 <= crc < 1 << 32:
        raise ValueError("something else stands where a CRC belongs")
    return crc


def containers(records: Any) -> list[dict[str, JsonValue]]:
    """Read what is said of the containers of the state dict."""
    if type(records) is not list:
        raise TypeError(f"a {type(records).__name__} stands where the containers belong")
    return [_container(mapping(record)) for record in records]


def _container(record: dict[str, Any]) -> dict[str, JsonValue]:
    path, kind = record["path"], record["type"]
    if type(path) is not list or not set(map(type, path)) <= {str, int} or min(_positions(path), default=0) < 0:
        raise TypeError("a container has something else for its path")
    if kind not in _CONTAINER_TYPES:
        raise ValueError("a container is of a type that is not known")
    read: dict[str, JsonValue] = {"path": path, "type": kind, "at": _count(record["at"])}
    integers = record.get("int_keys")
    if integers is not None:
        # A mapping, so that a key is found in it as fast in a long one.
        read["int_keys"] = integers if integers is True else dict.fromkeys(map(text, integers))
    if "factory" in record:
        if text(record["factory"]) not in FACTORIES:
            raise ValueError("a defaultdict makes its values with something that is not known")
        read["factory"] = record["factory"]
    if "keys" in record:
        read["keys"] = {each: _key(each, key) for each, key in mapping(record["keys"]).items()}
    if "module_metadata" in record:
        read["module_metadata"] = {name: mapping(facts) for name, facts in mapping(record["module_metadata"]).items()}
    return read


def _key(name: str, value: Any) -> JsonValue:
    if str(decode_key(value)) != name:
        raise ValueError("a container has a key that is not the one of its name")
    return value  # type: ignore[no-any-return]


def _positions(path: list[Any]) -> list[int]:
    return [part for part in path if type(part) is int]
