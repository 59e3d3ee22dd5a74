"""Object stores of S3, Google Cloud Storage and Azure, by the package obstore; extra ``aiockpt[object]``.

obstore sends requests from threads of its own, repeats them, finds credentials, and takes over buffers without a copy.
What was found out about it: an upload in parts takes views of exactly the size of a part at once, and lets go of each
when it is sent; it aborts the upload if its source of views raises, but not if its task is cancelled; after a fork it
hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiockpt.core.threads import DaemonThreads, outlast
from aiockpt.errors import AiockptError, WriteError
from aiockpt.storage.faults import errors
from aiockpt.storage.objects.client import (
    LONGEST_S,
    ConditionError,
    NoBucketError,
    NotSentError,
    ObjectClient,
    ObjectFacts,
    ObjectSink,
    RefusedError,
)
from aiockpt.storage.objects.storage import ObjectStorage
from aiockpt.storage.remote import put_into

try:
    import obstore
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url
except ImportError as exc:
    raise ImportError("object stores need the package obstore: pip install 'aiockpt[object]'") from exc

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Document, Seen, Stamp

SCHEMES = ("s3", "gs", "az")
CLOCK_NAME = ".aiockpt.clock"

_LEAST_PART_BYTES = 5 << 20
_MOST_PARTS = 10_000
_IN_FLIGHT = 8  # parts of a file
_TIMEOUT = "300s"  # of a request: a part of 16 MiB at 56 KiB/s
_CLOCK_S = 600.0
_STOP_S = 5.0  # for an upload to be aborted, by requests; after that it is left open
_HASTY_S = 5
_ONCE_S = 60  # much less than others wait for a request that is on its way
_NICE = 10
_SECRET = re.compile(r"secret|token|key|password|credential|sas", re.IGNORECASE)
_SHORT = 7
_CAUSE = re.compile(r'(?:message|error): "(.*?)",\n')
_QUERY = re.compile(r"(https?://[^\s?]+)\?\S*")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_DENIED = re.compile("status code: 40[13]|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken")
_EXPIRED = re.compile("ExpiredToken|TokenRefreshRequired")
_NO_CREDENTIALS = re.compile(r"//(169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal)|CredentialsError")
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_")
_ELSEWHERE = re.compile("redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_REPEATED = re.compile(r"after \d+ retries")
_ANSWERED = re.compile("Server returned|DeleteObjects request failed")
_DENIALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_CONDITIONS = (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError)

logger = logging.getLogger("aiockpt")
_used_in: int | None = None  # the process that has made threads of obstore


def _is_panic(exc: BaseException) -> bool:
    """Return whether code of obstore has panicked, which raises what is derived from no other exception."""
    return type(exc).__name__ == "PanicException"


class ObstoreClient(ObjectClient):
    """Requests to a bucket or a container.

    Args:
        url: ``s3://bucket``, ``gs://bucket`` or ``az://container``.
        options: of obstore's store.
        conditions: the store honours conditions; else they are looked at before a put.
        longest_s: see `ObjectClient`.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], *, conditions: bool = True, longest_s: float = LONGEST_S
    ) -> None:
        self.kind, self._conditions, self.longest_s = url.partition("://")[0], conditions, longest_s
        self._given = url, options
        self.copies = self.kind != "az"  # whose copies may end after the answer
        self._hasty: ObstoreClient | None = None
        self._once: ObstoreClient | None = None
        if "@" in url:
            raise AiockptError(
                f"{self.kind}://***@{url.rpartition('@')[2]}: credentials belong in storage_options, not in the URL"
            )
        for name in ("client_options", "retry_config"):
            if not isinstance(options.get(name, {}), Mapping):
                raise AiockptError(f"{url}: {name} must be a dict, not {options[name]!r}; see storage_options")
        self._secrets = [str(value) for name, value in options.items() if _SECRET.search(name) and value]
        self._environment: dict[str, str] | None = _environment()  # None: the store is to be made anew
        self._store = self._made()
        self._clock: tuple[float, float] | None = None  # when it was looked at, and what it was ahead then

    def _made(self) -> Any:
        """Make a store of obstore, which looks at the environment only then."""
        url, options = self._given
        options = {"client_options": {}, **options}
        # Obstore looks at no client option of the environment if one is given.
        is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1") and self.kind == "s3"
        plain = {"allow_http": True} if is_plain else {}
        options["client_options"] = {"timeout": _TIMEOUT, **plain, **options["client_options"]}
        if self.kind == "s3":
            options = _s3_options(options)
        try:
            return from_url(url, **options)
        except (exceptions.BaseError, TypeError, ValueError, OverflowError) as exc:
            raise AiockptError(f"{url}: {self._wording(exc)}; see storage_options") from None
        except BaseException as exc:
            if not _is_panic(exc):
                raise
            what = "one of its options is of no store; allow_http and the like belong in client_options"
            raise AiockptError(f"{url}: {what} ({self._wording(exc)}); see storage_options") from None

    @property
    def hasty(self) -> ObstoreClient:
        if self._hasty is None:
            self._hasty = self._limited(_HASTY_S, {"max_retries": 3} | self._given[1].get("retry_config", {}))
        return self._hasty

    def _limited(self, limit_s: int, retries: Mapping[str, Any]) -> ObstoreClient:
        """Return a client whose requests end after so long."""
        url, options = self._given
        limits = {"timeout": f"{limit_s}s", "connect_timeout": f"{_HASTY_S}s"}
        given = {
            "retry_config": {**retries, "retry_timeout": timedelta(seconds=limit_s)},
            "client_options": {**options.get("client_options", {}), **limits},
        }
        return ObstoreClient(url, {**options, **given}, conditions=self._conditions, longest_s=limit_s)

    @property
    def store(self) -> Any:
        """The store of obstore, unless this process can't use it."""
        global _used_in
        if _used_in is None:
            _used_in = os.getpid()
            # Its threads have the priority of the one that starts them; their copies must not slow training down.
            with DaemonThreads(1, "aiockpt-obstore", nice=_NICE) as starting:
                starting.submit(obstore.put, MemoryStore(), "first", b"").result()
        if _used_in != os.getpid():
            raise AiockptError(
                "object stores can't be used in a process that was forked from one that has used them: start processes "
                "by 'spawn' or 'forkserver'"
            )
        if self._environment != (found := _environment()):  # such as other credentials
            self._environment, self._store = found, self._made()
        return self._store

    def _wording(self, exc: BaseException) -> str:
        """Return the message of an error without the details, and without credentials."""
        text, _, details = str(exc).partition("\n\nDebug source")
        text = _QUERY.sub(r"\1", text)
        if text.endswith("error sending request") and (cause := _CAUSE.search(details)):
            text += f" ({cause[1]})"
        if "<Error>" in text:  # S3 also shows what it has signed
            said = [found[1] for name in ("Code", "Message") if (found := re.search(f"<{name}>(.*?)</{name}>", text))]
            text = f"{text.partition('<')[0]}{': '.join(said)}"
        for secret in self._secrets:
            # A short one, of a test, is also a part of words.
            text = re.sub(
                re.escape(secret) if len(secret) > _SHORT else rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text
            )
        return " ".join(text.split())

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Raise errors of obstore as OSError."""
        try:
            yield
        except (exceptions.BaseError, FileNotFoundError) as exc:
            raise self._error(key, exc) from None
        except BaseException as exc:
            if not _is_panic(exc):
                raise
            what = "no request can be made with the endpoint, region or credentials"
            raise OSError(f"{self._given[0]}/{key}: {what}: {self._wording(exc)}; see storage_options") from None

    def _error(self, key: str, exc: Exception) -> OSError:
        text, where = self._wording(exc), f"{self._given[0]}/{key}"
        if isinstance(exc, _CONDITIONS):
            return ConditionError(f"the object {key} is not the one that was expected: {text}")
        if _NO_BUCKET.search(text):
            return NoBucketError(f"{self._given[0]} does not exist, or not at this endpoint: {text}")
        if isinstance(exc, exceptions.NotFoundError | FileNotFoundError):
            return FileNotFoundError(f"the object {key} does not exist: {text}")
        if _NO_CREDENTIALS.search(text):
            what = "no credentials are in storage_options, in the environment, or given by the machine"
            return PermissionError(f"{where}: access is denied: {what}: {text}")
        if _EXPIRED.search(text):
            self._environment = None  # a file of profiles, too, may have others by now
            what = "the credentials have expired; set new ones, or pass credential_provider, which renews them"
            return PermissionError(f"{where}: access is denied: {what}: {text}")
        if _REPEATED.search(text):  # one that was sent before may have been done, or may be yet
            after = "an upload has failed, and could not be aborted either: " if "performing DELETE" in text else ""
            advice = "see retry_config in storage_options for how often, and how long, requests are repeated"
            return OSError(f"{where}: {after}{text}; {advice}")
        if _ELSEWHERE.search(text):
            what = "the region or the endpoint in storage_options is not that of this bucket"
            return PermissionError(f"{self._given[0]}: {what}: {text}")
        if isinstance(exc, _DENIALS) or _DENIED.search(text):
            advice = "look at the credentials and their rights"
            return PermissionError(f"{where}: access is denied, so {advice}: {text}")
        return (RefusedError if _ANSWERED.search(text) else OSError)(f"{where}: {text}")

    def _stamp(self, meta: Mapping[str, Any]) -> Stamp:
        if self.kind == "gs":  # which compares generations, but does not list them
            return meta.get("version") or f"etag:{meta.get('e_tag')}"
        return meta.get("e_tag") or ""

    def _facts(self, meta: Mapping[str, Any]) -> ObjectFacts:
        return ObjectFacts(meta["size"], self._stamp(meta), meta["last_modified"].timestamp())

    # --- requests -----------------------------------------------------------------------------------------

    def put(self, key: str, data: Document, only_if: Stamp | None = None) -> Stamp:
        mode: Any = "overwrite"
        if only_if is not None and self._conditions:
            condition = {"version": only_if} if self.kind == "gs" else {"e_tag": only_if}
            mode = condition if only_if else "create"
        elif only_if is not None:
            found = self._head(key)
            if (found.stamp if found else "") != only_if:
                raise ConditionError(f"the object {key} is another one")
        with self.errors(key):
            return self._stamp(obstore.put(self.store, key, memoryview(data).cast("B"), mode=mode, use_multipart=False))

    def get(self, key: str) -> tuple[ObjectFacts, bytes] | None:
        with contextlib.suppress(FileNotFoundError), self.errors(key):
            result = obstore.get(self.store, key)
            return self._facts(result.meta), bytes(result.bytes())
        return None

    def _head(self, key: str) -> ObjectFacts | None:
        try:
            with self.errors(key):
                return self._facts(obstore.head(self.store, key))
        except FileNotFoundError:
            return None
        except (PermissionError, RefusedError) as exc:  # the answer to a HEAD has no words; the key may be a prefix
            try:
                with self.errors(key):
                    obstore.get_range(self.store, key, start=0, length=1)
            except (PermissionError, NoBucketError) as named:
                raise named from None
            except OSError:
                pass
            raise exc from None

    def tail(self, key: str, nbytes: int) -> tuple[ObjectFacts, bytes] | None:
        if nbytes and self.kind != "az":  # which has no ranges from the end
            try:
                with self.errors(key):
                    result = obstore.get(self.store, key, options={"range": {"suffix": nbytes}})
                    return self._facts(result.meta), bytes(result.bytes())[-nbytes:]
            except FileNotFoundError:
                return None
            except (PermissionError, NoBucketError):
                raise
            except OSError as exc:  # some stores refuse it for an empty object
                logger.debug("no last bytes: %s", exc)
        for _ in range(_IN_FLIGHT):
            facts = self._head(key)
            if facts is None:
                return None
            data = bytearray(min(nbytes, facts.size))
            with contextlib.suppress(ConditionError, FileNotFoundError):  # it was replaced in between
                self.read(key, [(facts.size - len(data), len(data))], memoryview(data), None, facts.stamp)
                return facts, bytes(data)
        raise OSError(f"{key} is replaced again and again")

    def read(
        self,
        key: str,
        runs: Sequence[tuple[int, int]],
        view: memoryview,
        seen: Seen | None = None,
        stamp: Stamp | None = None,
    ) -> int:
        runs, at = [run for run in runs if run[1]], 0
        with self.errors(key):
            for data in self._pieces(key, runs, stamp):
                at += put_into(view[at:], data, seen)
        return at

    def _pieces(self, key: str, runs: Sequence[tuple[int, int]], stamp: Stamp | None) -> Any:
        if stamp is not None:
            return (self._checked(key, run, stamp) for run in runs)
        if runs[1:]:
            starts, lengths = zip(*runs, strict=True)
            return obstore.get_ranges(self.store, key, starts=starts, lengths=lengths)
        return (obstore.get_range(self.store, key, start=start, length=length) for start, length in runs)

    def _checked(self, key: str, run: tuple[int, int], stamp: Stamp) -> Any:
        is_version = self.kind == "gs" and not stamp.startswith("etag:")
        condition = {"version": stamp} if is_version else {"if_match": stamp.removeprefix("etag:")}
        options: Any = {"range": (run[0], sum(run)), **condition}
        return obstore.get(self.store, key, options=options).bytes()

    def below(self, prefix: str, most: float = math.inf) -> dict[str, ObjectFacts]:
        found: dict[str, ObjectFacts] = {}
        with self.errors(prefix):
            for batch in obstore.list(self.store, prefix[:-1] or None):
                found |= {meta["path"][len(prefix) :]: self._facts(meta) for meta in batch}
                if len(found) >= most:
                    break
        return found

    def tops(self, prefix: str) -> tuple[dict[str, ObjectFacts], list[str]]:
        with self.errors(prefix):
            found = obstore.list_with_delimiter(self.store, prefix[:-1] or None)
        objects = {meta["path"][len(prefix) :]: self._facts(meta) for meta in found["objects"]}
        objects = {name: facts for name, facts in objects.items() if not name.startswith(CLOCK_NAME)}
        return objects, [name[len(prefix) :].rstrip("/") for name in found["common_prefixes"]]

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if not keys:
            return
        try:
            with self.errors(keys[0]):
                obstore.delete(self.store, keys)
        except FileNotFoundError:  # of one of them; only some stores say so
            for key in keys if keys[1:] else ():
                self.delete([key])

    def delete_once(self, key: str) -> None:
        if self._once is None:
            self._once = self._limited(_ONCE_S, {"max_retries": 0})
        self._once.delete([key])

    def copy(self, key: str, other: str) -> None:
        with self.errors(key):
            obstore.copy(self.store, key, other)

    def now(self, near: str) -> float:
        if self._clock is None or time.monotonic() - self._clock[0] > _CLOCK_S:
            key = f"{near}{CLOCK_NAME}-{secrets.token_hex(8)}"
            try:
                self.put(key, b"")
                found = self._head(key)
                self.delete([key])
            except PermissionError:  # of one who only reads
                found = None
            ahead = 0.0 if found is None else found.modified - time.time()
            self._clock = time.monotonic(), ahead + time.time() - time.monotonic()
        return time.monotonic() + self._clock[1]

    def sink(self, key: str, nbytes: int | None, workers: Workers, *, held: bool = False) -> ObjectSink:
        return _Upload(self, key, nbytes, workers, held=held)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add what a user of AWS expects: the profiles of its tools, and no second hash of what TLS protects."""
    names = {name.lower().removeprefix("aws_") for name in options}
    given = dict(options)
    is_plain = options["client_options"].get("allow_http") or options.get("allow_http")
    if not is_plain and "unsigned_payload" not in names:
        given["unsigned_payload"] = True
    own = {
        "access_key_id",
        "credential_provider",
        "skip_signature",
        "web_identity_token_file",
        "container_credentials_relative_uri",
    }
    is_given = not names.isdisjoint(own) or "AWS_ACCESS_KEY_ID" in os.environ
    if not is_given and ("AWS_PROFILE" in os.environ or Path("~/.aws").expanduser().is_dir()):
        with contextlib.suppress(ImportError, ValueError):  # no boto3, or no credentials there
            from obstore.auth.boto3 import Boto3CredentialProvider

            given["credential_provider"] = Boto3CredentialProvider()
    return given


