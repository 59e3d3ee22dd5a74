"""Open the files that a CUDA device opens once in a process, before leaks are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.fakecuda import device as fake
from tests.ranks.world import start_server

NOT_ON_THE_FAKE_DEVICE = {
    "test_compiled_training_with_a_guard": "the compiler makes kernels of its own",
    "test_a_tensor_above_4_gib": "takes 12 GiB of host memory",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = NOT_ON_THE_FAKE_DEVICE.get(item.name) if fake.is_here() else None
        if reason is not None and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=f"on the fake device: {reason}"))


@pytest.fixture(autouse=True)
def means_something() -> Iterator[None]:
    """On the fake device, check that the engine used it as CUDA, and did nothing that it can't do or must not."""
    yield
    if fake.is_here():
        fake.check()


@pytest.fixture(autouse=True)
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--check-order``, prove that all accesses of a test to the device's memory have an order."""
    if not request.config.getoption("check_order") or request.node.get_closest_marker("unordered"):
        yield
        return
    # Here: torch's sanitizer, which this imports, turns on a trace of the device for good. The trace calls Python where
    # memory is freed, and if that is on the way of an error out of an operator, the error is lost (SystemError).
    from tests.ordering import watch_cuda

    with watch_cuda() as checker:
        yield
    checker.check()


@pytest.fixture(scope="session", autouse=True)
def server_of_worlds() -> None:
    """Start the server that ranks are forked from, which has no context of CUDA, before children are counted."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def warm_devices(warm: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not torch.cuda.is_available():
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    state = {f"w{device.index}": torch.ones(300, 300, device=device) for device in devices}
    for tensor in state.values():
        (tensor @ tensor).sum().item()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path_factory.mktemp("warm") / "c")
