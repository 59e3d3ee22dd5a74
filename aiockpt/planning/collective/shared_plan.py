"""The global plan of safetensors files, which all ranks write together: the place of every byte, before any is written.

Each tensor has one place in one file, as if one process wrote it whole. A rank gets the places of the tensors whose
parts it writes, from which it knows where its parts belong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.safetensors.writer import Stored
from aiockpt.planning.collective.cache import GlobalPlanCache
from aiockpt.planning.collective.plan import plan_globally
from aiockpt.planning.parts import crc_of_parts
from aiockpt.planning.planner import SharedFiles
from aiockpt.planning.safetensors_plan import SafetensorsFormat, index_documents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.planning.collective.messages import RankInventory, Written
    from aiockpt.planning.collective.plan import GlobalPlan
    from aiockpt.planning.planner import FileFormat


class SharedPlanCache(GlobalPlanCache):
    """A global plan of files that all ranks write together."""

    knows_places = True  # they follow from the plan

    def __init__(self, token: int, ranks: Sequence[RankInventory], plan: GlobalPlan, form: SafetensorsFormat) -> None:
        super().__init__(token, ranks, plan)
        tensors = plan.tensors.items()
        stored = [Stored(name, whole.dtype, whole.shape) for name, whole in tensors if name not in plan.aliases]
        files = form.plan_files(stored, plan.aliases)
        heads = form.encode_heads(files)
        self.is_single_file = form.is_single_file
        self.sizes = {
            file.name: len(head) + (file.ends[-1] if file.ends else 0) for file, head in zip(files, heads, strict=True)
        }
        self._heads = [file[-2:] for file in files]
        self._index = (
            {}
            if self.is_single_file
            else index_documents(
                {file.name: [tensor.name for tensor in file.tensors] for file in files}, self.tensor_bytes
            )
        )
        self._place_of: dict[str, tuple[int, int]] = {}
        for number, (file, head) in enumerate(zip(files, heads, strict=True)):
            begins = [0, *file.ends[:-1]]
            for tensor, begin in zip(file.tensors, begins, strict=False):
                self._place_of[tensor.name] = number, len(head) + begin

    def share_of(self, rank: int) -> SharedFiles:
        """Return what a rank has to know to write its parts."""
        names = self.ranks[rank].names
        places = {leaf: self._place_of[names[leaf]] for leaf in self.plan.assignments[rank]}
        return SharedFiles(list(self.sizes), list(self.sizes.values()), places, self._heads if rank == 0 else ())

    def data_files(self, results: Sequence[Written]) -> dict[str, FileFacts]:
        """Return the facts of the files, from those of their parts."""
        facts: dict[str, FileFacts] = {}
        for name, nbytes in self.sizes.items():
            shares = [written.files[name].crc for written in results if name in written.files]
            facts[name] = FileFacts(nbytes, crc_of_parts(shares, nbytes))
        return facts

    def files_beside(self, results: Sequence[Written]) -> Mapping[str, bytes | bytearray]:
        """Return the index of a set of files."""
        return self._index


def plan_cache_of(token: int, ranks: Sequence[RankInventory], form: FileFormat) -> GlobalPlanCache:
    """Plan for all ranks in a format; raise `SaveError` if they contradict each other."""
    if isinstance(form, SafetensorsFormat):
        return SharedPlanCache(token, ranks, plan_globally(ranks), form)
    return GlobalPlanCache(token, ranks, plan_globally(ranks))