# --- uploads --------------------------------------------------------------------------------------------


class _StopError(Exception):
    """Makes obstore abort an upload."""


class _Feed:
    """The parts of an upload. No generator, whose frame would keep the last one until the next."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[memoryview | type[BaseException]] = asyncio.Queue()

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> memoryview:
        found = [await self.queue.get()]
        if isinstance(found[0], type):
            raise found[0]
        return found.pop()  # type: ignore[return-value]


class _Upload(ObjectSink):
    """An object whose parts are sent at the same time; views of the size of a part are not copied."""

    def __init__(
        self, client: ObstoreClient, key: str, nbytes: int | None, workers: Workers, *, held: bool = False
    ) -> None:
        self._client, self._key, self._nbytes = client, key, nbytes
        self._workers, self._held = workers, held
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_IN_FLIGHT)
        self._feed = _Feed()
        self._sending: asyncio.Future[Any] | None = None
        self._part_bytes = 0
        self._rest = bytearray()  # copied: less than a part

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        view = view.cast("B") if view.format != "B" else view
        if not self._part_bytes:
            least = math.ceil((self._nbytes or 0) / _MOST_PARTS)
            self._part_bytes = max(_LEAST_PART_BYTES, len(view), least)
        self.nbytes += len(view)
        is_last = self.nbytes == self._nbytes
        # Of an object that is held, a last part that is short rests here, and so does a single one.
        is_ready = len(view) == self._part_bytes if self._held else len(view) == self._part_bytes or is_last
        is_ready = is_ready and not (self._held and is_last and self._sending is None)
        if not self._rest and not view.readonly and is_ready:
            await self._send(view, free, is_whole=self.nbytes == len(view) and is_last)
            return
        while view:
            taken = view[: self._part_bytes - len(self._rest)]
            self._rest += taken
            view = view[len(taken) :]
            rests = self._held and is_last and not view and self._sending is None
            if len(self._rest) == self._part_bytes and not rests:
                await self._send_rest()
        free()

    async def _send_rest(self, *, is_whole: bool = False) -> None:
        rest, self._rest = self._rest, bytearray()
        await self._send(memoryview(rest), lambda: None, is_whole=is_whole)

    async def _send(self, view: memoryview, free: Callable[[], object], *, is_whole: bool) -> None:
        """Send a part, or the whole object."""
        await self._slot()
        array = (ctypes.c_char * len(view)).from_buffer(view)
        released = weakref.finalize(array, self._let_go, free)  # called in a thread of obstore
        released.atexit = False
        part = memoryview(array).cast("B")
        del array, view
        store, key = self._client.store, self._key
        if is_whole:
            self._sending = asyncio.ensure_future(obstore.put_async(store, key, part, use_multipart=False))
            return
        if self._sending is None:
            upload = obstore.put_async(
                store, key, self._feed, chunk_size=self._part_bytes, max_concurrency=_IN_FLIGHT, use_multipart=True
            )
            self._sending = asyncio.ensure_future(upload)
            self._sending.add_done_callback(self._drop_rest)
        self._feed.queue.put_nowait(part)

    def _drop_rest(self, _: object) -> None:
        """Free the parts that an upload which has failed has not taken: others may be waiting for that memory."""
        self._feed = _Feed()

    def _let_go(self, free: Callable[[], object]) -> None:
        def freed() -> None:
            self._slots.release()
            free()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(freed)

    async def _slot(self) -> None:
        """Wait until another part may be sent; raise if the upload has failed."""
        if self._sending is None:
            await self._slots.acquire()
            return
        slot = asyncio.ensure_future(self._slots.acquire())
        try:
            await asyncio.wait({slot, self._sending}, return_when=asyncio.FIRST_COMPLETED)
            if self._sending.done():
                await self._sent()
        except BaseException:
            if slot.done():  # it would be missing in `_all_free`
                self._slots.release()
            else:
                slot.cancel()
            raise

    async def _sent(self) -> None:
        if self._sending is not None:
            with errors(WriteError, "send a file"), self._client.errors(self._key):
                await asyncio.shield(self._sending)

    async def finish(self) -> None:
        if not self._held:
            await self._complete()
        elif self._sending is not None:  # but for a last part that is short, as that of a single one
            free = 0
            try:
                while free < _IN_FLIGHT:
                    await self._slot()
                    free += 1
            finally:
                for _ in range(free):
                    self._slots.release()

    @property
    def is_conditional(self) -> bool:  # type: ignore[override] # once it is finished
        return self._sending is None and self._client._conditions

    async def appear(self, only_if: Stamp) -> None:
        if self._sending is None:  # small enough for one request
            await self._workers.run(self._client.put_surely, self._key, bytes(self._rest), only_if)
        else:
            try:
                await self._complete()
            except WriteError as exc:
                # The request that ends an upload is a POST, except in Azure.
                is_part = self._client.kind != "az" and "performing PUT" in str(exc)
                raise (NotSentError if is_part else OSError)(str(exc)) from exc

    async def _complete(self) -> None:
        if self._rest or self._sending is None:
            await self._send_rest(is_whole=self._sending is None)
        self._feed.queue.put_nowait(StopAsyncIteration)
        await self._sent()
        await self._all_free()

    async def stop(self) -> None:
        self._feed.queue.put_nowait(_StopError)
        if self._sending is not None:
            await outlast(asyncio.wait([self._sending], timeout=_STOP_S))
            if not self._sending.done():  # the store does not answer
                self._sending.cancel()
                await outlast(asyncio.wait([self._sending]))
            self._sending.cancelled() or self._sending.exception()
            await outlast(self._all_free())

    async def _all_free(self) -> None:
        for _ in range(_IN_FLIGHT):
            await self._slots.acquire()
        for _ in range(_IN_FLIGHT):
            self._slots.release()


# --- the storage ----------------------------------------------------------------------------------------


class ObstoreStorage(ObjectStorage):
    """Keeps checkpoints in a bucket; see `storage_for_url`."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._given = url, dict(options)
        own = {name: value for name, value in options.items() if name in ("grace_s", "conditions")}
        given = {name: value for name, value in options.items() if name not in own}
        super().__init__(url, ObstoreClient(url, given, conditions=own.get("conditions") != "off"), **own)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObstoreStorage, self._given


def storage_for_url(url: str, **options: Any) -> ObstoreStorage:
    """Return the storage of a bucket: the factory of ``s3://``, ``gs://`` and ``az://``. Does not block.

    Args:
        url: the scheme and the bucket or container.
        options: ``grace_s`` and ``conditions`` as of `aiockpt.storage.objects.storage.ObjectStorage`; all others as of
            obstore's stores: ``region``, ``endpoint``, ``access_key_id``, ``client_options``, ``retry_config``,
            ``credential_provider`` and so on. A credential provider must be picklable for a writer process.

    Raises:
        AiockptError: an option is not known, or not valid.
    """
    return ObstoreStorage(url, options)
