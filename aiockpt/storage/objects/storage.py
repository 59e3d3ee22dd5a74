"""Checkpoints in an object store, whatever its requests are; see `aiockpt.storage.objects`."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, DeleteError, WriteError
from aiockpt.storage.base import LeaseFacts, LookBudget, SharedTransaction, Source, Stamp
from aiockpt.storage.faults import errors
from aiockpt.storage.local.temp_dir import copy_ticket, new_ticket
from aiockpt.storage.objects.cleaning import holders, liveness_of, split_token, ticket_of, token_name
from aiockpt.storage.objects.client import ConditionError
from aiockpt.storage.objects.commit import COMMIT_NAME, with_token
from aiockpt.storage.objects.lease import owner_of
from aiockpt.storage.objects.reading import ObjectListing
from aiockpt.storage.objects.records import ObjectRecords
from aiockpt.storage.objects.transaction import ObjectTransaction, entered
from aiockpt.storage.remote import open_remote

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers


class ObjectStorage(ObjectRecords):
    """Keeps checkpoints in an object store. Its paths are URLs."""

    # --- checkpoints ----------------------------------------------------------------------------------------

    def new_ticket(self, path: str) -> str:
        return new_ticket()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        path = self.resolve(path)
        begun = ObjectTransaction(self, path, ticket or new_ticket(), _workers=workers, _overwrite=overwrite)
        return await entered(f"begin to write {path}", begun.begin(), begun.abort)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        joined = ObjectTransaction(self, self.resolve(path), ticket, _workers=workers, _joins=True)
        return await entered(f"join the save of {path}", workers.run(joined.enter), joined.release)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        taken = ObjectTransaction(self, self.resolve(path), ticket, _workers=workers, _overwrite=overwrite)
        return await entered(f"take over the save of {path}", workers.run(taken.enter, stamp), taken.release)

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        path = self.resolve(path)

        def find() -> tuple[str, bool]:
            """Return the ticket of a copy that is being written, or a new one, and whether it is there already."""
            now = self.record(path)
            for number in itertools.count():
                ticket = copy_ticket(save_id, number)
                token = f"{self.key(path)}{token_name(ticket)}/"
                found = self.objects.get(f"{token}state")
                # One that was replaced, or given up, may be removed at any time from now on.
                is_open = found is None or found[1].startswith((b"open", b"publish"))
                if is_open and (now is None or now.token != token):
                    return ticket, found is not None
            raise AssertionError("unreachable")

        with errors(WriteError, f"look for what was written of {path}"):
            ticket, is_there = await workers.run(find)
        if not is_there:
            return await self.begin(path, overwrite=True, workers=workers, ticket=ticket)
        return await self.take_over(path, ticket, overwrite=True, workers=workers, stamp=None)

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await open_remote(self.look, self.resolve(path), workers)

    async def delete(self, path: str, *, workers: Workers) -> None:
        path = self.resolve(path)

        def delete() -> None:
            self.check_lease(path)
            while (now := self.record(path)) is not None:
                self._check_deletion(now.token)
                with contextlib.suppress(ConditionError):  # it was replaced just now
                    self._delete_commit(now)
                    return
            if self._delete_object(path):
                return
            with self.look(path) as listing:
                names = ", ".join([*listing.folders, *listing.files])
            raise DeleteError(f"{path} is no checkpoint of aiockpt, but has {names} below it; nothing was deleted")

        with errors(DeleteError, f"delete {path}"):
            try:
                await workers.run(delete)
            except FileNotFoundError as exc:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        with errors(DeleteError, f"look for what killed processes have left in {directory}"):
            return await workers.run(self.clean_up, self.resolve(directory), older_than_s)

    # --- directories ------------------------------------------------------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> ObjectListing:
        return ObjectListing(self, path, budget or LookBudget())

    def stamps(self, directory: str, count: int) -> Mapping[str, Stamp]:
        # A list takes a request for 1,000 keys, a look one for a checkpoint: no more than a tenth of those.
        found = self.objects.below(self.key(directory), 100 * count)
        at = {name.removesuffix(f"/{COMMIT_NAME}"): facts.stamp for name, facts in found.items()}
        return {name: stamp for name, stamp in at.items() if "/" not in name and f"{name}/{COMMIT_NAME}" in found}

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Copy the commit object, which goes on naming the objects below the old path, and delete the old one."""
        now = self.record(path)
        found = None if now is None else self.objects.get(now.key)
        if now is None or found is None:
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        data = with_token(found[1], now.token)
        for aside in (self.below(self.split(path)[0], name) for name in names):
            with contextlib.suppress(ConditionError):
                self.objects.put_surely(self.key(aside) + COMMIT_NAME, data, "")
                break
        else:
            raise FileExistsError(f"each name for {path} is taken")
        self.objects.put(f"{now.token}state", b"aside")
        self.unpublish(now.key, found[0].stamp)
        return aside

    def owner_of(self, directory: str) -> LeaseFacts | None:
        return owner_of(self.objects, self.key(directory))

    def is_finishing(self, directory: str) -> bool:
        key, tokens = self.key(directory), defaultdict[str, list[str]](list)
        for name in self.objects.below(key):
            token, rest = split_token(key + name)
            tokens[token].append(rest)
        return any(
            liveness_of([ticket_of(token.split("/")[-2]) or ""]) == "dead" and liveness_of(holders(each)) == "alive"
            for token, each in tokens.items()
            if token
        )
