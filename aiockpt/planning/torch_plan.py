"""Plans of a single ``torch.save`` file, whose one pickle has the structure and everything that is no tensor."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.dataclasses import dataclass, replace
from aiockpt.errors import AiockptError, SaveError
from aiockpt.format.item.arrays import ARRAY_RECORD
from aiockpt.format.item.item_framing import MAP_NORESERVE
from aiockpt.format.item.objects import decode_object
from aiockpt.format.manifest.index_writer import Drafts
from aiockpt.format.torch_file.framing import frame_archive
from aiockpt.planning.flatten import unflatten
from aiockpt.planning.layout import ITEM_ALIGNMENT, align_up, lay_out
from aiockpt.planning.planner import FileFormat, Layout, RankLeaves, SavePlan, StateSummary

if TYPE_CHECKING:
    from aiockpt.format.item.ziparchive import Framing
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.planning.specs import TensorSpec


@dataclass(frozen=True)
class TorchPlan(SavePlan):
    """A layout of one file, together with its first bytes."""

    is_single_file = True

    def drafts(self, *, is_transformed: bool = False) -> Drafts:
        return Drafts({})


class TorchFormat(FileFormat):
    """The format of ``torch.save``. Tensors are stored as those of the CPU, NumPy arrays as tensors.

    ``wrapped`` is the only key of the state if the value of that is to be stored, and no dict.
    """

    name = "torch"

    def __init__(self, wrapped: str | None = None) -> None:
        self._wrapped = wrapped

    def framing(self, name: str, spec: TensorSpec) -> Framing:
        raise SaveError(f"{name} can't be framed alone: a torch.save file has one pickle for all tensors")

    def fill(self, layout: Layout, snapshot: Snapshot) -> None:
        """Reuse no layout: the pickle, which comes first in the file, may have another length in each save."""

    def lay_out(self, summary: StateSummary, snapshot: Snapshot, written: RankLeaves | None = None) -> TorchPlan:
        """Frame the file by ``torch.save`` itself, with stand-ins for the tensors."""
        values = _stand_ins(summary)
        later = {tensor.untyped_storage()._cdata: leaf for leaf, tensor in values.items() if leaf not in summary.tied}
        values |= {leaf: _value(snapshot, leaf) for leaf, spec in enumerate(summary.specs) if spec is None}
        if snapshot.together:
            values |= _decoded("the state", snapshot.together)
        # NumPy arrays stay tensors: torch.load refuses pickled arrays unless it is allowed NumPy's functions.
        containers = [record for record in snapshot.containers if record["type"] != ARRAY_RECORD]
        state = unflatten(summary.structure.paths, map(values.__getitem__, range(len(values))), containers)
        try:
            framed = frame_archive(state if self._wrapped is None else state[self._wrapped], later)
        except Warning:  # an error only because the program makes errors of warnings
            raise
        except Exception as exc:  # torch.save raises many types for what it can't store
            raise SaveError(
                f"torch.save can't store the state in one file ({type(exc).__name__}: {exc}): save with format='dcp'"
            ) from exc
        items = [(later[storage._cdata], framing) for storage, framing in framed.framings]
        image = lay_out("model.pt", len(framed.head), items, aligned=False)
        nbytes = image.nbytes + len(framed.tail)
        image = replace(image, nbytes=nbytes, tail=framed.tail, crc_at=framed.crc_at)
        return TorchPlan(Layout(summary, [image]), [framed.head])


def _stand_ins(summary: StateSummary) -> dict[int, Any]:
    """Return a tensor without memory for each leaf that is one, with the strides that are stored; tied as they are."""
    sizes = [0 if spec is None else math.prod(spec.shape) * spec.dtype.itemsize for spec in summary.specs]
    total = sum(align_up(nbytes, ITEM_ALIGNMENT) for leaf, nbytes in enumerate(sizes) if leaf not in summary.tied)
    # One mapping for all, none of which is ever touched: the kernel limits their number.
    memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE) if total else None
    found: dict[int, Any] = {}
    at = 0
    for leaf, (spec, nbytes) in enumerate(zip(summary.specs, sizes, strict=True)):
        if spec is None:
            continue
        if leaf in summary.tied:
            found[leaf] = found[summary.tied[leaf]]
        elif memory is None or not nbytes:
            found[leaf] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu").as_strided(
                spec.shape, spec.saved_stride
            )
        else:
            data = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=at)
            found[leaf] = data.view(spec.dtype).as_strided(spec.shape, spec.saved_stride)
            at += align_up(nbytes, ITEM_ALIGNMENT)
    return found


def _value(snapshot: Snapshot, leaf: int) -> Any:
    """Return what is stored in the pickle, with tensors in host memory: as it was when save() was called."""
    tensor, name = snapshot.tensors[leaf], snapshot.structure.names[leaf]
    if tensor is not None:  # a sparse or quantized one
        with snapshot.readable(tensor.device):
            return tensor.cpu()
    if leaf in snapshot.values or snapshot.together:
        return snapshot.values.get(leaf)
    return _decoded(name, snapshot.blobs[leaf])


def _decoded(name: str, blob: bytes) -> Any:
    try:
        return decode_object(name, blob, trust=True, map_location="cpu")  # pickled by this process
    except AiockptError as exc:
        raise SaveError(f"{name} can't be put into the one pickle of a torch.save file: {exc}") from exc
