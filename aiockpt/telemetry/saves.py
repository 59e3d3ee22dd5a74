"""The results of saves and loads, and of mirroring a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from aiockpt.telemetry.timeline import Timed


@dataclass(frozen=True)
class SaveResult(Timed):
    """A written checkpoint: its size, and how long saving took.

    Attributes:
        path: where the checkpoint is.
        nbytes: the bytes of its files with items.
        tensor_bytes: the bytes of the tensors in them.
        tensors: how many tensors were stored.
        objects: how many objects were stored.
        files: the size in bytes of each file; of several ranks, rank 0 has all and each other one its own.
        captured_s: how long `save()` held its caller, in seconds.
        planned_s: how long planning took.
        staged_s: from the call until staged.
        written_s: from the call until durable under the final name.
        post_commit_error: the exception of the post_commit hook, if it failed.
        fallback_error: why it is at the ``fallback_path``; None if it is where it was to go.
        bytes_reused: of ``nbytes``, those of files that are shared with the ``base`` of a delta save.
        error: why nothing was written, in the results of `SyncCheckpointer.save` with ``on_failure="warn"``.

    `timeline` returns what each thread did, `chrome_trace` writes it to a file, and a notebook shows it. With several
    ranks, each has the timeline of its own threads.
    """

    path: str
    nbytes: int
    tensor_bytes: int
    tensors: int
    objects: int
    files: Mapping[str, int] = field(repr=False)
    captured_s: float
    planned_s: float
    staged_s: float
    written_s: float
    post_commit_error: BaseException | None = None
    fallback_error: BaseException | None = None
    error: BaseException | None = None
    bytes_reused: int = 0

    @classmethod
    def of_failure(cls, path: str, error: BaseException, elapsed_s: float) -> Self:
        """Make the result of a save that has failed, and wrote nothing."""
        return cls(path, 0, 0, 0, 0, {}, 0.0, 0.0, 0.0, elapsed_s, error=error)

    @property
    def bytes_written(self) -> int:
        """Of ``nbytes``, those that were written."""
        return self.nbytes - self.bytes_reused

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the files per second, from the call until durable."""
        return self.nbytes / self.written_s if self.written_s else 0.0

    def _repr_html_(self) -> str:
        from aiockpt.telemetry.card import card, size_text, time_text

        facts = {
            "tensors": f"{self.tensors} ({size_text(self.tensor_bytes)}), and {self.objects} objects",
            "files": f"{len(self.files)} ({size_text(self.nbytes)})",
            **({"shared with the base": size_text(self.bytes_reused)} if self.bytes_reused else {}),
            "held the caller": time_text(self.captured_s),
            "staged after": time_text(self.staged_s),
            "written after": f"{time_text(self.written_s)} ({size_text(self.bytes_per_s)}/s)",
        }
        errors = {
            "not written": self.error,
            "at the fallback path, because": self.fallback_error,
            "the post_commit hook failed": self.post_commit_error,
        }
        notes = "\n".join(f"{what}: {error}" for what, error in errors.items() if error is not None)
        title = "not saved" if self.error is not None else "saved"
        return card(title, self.path, {} if self.error is not None else facts, self.timeline(), notes)


# --- loads --------------------------------------------------------------------------------------------


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


# --- mirrors ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """A step that is durable in the mirror.

    Attributes:
        path: its path there.
        nbytes: the bytes of its files.
        sent_bytes: those that were sent now; the others were there, from an attempt that was interrupted, or
            came from an earlier step.
        mirrored_s: how long that took, in seconds; 0 if it was there already.
    """

    path: str
    nbytes: int
    sent_bytes: int
    mirrored_s: float


@dataclass(frozen=True, slots=True)
class MirrorBacklog:
    """The steps that a mirror lacks, as it was seen last.

    Attributes:
        steps: the steps that will be mirrored, in this order.
        nbytes: the bytes of their files.
        newest: the newest step that the mirror has; None if it has none, or was not reached yet.
        newest_time: when that was saved, in seconds as in `time.time`; 0 if there is none.
        error: why the last attempt has failed; None if it has not.
    """

    steps: tuple[int, ...] = ()
    nbytes: int = 0
    newest: int | None = None
    newest_time: float = 0.0
    error: BaseException | None = None
