"""Readers of open checkpoints: mappings of keys to facts, with `read`, `read_many` and `stream`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeVar

import anyio
import torch

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.parameters import parameters_of
from aiockpt.core.threads import check_asyncio, has_loop
from aiockpt.errors import AiockptError, LoadError
from aiockpt.format.index import ObjectEntry
from aiockpt.options import DType, LoadOptions, check_options
from aiockpt.planning.layout import split_in_order
from aiockpt.reading.info import (
    ObjectInfo,
    TensorInfo,
    describe,
    has_value,
    html_table,
    shown_infos,
    stored_bytes,
    text_table,
)
from aiockpt.reading.load import read_requests
from aiockpt.reading.open import OpenCheckpoint, open_checkpoint
from aiockpt.snapshot.capture import ready_events

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.engine.engine import Engine
    from aiockpt.reading.read_plan import ReadRequest
    from aiockpt.storage.base import Storage

T = TypeVar("T")

Order = Literal["file", "keys"]

_GROUP_BYTES = 32 << 20  # read at once by a stream
_PART_BYTES = 16 << 20  # read at once of the stored bytes of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a read.

    Attributes:
        device: the device of new tensors; None: host memory.
        dtype: the dtype to cast floating-point values to, except those of tensors without dimensions; "target": that
            of ``out``.
        verify: check the CRC of every stored chunk that is read whole; None: as this reader was opened.
    """

    device: torch.device | str | None = None
    dtype: DType = None
    verify: bool | None = None


@dataclass(frozen=True, slots=True)
class ReadOne(ReadOptions):
    """Arguments of `CheckpointReader.read`.

    Attributes:
        key: the key.
        index: the part of a tensor to read: slices with positive steps, integers, ``...``, or a tuple of these, as in
            indexing a tensor. Only the bytes of that part are read. None: the whole tensor.
        out: a tensor of the resulting shape and dtype to fill, on any device and with any strides.
    """

    key: str
    index: object = None
    out: torch.Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class ReadMany(ReadOptions):
    """Arguments of `CheckpointReader.read_many`.

    Attributes:
        keys: names, names of containers and glob patterns; or a mapping of names to indices as in `read`; None:
            everything.
    """

    keys: Any = None


@dataclass(frozen=True, slots=True)
class Stream(ReadMany):
    """Arguments of `CheckpointReader.stream`.

    Attributes:
        order: "file": in file order, which is fastest; "keys": in the order of ``keys``.
        buffer_bytes: the read-ahead in bytes.
    """

    order: Order = field(default="file", kw_only=True)
    buffer_bytes: int = field(default=256 << 20, kw_only=True)


