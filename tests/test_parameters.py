"""The facades' options: declared once, and shown by `inspect.signature`, `help` and error messages."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiockpt
from aiockpt.engine.requests import LoadRequest, OpenRequest, SaveRequest
from aiockpt.manager.requests import RestoreRequest
from aiockpt.options import CheckpointerOptions, SaveOptions
from aiockpt.reading.reader import ReadMany, ReadOne, Stream

KINDS = [aiockpt.AsyncCheckpointer, aiockpt.SyncCheckpointer]
MANAGERS = [aiockpt.CheckpointManager, aiockpt.SyncCheckpointManager]
METHODS = [
    *((kind, "__init__", CheckpointerOptions) for kind in KINDS),
    *((kind, "save", SaveRequest) for kind in KINDS),
    *((kind, "load", LoadRequest) for kind in KINDS),
    *((kind, "open", OpenRequest) for kind in KINDS),
    (aiockpt.SyncCheckpointer, "submit", SaveRequest),
    *((kind, "read", ReadOne) for kind in (aiockpt.CheckpointReader, aiockpt.SyncCheckpointReader)),
    *((kind, "read_many", ReadMany) for kind in (aiockpt.CheckpointReader, aiockpt.SyncCheckpointReader)),
    *((kind, "stream", Stream) for kind in (aiockpt.CheckpointReader, aiockpt.SyncCheckpointReader)),
    *((kind, "restore", RestoreRequest) for kind in MANAGERS),
]


def test_the_replacements_for_calls_of_other_libraries_exist() -> None:
    """Every method and parameter in the right columns of the tables of the page."""
    kinds = {"ckpt": aiockpt.SyncCheckpointer, "save": aiockpt.SaveHandle(".", None, 0.0)}  # type: ignore[arg-type]
    page = (Path(aiockpt.__file__).parent / "docs/migrating.md").read_text()
    tables = page.partition("## From torch.distributed.checkpoint")[2].partition("## From Lightning")[0]
    rows = [line.split(" | ")[1] for line in tables.splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    used = [found for row in rows for found in re.findall(r"\b(ckpt|save)\.(\w+)(?:\((.*?)\)(?:$|,| |`))?", row)]
    assert len(used) > 15
    for owner, name, arguments in used:
        method = getattr(kinds[owner], name)
        if arguments:
            assert set(re.findall(r"(\w+)=", arguments)) <= set(inspect.signature(method).parameters), name


# Numbers that are no durations.
NO_DURATIONS = {
    "bandwidth",
    "bytes_per_s",
    "factor",
    "luck",
    "newest_time",
    "now",
    "since",
    "started",
}


def test_durations_have_one_suffix() -> None:
    """Or are a ``timeout``, as in the standard library; that of a policy, which has no other option, is ``seconds``."""
    names = {
        name
        for public in (getattr(aiockpt, name) for name in aiockpt.__all__)
        if inspect.isclass(public)
        for call in (public, *(value for name, value in inspect.getmembers(public, callable) if name[0] != "_"))
        for name, parameter in _parameters(call).items()
        if str(parameter.annotation) in ("float", "float | None", "<class 'float'>")
    }
    assert {"grace_s", "drain_timeout", "timeout", "patience_s"} <= names
    durations = names - NO_DURATIONS - {"seconds", "time", "timeout"}
    assert {name for name in durations if not name.endswith(("_s", "_timeout"))} == set()


def _parameters(call: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # of an extension
        return {}


@pytest.mark.parametrize(("kind", "name", "request_type"), METHODS)
def test_signature_and_help_have_every_option(kind: Any, name: str, request_type: type[Any]) -> None:
    method = getattr(kind, name)
    signature = inspect.signature(method)
    assert sorted(signature.parameters) == sorted(["self", *inspect.signature(request_type).parameters])
    for each in fields(request_type):
        assert f"\n    {each.name}: " in method.__doc__, each.name
        assert signature.parameters[each.name].annotation == each.type
    assert method.__doc__.count("Args:") == 1
    assert "\n\nArgs:\n    " in method.__doc__
    assert method.__name__ == name


@pytest.mark.parametrize(
    ("method", "first"),
    [
        *(
            (kind, ["directory", "keep", "save", "read_only"])
            for kind in (*MANAGERS, *(each.__init__ for each in MANAGERS))
        ),
        *((kind.save, ["self", "step", "state_dict", "metrics", "overwrite"]) for kind in MANAGERS),
        *((kind.load, ["self", "path", "state_dict", "map_location", "keys", "dtype", "strict"]) for kind in KINDS),
        *((kind, ["on_busy", "max_in_flight", "on_failure"]) for kind in KINDS),
    ],
)
def test_what_everybody_needs_comes_first(method: Any, first: list[str]) -> None:
    names = list(inspect.signature(method).parameters)
    assert (names if isinstance(method, type) or first[0] == "self" else names[1:])[: len(first)] == first
    text = pydoc.render_doc(method, renderer=pydoc.plaintext)
    shown = [text.index(f"    {name}: ") for name in names if name != "self"]
    assert isinstance(method, type) or shown == sorted(shown), "the text is in another order"


def test_the_state_and_the_path_may_be_named_and_options_must_be() -> None:
    parameters = inspect.signature(aiockpt.AsyncCheckpointer.save).parameters
    assert [parameters[name].kind.name for name in ("state_dict", "path")] == ["POSITIONAL_OR_KEYWORD"] * 2
    assert all(parameters[each.name].kind.name == "KEYWORD_ONLY" for each in fields(SaveOptions))


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"SyncCheckpointer.__init__\(\) got an unexpected keyword argument 'nice'"):
        aiockpt.SyncCheckpointer(nice=3)
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(TypeError, match=r"SyncCheckpointer.submit\(\) got .* 'overwrit'"):
            ckpt.submit({}, "a", overwrit=True)
        with pytest.raises(TypeError, match=r"SyncCheckpointer.save\(\) missing a required argument: 'path'"):
            ckpt.save({})
        with pytest.raises(TypeError, match=r"SyncCheckpointer.load\(\) too many positional arguments"):
            ckpt.load("a", {}, "cpu")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"devices": "cpu"}, TypeError, r"AsyncCheckpointer.load\(\) got .* 'devices'"),
        ({"keys": [5]}, TypeError, "keys must be names and patterns"),
        ({"missing": 3}, TypeError, "missing must be a list"),
        ({"state_dict": {}, "mmap": True}, ValueError, "mmap=True returns tensors"),
        ({"path": b"a"}, TypeError, "path must be text"),
        ({"path": {"w": 1}}, TypeError, "path must be text or an os.PathLike of text, not a dict"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_of_a_load_fails_at_the_call(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        aiockpt.AsyncCheckpointer().load(**{"path": "a", **options})


@pytest.mark.parametrize("value", ["no", "false", None, 2])
def test_a_flag_is_true_or_false(value: Any, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": 1}, tmp_path / "c")
        with pytest.raises(TypeError, match=rf"SyncCheckpointer.save\(\) overwrite must be True or .*, not {value!r}"):
            ckpt.save({"x": 2}, tmp_path / "c", overwrite=value)
        with pytest.raises(TypeError, match=r"SyncCheckpointer.load\(\) trust must be True or False"):
            ckpt.load(tmp_path / "c", trust=value)
        assert ckpt.load(tmp_path / "c", trust=np.True_, verify=1) == {"x": 1}
    with pytest.raises(TypeError, match=r"CheckpointManager.* lock must be True or False"):
        aiockpt.CheckpointManager(tmp_path / "run", lock=value)
    with pytest.raises(TypeError, match=r"SyncCheckpointer.* fsync must be True or False"):
        aiockpt.SyncCheckpointer(fsync=value)


@pytest.mark.asyncio
async def test_a_load_begins_when_it_is_awaited(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        load = ckpt.load(tmp_path / "c")
        await ckpt.save({"x": 1}, tmp_path / "c")
        assert await load == {"x": 1}
