"""A bucket of a server, with what is needed to use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiockpt
from aiockpt.storage.objects.cleaning import split_token
from aiockpt.storage.objects.obstore import ObstoreStorage


@dataclass(frozen=True)
class Bucket:
    """The URL of a bucket, and the options of its storage; readers get no time after a replacement."""

    url: str
    given: dict[str, Any]

    def __truediv__(self, name: str) -> str:
        return f"{self.url}/{name}"

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def options(self) -> dict[str, Any]:
        # A connection that rests would count as a leak.
        client = self.given["client_options"] | {"pool_max_idle_per_host": "0"}
        return {"grace_s": 0.0, **self.given, "client_options": client}

    def storage(self, **more: Any) -> ObstoreStorage:
        return ObstoreStorage(self.url, self.options | more)

    def checkpointer(self, **more: Any) -> aiockpt.SyncCheckpointer:
        return aiockpt.SyncCheckpointer(storage_options=self.options, **more)

    def listed(self) -> list[str]:
        """Return all keys."""
        return sorted(self.storage().objects.below(""))

    def dead(self) -> list[str]:
        """Return the keys that belong to no checkpoint."""
        storage, keys = self.storage(), self.listed()
        paths = [key.rpartition("/")[0] for key in keys if key.endswith("/.metadata") and not split_token(key)[0]]
        live = {commit.token for path in paths if (commit := storage.record(self / path)) is not None}
        return [key for key in keys if not key.endswith("/.metadata") and not key.startswith(tuple(live))]
