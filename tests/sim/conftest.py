"""The simulated device, for each test as new; and the tests are skipped where it is not built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim import device as sim


@pytest.fixture(scope="session", autouse=True)
def built(warm: None) -> None:
    """Register the device, after `warm`: its threads and files are there before leaks are counted."""
    if reason := sim.missing():
        pytest.skip(reason)
    sim.extension()


@pytest.fixture(autouse=True)
def device(built: None) -> Iterator[None]:
    """Undo what a test has set, and check that it has not misused the device."""
    sim.reset()
    sim.set_seed(1)
    yield
    misuses, left = sim.misuses(), sim.statistics()["registered"]
    sim.reset()
    assert not misuses
    assert not left, f"{left} pieces of host memory are still locked"


@pytest.fixture(params=["locked", "pageable"])
def locking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether staging locks its memory. If not, as `torch.accelerator` has no call for it, copies are not async."""
    if request.param == "locked":
        sim.lock_memory(monkeypatch)
    return request.param
