"""Following a run in an object store."""

from __future__ import annotations

import itertools

import torch

import aiockpt
from aiockpt.storage import storage_for
from benchmarks.harness.object_server import ObjectServer
from tests.objects.buckets import Bucket


def test_a_poll_takes_two_requests_at_most(bucket: Bucket, server: ObjectServer) -> None:
    polls = itertools.count()

    def until() -> bool:
        if (poll := next(polls)) == 0:
            server.rules()
        return poll == 3

    into = {"x": torch.zeros(1000), "frozen": torch.zeros(1000)}
    with bucket.checkpointer() as ckpt:
        for step in range(3):
            state = {"x": torch.full((1000,), float(step)), "frozen": torch.arange(1000.0)}
            ckpt.save(state, bucket / f"run/step-{step:08}", hashes=True)
    with aiockpt.watch_sync(bucket / "run", storage_options=bucket.options, poll_s=0.01, until=until) as versions:
        steps = []
        for version in versions:
            assert set(version.load(into)) == {"x", "frozen"}
            assert torch.equal(into["x"], state["x"])
            steps.append(version.step)
            with bucket.checkpointer() as ckpt:
                ckpt.save(state, bucket / "run/notes")  # no step
    assert steps == [2]
    assert len(server.log) <= 2 * 3, server.log


def test_a_folder_that_becomes_a_checkpoint_is_one_at_the_next_look(bucket: Bucket) -> None:
    storage, path = storage_for(bucket / "run", **bucket.options)
    with bucket.checkpointer() as ckpt:
        ckpt.save({"x": torch.zeros(10)}, bucket / "run/inner")
        for _ in range(2):
            with storage.look(path) as listing:
                assert (listing.folders, list(listing.files)) == (["inner"], [])
        ckpt.delete(bucket / "run/inner")
        ckpt.save({"x": torch.ones(10)}, bucket / "run")
        with storage.look(path) as listing:
            assert ".metadata" in listing.files