@dataclass(eq=False, repr=False)
class _Reader(Mapping[str, "TensorInfo | ObjectInfo"]):
    """Base of both readers: a mapping of keys to the facts in the index."""

    _engine: Engine
    _storage: Storage
    path: str
    _options: LoadOptions
    _checkpointer: object  # a checkpointer that closes itself when its last reference goes
    _close_checkpointer: Callable[[], Awaitable[None]] | None = None  # if the checkpointer is the reader's alone
    _open: OpenCheckpoint | None = None
    _block: ClassVar[str] = "`with`"

    @property
    def _opened(self) -> OpenCheckpoint:
        if self._open is None:
            raise LoadError(f"the reader of {self.path} is not open: use it within its {self._block} block")
        return self._open

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata given to `save`, or that in the header of a safetensors file."""
        return self._opened.index.metadata

    @property
    def format(self) -> str:
        """The file format: "aiockpt", "dcp" (of ``torch.distributed.checkpoint``), "torch" or "safetensors"."""
        return self._opened.index.format

    @property
    def beside(self) -> Sequence[str]:
        """Files in its directory with other parts of the state, such as ``optimizer.pt``, which are not read."""
        return self._opened.index.beside

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file, by name relative to the checkpoint."""
        return self._opened.source.files

    def stored_parts(self, key: str) -> Iterator[bytes]:
        """Yield the stored bytes of an object in parts of 16 MiB, without unpickling them; none if it has none. Blocks.

        Raises:
            LoadError: reading failed.
        """
        source, entry = self._opened.source, self._opened.index.entries[key]
        if isinstance(entry, ObjectEntry):
            place = source.exact_range(entry.place)
            for at in range(0, place.length, _PART_BYTES):
                yield source.read_bytes(place.file, place.offset + at, min(_PART_BYTES, place.length - at))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors. A tensor stored once under several keys counts once."""
        return stored_bytes(self.values())

    def __getitem__(self, key: str) -> TensorInfo | ObjectInfo:
        entry = self._opened.index.entries.get(key)
        if entry is None:
            raise KeyError(f"{self.path} has no {key!r}; keys() gives all that it has")
        return describe(key, entry, self._opened.tied.get(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened.index.entries)

    def __len__(self) -> int:
        return len(self._opened.index.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._opened.index.entries

    def __repr__(self) -> str:
        if self._open is None:
            return f"<{type(self).__name__} of {self.path}, not open>"
        values = {} if has_loop() else self._small_values()  # which blocks
        return text_table(type(self).__name__, self.path, self.format, self, values)

    def _repr_html_(self) -> str:
        if self._open is None:
            return f"<pre>{self!r}</pre>"
        return html_table(self.path, self.format, self, self._small_values())

    def _small_values(self) -> dict[str, Any]:
        """Read the scalars and small objects that a table shows; those that may not be read are left out. Blocks."""
        found: dict[str, Any] = {}
        for info in shown_infos(self):
            if has_value(info):
                with contextlib.suppress(AiockptError):
                    found |= self._begin_read([self._opened.request(info.key, None)], ReadOptions()).result()
        return found

    def _begin_open(self) -> Call[OpenCheckpoint]:
        return self._engine.call(
            lambda tools: open_checkpoint(self._storage, self.path, self._options, tools), f"open {self.path}"
        )

    def _begin_read(self, wanted: Sequence[ReadRequest], how: ReadOptions) -> Call[dict[str, Any]]:
        opened = self._opened
        if how.device is not None and not isinstance(how.device, str | torch.device):
            raise TypeError(f"device must be a torch.device or its name, not {how.device!r}")
        changes: dict[str, Any] = {"map_location": how.device, "dtype": how.dtype, "verify": how.verify}
        options = replace(self._options, **{name: value for name, value in changes.items() if value is not None})
        check_options(options, into=any(each.out is not None for each in wanted))
        ready = ready_events({each.name: each.out for each in wanted if each.out is not None})
        return self._engine.call(
            lambda tools: read_requests(opened, wanted, options, tools, ready),
            f"read {len(wanted)} keys of {self.path}",
        )

    def _keep(self, opened: OpenCheckpoint) -> None:
        """Keep what was opened; close it if another task was faster."""
        if self._open is None:
            self._open = opened
        else:
            opened.source.close()

    def _close(self) -> None:
        """Close the files; reads in progress keep the ones they need."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.source.close()

    def _wanted(self, keys: Any) -> list[ReadRequest]:
        """Return the requests for keys and patterns, or for a mapping of keys to indices."""
        if isinstance(keys, Mapping):
            return [self._opened.request(key, index) for key, index in keys.items()]
        return [self._opened.request(key, None) for key in self._opened.names(keys)]

    def _begin_one(self, request: ReadOne) -> Call[dict[str, Any]]:
        return self._begin_read([self._opened.request(request.key, request.index, request.out)], request)

    def _begin_many(self, request: ReadMany) -> Call[dict[str, Any]]:
        return self._begin_read(self._wanted(request.keys), request)

    def _ahead(self, request: Stream) -> _Ahead:
        """Return the read-ahead queue of a stream, with its keys cut into groups that are read together."""
        if request.order not in ("file", "keys"):
            raise ValueError(f"order must be 'file' or 'keys', not {request.order!r}")
        if type(request.buffer_bytes) is not int or request.buffer_bytes < 1:
            raise ValueError(f"buffer_bytes must be a positive number of bytes, not {request.buffer_bytes!r}")
        wanted = self._wanted(request.keys)
        if request.order == "file":
            wanted.sort(key=lambda each: each.position)
        sizes = {number: each.nbytes(request.dtype) for number, each in enumerate(wanted)}
        groups = split_in_order(sizes, min(_GROUP_BYTES, request.buffer_bytes))
        found = (([wanted[n] for n in each], sum(sizes[n] for n in each)) for each in groups if each)
        return _Ahead(self, deque(found), request)


@dataclass(eq=False)
class _Ahead:
    """The read-ahead queue of a stream: as many groups as fit into its buffer, but at least one."""

    _reader: _Reader
    _waiting: deque[tuple[list[ReadRequest], int]]
    _request: Stream
    # In order: the call that reads a group, the group, and its bytes.
    begun: deque[tuple[Call[dict[str, Any]], list[ReadRequest], int]] = field(default_factory=deque)

    def start(self) -> bool:
        """Start reading the groups that fit; return False at the end of the stream."""
        while self._waiting:
            wanted, nbytes = self._waiting[0]
            if self.begun and sum(size for _, _, size in self.begun) + nbytes > self._request.buffer_bytes:
                break
            self._waiting.popleft()
            self.begun.append((self._reader._begin_read(wanted, self._request), wanted, nbytes))
        return bool(self.begun)

    def cancel(self) -> list[Call[dict[str, Any]]]:
        """Cancel and return all calls in progress."""
        calls = [call for call, _, _ in self.begun]
        for call in calls:
            call.cancel()
        return calls


_INSTEAD = "use the open() of a SyncCheckpointer in a thread"


