"""A bucket of a server, with what is needed to use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiockpt
from aiockpt.storage.objects.cleaning import split_token
from aiockpt.storage.objects.obstore import ObstoreStorage
from aiockpt.storage.objects.storage import ObjectStorage
from benchmarks.harness.object_server import ObjectServer
from tests.places import ServerPath


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
        storage = self.storage()
        keys = sorted(storage.objects.below(""))
        paths = [key.rpartition("/")[0] for key in keys if key.endswith("/.metadata") and not split_token(key)[0]]
        live = {commit.token for path in paths if (commit := storage.record(self / path)) is not None}
        return [key for key in keys if not key.endswith("/.metadata") and not key.startswith(tuple(live))]


class PlacedStorage(ObjectStorage):
    """The storage of a bucket whose URL names the port of its server, for processes that get nothing but a path."""

    def __init__(self, url: str) -> None:
        self._url = url
        scheme, _, place = url.removeprefix("at-").partition("://")
        port, _, bucket = place.partition(".")
        found = Bucket(f"{scheme}://{bucket}", ObjectServer(f"http://127.0.0.1:{port}").options(scheme))
        super().__init__(url, found.storage().objects)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacedStorage, (self._url,)


def path_in(server: ObjectServer, scheme: str, bucket: str) -> ServerPath:
    """Return a path in a bucket of a server."""
    return ServerPath(f"at-{scheme}://{server.url.rpartition(':')[2]}.{bucket}/run")
