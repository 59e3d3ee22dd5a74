"""Rank 0's work for aiockpt: planning and publishing a save, with the messages of simulated ranks.

The messages have exactly the bytes that real ranks would send. The network and the disk are left out.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from aiockpt.core.strides import row_strides
from aiockpt.format.index import ItemRange
from aiockpt.format.manifest.columnar_index import ItemForm
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.collective.cache import GlobalPlanCache, files_of
from aiockpt.planning.collective.messages import (
    ItemPlaces,
    PlanRequest,
    RankAssignment,
    RankInventory,
    ShardForm,
    Written,
)
from aiockpt.planning.collective.plan import plan_globally
from aiockpt.saving.collective import documents_of_ranks
from benchmarks.harness.measure import Sample
from benchmarks.ranks.clock import Clock
from benchmarks.ranks.imagined import DTYPE, FILES, Imagined, file_name, item_bytes


def inventory(world: Imagined, rank: int) -> RankInventory:
    """Return the inventory that a rank would send."""
    names, paths, offsets, form_of = [], [], [], []
    forms: dict[ShardForm, int] = {}
    for name, path, rows in world.of_rank(rank):
        shape, begin, sizes = world.part(rank, rows)
        names.append(name)
        paths.append(path)
        offsets.append(begin)
        form_of.append(forms.setdefault(ShardForm(shape, _item(sizes, item_bytes(rows))), len(forms)))
    for name, path in world.objects():
        names.append(name)
        paths.append(path)
        offsets.append(())
        form_of.append(-1)
    return RankInventory(names, paths, list(forms), form_of, offsets)


def written(held: RankInventory, rank: int, share: Sequence[int], *, places: bool, step: int) -> Written:
    """Return the report that a rank would send after it has written its share."""
    leaves = [leaf for leaf in share if held.form_of[leaf] >= 0]
    objects = {leaf: ItemRange(file_name(rank, 0), step + n, 600) for n, leaf in enumerate(share[len(leaves) :])}
    lengths = [held.forms[held.form_of[leaf]].item.item_bytes for leaf in leaves]
    begins, at = [], 0
    for length in lengths:
        begins.append(at)
        at += length
    files = {file_name(rank, n): FileFacts(at + n, crc32(b"%d" % n, rank + step)) for n in range(FILES)}
    half = len(leaves) // 2
    file_of = [0] * (len(leaves) - half) + [1] * half
    table = ItemPlaces(list(files), leaves, file_of, begins, lengths) if places else None
    return Written(files, len(leaves), objects, table, crcs=np.arange(len(leaves), dtype=np.uint32).tobytes())


def _item(sizes: tuple[int, ...], nbytes: int) -> ItemForm:
    payload_bytes = math.prod(sizes) * DTYPE.itemsize
    return ItemForm(DTYPE, sizes, row_strides(sizes), nbytes, 64, payload_bytes)


class Coordinator:
    """Rank 0 of a simulated world, over several saves.

    Attributes:
        book: the cached plan; None before the first save.
        results: the ranks' reports of the last save.
        sent_bytes: all bytes that the other ranks sent for the last save.
        index_bytes: the size of the last `.metadata`.
    """

    def __init__(self, world: Imagined) -> None:
        self._world = world
        self.results: list[Written] = []
        self.plan_cache: GlobalPlanCache | None = None
        self.sent_bytes = self.index_bytes = 0

    def save(self, step: int) -> Sample:
        """Run rank 0's work of a save; return the seconds of each kind of work."""
        clock = Clock()
        self.sent_bytes = 0
        self._plan(clock)
        self._publish(clock, step)
        return clock.spent

    def _plan(self, clock: Clock) -> None:
        world, plan_cache = self._world, self.plan_cache
        token = plan_cache.token if plan_cache is not None else None
        calls = self._received(
            clock,
            (
                PlanRequest(False, "dcp", token, None if token else inventory(world, rank))
                for rank in range(world.ranks)
            ),
        )
        if plan_cache is None:
            plan = clock("plan", plan_globally, [call.inventory for call in calls])
            self.plan_cache = plan_cache = clock("plan", GlobalPlanCache, 1, [call.inventory for call in calls], plan)
        fresh = token is None
        shares = plan_cache.plan.assignments if fresh else [None] * world.ranks
        orders = [
            RankAssignment("a ticket", plan_cache.token, share, report_places=not plan_cache.knows_places)
            for share in shares
        ]
        self._reply(clock, orders)

    def _publish(self, clock: Clock, step: int) -> None:
        plan_cache = self.plan_cache
        assert plan_cache is not None
        places = not plan_cache.knows_places
        results = self._received(
            clock,
            (
                written(held, rank, plan_cache.plan.assignments[rank], places=places, step=step)
                for rank, held in enumerate(plan_cache.ranks)
            ),
        )
        self.results = results
        clock("check", plan_cache.check, results)
        files = clock("check", files_of, results)
        clock("check", _check_sizes, results, {name: facts.nbytes for name, facts in files.items()})
        item_bytes = sum(facts.nbytes for facts in files.values())
        drafts = clock("metadata", plan_cache.drafts, [each.objects for each in results])
        self.index_bytes = len(drafts.documents[METADATA_NAME])
        times_s = {"captured": 0.001, "data_written": 1.0}
        clock("manifest", documents_of_ranks, plan_cache, results, files, times_s, {}, {}, False)
        sizes = {name: facts.nbytes for name, facts in files.items()}
        self._reply(clock, plan_cache.summaries(sizes, item_bytes))

    def _received(self, clock: Clock, values: Iterable[Any]) -> list[Any]:
        """Return the values after a round trip through pickled messages, except rank 0's own, which needs none."""
        heard = []
        for rank, value in enumerate(values):
            if rank == 0:
                heard.append(value)
                continue
            message = pickle.dumps(value)
            self.sent_bytes += len(message)
            heard.append(clock("hear", lambda message=message: pickle.loads(message)))
        return heard

    @staticmethod
    def _reply(clock: Clock, replies: Sequence[Any]) -> None:
        for reply in {id(reply): reply for reply in replies[1:]}.values():
            clock("tell", pickle.dumps, (reply,))


def _check_sizes(results: Sequence[Written], seen: dict[str, int]) -> None:
    for written in results:
        for name, facts in written.files.items():
            if seen.get(name) != facts.nbytes:
                raise ValueError(name)
