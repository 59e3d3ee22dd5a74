"""The global plan of a state with parts on many ranks: the assignments, and the index."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from aiockpt.core.strides import row_strides
from aiockpt.errors import SaveError
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.index import ItemRange, ObjectEntry, TensorEntry
from aiockpt.format.manifest.columnar_index import ItemForm
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.collective.cache import GlobalPlanCache, files_of
from aiockpt.planning.collective.messages import ItemPlaces, RankInventory, ShardForm, Written
from aiockpt.planning.collective.plan import GlobalPlan, GlobalTensor, plan_globally

Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
FRAMING = 1234


def part(whole: tuple[int, ...], at: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Part:
    return whole, at or (0,) * len(whole), whole if sizes is None else sizes


def held(
    leaves: dict[str, Part | None],
    *,
    dtype: torch.dtype = torch.float32,
    paths: list[tuple[str | int, ...]] | None = None,
    tied: dict[int, int] | None = None,
    containers: list[dict[str, Any]] | None = None,
) -> RankInventory:
    """Return a rank's inventory: for each name its `Part`, or None for an object."""
    forms: dict[ShardForm, int] = {}
    form_of, offsets = [], []
    for each in leaves.values():
        if each is None:
            form_of.append(-1)
            offsets.append(())
            continue
        whole, at, sizes = each
        nbytes = dtype.itemsize * torch.Size(sizes).numel()
        item = ItemForm(dtype, sizes, row_strides(sizes), nbytes + FRAMING, 64, nbytes)
        form_of.append(forms.setdefault(ShardForm(whole, item), len(forms)))
        offsets.append(at)
    paths = paths or [tuple(name.split(".")) for name in leaves]
    return RankInventory(list(leaves), paths, list(forms), form_of, offsets, tied or {}, containers or [])


def received(ranks: list[RankInventory]) -> list[RankInventory]:
    """Return the inventories as rank 0 gets them: all but its own have been pickled."""
    return [ranks[0], *(pickle.loads(pickle.dumps(each)) for each in ranks[1:])]


def rows(count: int, rank: int, world: int, columns: int = 4) -> Part:
    """Return a rank's part of a matrix that is cut by rows."""
    each = -(-count // world)
    begin = min(count, each * rank)
    return part((count, columns), (begin, 0), (min(count, begin + each) - begin, columns))


def loads_of(ranks: list[RankInventory], plan: GlobalPlan) -> list[int]:
    return [
        sum(each.forms[each.form_of[leaf]].item.item_bytes for leaf in share if each.form_of[leaf] >= 0)
        for each, share in zip(ranks, plan.assignments, strict=True)
    ]


def writes(ranks: list[RankInventory], plan: GlobalPlan) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        (each.names[leaf], each.offsets[leaf])
        for each, share in zip(ranks, plan.assignments, strict=True)
        for leaf in share
    )


def written_of(ranks: list[RankInventory], plan: GlobalPlan, step: int = 0, *, places: bool = True) -> list[Written]:
    """Return the results of ranks that followed the plan, with a different length and place for each item."""
    results = []
    for rank, (each, share) in enumerate(zip(ranks, plan.assignments, strict=True)):
        files = {f"__{rank}_{number}.distcp": FileFacts(10**6 + rank + step, rank * 7 + number) for number in range(2)}
        leaves = [leaf for leaf in share if each.form_of[leaf] >= 0]
        random.Random(rank).shuffle(leaves)
        table = ItemPlaces(
            list(files),
            leaves,
            [leaf % 2 for leaf in leaves],
            [10_000 * rank + 100 * leaf for leaf in leaves],
            [each.forms[each.form_of[leaf]].item.item_bytes + leaf for leaf in leaves],
        )
        objects = {
            leaf: ItemRange(f"__{rank}_0.distcp", step + 5_000_000 + 77 * leaf, 40 + leaf)
            for leaf in share
            if each.form_of[leaf] < 0
        }
        results.append(Written(files, len(leaves), objects, table if places else None))
    return results


def metadata_of(cache: GlobalPlanCache, results: list[Written]) -> bytes | bytearray:
    return cache.drafts([written.objects for written in results]).documents[METADATA_NAME]


