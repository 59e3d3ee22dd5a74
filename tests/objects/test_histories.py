"""Random histories of runs, as in `tests.manager.test_histories`, in an object store by the client that users have."""

from __future__ import annotations

import uuid

import pytest

from benchmarks.harness.object_server import ObjectServer
from tests.manager.histories import Histories
from tests.manager.test_histories import check
from tests.manager.test_rank_histories import match
from tests.objects.buckets import path_in
from tests.ranks.conftest import world2
from tests.ranks.world import World

pytestmark = pytest.mark.usefixtures("forks")

__all__ = ["world2"]


# What a manager does depends little on the requests: in Google's ways fewer histories are enough.
@pytest.mark.parametrize(
    ("scheme", "count"),
    [("s3", 3), *(pytest.param(*each, marks=pytest.mark.full) for each in (("s3", 50), ("gs", 12)))],
)
def test_runs_and_restores_match_the_model(scheme: str, count: int, server: ObjectServer) -> None:
    check(count, lambda: Histories(path_in(server, scheme, uuid.uuid4().hex)))


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.full)])
def test_two_ranks_match_the_model(count: int, world2: World, server: ObjectServer) -> None:
    match(world2, count, {"flip", "delete"}, lambda: path_in(server, "s3", uuid.uuid4().hex))
