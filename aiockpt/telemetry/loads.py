"""The result of a load."""

from __future__ import annotations

from dataclasses import dataclass

from aiockpt.telemetry.timeline import Timed


@dataclass(frozen=True)
class LoadResult(Timed):
    """A finished load: its size, and how long it took.

    Attributes:
        path: the checkpoint.
        nbytes: the bytes that were read from its files, by this rank or by another one for it.
        tensors: how many tensors were read; each stored piece of one counts.
        objects: how many objects were read.
        opened_s: how long it took until its metadata was read, in seconds.
        loaded_s: from the call until everything was loaded, and every ``load_state_dict`` had returned.

    `timeline` returns what each thread did, `chrome_trace` writes it to a file, and a notebook shows it.
    """

    path: str
    nbytes: int
    tensors: int
    objects: int
    opened_s: float
    loaded_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second."""
        return self.nbytes / self.loaded_s if self.loaded_s else 0.0

    def _repr_html_(self) -> str:
        from aiockpt.telemetry.card import card, size_text, time_text

        facts = {
            "tensors": f"{self.tensors}, and {self.objects} objects",
            "read": size_text(self.nbytes),
            "opened after": time_text(self.opened_s),
            "loaded after": f"{time_text(self.loaded_s)} ({size_text(self.bytes_per_s)}/s)",
        }
        return card("loaded", self.path, facts, self.timeline())
