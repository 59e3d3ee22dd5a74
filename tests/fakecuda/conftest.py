"""The fake device, for each test as new."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

import aiockpt
from aiockpt.staging import runtime
from tests.fakecuda import device as fake


@pytest.fixture(scope="session", autouse=True)
def ready(warm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the contexts of both devices, after `warm`: their threads and files are there before leaks are counted."""
    if not fake.is_here():
        pytest.skip("the fake CUDA device is not here: see README.md")
    if request.config.getoption("check_order"):
        pytest.skip("--check-order is for tests/gpu: torch's trace, which it turns on, loses errors")
    assert "torch.cuda._sanitizer" not in sys.modules, "its import turns on torch's trace, which loses errors"
    state = {str(index): torch.ones(300, 300, device=f"cuda:{index}") for index in range(2)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path_factory.mktemp("ready") / "c")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Mend the context before garbage is collected, else torch's allocator would end the process."""
    if fake.is_here():
        fake.reset()


@pytest.fixture(autouse=True)
def device(ready: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test has set, and check that it has not misused the device."""
    driver = runtime._driver()
    monkeypatch.setattr(driver, "_copy_batch", driver._copy_batch)  # after an error, as of a broken context, it is None
    fake.reset()
    fake.misuses()
    fake.set_seed(1)
    yield
    fake.reset()
    fake.check()
    assert not (left := fake.locked()), f"{left} pieces of host memory are still locked"


@pytest.fixture(params=fake.POSES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of device that the engine takes the fake one for."""
    fake.pose_as(request.param, monkeypatch)
    return request.param