class CheckpointReader(_Reader):
    """An open checkpoint: a mapping of its keys to facts about the stored values, with methods to read them.

    ::

        async with ckpt.open("runs/a/step-100") as reader:
            print(reader)                                                   # a table of its contents
            rows = await reader.read("model.embed.weight", slice(0, 128))   # reads only the bytes of these rows
            async for key, tensor in reader.stream():                       # everything, in bounded memory
                ...

    Returned by `aiockpt.AsyncCheckpointer.open` and `aiockpt.open`. Reading raises the same errors as
    `aiockpt.AsyncCheckpointer.load`. Several tasks may use one reader at the same time.
    """

    _block = "`async with`"
    _openers = 0  # tasks that open it at the moment

    def __enter__(self) -> NoReturn:
        raise TypeError("reading is awaited: write `async with`, or use `open` of a SyncCheckpointer")

    __exit__ = None  # type checkers refuse `with` as well

    async def __aenter__(self) -> Self:
        check_asyncio(f"a reader of {self.path}", _INSTEAD)
        if self._open is not None:
            return self
        self._openers += 1
        opened: OpenCheckpoint | None = None
        try:
            # If this task is cancelled while the engine opens the files, they are closed as soon as they are open.
            opened = await self._begin_open().wait(lambda late: late.source.close())
        finally:
            self._openers -= 1
            # Other tasks may still open the reader with this checkpointer: the last one that fails closes it.
            if opened is None and self._open is None and not self._openers:
                await self._end_checkpointer()
        self._keep(opened)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, None, Self]:
        """Open without ``async with``, as in notebook cells; the caller calls `aclose`."""
        return self.__aenter__().__await__()

    @parameters_of(ReadOne)
    async def read(self, request: ReadOne) -> Any:
        """Read a tensor, a part of one, or an object. A saved NumPy array is read as a tensor.

        Returns:
            The tensor, ``out``, or the object.

        Raises:
            KeyError: there is no such key.
            IndexError: the index does not fit the shape.
            TypeError: the index is of another kind, or the key is an object.
        """
        check_asyncio("read()", _INSTEAD)
        values = await self._begin_one(request).wait()
        return values[request.key]

    @parameters_of(ReadMany)
    async def read_many(self, request: ReadMany) -> dict[str, Any]:
        """Read several tensors and objects at once, which is faster than reading them one by one.

        Returns:
            The values by key.
        """
        check_asyncio("read_many()", _INSTEAD)
        return await self._begin_many(request).wait()

    @parameters_of(Stream)
    def stream(self, request: Stream) -> AsyncIterator[tuple[str, Any]]:
        """Yield the keys one by one with their values, reading ahead in bounded memory.

        Values that are being read, or were read and not yet yielded, have ``buffer_bytes`` at most, or are one
        tensor if it is larger. Reading pauses until the loop's body asks for the next value.

        Returns:
            An iterator of keys and values; leaving the loop early stops the reading.

        Raises:
            MissingKeysError: a key or pattern matches nothing; see `read` for other errors.
            ValueError: ``order`` or ``buffer_bytes`` is invalid.
        """
        return self._streamed(self._ahead(request))

    @staticmethod
    async def _streamed(ahead: _Ahead) -> AsyncIterator[tuple[str, Any]]:
        check_asyncio("stream()", _INSTEAD)
        try:
            while ahead.start():
                call, wanted, _ = ahead.begun[0]
                values = await call.wait()
                for each in wanted:
                    yield each.name, values.pop(each.name)  # a value that the caller has dropped takes no memory
                ahead.begun.popleft()
        finally:
            async with contextlib.AsyncExitStack() as stack:  # waits for all calls, even if one wait is cancelled
                for call in ahead.cancel():
                    stack.push_async_callback(call.stop)

    async def aclose(self) -> None:
        """Close the files. Idempotent. Values that were read stay valid, and reads in progress complete."""
        try:
            self._close()
        finally:
            await self._end_checkpointer()

    async def _end_checkpointer(self) -> None:
        if self._close_checkpointer is not None:
            with anyio.CancelScope(shield=True):
                await self._close_checkpointer()


class SyncCheckpointReader(_Reader):
    """An open checkpoint, for synchronous programs; see `CheckpointReader`. Every method blocks."""

    def __enter__(self) -> Self:
        if self._open is None:
            self._open = self._begin_open().result(lambda late: late.source.close())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @parameters_of(ReadOne)
    def read(self, request: ReadOne) -> Any:
        """Read a tensor, a part of one, or an object; see `CheckpointReader.read`."""
        return self._begin_one(request).result()[request.key]

    @parameters_of(ReadMany)
    def read_many(self, request: ReadMany) -> dict[str, Any]:
        """Read several tensors and objects at once; see `CheckpointReader.read_many`."""
        return self._begin_many(request).result()

    @parameters_of(Stream)
    def stream(self, request: Stream) -> Iterator[tuple[str, Any]]:
        """Yield the keys one by one with their values, in bounded memory; see `CheckpointReader.stream`."""
        return self._streamed(self._ahead(request))

    @staticmethod
    def _streamed(ahead: _Ahead) -> Iterator[tuple[str, Any]]:
        try:
            while ahead.start():
                call, wanted, _ = ahead.begun[0]
                values = call.result()
                for each in wanted:
                    yield each.name, values.pop(each.name)
                ahead.begun.popleft()
        finally:
            for call in ahead.cancel():
                call.completion.exception()  # blocks until the call is over; its outcome no longer matters

    def close(self) -> None:
        """Close the files. Idempotent. Values that were read stay valid, and reads in progress complete."""
        self._close()
