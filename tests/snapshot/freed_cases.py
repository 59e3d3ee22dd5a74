"""Save tensors whose storage was shrunk, and load into them; print a line for each. Run by test_freed."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import aiockpt
import aiockpt.dcp
from tests.stock import ALONE

warnings.simplefilter("ignore")  # torch warns of prototype features


class Own(torch.Tensor):
    """A subclass with a storage of its own."""


class Holder:
    """A user's object that holds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def shrunk(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    """Shrink the storage of a tensor to `nbytes`; return the tensor."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _part(value: Any, part: torch.Tensor) -> Any:
    shrunk(part)
    return value


def _at(address: int, nbytes: int) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def _coo() -> torch.Tensor:
    values = torch.ones(5)
    sparse = torch.sparse_coo_tensor(torch.arange(5)[None], values, (9,), is_coalesced=True, check_invariants=False)
    return _part(sparse, values)


def _csr() -> torch.Tensor:
    sparse = torch.eye(9).to_sparse_csr()
    return _part(sparse, sparse.col_indices())


def _jagged() -> torch.Tensor:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return _part(nested, nested.values())


def _dtensor() -> torch.Tensor:
    mesh = DeviceMesh("cpu", [0])
    return DTensor.from_local(shrunk(torch.ones(10, 10)), mesh, [Shard(0)])


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3_000), 0.1, 0, torch.qint8)


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "an offset": lambda: shrunk(torch.arange(100_000.0)[90_000:91_000], 8000),
    "a large one": lambda: shrunk(torch.arange(10_000_000.0)[9_000_000:], 4_000_000),
    "one byte": lambda: shrunk(torch.ones(1000), 3999),
    "one byte of a large one": lambda: shrunk(torch.ones(1_000_000), 3_999_999),
    "transposed": lambda: shrunk(torch.ones(2000, 100)[1900:].t(), 8000),
    "transposed, large": lambda: shrunk(torch.ones(2000, 1000).t(), 8000),
    "sliced": lambda: shrunk(torch.arange(100_000.0)[50_000::100], 8000),
    "columns": lambda: shrunk(torch.ones(100_000, 10)[90_000:, 3:5], 8000),
    "conjugated": lambda: shrunk(torch.ones(1000, dtype=torch.complex64)[900:].conj(), 7900),
    "negated": lambda: shrunk(torch.ones(1000, dtype=torch.complex64).conj().imag, 4000),
    "expanded": lambda: shrunk(torch.ones(1).expand(1000)),
    "empty storage": lambda: shrunk(torch.ones(1)),
    "parameter": lambda: torch.nn.Parameter(shrunk(torch.ones(1000)[900:], 3600)),
    "subclass": lambda: shrunk(torch.ones(10).as_subclass(Own)),
    "DTensor": _dtensor,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "sparse": _coo,
    "compressed": _csr,
    "jagged": _jagged,
    "quantized": lambda: shrunk(_quantized(), 2999),
    "quantized view": lambda: shrunk(_quantized()[2_000:], 2000),
    "inside of an object": lambda: Holder(shrunk(torch.ones(10))),
}
ABSENT: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch._efficientzerotensor((4,)),
    "large zeros": lambda: torch._efficientzerotensor((100_000,)),
    "transposed zeros": lambda: torch._efficientzerotensor((300, 400)).t(),
    "a parameter of zeros": lambda: torch.nn.Parameter(torch._efficientzerotensor((4,))),
    "conjugated zeros": lambda: torch._efficientzerotensor((4,), dtype=torch.complex64).conj(),
    "a subclass of zeros": lambda: torch._efficientzerotensor((4,)).as_subclass(Own),
    "a null pointer": lambda: _at(0, 16),
}
"""Tensors that have values or bytes, but no memory."""
FINE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: shrunk(torch.ones(0)),
    "just enough": lambda: shrunk(torch.arange(100.0)[10:20], 80),
    "just enough of columns": lambda: shrunk(torch.ones(10, 10)[:3, 2:4], 96),
}
UNPLAIN = {"negated", "conjugated", "subclass"}
"""Cases that safetensors files can't hold."""
UNFILLED = {"expanded"}
"""Cases that can't be a target for other reasons."""


def save_all(where: str, checkpointer: aiockpt.SyncCheckpointer) -> None:
    for name, make in (STRIDED | OTHERS).items():
        for validate in ("versions", "hash"):
            report(
                f"save {name} {validate}", lambda m=make, v=validate: checkpointer.submit({"k": m()}, where, validate=v)
            )
    for name, make in STRIDED.items():
        if name not in UNPLAIN:
            file = f"{where}.safetensors"
            report(
                f"save {name} safetensors",
                lambda m=make, f=file: checkpointer.submit({"k": m()}, f, format="safetensors"),
            )
    for name, make in STRIDED.items():
        writer = aiockpt.dcp.FileSystemWriter(where, checkpointer=checkpointer)
        report(f"dcp save {name}", lambda m=make, w=writer: dcp.save({"k": m()}, storage_writer=w, **ALONE))


def use_absent(where: str, checkpointer: aiockpt.SyncCheckpointer) -> None:
    for number, (name, make) in enumerate(ABSENT.items()):
        for validate in ("versions", "hash"):
            report(
                f"absent save {name} {validate}",
                lambda m=make, v=validate: checkpointer.submit({"k": m()}, f"{where}/saved", validate=v),
            )
        report(
            f"absent save {name} in an object", lambda m=make: checkpointer.submit({"k": Holder(m())}, f"{where}/saved")
        )
        target = make()
        path = f"{where}/absent {number}"
        checkpointer.save({"k": torch.ones(target.shape, dtype=target.dtype)}, path)
        report(f"absent load {name}", lambda p=path, t=target: checkpointer.load(p, {"k": t}))
        with checkpointer.open(path) as reader:
            report(f"absent read {name}", lambda r=reader, t=target: r.read("k", out=t))


def load_all(where: str, checkpointer: aiockpt.SyncCheckpointer) -> None:
    for number, (name, make) in enumerate(STRIDED.items()):
        if name in UNFILLED:
            continue
        target = make()
        path = f"{where}/{number}"
        checkpointer.save({"k": torch.ones(target.shape)}, path)
        report(f"load {name}", lambda p=path, t=target: checkpointer.load(p, {"k": t}))
        with checkpointer.open(path) as reader:
            report(f"read {name}", lambda r=reader, t=target: r.read("k", out=t))
        report(
            f"dcp load {name}",
            lambda p=path, t=target: dcp.load({"k": t}, storage_reader=aiockpt.dcp.FileSystemReader(p), **ALONE),
        )


def report(what: str, attempt: Callable[[], Any]) -> None:
    """Run a case and print its outcome; the name first, because the case may crash the process."""
    sys.stdout.write(f"{what}: ")
    sys.stdout.flush()
    how = "done"
    try:
        attempt()
    except CheckpointException as exc:
        ((error, _),) = exc.failures.values()
        how = f"{type(error).__name__}: {error}"
    except Exception as exc:
        how = f"{type(exc).__name__}: {exc}"
    sys.stdout.write(f"{how}\n")
    sys.stdout.flush()


def main() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        aiockpt.SyncCheckpointer(process_group=None) as checkpointer,
    ):
        save_all(os.path.join(folder, "saved"), checkpointer)
        load_all(folder, checkpointer)
        use_absent(os.path.join(folder, "absent"), checkpointer)
        for name, make in FINE.items():
            path = os.path.join(folder, name)
            report(f"fine {name}", lambda m=make, p=path: checkpointer.load(checkpointer.save({"k": m()}, p).path))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
