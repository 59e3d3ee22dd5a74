"""Arguments of the managers' methods, their checks, and what `restore` returns."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from aiockpt.core.dataclasses import KW_ONLY, dataclass, field, fields, replace
from aiockpt.core.parameters import outer_stacklevel
from aiockpt.manager.policies import SavePolicy, as_policy
from aiockpt.manager.scan import RUN_KEY
from aiockpt.options import Base, CheckpointerOptions, DType, MapLocation, Path, SaveOptions

if TYPE_CHECKING:
    from aiockpt.engine.facade import CheckpointerBase
    from aiockpt.engine.requests import StateDict
    from aiockpt.manager.policies import KeepPolicy, Mode
    from aiockpt.planning.filters import Filter
    from aiockpt.telemetry.progress import OnProgress
    from aiockpt.telemetry.saves import SaveResult

Verification = Literal["auto", "before", "while"]
StepChoice = int | Literal["latest", "best"]


@dataclasses.dataclass(frozen=True, slots=True)
class Mirror:
    """The mirror of a run, to which its steps are copied behind, when they are written; see `SaveHandle.mirrored`.

    Attributes:
        directory: another directory, or a URL such as ``s3://bucket/runs/a``; neither of the two is in the other.
        keep: the steps to keep there: a policy, or a list of them. None: as the run.
        every: the steps to copy, by a policy such as ``EverySteps(1000)``. None: all that both the run and the mirror
            keep; when copying is behind, steps that they no longer keep are left out. The newest step is copied in any
            case when the manager is closed.
        bandwidth: the most bytes per second that are copied; None: no limit.
        required: whether steps that the mirror keeps stay in the run until they are copied, even if the disk gets full
            meanwhile.
        timeout: seconds that `restore` waits for the list of the mirror's steps.
        ephemeral: whether the run's directory is lost with the node, so that the notice of `on_signal` has to last
            until the last save is mirrored, not only written.

    Raises:
        TypeError: ``keep`` or ``every`` is no policy, or a flag is neither True nor False.
        ValueError: ``bandwidth`` or ``timeout`` is not positive.
    """

    directory: Path
    _: KW_ONLY
    keep: KeepPolicy | Iterable[KeepPolicy] | None = None
    every: SavePolicy | None = None
    bandwidth: float | None = None
    required: bool = False
    timeout: float = 10.0
    ephemeral: bool = False

    def __post_init__(self) -> None:
        as_policy(self.keep)
        if self.every is not None and not isinstance(self.every, SavePolicy):
            raise TypeError(f"every= of a mirror must be a policy such as EverySteps(100), not {self.every!r}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth= of a mirror must be positive, in bytes per second, not {self.bandwidth!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout= of a mirror must be positive, in seconds, not {self.timeout!r}")
        for name in ("required", "ephemeral"):
            if (value := getattr(self, name)) not in (True, False):  # a text such as "no" would count as true
                raise TypeError(f"{name}= of a mirror must be True or False, not {value!r}")


_OF_MIRROR = {f"mirror_{each.name}" for each in fields(Mirror)} - {"mirror_directory"}
"""Former names of the settings of a `Mirror`."""


@dataclass(frozen=True, slots=True)
class ManagerOptions(CheckpointerOptions):
    """Arguments of a manager; every option of a checkpointer is one too.

    Attributes:
        directory: the run's directory, in a local or mounted file system; created when the run is opened for writing.
            ``~`` is the home directory. Names of steps in it, such as ``step-00000100``, belong to the manager.
        keep: the steps to keep: a policy such as `KeepLatest`, or a list of policies, of which each keeps what it
            chooses. None: all. Steps are deleted only after a later save of this run is written.
        save: when `due` says that a save is due: `EverySteps`, `EverySeconds`, `WhenIdle`, combined with ``|``. None:
            never, but for the last save.
        read_only: whether it only reads, takes no lock, and renames and deletes nothing. False: the manager owns the
            run, and a second one is refused.
        missing_ok: whether what only reads takes a directory that does not exist for a run without steps. False: a look
            at it, or a restore, raises CheckpointNotFoundError.
        names: the names of the steps' directories, as a format with one field for the number, such as
            ``"checkpoint-{}"``. Only directories with such names are steps.
        include: what each save has, unless it says otherwise, as ``include`` of `save`; `restore` knows it by the step.
        exclude: what each save leaves out, likewise.
        base: an earlier step of which each save shares the files that have not changed, unless it says otherwise:
            "auto", or a `Base`. Steps may be deleted in any order all the same. A mirror gets each step whole.
        lock: whether the run has one manager that writes. False: something else sees to it that only one does.
        on_written: a function that is called with each step that is written, and its SaveResult; in a thread of the
            manager, before steps are deleted. Closing waits for it. An error of it is logged.
        mirror: a second directory, a URL, or a `Mirror` with settings, to which the steps are copied when they are
            written, behind; see `SaveHandle.mirrored`. `restore` takes the newest step of both. None: there is none.
        own_disks: whether each host has a disk of its own at this path, such as its NVMe, and keeps the files of its
            own ranks there. All of them together are the run. See the page on tiers.
        checkpointer: a checkpointer to save and load with, which is not closed with the manager. None: the manager
            makes one with the options that are given, and closes it.
    """

    directory: Path
    keep: KeepPolicy | Iterable[KeepPolicy] | None = field(default=None, kw_only=True)
    save: SavePolicy | None = field(default=None, kw_only=True)
    read_only: bool = field(default=False, kw_only=True)
    missing_ok: bool = field(default=False, kw_only=True)
    names: str = field(default="step-{:08d}", kw_only=True)
    include: Filter | None = field(default=None, kw_only=True)
    exclude: Filter | None = field(default=None, kw_only=True)
    base: Path | Base | None = field(default=None, kw_only=True)
    lock: bool = field(default=True, kw_only=True)
    on_written: Callable[[int, SaveResult], object] | None = field(default=None, kw_only=True)
    mirror: Path | Mirror | None = field(default=None, kw_only=True)
    own_disks: bool = field(default=False, kw_only=True)
    checkpointer: CheckpointerBase | None = field(default=None, kw_only=True)

    gone: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("replicas", "replica_directory", "replica_bandwidth"),
        "hosts no longer copy each other's files: leave it out, and pass mirror= for a second copy of each step",
    )

    @staticmethod
    def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with those of former names in their place; warn of them."""
        former = {name: value for name, value in options.items() if name == "mode" or name in _OF_MIRROR}
        present = {name: value for name, value in options.items() if name not in former}
        mode = former.pop("mode", None)
        if mode not in (None, "write", "read"):
            raise ValueError(f"mode must be 'write' or 'read', not {mode!r}")
        if mode is not None:
            _deprecate(f"mode={mode!r}", f"read_only={mode == 'read'}")
            present["read_only"] = mode == "read" or present.get("read_only", False)
        if flat := [name for name, value in former.items() if value is not None]:
            settings = {name.removeprefix("mirror_"): former[name] for name in flat}
            mirror = present.get("mirror")
            if mirror is None:
                raise ValueError(
                    f"{', '.join(flat)}: these are for a mirror: pass mirror=aiockpt.Mirror(DIRECTORY, ...)"
                )
            instead = ", ".join(f"{name}=..." for name in settings)
            _deprecate(", ".join(flat), f"mirror=aiockpt.Mirror(DIRECTORY, {instead})")
            present["mirror"] = (
                replace(mirror, **settings) if isinstance(mirror, Mirror) else Mirror(mirror, **settings)
            )
        return present


