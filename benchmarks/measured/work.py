"""Work beside a save: a loop of plain Python, and threads that prepare samples for a loop."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

_SIDE = 128


class Work(ABC):
    """Work that consists of steps.

    Attributes:
        unit: the unit of the work of a step.
        per_step: the number of units in a step.
    """

    name: str
    unit = "steps"
    per_step = 1

    def running(self) -> AbstractContextManager[object]:
        """Run the threads that the steps need while the context is open."""
        return contextlib.nullcontext()

    @abstractmethod
    def step(self) -> None:
        """Run one step."""


class PythonLoop(Work):
    """A training loop of plain Python, which needs the GIL all the time.

    Args:
        operations: the number of operations in a step; the default takes some milliseconds.
    """

    name = "a loop of plain Python"

    def __init__(self, operations: int = 20_000) -> None:
        self._operations = operations

    def step(self) -> None:
        metrics: dict[str, float] = {}
        for number in range(self._operations):
            key = f"metric.{number % 97}"
            metrics[key] = 0.9 * metrics.get(key, 0.0) + 0.1 * (number & 1023)


class Loader(Work):
    """Threads that decode, augment and describe samples, and a loop that gathers them into batches.

    Args:
        threads: the number of threads that prepare samples.
        batch: the number of samples in a step.
    """

    name = "threads that load data"
    unit = "samples"

    def __init__(self, threads: int = 4, batch: int = 32) -> None:
        self.per_step, self._threads = batch, threads
        pixels = np.random.default_rng(0).integers(0, 64, (_SIDE, _SIDE, 3), dtype=np.uint8)
        label = {"boxes": [[number, number + 1, number + 2, number + 3] for number in range(16)], "names": ["x"] * 16}
        self._stored = (zlib.compress(pixels.tobytes(), 1), json.dumps(label))
        self._weights = np.ones((64 * 64 * 3, 16), dtype=np.float32)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._over = threading.Event()
        self._ready: queue.Queue[np.ndarray] = queue.Queue(4 * self.per_step)
        threads = [threading.Thread(target=self._prepare, args=(seed,)) for seed in range(self._threads)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _prepare(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self._over.is_set():
            sample = self._sample(random)
            while not self._over.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(sample, timeout=0.1)
                    break

    def _sample(self, random: np.random.Generator) -> np.ndarray:
        image, label = self._stored
        pixels = np.frombuffer(zlib.decompress(image), dtype=np.uint8).reshape(_SIDE, _SIDE, 3)
        top, left = random.integers(0, _SIDE - 64, 2)
        cropped = pixels[top : top + 64, left : left + 64]
        if random.random() < 0.5:
            cropped = cropped[:, ::-1]
        boxes = [[x - left, y - top, u - left, v - top] for x, y, u, v in json.loads(label)["boxes"]]
        kept = sum(0 <= x < 64 and 0 <= y < 64 for x, y, _, _ in boxes)
        scaled = cropped.astype(np.float32)
        return (scaled - scaled.mean()) / (scaled.std() + 1e-6) + kept

    def step(self) -> None:
        batch = np.stack([self._ready.get(timeout=60.0).ravel() for _ in range(self.per_step)])
        batch @ self._weights
