"""Contenders that load: packages made for loading. They are optional; the row of a missing package says so.

Run:ai Model Streamer and fastsafetensors are made for GPUs, but work without one; both read safetensors files.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.harness.states import State
from benchmarks.peers.checkpoints import torch_checkpointing_load
from benchmarks.peers.loaders import Blocking, Loader


def runai_load(path: Path) -> Loader:
    """Return the contender Run:ai Model Streamer, whose tensors own their memory."""

    def load(file: Path) -> State:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(file))
            return dict(streamer.get_tensors())

    return Blocking("Run:ai streamer", path, load, "reads past the page cache, into huge pages; checks no bytes")


def fastsafetensors_load(path: Path, *, direct: bool) -> Loader:
    """Return the contender fastsafetensors, without GPUDirect Storage."""

    def load(file: Path) -> State:
        from fastsafetensors import fastsafe_open

        os.environ["FASTSAFETENSORS_ODIRECT"] = str(int(direct))  # by default it bypasses the page cache
        with fastsafe_open([str(file)], device="cpu", nogds=True) as opened:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}

    return Blocking("fastsafetensors", path, load, f"nogds, {'direct' if direct else 'buffered'} I/O; checks no bytes")


class TorchCheckpointing(Loader):
    """``torch_checkpointing``, which reads one file after the other."""

    def __init__(self, path: Path, target: State | None = None, *, direct: bool) -> None:
        super().__init__(path)
        self.name = f"torch_checkpointing, {'new tensors' if target is None else 'into a target'}"
        self.note = f"{'direct' if direct else 'buffered'} I/O"
        self.into_target = target is not None
        self._target, self._direct = target, direct

    async def load(self) -> State:
        return torch_checkpointing_load(self.path, self._target, direct=self._direct)