@dataclass(frozen=True, slots=True)
class StepRequest(SaveOptions):
    """Arguments of a manager's `save`; every option of a checkpointer's `save` but ``storage`` is one too.

    Attributes:
        step: the number of the step, 0 or more. Its directory must not exist, unless ``overwrite`` is given.
        state_dict: the state; see `AsyncCheckpointer.save`.
        metrics: numbers that belong to the step, by name, such as ``{"loss": loss}``: floats, or tensors and NumPy
            scalars of no dimension, of which the call takes the value. For a tensor on an accelerator, that waits for
            everything before it in its stream. NaN is kept, and is never the best. With many ranks, those of rank 0
            count, and so does its ``metadata``.
    """

    step: int
    state_dict: StateDict = field(repr=False)
    metrics: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Arguments of a manager's `restore`.

    Attributes:
        state_dict: the state to load into; see `AsyncCheckpointer.load`.
        step: "latest", "best", or the number of a step. A certain step that is damaged raises.
        metric: for "best", the name of the metric; None: that of the `KeepBest` of this manager.
        mode: for "best", "min" or "max"; None: as the `KeepBest` of this metric, else "min".
        verify_when: "auto": as described. "before": verify every step before it is loaded, so that the target stays
            untouched in all cases. "while": load at once.
        discard_later: whether to delete the steps after the restored one, pinned or not, once it is restored, the
            newest first. They are of no use if the run goes on from here, but a restart would take the latest. For
            this start alone: a restarted job that passes True again loses what it saved. None: warn of them.
        map_location: this and the following are as in `AsyncCheckpointer.load`.
        keys: what to load. None: everything that the step has. Keys that it was saved without, by ``include`` or
            ``exclude``, are left as they are, with a `MissingKeysWarning`, and are ``left`` of the result.
        dtype: what to cast floating-point tensors to; "target": each to what it is in the target.
        strict: raise if the step lacks a key that it was not saved without.
        missing: a list for the keys that it lacks.
        safe_globals: classes and functions that pickled objects may use.
        trust: unpickle objects without restriction.
        share: whether ranks read once what several of them need.
        progress: a function that is called while the load runs.
    """

    state_dict: StateDict = field(repr=False)
    step: StepChoice = "latest"
    _: KW_ONLY
    metric: str | None = None
    mode: Mode | None = None
    verify_when: Verification = "auto"
    discard_later: bool | None = None
    map_location: MapLocation | None = None
    keys: str | Sequence[str] | None = None
    dtype: DType = None
    strict: bool | Callable[[str], bool] = True
    missing: list[str] | None = None
    safe_globals: Sequence[Any] = ()
    trust: bool = False
    share: Literal["auto"] | bool = "auto"
    progress: OnProgress | None = None

    @staticmethod
    def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with those of former names in their place; warn of them."""
        present = dict(options)
        if (verify := present.pop("verify", None)) is not None:
            _deprecate("verify=", f"verify_when={verify!r}")
            present["verify_when"] = verify
        return present

    def load_options(self) -> dict[str, Any]:
        """Return the arguments of the load."""
        names = ("map_location", "keys", "dtype", "strict", "missing", "safe_globals", "trust", "share", "progress")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was passed over by a restore.

    Attributes:
        step: its number.
        path: where it is now: it was renamed, unless the manager only reads.
        reason: what is wrong with it.
    """

    step: int
    path: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """The step from which a run goes on.

    Attributes:
        step: its number.
        path: its directory.
        metrics: the metrics that were saved with it.
        metadata: the other metadata that was saved with it.
        skipped: the damaged steps that were passed over, newest first; also a damaged copy of this one.
        repaired: the keys of this step that were read from the mirror, as the run's directory has damaged them; or the
            names of files, where the damage is not that of a tensor.
        left: the keys that this step was saved without, which are as they were.
    """

    step: int
    path: str
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    skipped: tuple[SkippedStep, ...] = ()
    repaired: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def _deprecate(name: str, instead: str) -> None:
    warnings.warn(f"{name}: pass {instead} instead", DeprecationWarning, stacklevel=outer_stacklevel())


def checked_restore(request: RestoreRequest, directory: str, *, writes: bool) -> RestoreRequest:
    """Return a request with the number of its step; raise TypeError or ValueError if something in it is wrong."""
    if request.verify_when not in ("auto", "before", "while"):
        raise ValueError(f"verify_when must be 'auto', 'before' or 'while', not {request.verify_when!r}")
    if request.step not in ("latest", "best"):
        if isinstance(request.step, str):
            raise ValueError(f"step must be 'latest', 'best' or a number, not {request.step!r}")
        request = replace(request, step=check_step(request.step))
    if request.discard_later and not writes:
        raise ValueError(f"discard_later: this manager only reads {directory}; make one without read_only=True")
    return request


def check_step(step: object) -> int:
    """Return the number of a step; raise TypeError or ValueError if it is none."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step must be an integer, not {step!r}") from None
    if not 0 <= number < 10**18:
        raise ValueError(f"step must be at least 0 and below 10**18, not {number}")
    return number


def check_metrics(metrics: object) -> dict[str, float]:
    """Return metrics as floats; raise TypeError or ValueError, naming the metric, for anything else.

    Blocks until a tensor on an accelerator is computed.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to numbers, not {metrics!r}")
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: object, value: Any) -> float:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be text, not {name!r}")
    is_scalar = getattr(value, "ndim", None) == 0  # of torch or NumPy
    try:
        if not is_scalar and not isinstance(value, int | float):
            raise TypeError
        return float(value.item() if is_scalar else value)  # item: float() of a loss with a gradient warns
    except OverflowError:
        raise ValueError(f"the metric {name!r} is too large for a float") from None
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as exc:
        raise TypeError(
            f"the metric {name!r} is a {type(value).__name__}, not a number: pass a float, or a tensor of no dimension"
        ) from exc


def check_metadata(metadata: object) -> dict[str, Any]:
    """Return a copy of the caller's metadata; raise ValueError if it has the manager's own key."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of JSON-able values, not {type(metadata).__name__}")
    if RUN_KEY in metadata:
        raise ValueError(f"metadata has the key {RUN_KEY!r}, which is the manager's: use another name")
    return dict(metadata)
