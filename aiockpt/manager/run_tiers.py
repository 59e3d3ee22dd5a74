"""The tiers of a run: its directory, which may be the disks of several hosts, and the mirror that gets its steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiockpt.core.lazy import importing
from aiockpt.errors import AiockptError, DeleteError
from aiockpt.manager.policies import as_policy
from aiockpt.manager.requests import mirror_of
from aiockpt.manager.scan import StepNames
from aiockpt.manager.tiers import Tier

if TYPE_CHECKING:
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.manager.disks import RunDisks
    from aiockpt.manager.mirror import MirrorCopier
    from aiockpt.manager.policies import KeepPolicy
    from aiockpt.manager.requests import ManagerOptions, Mirror
    from aiockpt.manager.retention import Retention
    from aiockpt.storage.base import Storage


class Tiers:
    """The tiers of a run. A run without a mirror, or without disks of hosts, does not import their code."""

    def __init__(self, options: ManagerOptions, access: EngineAccess) -> None:
        storage, directory = access.locate(options.directory)
        names = StepNames(options.names)
        self.disks: RunDisks | None = None  # the disks of the hosts, if each has its own
        if options.own_disks:
            with importing():
                from aiockpt.manager.disks import RunDisks

            self.disks = RunDisks(storage, directory, names, access)
            storage = self.disks.storage
        self.run = Tier(storage, directory, names)  # the run's directory
        self.options = mirror_of(options)  # the settings of the mirror; None: there is none
        # the directory of the mirror, on all ranks
        self.mirror = None if self.options is None else self._located(self.options, access)
        # what copies to the mirror, on the rank that does; None until it begins
        self.copier: MirrorCopier | None = None

    def _located(self, mirror: Mirror, access: EngineAccess) -> Tier:
        with importing():
            from aiockpt.manager import mirror as _  # noqa: F401 - for what copies, in the caller's thread
        storage, directory = access.locate_by_path(mirror.directory)
        run = self.run.directory
        if f"{directory}/".startswith(f"{run}/") or f"{run}/".startswith(f"{directory}/"):
            raise ValueError(f"mirror is {directory}, and the run {run}: one must not be in the other")
        return Tier(storage, directory, self.run.names)

    def storage_at(self, *, is_mirror: bool) -> Storage:
        """Return the storage of the run's directory, or of its mirror."""
        tier = self.mirror if is_mirror else self.run
        if tier is None:
            raise RuntimeError("there is no mirror")
        return tier.storage

    @property
    def patience_s(self) -> float:
        """How long a call waits for the list of the mirror's steps, in seconds."""
        return 0.0 if self.options is None else self.options.timeout

    def begin_to_copy(
        self, keep: KeepPolicy | None, retention: Retention, access: EngineAccess, *, locks: bool
    ) -> None:
        """Copy from now on what the mirror lacks, which an earlier manager may have left. Idempotent."""
        if self.copier is not None or self.mirror is None or self.options is None:
            return
        from aiockpt.manager.mirror import MirrorCopier, MirrorSettings  # imported already, since there is a mirror

        mirror = self.options
        mirror_keep = keep if mirror.keep is None else as_policy(mirror.keep)
        settings = MirrorSettings(keep, mirror_keep, mirror.every, mirror.bandwidth, mirror.required, locks)
        self.copier = MirrorCopier(self.run, self.mirror, settings, access.reports, retention)
        retention.attach(self.copier)
        self.copier.poke()

    def expected_s(self) -> float:
        """Return the expected seconds from the end of a save until it survives the loss of the run's directory.

        0 if the directory is not lost with the node.
        """
        if self.copier is None or self.options is None or not self.options.ephemeral:
            return 0.0
        return self.copier.expected_s()

    def discard(self, after: int, retention: Retention) -> None:
        """Delete the steps after one, first from the mirror: else a restart would take them from there. Blocks."""
        with contextlib.ExitStack() as stack:
            if self.copier is not None:
                stack.callback(self.copier.resume)
                try:
                    self.copier.discard(after, self.patience_s)
                except AiockptError as exc:
                    raise DeleteError(f"step {after} was restored, but the mirror has later ones: {exc}") from exc
            retention.discard(after)
