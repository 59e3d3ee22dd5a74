"""Submitting a save: everything is checked and captured in the caller's thread, then the save is queued."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import aiockpt.saving.pipeline  # noqa: F401 - what runs the save, imported before the engine's thread wants it
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.lazy import importing
from aiockpt.core.parameters import outer_stacklevel
from aiockpt.core.spans import Span
from aiockpt.core.wording import a
from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    DequantizedWarning,
    SafeGlobalsWarning,
    SaveError,
    SaveSkippedError,
    WriteError,
)
from aiockpt.format.hashes import require_hash
from aiockpt.format.item.objects import needed_for
from aiockpt.format.manifest.manifest import check_user_metadata
from aiockpt.format.names import COMMON_NAME, CONFIG_NAME, SUFFIX
from aiockpt.format.recognise import TORCH_SUFFIXES, is_mark
from aiockpt.format.transforms.zstd import choose_compression
from aiockpt.options import Base, Path, Replicas, SaveFormat, SaveOptions, Validation, check_choice
from aiockpt.planning.base import DeltaSpec
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.flatten import NameMemo
from aiockpt.planning.safetensors_plan import SafetensorsFormat
from aiockpt.planning.torch_plan import TorchFormat
from aiockpt.saving.job import AppendSpec, PartSpec, RefusedSpec, SaveJob, SaveSpec
from aiockpt.snapshot.capture import capture_items, capture_state
from aiockpt.storage.base import Storage, shared_storage
from aiockpt.storage.registry import scheme_of, text_of

if TYPE_CHECKING:
    import torch

    from aiockpt.coordination.protocol import RankCall
    from aiockpt.engine.engine import Engine
    from aiockpt.engine.requests import SaveRequest, StateDict, TransactionRequest
    from aiockpt.format.transforms.base import Transform
    from aiockpt.planning.planner import FileFormat, Planner
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.joint import Joint
    from aiockpt.storage.registry import Storages


_SHOWN = 5
_KEPT_SETS = 1000


class Submitter:
    """Turns the calls of a checkpointer into queued saves."""

    def __init__(self, engine: Engine, storages: Storages, transforms: Sequence[Transform]) -> None:
        self.engine = engine
        self._options = engine.options
        self.storages = storages
        self._transforms = transforms
        self._names = NameMemo()
        self._warned: set[frozenset[str]] = set()
        self._warned_classes: set[str] = set()  # of `_warn_of_dequantized`

    def submit(self, request: SaveRequest) -> SaveHandle:
        """Queue a save; see `aiockpt.AsyncCheckpointer.save`."""
        return self._submit(request, SaveSpec).handle

    def submit_part(self, request: SaveRequest, *, is_alone: bool) -> SaveJob:
        """Queue a part of a transaction.

        ``is_alone``: this rank makes it alone: the others don't call it, and are not informed if it fails.
        """
        return self._submit(request, PartSpec, is_alone=is_alone)

    def _submit(self, request: SaveRequest, kind: type[SaveSpec], *, is_alone: bool = False) -> SaveJob:
        started = time.perf_counter()
        coordinator = None if is_alone else self.engine.coordinator()
        call = None if coordinator is None else coordinator.call("save")
        path = self.storages.printable(request.path, request.storage)
        self.engine.origin.check(f"a save to {path}")
        try:
            ranks = None if coordinator is None else coordinator.world_size
            job = SaveJob(self._spec(request, kind, started, call, ranks), self.engine)
            captured = time.perf_counter()
            job.captured_s = captured - started
            job.spans.append(Span("capture", threading.current_thread().name, started, captured))
            self.engine.submit(job)
        except BaseException as exc:
            if not is_alone:
                self.refuse(path, exc, call)
            is_calm = (self._options.warn_only and isinstance(exc, WriteError)) or isinstance(exc, SaveSkippedError)
            if not is_calm:
                raise
            job = self._refusal(path, exc, started, call=None)
            job.settle(None, exc)
            return job
        job.captured_s = time.perf_counter() - started
        return job

    def rehearse(self, state_dict: StateDict) -> None:
        """Capture a state and drop it: a save then imports, calls and faults in nothing for the first time."""
        with contextlib.suppress(AiockptError):  # only sizes matter here; a save refuses what it can't store
            capture_state(
                state_dict,
                self._names,
                ranks=1,
                sampled=self._options.validate == "hash",
                arenas=self.engine.arenas,
            ).release()

    def refuse(self, path: str, error: BaseException, call: RankCall | None = None) -> None:
        """Inform the other ranks, which have called save() too: they must fail, not wait for this one.

        ``call`` is None if this rank has not counted it.
        """
        if (coordinator := self.engine.coordinator()) is not None:
            job = self._refusal(path, error, time.perf_counter(), call or coordinator.call("save"))
            self.engine.refuse(job, error)

    def _refusal(self, path: str, error: BaseException, started: float, call: RankCall | None) -> SaveJob:
        """Return the job that only says why this process does not save."""
        storage, options = self.storages.default, self._options
        fallback = None if options.fallback_path is None else (storage, "")  # the others ask whether to go there
        spec = RefusedSpec(
            path=path,
            storage=storage,
            started=started,
            warn_only=options.warn_only,
            fallback=fallback,
            call=call,
            error=error,
        )
        return SaveJob(spec, self.engine)

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        path: Path,
        ticket: str,
        planner: Planner,
        transforms: Sequence[Transform],
        storage: Storage | None = None,
    ) -> SaveJob:
        """Queue a save that adds files to a transaction; see `CheckpointerBase.submit_items`."""
        started = time.perf_counter()
        self.engine.origin.check(f"a save to {self.storages.printable(path)}")
        if self._transforms:
            raise SaveError("items can't be added to another's checkpoint by a checkpointer that has transforms")
        storage, where = self.storages.of(path, storage)
        snapshot = capture_items(items, sampled=self._options.validate == "hash")
        self._warn_of_permissions(snapshot)
        self._warn_of_dequantized(snapshot)
        spec = AppendSpec(
            path=where,
            storage=storage,
            snapshot=snapshot,
            started=started,
            planner=planner,
            ticket=ticket,
            transforms=transforms,
        )
        job = SaveJob(spec, self.engine)
        self.engine.submit(job)
        job.captured_s = time.perf_counter() - started
        return job

    def _fallback_for(self, where: str, storage: Storage) -> tuple[Storage, str] | None:
        """Return the storage and the path of the fallback of a checkpoint; None if there is none."""
        fallback = self._options.fallback_path
        if fallback is None:
            return None
        path = text_of(fallback(where) if callable(fallback) else fallback)
        if scheme_of(path) == scheme_of(where):
            place, path = storage, storage.resolve(path)
        else:
            place, path = self.storages.of(path)
        return place, path if callable(fallback) else place.below(path, storage.split(where)[1])

    def _check_place(
        self,
        request: SaveRequest,
        format: SaveFormat,
        storage: Storage,
        where: str,
        fallback: tuple[Storage, str] | None,
        *,
        together: bool,
    ) -> None:
        """Raise if the storage can't have such a checkpoint, or the path is taken; see `Storage.check`."""
        if (format == "torch" or where.endswith(SUFFIX)) and not storage.traits.single_files:
            raise SaveError(f"{where}: {type(storage).__name__} keeps no checkpoints of one file; save to a directory")
        if together and format == "safetensors" and not storage.traits.shared_files:
            raise SaveError(
                f"{where}: {type(storage).__name__} can't let several ranks write one file, as format='safetensors' "
                "does: save with format='dcp', or with process_group=None on one rank"
            )
        if self.engine.queue.is_path_busy(where, overwrite=request.overwrite):
            raise CheckpointExistsError(f"a save to {where} is in flight; wait for it, or save under another name")
        try:
            check = storage.check_repository if format == "safetensors" else storage.check
            check(where, overwrite=request.overwrite)
        except WriteError:
            if fallback is None:  # else the save meets the same error, and uses the fallback
                raise

    def _spec(
        self, request: SaveRequest, kind: type[SaveSpec], started: float, call: RankCall | None, ranks: int | None
    ) -> SaveSpec:
        """Check everything that can be checked at the call, and capture the state."""
        together, takes_turn = ranks is not None, kind.has_outcome  # else its transaction has passed this
        if takes_turn:
            self.engine.queue.raise_unreported()
        storage, where = self.storages.of(request.path, request.storage, request.storage_options)
        format = format_for(request.format, where)
        if format == "torch" and together:
            raise SaveError(
                f"{where}: a torch.save file is written by one process. Save with format='dcp', and convert it with "
                "`aiockpt convert`, or save with process_group=None on one rank"
            )
        if self.engine.leads and takes_turn:  # one rank decides for all: the others may be behind or ahead of it
            self.engine.queue.admit(where)
        fallback = self._fallback_for(where, storage) if takes_turn else None
        self._check_place(request, format, storage, where, fallback, together=together)
        self._check_transforms(request, format)
        delta = self._delta(request, format, storage, together=together)
        self._check_sharing(storage, together=together)
        request = _checked(request, self._options.validate)
        file_format = choose_file_format(request, format, where, files=self._options.writing_threads)
        files = read_files(request.files or {}, is_single=format == "torch" or where.endswith(SUFFIX))
        snapshot = self._capture(request, file_format, ranks)
        names, compress = snapshot.structure.names, request.compress
        return kind(
            path=where,
            storage=storage,
            started=started,
            snapshot=snapshot,
            options=replace(request, state_dict={}, files=None),
            files=files,
            file_format=file_format,
            compression=None if compress is None else choose_compression(compress, names, snapshot.tensors),
            transforms=self._transforms,
            delta=delta,
            warn_only=self._options.warn_only,
            fallback=fallback,
            call=call,
        )

    def _check_sharing(self, storage: Storage, *, together: bool) -> None:
        """Raise SaveError if several processes are to write, and the storage does not allow it."""
        if together or self._options.process_writer is not None:
            shared_storage(storage)
        if self._options.process_writer is not None:
            check_portable(storage, *self._transforms)

    def _capture(self, request: SaveRequest, file_format: FileFormat | None, ranks: int | None) -> Snapshot:
        """Capture the state, and warn of what is not loaded as it was saved."""
        with gc_pause():  # what is captured is no garbage
            snapshot = capture_state(
                request.state_dict,
                self._names,
                ranks=ranks,
                sampled=request.validate == "hash",
                include=request.include,
                exclude=request.exclude,
                arenas=self.engine.arenas,
                group=self._options.process_group,
                together=isinstance(file_format, TorchFormat),
            )
        if file_format is not None:
            file_format.validate(snapshot)
        self._warn_of_permissions(snapshot)
        self._warn_of_dequantized(snapshot)
        self._warn_of_sharing(snapshot)
        return snapshot

    def submit_joint(self, joint: Joint, request: TransactionRequest) -> SaveHandle:
        """Queue the last step of a transaction: it publishes what its parts have written, or removes it."""
        started, coordinator = time.perf_counter(), self.engine.coordinator()
        with importing():
            from aiockpt.saving.joint import JointSpec
        spec = JointSpec(
            path=joint.path,
            storage=joint.storage,
            started=started,
            options=SaveOptions(pre_commit=request.pre_commit, post_commit=request.post_commit),
            warn_only=self._options.warn_only,
            call=None if coordinator is None else coordinator.call("save"),
            joint=joint,
        )
        job = SaveJob(spec, self.engine)
        self.engine.submit(job)
        self.engine.joints.discard(joint)
        return job.handle

    def _warn_of_permissions(self, snapshot: Snapshot) -> None:
        """Warn about objects that need ``safe_globals`` or ``trust`` to be loaded, once for each set of classes."""
        new: dict[frozenset[str], int] = {}
        for leaf, (_, foreign) in snapshot.foreign.items():
            if frozenset(foreign) not in self._warned:
                new.setdefault(frozenset(foreign), leaf)
        kinds: list[str] = []
        names: dict[str, None] = {}
        listed = True
        for leaf in new.values():
            kind, foreign = snapshot.foreign[leaf]
            needed = needed_for(snapshot.blobs[leaf], foreign)
            if needed.names or not needed.suffices:
                kinds.append(f"{snapshot.structure.names[leaf]} is {a(kind)}")
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
                stacklevel=outer_stacklevel(),
            )
        if len(self._warned) > _KEPT_SETS:
            self._warned.clear()
        self._warned |= new.keys()  # not before the warning: if it is an error, every such save must be refused

    def _warn_of_dequantized(self, snapshot: Snapshot) -> None:
        """Warn about tensors that are saved as plain ones, once for each class."""
        new = snapshot.encoded.keys() - self._warned_classes
        for kind in sorted(new):
            warnings.warn(
                DequantizedWarning(
                    f"{snapshot.encoded[kind]} is {a(kind)}: its dequantize() is saved, and a plain tensor comes back. "
                    f"Where a target has {a(kind)}, it takes that if its copy_() encodes plain values, else the load "
                    "is refused; a new optimizer goes on with the plain tensor"
                ),
                stacklevel=outer_stacklevel(),
            )
        self._warned_classes |= new  # not before the warnings: if they are errors, every such save must be refused

    def _warn_of_sharing(self, snapshot: Snapshot) -> None:
        """Warn, once for each class, about an object that two others share: each is stored with one of its own."""
        if snapshot.shared is None or snapshot.together or snapshot.shared[2] in self._warned_classes:
            return
        one, other, kind = snapshot.shared
        warnings.warn(
            f"{one} and {other} share {a(kind)}, which is stored with each, so that they are loaded with one each: to "
            "keep it shared, save it once, under a key of its own, or both within one object",
            stacklevel=outer_stacklevel(),
        )
        self._warned_classes.add(kind)

    def _check_transforms(self, request: SaveRequest, format: SaveFormat) -> None:
        """Raise if items can't be compressed or transformed in this format."""
        if format != "dcp" and (request.compress is not None or self._transforms):
            what = "transforms" if self._transforms else "compress"
            raise ValueError(f"{what} is for format='dcp'; {format} files hold tensors as they are")

    def _delta(self, request: SaveRequest, format: SaveFormat, storage: Storage, *, together: bool) -> DeltaSpec | None:
        """Return how hashes are kept, and upon what the save is based; raise SaveError if that is not possible here."""
        if request.base is None and not request.hashes:
            return None
        base = request.base if isinstance(request.base, Base) or request.base is None else Base(request.base)
        options, what = self._options, "hashes=True" if base is None else "base="
        is_encoded, has_hints = request.compress is not None or bool(self._transforms), bool(request.separation_hint)
        refused = {
            f"format={format!r}: save with format='dcp'": format != "dcp",
            "compress= or transforms=, whose items are stored in another form": is_encoded,
            "several ranks: save with process_group=None on one rank": together,
            "writer='process': save with writer='thread'": options.process_writer is not None,
        }
        if base is not None:
            kind = type(storage).__name__
            refused |= {
                f"{kind}, whose checkpoints share no files: save to a file system": not storage.traits.adopts,
                "separation_hint=: what changes and what does not go to different files": has_hints,
                "fallback_path=, where there may be no file to share": options.fallback_path is not None,
            }
        for why in [why for why, holds in refused.items() if holds]:
            raise SaveError(f"{what} can't be used with {why}")
        new_hash = require_hash()
        with importing():
            import aiockpt.saving.delta  # noqa: F401 - as above
        memory = self.engine.base_memory
        if base is None:
            return DeltaSpec(new_hash, memory)
        if base.path == "auto":
            return DeltaSpec(new_hash, memory, is_auto=True, full_every=base.full_every)
        its_storage, path = self.storages.of(base.path, request.storage, request.storage_options)
        if its_storage is not storage:
            raise SaveError(
                f"base={path!r} is in another storage than the checkpoint: save beside it, or with base=None"
            )
        return DeltaSpec(new_hash, memory, path, full_every=base.full_every)


