"""Random programs that save while they train on the fake CUDA device; runner.py runs them, and checks what they save.

Most of a program are scenes, in which the device holds the copies of a save while the program goes on, so that its
steps overlap the save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fakecuda import device as fake

CHUNK = 64 << 10
STREAMS = 3  # of the program, on each device

KINDS = {  # dtype, shape, device, and how the saved tensor lies in its memory
    "large": (torch.int32, (61_000,), "cuda:0", ""),
    "larger": (torch.int32, (130, 1000), "cuda:0", ""),
    "middle": (torch.int32, (20_000,), "cuda:0", ""),
    "small": (torch.int32, (100,), "cuda:0", ""),
    "strided": (torch.int32, (150, 300), "cuda:0", "strided"),
    "transposed": (torch.int64, (100, 170), "cuda:0", "transposed"),
    "conjugated": (torch.complex64, (9_000,), "cuda:0", "conjugated"),
    "other device": (torch.int32, (30_000,), "cuda:1", ""),
    "host": (torch.int32, (30_000,), "cpu", ""),
    "parameter": (torch.float32, (25_000,), "cuda:0", ""),
    "matrix": (torch.float32, (200, 120), "cuda:0", ""),
}


@dataclass(frozen=True)
class Action:
    """One line of a program: a method of the runner, and its numbers."""

    what: str
    which: int = 0  # of the tensors, the saves or the streams there are, modulo their number
    value: int = 1


@dataclass(frozen=True)
class Program:
    """A program, and the device that it runs on."""

    seed: int  # of the delays
    delays: dict[str, int]  # by kind of task, in microseconds at most
    launch_us: int  # that each launch by an operator on many tensors takes at most
    kind: str  # what the engine takes the device for
    refuses: str  # a call that this driver does not know; or none
    options: dict[str, Any]
    tensors: list[str]
    actions: list[Action]


STEPS = ["add", "scale a part", "add to all", "copy", "step", "guarded step", "step on all streams"]
CHANGES = [*STEPS, "free", "replace", "load into", "replay"]
WAITS = ["fence", "fence all", "staged", "written", "cancel", "compute", "let go"]
OTHERS = ["load", "use", "stream", "full save", "busy", "save", "hold"]

_numbers = {"which": st.integers(0, 11), "value": st.integers(1, 9)}


def _one(*names: str) -> st.SearchStrategy[Action]:
    return st.builds(Action, st.sampled_from(names), **_numbers)


@st.composite
def _save_behind_work(draw: st.DrawFn) -> list[Action]:
    """A save right behind changes that a busy stream has not made yet."""
    return [Action("busy", 0, draw(st.integers(4, 9))), draw(_one(*STEPS)), Action("save", 0, 1), draw(_one(*WAITS))]


@st.composite
def _steps_behind_a_fence(draw: st.DrawFn) -> list[Action]:
    """Steps on several streams behind a fence, while the copies are held."""
    fence = draw(st.sampled_from([Action("fence"), Action("fence all"), Action("guarded step")]))
    steps = draw(st.lists(_one(*STEPS, "stream"), min_size=1, max_size=3))
    return [Action("hold"), draw(_one("save")), fence, *steps, Action("let go")]


@st.composite
def _freed_behind_a_save(draw: st.DrawFn) -> list[Action]:
    """Memory that is freed while its copies are held; something else gets it at once."""
    return [Action("hold"), draw(_one("save")), Action("enqueued"), draw(_one("free")), Action("let go")]


@st.composite
def _freed_beside_a_fence(draw: st.DrawFn) -> list[Action]:
    """Memory that is freed while its copies are held, and another stream waits for them."""
    return [Action("hold"), draw(_one("save")), Action("enqueued"), draw(_one("free beside a fence")), Action("let go")]


@st.composite
def _loaded_at_once(draw: st.DrawFn) -> list[Action]:
    """New tensors that are used as soon as they are there, and targets that the program still uses."""
    begin = [draw(_one("save")), Action("written")]
    work = [draw(_one("busy")), draw(_one(*STEPS))]
    return [*begin, *work, draw(_one("load", "use", "load into")), draw(_one("use", "load", "add"))]


@st.composite
def _steps_unordered(draw: st.DrawFn) -> list[Action]:
    """Steps beside a save that nothing orders: it fails as torn, or is whole."""
    return [draw(_one("save")), *draw(st.lists(_one(*STEPS), min_size=1, max_size=2)), draw(_one("staged", "written"))]


_scene = st.one_of(
    _save_behind_work(),
    _steps_behind_a_fence(),
    _freed_behind_a_save(),
    _freed_beside_a_fence(),
    _loaded_at_once(),
    _steps_unordered(),
    st.lists(_one(*CHANGES, *WAITS, *OTHERS), min_size=1, max_size=4),
)
_microseconds = st.sampled_from([0, 0, 100, 1000, 4000])

programs = st.builds(
    Program,
    seed=st.integers(0, 2**32),
    delays=st.fixed_dictionaries(dict.fromkeys(("kernel", "to_host", "from_host", "register"), _microseconds)),
    launch_us=st.sampled_from([0, 1000, 20_000]),
    kind=st.sampled_from(["CUDA"] * 5 + list(fake.POSES)),
    refuses=st.sampled_from(["", "", "", "", "cuMemHostRegister_v2", "cuMemcpyBatchAsync"]),
    options=st.fixed_dictionaries(
        {
            "chunk_bytes": st.sampled_from([CHUNK, 8 * CHUNK]),
            "staging_bytes": st.sampled_from([2 * CHUNK, 6 * CHUNK, 64 * CHUNK, 64 * CHUNK]),
            "validate": st.sampled_from(["versions", "versions", "hash"]),
            "max_in_flight": st.integers(1, 3),
        }
    ),
    tensors=st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=6),
    actions=st.lists(_scene, min_size=2, max_size=4).map(lambda scenes: [action for some in scenes for action in some]),
)

_QUICK = {"staging_bytes": 64 * CHUNK, "chunk_bytes": 8 * CHUNK, "validate": "versions", "max_in_flight": 1}


def _known(tensors: list[str], actions: list[Action], *, launch_us: int = 0, **delays: int) -> Program:
    return Program(1, delays, launch_us, "CUDA", "", _QUICK, tensors, actions)


KNOWN = {
    "an operator counts its changes late": _known(
        ["large", "larger", "matrix", "strided"], [Action("save"), Action("add to all")], launch_us=20_000
    ),
    "memory is freed under its copies": _known(
        ["large", "larger", "matrix"],
        [Action("busy", 0, 9), Action("save"), Action("compute", 0, 6), Action("free", 0, 3)],
        to_host=4000,
    ),
    "memory is freed while another stream waits": _known(
        ["large", "larger"], [Action("hold"), Action("save"), Action("enqueued"), Action("free beside a fence", 0, 5)]
    ),
    "steps follow a fence while copies are held": _known(
        ["large", "larger"],
        [Action("hold"), Action("save"), Action("fence all"), Action("add"), Action("add", 1), Action("let go")],
    ),
    "targets are used until they are filled": _known(
        ["large", "larger"],
        [Action("save"), Action("written"), Action("busy", 0, 9), Action("add"), Action("add", 1), Action("load into")],
    ),
    "a loaded tensor is dropped while it is read": _known(
        ["large", "larger", "middle"],
        [Action("save"), Action("written"), *[Action("busy", 0, 3), Action("use")] * 4],
        kernel=4000,
    ),
    "small tensors are freed in another stream": _known(
        ["small", "matrix"],
        [Action("stream", 1), Action("busy", 0, 9), Action("save"), Action("free", 0)],
        kernel=4000,
    ),
    "a capture before the first save": _known(
        ["large"], [Action("replay"), Action("save"), Action("fence"), Action("replay")]
    ),
}
"""Programs that have found something once, a defect of the engine or a mutant."""
