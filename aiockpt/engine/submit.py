"""Saves as they are called for: everything is checked and captured at the call, then they are put in line."""

from __future__ import annotations

import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aiockpt.errors import CheckpointExistsError, SafeGlobalsWarning, SaveError, SaveSkippedError, WriteError
from aiockpt.format.item.objects import needed_for
from aiockpt.format.manifest.manifest import check_user_metadata
from aiockpt.format.transforms.rules import choose_compression
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.flatten import NameMemo
from aiockpt.saving.job import SaveJob, choose_form, format_for
from aiockpt.snapshot.capture import capture_items, capture_state
from aiockpt.snapshot.live import Stateful
from aiockpt.snapshot.sampling import check_validation
from aiockpt.storage.base import shared_storage
from aiockpt.storage.local.storage import absolute

if TYPE_CHECKING:
    import torch

    from aiockpt.engine.engine import Engine
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.rules import CompressRule
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.hooks import Hook
    from aiockpt.saving.job import SaveFormat
    from aiockpt.snapshot.sampling import Validation
    from aiockpt.storage.base import Storage

_SHOWN = 5
_KEPT_SETS = 1000

StateDict = Mapping[Any, Any] | Stateful
Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `aiockpt.AsyncCheckpointer.save` for the meaning of each."""

    overwrite: bool = False
    metadata: Mapping[str, Any] | None = None
    format: SaveFormat | None = None
    shard_bytes: int | None = None
    separation_hint: str | Sequence[str] | None = None
    pre_commit: Hook | None = None
    post_commit: Hook | None = None
    storage: Storage | None = None
    compress: CompressRule = None
    validate: Validation | None = None


class Submitter:
    """Makes saves of calls, for the facades.

    Args:
        engine: does them.
        storage: where checkpoints are kept unless a call names another place.
        transforms: what is done to all items.
        fallback_path: where checkpoints go that can't be written where they were to go.
        validate: how changes are found unless a call says so.
        decentralized: each rank decides what it writes.
    """

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        *,
        transforms: Sequence[Transform],
        fallback_path: Path | Callable[[str], Path] | None,
        validate: Validation,
        decentralized: bool,
    ) -> None:
        self._engine = engine
        self._storage = storage
        self._transforms = transforms
        self._fallback_path = (
            fallback_path if callable(fallback_path) or not fallback_path else os.fspath(fallback_path)
        )
        self._validate = validate
        self._decentralized = decentralized
        self._names = NameMemo()
        self._seen: set[frozenset[str]] = set()

    @property
    def forgiving(self) -> bool:
        """Whether failures do not end training."""
        return self._engine.options.on_failure == "warn"

    def located(self, path: Path, storage: Storage | None) -> tuple[Storage, str]:
        """Give the storage and the one name that a path has there.

        Raises:
            TypeError: it is no path.
            AiockptError: it does not belong there.
        """
        where = os.fspath(path)
        if not isinstance(where, str):
            raise TypeError(f"path must be text or an os.PathLike of text, not {path!r}")
        storage = storage if storage is not None else self._storage
        return storage, storage.resolve(where)

    def submit(self, state_dict: StateDict, path: Path, options: SaveOptions, *, ranks: int | None) -> SaveHandle:
        """Put a save in line; see `aiockpt.AsyncCheckpointer.save` for what it raises.

        Args:
            state_dict: what to save.
            path: where.
            options: how.
            ranks: how many save together; None: this process alone.
        """
        started = time.perf_counter()
        self._engine.origin.check(f"a save to {named(path)}")
        try:
            job = self._job(state_dict, path, options, started, ranks=ranks)
            self._engine.submit(job)
        except BaseException as exc:
            if ranks is not None:  # the others have called as well: they are to fail, not to wait
                refusal = SaveJob.of_refusal(named(path), self._storage, exc, started, self._engine.origin)
                self._engine.refuse(refusal)
            is_calm = self.forgiving and isinstance(exc, WriteError)
            if is_calm or isinstance(exc, SaveSkippedError):
                return self._over(named(path), exc, started)
            raise
        job.captured_s = time.perf_counter() - started
        return job.handle

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        directory: Path,
        planner: LocalPlanner,
        *,
        files: int | None,
        separation_hint: Sequence[str],
    ) -> SaveJob:
        """Put one in line that adds files to a directory; see `CheckpointerBase.submit_items`."""
        started = time.perf_counter()
        self._engine.origin.check(f"a save to {named(directory)}")
        if self._transforms:
            raise SaveError("items can't be added to another's checkpoint by a checkpointer that has transforms")
        storage, where = self.located(directory, None)
        job = SaveJob(
            path=where,
            storage=storage,
            overwrite=False,
            metadata={},
            capture=capture_items(items, sampled=self._validate == "hash"),
            started=started,
            origin=self._engine.origin,
            form=DcpFormat(files, separation_hint),
            part=planner,
        )
        self._engine.submit(job)
        job.captured_s = time.perf_counter() - started
        return job

    def _over(self, path: str, error: BaseException, started: float) -> SaveHandle:
        """Give the handle of a save that is over at the call."""
        origin = self._engine.origin
        job = SaveJob.of_failure(path, self._storage, error, started, origin, forgiving=self.forgiving)
        self._engine.line.record(job, error)
        return job.handle

    def _fallback_for(self, where: str, storage: Storage, *, together: bool) -> str | None:
        """Give the other path for a checkpoint.

        Raises:
            SaveError: several ranks save together.
        """
        if self._fallback_path is None:
            return None
        if together:
            raise SaveError(
                f"{where}: fallback_path is for one process; several ranks have none. Leave it out, or save with "
                "process_group=None"
            )
        if callable(self._fallback_path):
            return storage.resolve(os.fspath(self._fallback_path(where)))
        return storage.resolve(os.path.join(self._fallback_path, os.path.basename(where)))

    def _look(self, storage: Storage, where: str, fallback: str | None, *, overwrite: bool) -> None:
        """Refuse a path that is taken; see `Storage.check`."""
        if self._engine.line.holds(where, overwrite=overwrite):
            raise CheckpointExistsError(f"a save to {where} is in flight; wait for it, or save under another name")
        try:
            storage.check(where, overwrite=overwrite)
        except WriteError:
            if fallback is None:
                raise  # else the save finds it as well, and goes there

    def _job(
        self, state_dict: StateDict, path: Path, options: SaveOptions, started: float, *, ranks: int | None
    ) -> SaveJob:
        together = ranks is not None
        self._engine.line.raise_unseen()
        storage, where = self.located(path, options.storage)
        options = replace(options, format=format_for(options.format, where))
        self._engine.admit(where)
        fallback = self._fallback_for(where, storage, together=together)
        self._look(storage, where, fallback, overwrite=options.overwrite)
        self._check_transforms(options, where, together=together)
        if together or self._engine.options.writer is not None:
            shared_storage(storage)
        if self._engine.options.writer is not None:
            check_portable(storage, *self._transforms)
        try:
            facts = check_user_metadata({} if options.metadata is None else options.metadata)
        except TypeError as exc:
            raise SaveError(str(exc)) from None
        form = choose_form(
            options.format,
            where,
            facts,
            shard_bytes=options.shard_bytes,
            separation_hint=options.separation_hint,
            files=self._engine.io_threads,
            together=together,
        )
        capture = capture_state(
            state_dict,
            self._names,
            ranks=ranks,
            once=together and self._decentralized,
            sampled=check_validation(options.validate or self._validate) == "hash",
        )
        if form is not None:
            form.validate(capture)
        self._warn_of_permissions(capture)
        names = capture.structure.names
        compression = None if options.compress is None else choose_compression(options.compress, names, capture.tensors)
        return SaveJob(
            path=where,
            storage=storage,
            overwrite=options.overwrite,
            metadata=facts,
            capture=capture,
            started=started,
            origin=self._engine.origin,
            form=form,
            pre_commit=options.pre_commit,
            post_commit=options.post_commit,
            compression=compression,
            transforms=self._transforms,
            forgiving=self.forgiving,
            fallback=fallback,
        )

    def _warn_of_permissions(self, capture: Snapshot) -> None:
        """Warn of objects that will need permission to be loaded; once for each set of classes."""
        new: dict[frozenset[str], int] = {}
        for leaf, (_, foreign) in capture.foreign.items():
            if frozenset(foreign) not in self._seen:
                new.setdefault(frozenset(foreign), leaf)
        kinds: list[str] = []
        names: dict[str, None] = {}
        listed = True
        for leaf in new.values():
            kind, foreign = capture.foreign[leaf]
            needed = needed_for(capture.blobs[leaf], foreign)
            if needed.names or not needed.suffices:
                kinds.append(f"{capture.structure.names[leaf]} is a {kind}")
                names |= dict.fromkeys(needed.names)
                listed = listed and needed.suffices
        if kinds:
            more = [f"{len(kinds) - _SHOWN} more are others"] if len(kinds) > _SHOWN else []
            what = "it" if len(kinds) == 1 else "them"
            option = f"safe_globals=[{', '.join(names)}]" if listed else "trust=True, as safe_globals can't be enough"
            warnings.warn(
                SafeGlobalsWarning(
                    f"{', '.join(kinds[:_SHOWN] + more)}: loading {what} will need {option}",
                    tuple(names),
                ),
                stacklevel=_stacklevel(),
            )
        if len(self._seen) > _KEPT_SETS:
            self._seen.clear()
        self._seen |= new.keys()  # only now: where the warning is an error, every such save is refused

    def _check_transforms(self, options: SaveOptions, where: str, *, together: bool) -> None:
        """Refuse to compress, or to transform otherwise, what can't be.

        Raises:
            ValueError: it is for another format.
            SaveError: several ranks save together.
        """
        if options.compress is None and not self._transforms:
            return
        what = "transforms" if self._transforms else "compress"
        if options.format != "dcp":
            raise ValueError(f"{what} is for format='dcp'; {options.format} files hold tensors as they are")
        if together:
            raise SaveError(
                f"{where}: {what} is for one process; several ranks save their items as they are. Leave it out, or "
                "save with process_group=None"
            )


def _stacklevel() -> int:
    """Return the level, seen from the caller, of the first function that is not of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "aiockpt":
        level, frame = level + 1, frame.f_back
    return level


def check_portable(*tools: Storage | Transform) -> None:
    """Refuse a storage, or a transform, that a writer process can't have.

    Raises:
        SaveError: it can't be pickled, or its class is defined where the process does not look.
    """
    for tool in tools:
        try:
            if b"__main__" in pickle.dumps(tool):
                raise TypeError("it is defined in the main module, which that process does not import: move it to one")
        except Warning:  # an error only because the program makes errors of warnings
            raise
        except Exception as exc:  # whatever its class does
            raise SaveError(
                f"{type(tool).__name__} can't be sent to the writer process ({exc}): make it picklable, or use "
                "writer='thread'"
            ) from exc


def named(path: Path) -> str:
    """Name a path as `Storage.resolve` does, as far as that is possible."""
    try:
        return absolute(path)
    except (TypeError, ValueError):
        return str(path)