class WrittenPart(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    writer: tuple[int, int]


def parts_of(tensor: GlobalTensor) -> list[WrittenPart]:
    rows = zip(tensor.cut, tensor.ranks, tensor.leaves, strict=True)
    return [WrittenPart(offsets, sizes, (rank, leaf)) for (offsets, sizes), rank, leaf in rows]


def place_in(ranks: list[RankInventory], writer: tuple[int, int]) -> ItemRange:
    """Return the place that `written_of` reports for a tensor's item."""
    rank, leaf = writer
    nbytes = ranks[rank].forms[ranks[rank].form_of[leaf]].item.item_bytes
    return ItemRange(f"__{rank}_{leaf % 2}.distcp", 10_000 * rank + 100 * leaf, nbytes + leaf)


# --- assignments ----------------------------------------------------------------------------------------


def test_each_part_is_written_by_the_rank_that_has_it() -> None:
    ranks = received([held({"w": rows(10, rank, 4), "b": rows(3, rank, 4, 7)}) for rank in range(4)])
    plan = plan_globally(ranks)
    assert writes(ranks, plan) == Counter((name, each.offsets[n]) for each in ranks for n, name in enumerate("wb"))
    for tensor in plan.tensors.values():
        for offsets, sizes, (rank, leaf) in parts_of(tensor):
            assert ranks[rank].offsets[leaf] == offsets
            assert ranks[rank].forms[ranks[rank].form_of[leaf]].sizes == sizes
    w = plan.tensors["w"]
    assert (w.dtype, w.shape) == (torch.float32, (10, 4))
    assert [p.writer for p in parts_of(w) if 0 not in p.sizes] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_replicated_tensors_are_written_once_and_spread_evenly() -> None:
    sizes = [random.Random(5).randrange(1, 40) for _ in range(400)]
    leaves = {f"w{n}": part((size, 8)) for n, size in enumerate(sizes)}
    ranks = received([held(leaves) for _ in range(7)])
    plan = plan_globally(ranks)
    assert writes(ranks, plan) == {(name, (0, 0)): 1 for name in leaves}
    loads = loads_of(ranks, plan)
    mean = sum(loads) / len(loads)
    assert all(abs(load - mean) <= 0.1 * mean for load in loads), loads


def test_balance_counts_tensors_of_one_rank_alone() -> None:
    """A rank with large tensors of its own gets fewer replicated ones; with HSDP, two ranks have each shard."""
    alone = {"only.rank.zero": part((500, 8))}
    shared = {f"w{n}": part((n % 9 + 1, 8)) for n in range(300)}
    ranks = received([held((alone if rank == 0 else {}) | shared) for rank in range(3)])
    loads = loads_of(ranks, plan_globally(ranks))
    assert max(loads) - min(loads) <= 0.1 * sum(loads) / 3, loads
    pairs = [held({f"w{n}": rows(8 * (n % 5 + 1), rank % 2, 2) for n in range(200)}) for rank in range(4)]
    plan = plan_globally(received(pairs))
    loads = loads_of(pairs, plan)
    assert max(loads) - min(loads) <= 0.1 * sum(loads) / 4, loads
    assert set(writes(pairs, plan).values()) == {1}
    assert len(writes(pairs, plan)) == 400


def test_objects_come_from_the_first_rank_that_has_them() -> None:
    ranks = received(
        [held({"step": None, "w": rows(4, 0, 2)}), held({"w": rows(4, 1, 2), "step": None, "rng.1": None})]
    )
    plan = plan_globally(ranks)
    assert plan.objects == {"step": (0, 0), "rng.1": (1, 2)}
    assert plan.assignments == [[0, 1], [0, 2]]


def test_names_keep_the_order_of_the_ranks() -> None:
    ranks = received([held({"b": part((2,)), "a": None}), held({"c": part((3,)), "b": part((2,)), "0": None})])
    plan = plan_globally(ranks)
    assert list(plan.paths) == ["b", "a", "c", "0"]
    assert plan.paths["c"] == ("c",)
    assert plan_globally(received(ranks)) == plan, "the same plan for the same ranks"


def test_a_rank_may_have_several_parts() -> None:
    first = held({"w": part((6,), (0,), (2,))})
    second = held({"w": part((6,), (4,), (2,))})
    second = RankInventory(["w", "w"], [("w",)] * 2, second.forms, [0, 0], [(4,), (2,)])
    plan = plan_globally([first, second])
    assert parts_of(plan.tensors["w"]) == [((0,), (2,), (0, 0)), ((4,), (2,), (1, 0)), ((2,), (2,), (1, 1))]
    assert plan.assignments == [[0], [0, 1]]


# --- tied tensors ---------------------------------------------------------------------------------------


def test_tied_tensors_are_written_once() -> None:
    leaves = {"embed": rows(6, 0, 2), "other": rows(6, 0, 2), "head": rows(6, 0, 2)}
    more = {name: rows(6, 1, 2) for name in leaves}
    ranks = received([held(leaves, tied={2: 0}), held(more, tied={2: 0})])
    plan = plan_globally(ranks)
    assert plan.tensors["head"] == plan.tensors["embed"]
    assert plan.tensors["other"] != plan.tensors["embed"]
    assert plan.assignments == [[0, 1], [0, 1]]


def test_tensors_that_are_tied_on_some_ranks_only_are_written_separately() -> None:
    leaves = {"embed": rows(6, 0, 2), "head": rows(6, 0, 2)}
    more = {name: rows(6, 1, 2) for name in leaves}
    plan = plan_globally(received([held(leaves, tied={1: 0}), held(more)]))
    assert plan.assignments == [[0, 1], [0, 1]]
    assert plan.tensors["head"] != plan.tensors["embed"]


# --- contradictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (held({"w": part((4, 4))}), held({"w": None}), "w is a torch.float32 tensor of .4, 4. on rank 0 but an object"),
        (held({"w": part((4, 4))}), held({"w": part((4, 5))}), r"w is .*\(4, 4\) on rank 0 but .*\(4, 5\) on rank 1"),
        (held({"w": part((4,))}), held({"w": part((4,))}, dtype=torch.int32), "torch.float32 .*rank 0 .*torch.int32"),
        (held({"w": part((4,), (0,), (2,))}), held({"w": part((4,), (0,), (4,))}), "w has at .0,. a part .* overlap"),
        (held({"w": part((4,), (0,), (3,))}), held({"w": part((4,), (2,), (2,))}), "w: the part .*rank .* overlaps"),
        (held({"w": part((9,), (0,), (4,))}), held({"w": part((9,), (4,), (4,))}), "w: the ranks have 8 of its 9"),
        (held({"w": part((4,), (0,), (2,))}), held({"w": part((4,), (3,), (2,))}), "w has on rank 1 a part .*outside"),
    ],
)
def test_contradictions_name_key_and_rank(one: RankInventory, other: RankInventory, said: str) -> None:
    with pytest.raises(SaveError, match=said):
        plan_globally(received([one, other]))
    others = {"a": None, "b": part((3, 3))}
    with pytest.raises(SaveError, match=said.replace("rank 1", "rank 2")):
        plan_globally(received([one, held(others), other]))


