"""The checkpointer of plug-ins."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from aiockpt.integrations import saves
from aiockpt.integrations.saves import Lifetime
from tests.polling import until

STATE = {"x": torch.arange(10_000.0)}


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


def test_it_begins_and_ends_any_number_of_times(tmp_path: Path) -> None:
    held = Lifetime()
    held.end()
    for number in range(2):
        held.checkpointer.save(STATE, tmp_path / str(number))
        held.end()
        held.end()
        assert not _threads()


def test_it_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "IDLE_S", 0.05)
    held = Lifetime()
    held.checkpointer.save(STATE, tmp_path / "a")
    until(lambda: not _threads())
    assert held.checkpointer.verify(tmp_path / "a").ok
    held.end()


def test_copies_have_their_own(tmp_path: Path) -> None:
    held = Lifetime(on_busy="skip")
    first = held.checkpointer
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert other.checkpointer is not first
        assert other.checkpointer._options.on_busy == "skip"
        other.end()
    held.end()


def test_a_wrong_option_fails_at_once() -> None:
    with pytest.raises(TypeError, match="on_bussy"):
        Lifetime(on_bussy="skip")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking a process with threads
def test_a_forked_process_has_its_own(tmp_path: Path) -> None:
    held = Lifetime()
    held.checkpointer.save(STATE, tmp_path / "parent")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            held.checkpointer.save(STATE, tmp_path / "child")
            held.end()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert held.checkpointer.verify(tmp_path / "child").ok
    held.end()


@pytest.mark.slow
def test_no_framework_is_imported_with_the_package() -> None:
    code = (
        "import sys, aiockpt, aiockpt.integrations.saves\n"
        "print({'ray', 'lightning', 'pytorch_lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