def _checked(request: SaveRequest, validate: Validation) -> SaveRequest:
    """Return a request with values for all options; raise SaveError or ValueError if they are none."""
    try:
        metadata = check_user_metadata({} if request.metadata is None else request.metadata)
    except TypeError as exc:
        raise SaveError(str(exc)) from None
    validate = request.validate or validate
    check_choice("validate", validate, Validation)
    check_choice("replicas", request.replicas, Replicas)
    return replace(request, metadata=metadata, validate=validate)


def check_portable(*tools: Storage | Transform) -> None:
    """Raise SaveError if a storage or transform can't be pickled for the writer process."""
    for tool in tools:
        try:
            if b"__main__" in pickle.dumps(tool):
                raise TypeError("it is defined in the main module, which that process does not import: move it to one")
        except Warning:  # an error only because the program turns warnings into errors
            raise
        except Exception as exc:  # pickling runs code of its class
            raise SaveError(
                f"{type(tool).__name__} can't be sent to the writer process ({exc}): make it picklable, or use "
                "writer='thread'"
            ) from exc


def read_files(files: Mapping[str, bytes | Path], *, is_single: bool) -> dict[str, bytes]:
    """Return the bytes of the files that are added to a checkpoint; refuse names that mean something in one."""
    if files and is_single:
        raise ValueError("files can be added to a directory only, but the path names one file")
    read: dict[str, bytes] = {}
    for name, content in files.items():
        if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
            raise ValueError(f"files has the name {name!r}; a name has no '/', and no '.' at its beginning")
        if is_mark(name) or name in (COMMON_NAME, CONFIG_NAME):
            raise ValueError(f"files has {name}, which readers take for a part of the state; give it another name")
        if isinstance(content, bytes | bytearray | memoryview):
            read[name] = bytes(content)
            continue
        if not isinstance(content, str | os.PathLike):
            raise TypeError(f"files[{name!r}] must be bytes or the path of a file, not {type(content).__name__}")
        try:
            with open(os.path.expanduser(content), "rb") as file:
                read[name] = file.read()
        except OSError as exc:
            raise SaveError(f"files[{name!r}] can't be read: {exc}") from exc
    return read