def test_one_incomplete_tensor_of_many_is_named() -> None:
    def of(rank: int) -> dict[str, Part | None]:
        return {f"w{n}": rows(8, rank, 4) for n in range(50) if (n, rank) != (31, 2)}

    with pytest.raises(SaveError, match="w31: the ranks have 24 of its 32 elements"):
        plan_globally(received([held(of(rank)) for rank in range(4)]))


# --- containers ------------------------------------------------------------------------------------------


def test_records_of_containers_are_merged() -> None:
    one = held({"a.0": None, "z": None}, containers=[{"path": ["empty"], "type": "dict", "at": 1}])
    other = held({"n": None, "z": None}, containers=[{"path": ["last"], "type": "list", "at": 2}])
    plan = plan_globally(received([one, other]))
    assert list(plan.paths) == ["a.0", "z", "n"]
    assert plan.containers == [
        {"path": ["empty"], "type": "dict", "at": 1},
        {"path": ["last"], "type": "list", "at": 3},
    ]


def test_number_keys_of_all_ranks_are_kept() -> None:
    def of(*keys: str | int, numbers: bool | list[str]) -> RankInventory:
        record = {"path": ["d"], "type": "dict", "int_keys": numbers, "at": 0}
        return held({f"d.{key}": None for key in keys}, paths=[("d", key) for key in keys], containers=[record])

    every = plan_globally([of(3, 1, numbers=True), of(7, numbers=True)])
    assert every.containers == [{"path": ["d"], "type": "dict", "int_keys": True, "at": 0}]
    some = plan_globally([of(3, 1, numbers=True), of("x", 5, numbers=["5"])])
    assert some.containers[0]["int_keys"] == ["3", "1", "5"]


