"""torchdata's StatefulDataLoader: a live object like others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiockpt

dataloader = pytest.importorskip("torchdata.stateful_dataloader")


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    """An iterable that keeps its own position, in each worker."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream"])
def test_an_epoch_resumes_where_it_was(tmp_path: Path, workers: int, kind: str) -> None:
    def loader() -> torch.utils.data.DataLoader:
        data = Stream() if kind == "stream" else Numbers()
        return dataloader.StatefulDataLoader(data, batch_size=4, num_workers=workers, shuffle=kind == "shuffled")

    first, second = loader(), loader()
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(3)]
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"loader": first}, tmp_path / "c")
        rest = [batch.tolist() for batch in batches]
        ckpt.load(tmp_path / "c", {"loader": second})
    assert [batch.tolist() for batch in second] == rest
    assert len(rest) > 3
    assert seen[0] not in rest


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [4, 10, 13], ids=["within", "at the end", "in the second epoch"])
def test_training_resumes_with_the_same_batches_and_random_numbers(tmp_path: Path, workers: int, at: int) -> None:
    """To the end of a third epoch, although each new iterator and each shuffling draws a seed."""

    def loader() -> torch.utils.data.DataLoader:
        return dataloader.StatefulDataLoader(Numbers(), batch_size=4, num_workers=workers, shuffle=True)

    def steps(data: torch.utils.data.DataLoader, batches: Iterator[torch.Tensor], count: int) -> Iterator[Step]:
        while count:
            for batch in batches:
                count -= 1
                yield batch.tolist(), torch.rand(1).item(), random.random()
            batches = iter(data)

    Step = tuple[list[int], float, float]
    first, second = loader(), loader()
    seen: list[Step] = []
    with aiockpt.SyncCheckpointer() as ckpt:
        for step in steps(first, iter(first), 30):
            seen.append(step)
            if len(seen) == at:
                ckpt.save({"rng": aiockpt.RngState(), "data": first}, tmp_path / "c")
        rng = aiockpt.RngState()
        torch.manual_seed(77)
        ckpt.load(tmp_path / "c", {"rng": rng, "data": second})
    batches = iter(second)
    rng.rewind()
    assert list(steps(second, batches, 30 - at)) == seen[at:]
