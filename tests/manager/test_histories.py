"""Random histories of runs: saves, failures, cancellations, kills, damage, deletions, pins, restarts."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.manager.histories import Histories
from tests.places import ServerPath


def check(count: int, machine: Callable[[], Histories] = Histories) -> None:
    """Run histories of up to 30 events each."""
    limits = settings(max_examples=count, stateful_step_count=30, deadline=None, database=None)
    run_state_machine_as_test(machine, settings=settings(limits, suppress_health_check=list(HealthCheck)))


def test_directory_and_restores_match_the_model() -> None:
    check(15)


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.full)])
def test_server_and_restores_match_the_model(count: int, server_url: str) -> None:
    check(count, lambda: Histories(ServerPath(f"{server_url}/{uuid.uuid4().hex}")))


@pytest.mark.full
def test_thousand_histories() -> None:
    check(1000)