def test_other_keys_of_all_ranks_are_kept() -> None:
    def of(keys: dict[str, Any]) -> RankInventory:
        record = {"path": ["d"], "type": "dict", "keys": keys, "at": 0}
        return held({f"d.{key}": None for key in keys}, paths=[("d", key) for key in keys], containers=[record])

    both = plan_globally([of({"1.5": 1.5, "None": None}), of({"None": None, "(1, 2)": [1, 2]})])
    assert both.containers == [
        {"path": ["d"], "type": "dict", "keys": {"1.5": 1.5, "None": None, "(1, 2)": [1, 2]}, "at": 0}
    ]


# --- the cache of a global plan -------------------------------------------------------------------------


def world() -> list[RankInventory]:
    """Return the inventories of four ranks: even and uneven shards, replicas, tied names and objects."""
    ranks = []
    for rank in range(4):
        leaves = {
            "model.w": rows(10, rank, 4),
            "step": None,
            "model.cut": part((4, 6), (2 * (rank // 2), 3 * (rank % 2)), (2, 3)),
            "model.norm": part((7,)),
            "model.same": part((4, 6), (2 * (rank // 2), 3 * (rank % 2)), (2, 3)),
            "model.head": rows(10, rank, 4),
            "scalar": part(()),
            f"rng.{rank}": None,
        }
        ranks.append(held(leaves, tied={5: 0}))
    return received(ranks)


def test_torch_and_aiockpt_read_the_index() -> None:
    ranks = world()
    plan = plan_globally(ranks)
    cache = GlobalPlanCache(1, ranks, plan)
    assert not cache.knows_places
    for step in (0, 1000):
        results = written_of(ranks, plan, step, places=not cache.knows_places)
        cache.check(results)
        document = bytes(metadata_of(cache, results))
        metadata = pickle.loads(document)
        assert isinstance(metadata, Metadata)
        assert list(metadata.state_dict_metadata) == list(metadata.planner_data) == list(plan.paths)
        assert metadata.planner_data == plan.paths
        stored = 0
        entries = decode_metadata(document).entries
        for name, tensor in plan.tensors.items():
            told = metadata.state_dict_metadata[name]
            assert (told.properties.dtype, told.size) == (tensor.dtype, tensor.shape)
            assert [(c.offsets, c.sizes) for c in told.chunks] == [(p.offsets, p.sizes) for p in parts_of(tensor)]
            entry = entries[name]
            assert isinstance(entry, TensorEntry)
            assert {c.offsets for c in entry.chunks} >= {p.offsets for p in parts_of(tensor) if 0 not in p.sizes}
            for number, each in enumerate(parts_of(tensor)):
                stored += 1
                expected = place_in(ranks, each.writer)
                info = metadata.storage_data[MetadataIndex(name, each.offsets, number)]
                assert (info.relative_path, info.offset, info.length) == expected[:3]
                assert all(c.place == expected for c in entry.chunks if c.offsets == each.offsets and 0 not in c.sizes)
        for name, (rank, leaf) in plan.objects.items():
            expected = results[rank].objects[leaf]
            assert expected.offset >= step
            assert isinstance(metadata.state_dict_metadata[name], BytesStorageMetadata)
            info = metadata.storage_data[MetadataIndex(name)]
            assert (info.relative_path, info.offset, info.length) == expected[:3]
            assert entries[name] == ObjectEntry(expected)
        assert len(metadata.storage_data) == stored + len(plan.objects)


def test_places_beyond_four_gib_are_kept() -> None:
    ranks = [held({"w": rows(4, rank, 2)}) for rank in range(2)]
    plan = plan_globally(ranks)
    far = [2**40 + 3, 2**33 + 5]
    results = [
        Written(
            {f"__{n}_0.distcp": FileFacts(1, 2)}, 1, {}, ItemPlaces([f"__{n}_0.distcp"], [0], [0], [at], [2**31 + n])
        )
        for n, at in enumerate(far)
    ]
    cache = GlobalPlanCache(1, ranks, plan)
    cache.check(results)
    metadata = pickle.loads(bytes(metadata_of(cache, results)))
    infos = [metadata.storage_data[MetadataIndex("w", (2 * n, 0))] for n in range(2)]
    assert [(info.offset, info.length) for info in infos] == [(far[0], 2**31), (far[1], 2**31 + 1)]


def test_an_index_does_not_change_while_it_is_in_use() -> None:
    ranks = world()
    plan = plan_globally(ranks)
    cache = GlobalPlanCache(1, ranks, plan)
    results = written_of(ranks, plan)
    cache.check(results)
    seen = memoryview(metadata_of(cache, results))
    before = bytes(seen)
    later = bytes(metadata_of(cache, written_of(ranks, plan, 12345)))
    assert bytes(seen) == before
    assert later != before
    assert pickle.loads(later).storage_data[MetadataIndex("rng.2")].offset >= 12345


def test_ranks_with_the_same_names_share_them() -> None:
    ranks = received([held({"w": rows(8, rank, 4), "step": None}) for rank in range(4)])
    assert ranks[1].names is ranks[3].names
    assert ranks[1].paths is ranks[2].paths
    assert [each.offsets[0] for each in ranks] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert ranks[2] == held({"w": rows(8, 2, 4), "step": None})


def test_totals_count_each_stored_tensor_once() -> None:
    ranks = world()
    cache = GlobalPlanCache(9, ranks, plan_globally(ranks))
    assert (cache.token, len(cache.plan.tensors), len(cache.plan.objects)) == (9, 6, 5)
    assert cache.tensor_bytes == 4 * (40 + 24 + 7 + 24 + 1)


def _without_an_item(result: Written) -> Written:
    return Written(result.files, result.items - 1, result.objects, result.places)


def _with_an_item_twice(result: Written) -> Written:
    assert result.places is not None
    places = result.places._replace(leaves=[result.places.leaves[1], *result.places.leaves[1:]])
    return Written(result.files, result.items, result.objects, places)


def _without_a_file(result: Written) -> Written:
    return Written({"other": FileFacts(1, 2)}, result.items, result.objects, result.places)


def _without_an_object(result: Written) -> Written:
    return Written(result.files, result.items, {}, result.places)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without_an_item, "rank 2 was assigned"),
        (_without_an_object, "rank 2 was assigned"),
        (_with_an_item_twice, "rank 2 reports other items"),
        (_without_a_file, "rank 2 reports items in files that it did not write: .*__2_"),
    ],
)
def test_errors_about_missing_items_name_the_rank(spoil: Any, said: str) -> None:
    ranks = world()
    plan = plan_globally(ranks)
    results = written_of(ranks, plan)
    results[2] = spoil(results[2])
    with pytest.raises(SaveError, match=said):
        GlobalPlanCache(1, ranks, plan).check(results)


def test_missing_items_of_a_later_save_are_found() -> None:
    ranks = world()
    plan = plan_globally(ranks)
    cache = GlobalPlanCache(1, ranks, plan)
    cache.check(written_of(ranks, plan))
    later = written_of(ranks, plan, places=False)
    cache.check(later)
    for spoil in (_without_an_item, _without_an_object):
        with pytest.raises(SaveError, match="rank 3 was assigned"):
            cache.check([*later[:3], spoil(later[3])])


def test_files_of_two_ranks_have_two_names() -> None:
    one, other = (Written({"a": FileFacts(1, n), f"{n}": FileFacts(2, 2)}, 0, {}, None) for n in (5, 6))
    with pytest.raises(SaveError, match="a was written by rank 1 and by another"):
        files_of([one, other])
    assert files_of([one]) == {"a": FileFacts(1, 5), "5": FileFacts(2, 2)}


def test_many_ranks_with_the_same_names() -> None:
    """Many tensors have one part on each of many ranks, each at its own place."""
    size, names = 48, [f"layers.{n}.weight" for n in range(60)]
    ranks = received(
        [held({name: rows(96 * (n % 3 + 1), rank, size) for n, name in enumerate(names)}) for rank in range(size)]
    )
    plan = plan_globally(ranks)
    assert plan.assignments == [list(range(60))] * size
    for name, rank in itertools.product(names, range(size)):
        number = names.index(name)
        step = 2 * (number % 3 + 1)
        assert parts_of(plan.tensors[name])[rank] == ((step * rank, 0), (step, 4), (rank, number))
    cache = GlobalPlanCache(1, ranks, plan)
    results = written_of(ranks, plan)
    cache.check(results)
    metadata = pickle.loads(bytes(metadata_of(cache, results)))
    assert len(metadata.storage_data) == size * 60
    info = metadata.storage_data[MetadataIndex("layers.31.weight", (4 * 17, 0))]
    assert (info.relative_path, info.offset, info.length) == place_in(ranks, (17, 31))[:3]