# --- the file format --------------------------------------------------------------------------------


def format_for(name: SaveFormat | None, path: str) -> SaveFormat:
    """Return the requested format, or else the one of the path's ending; raise ValueError if they contradict."""
    if name not in (None, "safetensors") and path.lower().endswith(SUFFIX):
        raise ValueError(f"{path} ends in {SUFFIX}, which contradicts format={name!r}; rename it, or leave out format")
    # An explicit format='dcp' may make a directory of any other name: some frameworks call theirs `.ckpt`.
    end = path.lower()
    return name or ("safetensors" if end.endswith(SUFFIX) else "torch" if end.endswith(TORCH_SUFFIXES) else "dcp")


def choose_file_format(request: SaveRequest, name: SaveFormat, path: str, *, files: int) -> FileFormat | None:
    """Return the file format, None for DCP's default form; raise ValueError for options that contradict it."""
    hint = request.separation_hint
    hints = (hint,) if isinstance(hint, str) else tuple(hint or ())
    for hint in hints:
        if name != "dcp":
            raise ValueError("separation_hint is for format='dcp'")
        if not isinstance(hint, str) or not hint or "/" in hint or "\0" in hint or hint.startswith("."):
            raise ValueError(
                f"separation_hint has {hint!r}; it must be the beginning of names, and of file names: no '/', no '.' "
                "at its beginning"
            )
    if name == "safetensors":
        return SafetensorsFormat(
            request.metadata or {},
            single_file=path.endswith(SUFFIX),
            shard_bytes=request.shard_bytes,
            file_of=request.fqn_to_index_mapping,
        )
    if name not in ("dcp", "torch"):
        raise ValueError(f"format is {name!r}; it must be 'dcp', 'safetensors' or 'torch'")
    if request.shard_bytes is not None:
        raise ValueError("shard_bytes is for format='safetensors'")
    if request.fqn_to_index_mapping is not None:
        raise ValueError("fqn_to_index_mapping is for format='safetensors'")
    if name == "torch":
        if request.metadata:
            raise ValueError("a torch.save file has no place for metadata=: put it into the state")
        return TorchFormat()
    return DcpFormat(files, hints) if hints else None
