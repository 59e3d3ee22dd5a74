"""The disk of another host: two verbs, and servers that are dead, silent, strangers, or asked for what is outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.coordination.link import Endpoint, LinkBrokenError, proof
from aiockpt.core.threads import Workers
from aiockpt.storage import LocalStorage, WrapperStorage, peers
from aiockpt.storage.base import Source
from aiockpt.storage.peers import ERROR, LIST, READ, PeerDisk, PeerServer, PeerWire
from aiockpt.storage.remote import RemoteSource
from tests.polling import until
from tests.storage.relay import relay_to

DATA_NAME, BELOW = "__0_0.distcp", "more/notes.txt"
CONTENTS = os.urandom(9_000_001)  # more than two messages
GOOD = {"is_file": False, "files": {}, "folders": [], "others": [], "changed_s": 1.0, "stamp": "s"}
_LIMIT_S = 60


@pytest.fixture
def step(tmp_path: Path) -> str:
    """Return the path of a checkpoint in the directory that is served."""
    folder = tmp_path / "run" / "step-00000001"
    (folder / "more").mkdir(parents=True)
    (folder / DATA_NAME).write_bytes(CONTENTS)
    (folder / BELOW).write_text("notes")
    (tmp_path / "secret").write_text("not served")
    return str(folder)


@pytest.fixture
def server(step: str, tmp_path: Path) -> Iterator[PeerServer]:
    server = PeerServer(LocalStorage(), str(tmp_path / "run"), hosts=["127.0.0.1"])
    yield server
    assert server.close()
    assert server.close()  # once more does nothing


@pytest.fixture
def disk(server: PeerServer) -> Iterator[PeerDisk]:
    disk = PeerDisk(server.endpoint, "node17")
    yield disk
    disk.close()


def opened(disk: PeerDisk, path: str) -> Source:
    listing = peers._PeerListing(disk, path, f"{path} on host {disk.host_name}")
    return RemoteSource(listing)


def all_of(source: Source, name: str = DATA_NAME) -> bytes:
    return source.read_bytes(name, 0, source.files[name])


def at(endpoint: Endpoint, address: tuple[str, int], **changed: Any) -> Endpoint:
    return endpoint._replace(addresses=[address], **changed)


# --- what is listed and read ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_checkpoint_is_read(disk: PeerDisk, step: str, workers: Workers) -> None:
    source = await disk.open(step, workers=workers)
    assert dict(source.files) == {DATA_NAME: len(CONTENTS), BELOW: 5}
    assert source.is_remote
    seen: list[bytes] = []
    data = bytearray(len(CONTENTS))
    source.read(DATA_NAME, 0, memoryview(data), lambda piece: seen.append(bytes(piece)))
    assert bytes(data) == b"".join(seen) == CONTENTS
    runs = [(5, 0), (7, 3), (5_000_000, 4_000_001), (0, 1)]
    data = bytearray(sum(length for _, length in runs))
    source.read_runs(DATA_NAME, runs, memoryview(data))
    assert bytes(data) == b"".join(CONTENTS[offset : offset + length] for offset, length in runs)
    assert source.read_bytes(BELOW, 1, 3) == b"ote"
    assert source.read_bytes(DATA_NAME, 3, 0) == b""
    source.close()


def test_a_directory_is_listed_as_by_its_own_host(disk: PeerDisk, step: str) -> None:
    own, other = LocalStorage().look(step), disk.look(step)
    for name in ("path", "is_file", "files", "folders", "others", "changed_s", "stamp"):
        assert getattr(own, name) == getattr(other, name)
    for listing in (own, other):
        listing.list_below()
    assert own.files == other.files
    assert other.fetch(DATA_NAME, 5, 10) == CONTENTS[5:15]
    assert other.fetch(DATA_NAME, len(CONTENTS) - 2, 10) == CONTENTS[-2:]  # as far as there is something
    own.close()
    with disk.look(f"{step}/{DATA_NAME}") as alone:
        assert (alone.is_file, alone.files) == (True, {DATA_NAME: len(CONTENTS)})
    odd = os.fsdecode(b"odd\xff")
    Path(step, odd).write_bytes(b"x")
    with disk.look(step) as listing:
        assert listing.fetch(odd, 0, 1) == b"x"


@pytest.mark.asyncio
async def test_what_is_not_there(disk: PeerDisk, step: str, workers: Workers) -> None:
    with pytest.raises(FileNotFoundError, match="node17"):
        disk.look(f"{step}2")
    assert disk.stamp(f"{step}2") is None
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="node17"):
        await disk.open(f"{step}2", workers=workers)
    source = await disk.open(step, workers=workers)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"on host node17/none has 0 bytes, but 1 are needed"):
        source.read_bytes("none", 0, 1)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"on host node17/.* 9000002 are needed"):
        source.read_bytes(DATA_NAME, len(CONTENTS) - 1, 2)
    with pytest.raises(aiockpt.WriteError, match="written by the ranks of that host only"):
        await disk.begin(step, overwrite=True, workers=workers)
    with pytest.raises(aiockpt.DeleteError):
        await disk.delete(step, workers=workers)


def test_many_threads_read_at_once(disk: PeerDisk, step: str) -> None:
    source = opened(disk, step)
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: all_of(source), range(32)))
    assert found == [CONTENTS] * 32
    assert len(disk._idle) <= 16


# --- what changes meanwhile ---------------------------------------------------------------------------------


def replaced(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.mkdir()
    (path / DATA_NAME).write_bytes(CONTENTS)


def deleted(path: Path) -> None:
    for file in (path / DATA_NAME, path / BELOW):
        file.unlink()
    (path / "more").rmdir()
    path.rmdir()


def cut_short(path: Path) -> None:
    os.truncate(path / DATA_NAME, 100)


@pytest.mark.parametrize("change", [replaced, deleted, cut_short, lambda path: (path / DATA_NAME).unlink()])
@pytest.mark.parametrize("anew", [False, True])
def test_what_changes_is_never_mixed(disk: PeerDisk, step: str, change: Callable[[Path], object], anew: bool) -> None:
    """A file is read as it was opened, or is an error, whether the connection is the same or another one."""
    source, listing = opened(disk, step), disk.look(step)
    assert source.read_bytes(DATA_NAME, 0, 10) == CONTENTS[:10]
    change(Path(step))
    if anew:
        disk.close()
    try:
        assert all_of(source) == CONTENTS
    except aiockpt.CorruptCheckpointError as exc:
        assert "node17" in str(exc)
    else:
        raise AssertionError(change)
    with contextlib.suppress(FileNotFoundError):
        assert listing.fetch(DATA_NAME, 0, 100) == CONTENTS[:100]
    assert anew is False or disk.stamp(step) != listing.stamp


def test_disk_that_fails_is_no_damage(step: str, tmp_path: Path) -> None:
    """An error of the disk, or of the user's own storage, has its text, and the connection goes on."""

    class Failing(WrapperStorage):
        error: Exception = OSError(5, "the disk has failed")

        def look(self, *args: Any) -> Any:
            listing = super().look(*args)

            def fail(*_: object) -> bytes:
                raise self.error

            listing.fetch = fail  # type: ignore[method-assign]
            return listing

    storage = Failing(LocalStorage())
    server = PeerServer(storage, str(tmp_path / "run"), hosts=["127.0.0.1"])
    disk = PeerDisk(server.endpoint, "node17")
    source = opened(disk, step)
    for error in (storage.error, RuntimeError("a defect")):
        storage.error = error
        with pytest.raises(aiockpt.LoadError, match=r"disk has failed|a defect") as caught:
            all_of(source)
        assert type(caught.value) is aiockpt.LoadError
    assert len(disk._idle) == 1
    disk.close()
    assert server.close()


# --- what is not served -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["", "/", "/etc", "{run}/..", "{run}/../secret", "{run}2", "{run}/step-00000001/../../x"]
)
def test_paths_that_leave_the_root_are_refused(disk: PeerDisk, step: str, tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match=r"nothing else is served|is empty"):
        disk.look(path.format(run=tmp_path / "run"))
    assert disk.look(str(tmp_path / "run")).folders == ["step-00000001"]


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "more/../../../secret", "link", ""])
def test_names_that_lead_out_are_refused(
    server: PeerServer, disk: PeerDisk, step: str, name: str, tmp_path: Path
) -> None:
    """By the server, whatever its client asks for."""
    Path(step, "link").symlink_to(tmp_path / "secret")
    stamp = disk.stamp(step)
    with pytest.raises(OSError, match="node17"):
        disk.ask(READ, step, memoryview(bytearray(3)), stamp=stamp, name=name, runs=[(0, 3)], below=True)


# --- hostile sides --------------------------------------------------------------------------------------------


def prove(own: socket.socket, secret: bytes) -> None:
    """Do as the server of a link: prove that the secret is known, and wait until the client goes on without it."""
    proving, received = proof(secret, "impostor"), b""
    with contextlib.suppress(StopIteration):
        while True:
            message, nbytes = proving.send(received or None)
            own.sendall(message)
            received = own.recv(nbytes, socket.MSG_WAITALL)


@contextlib.contextmanager
def impostor(secret: bytes, behave: Callable[[PeerWire], object]) -> Iterator[tuple[str, int]]:
    """Serve one connection of a server that knows the secret, and does something else than it should."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()

    def serve() -> None:
        own, _ = listening.accept()
        listening.close()
        with contextlib.closing(own), contextlib.suppress(LinkBrokenError, OSError):
            prove(own, secret)
            behave(PeerWire(own, _LIMIT_S))

    thread = threading.Thread(target=serve)
    thread.start()
    yield address
    thread.join(_LIMIT_S)
    assert not thread.is_alive()


def answers(kind: int, data: bytes) -> Callable[[PeerWire], None]:
    """Answer the second request with this message."""

    def behave(wire: PeerWire) -> None:
        wire.take()
        wire.put(LIST, json.dumps(GOOD | {"files": {"f": 10}}).encode())
        wire.take()
        wire.put(kind, data)
        wire.wait()  # until the client leaves

    return behave


@pytest.mark.parametrize(
    "behave",
    [
        lambda wire: wire.send(LIST, 0, memoryview(b"{}")),  # a wrong CRC
        lambda wire: wire._socket.sendall(peers.Wire.__module__.encode()),  # no message at all, and the end
        lambda wire: wire._socket.sendall(b"\0" * 7 + b"\0" + b"\x7f" + b"\0" * 15),  # an endless document
        answers(READ, b"x" * 11),  # more than was asked for
    ],
)
def test_server_that_does_not_follow_the_protocol(server: PeerServer, behave: Callable[[PeerWire], object]) -> None:
    with impostor(server.endpoint.secret, behave) as address:
        disk = PeerDisk(at(server.endpoint, address), "node17", stall_s=20)
        with pytest.raises((aiockpt.LoadError, ConnectionError), match="node17 does not answer"):
            opened(disk, "/run/step").read_bytes("f", 0, 10)
        disk.close()


def test_file_that_ends_early_is_damaged(server: PeerServer) -> None:
    with impostor(server.endpoint.secret, answers(READ, b"x" * 9)) as address:
        disk = PeerDisk(at(server.endpoint, address), "node17", stall_s=20)
        with pytest.raises(aiockpt.CorruptCheckpointError, match="ends too early"):
            opened(disk, "/run/step").read_bytes("f", 0, 10)
        disk.close()


@pytest.mark.parametrize(
    "request_",
    [
        (LIST, b"[]"),
        (LIST, b'{"path": "/run"}'),
        (LIST, b"\xff"),
        (READ, b'{"path": "/run", "below": false, "name": "x", "runs": []}'),  # nothing that was listed
        (9, b"{}"),
        (LIST, b"[" * 100_000),
    ],
)
def test_client_that_does_not_follow_the_protocol(
    server: PeerServer, disk: PeerDisk, step: str, request_: tuple[int, bytes]
) -> None:
    """It gets an error, and no other one does."""
    wire = disk._connected()
    wire.put(*request_)
    assert wire.take()[0] == ERROR
    wire.close()
    assert all_of(opened(disk, step)) == CONTENTS


@pytest.mark.parametrize("runs", [[[-1, 5]], [[0]], "all", [["a", 1]], None])
def test_runs_that_are_none(disk: PeerDisk, step: str, runs: object) -> None:
    with pytest.raises(OSError, match="node17"):
        disk.ask(READ, step, stamp=disk.stamp(step), name=DATA_NAME, runs=runs, below=False)


def test_stranger_is_told_nothing(server: PeerServer, step: str) -> None:
    """Neither one with another secret, nor one that says nothing, or nonsense, or sends back what it gets."""
    stranger = PeerDisk(server.endpoint._replace(secret=b"x" * 32), "node17")
    with pytest.raises(ConnectionError, match=r"does not know the secret|has closed"):
        stranger.look(step)
    (address,) = server.endpoint.addresses
    for send in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 60, None):
        with socket.create_connection(tuple(address)) as own:
            own.settimeout(_LIMIT_S)
            nonce = own.recv(1 << 16)
            own.sendall(nonce if send is None else send)
            answer = b""
            with contextlib.suppress(OSError):  # it may have left already
                own.shutdown(socket.SHUT_WR)
                while data := own.recv(1 << 16):
                    answer += data
            assert len(answer) <= 32 + 8 + 100  # a proof, and the name of the host
            assert b"step-" not in answer


def test_silent_stranger_is_left_after_a_limit(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte now and then; and there are never more of them than a limit."""
    monkeypatch.setattr(peers, "_MOST_CONNECTIONS", 2)
    server = PeerServer(LocalStorage(), str(tmp_path / "run"), hosts=["127.0.0.1"], stall_s=0.5)
    (address,) = server.endpoint.addresses
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(tuple(address))) for _ in range(2)]
        for own in strangers:
            own.settimeout(_LIMIT_S)
            assert len(own.recv(32, socket.MSG_WAITALL)) == 32
        third = stack.enter_context(socket.create_connection(tuple(address)))
        third.settimeout(_LIMIT_S)
        assert third.recv(1) == b""  # at once
        left = list(strangers)
        while left:  # until the server has left both, whatever they send
            for own in list(left):
                own.settimeout(0.01)
                try:
                    own.sendall(b"x")
                    if own.recv(1) == b"":
                        left.remove(own)
                except TimeoutError:
                    pass
                except ConnectionError:
                    left.remove(own)
    disk = PeerDisk(server.endpoint, "node17")
    assert all_of(opened(disk, step)) == CONTENTS
    disk.close()
    assert server.close()


# --- connections that are cut, and sides that are dead or silent ----------------------------------------------


@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5, 10, 40])
def test_cut_connection_is_an_error_and_the_next_call_goes_on(server: PeerServer, step: str, cut_at: int) -> None:
    (target,) = server.endpoint.addresses
    with relay_to(tuple(target)) as relay:
        disk = PeerDisk(at(server.endpoint, relay.address), "node17")
        relay.cut_at = cut_at
        try:
            found = all_of(opened(disk, step))
        except (aiockpt.LoadError, ConnectionError) as exc:
            assert "node17 does not answer" in str(exc)
            assert not isinstance(exc, aiockpt.CorruptCheckpointError)
        else:
            assert found == CONTENTS
        relay.cut_at = None
        assert all_of(opened(disk, step)) == CONTENTS
        disk.close()


def test_damage_on_the_way_is_found(server: PeerServer, step: str) -> None:
    (target,) = server.endpoint.addresses
    with relay_to(tuple(target)) as relay:
        disk = PeerDisk(at(server.endpoint, relay.address), "node17")
        source = opened(disk, step)
        relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 1000 else data
        with pytest.raises(aiockpt.LoadError, match="CRC-32 differs"):
            all_of(source)
        relay.change = lambda data: data
        assert all_of(source) == CONTENTS
        disk.close()


def test_server_that_is_gone(server: PeerServer, disk: PeerDisk, step: str) -> None:
    source = opened(disk, step)
    assert server.close()
    for _ in range(2):
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            all_of(source)
        with pytest.raises(ConnectionError, match="host node17 does not answer"):
            disk.look(step)


def test_silent_host_is_not_asked_again_for_a_while(step: str) -> None:
    """Not even by other threads; when it is, and answers, all is as before."""
    listening = socket.create_server(("127.0.0.1", 0))  # it accepts, and never says anything
    endpoint = Endpoint([listening.getsockname()], b"s" * 32, peers.network_namespace(), "node17", 0)
    disk = PeerDisk(endpoint, "node17", stall_s=0.3)
    with pytest.raises(ConnectionError, match="temporarily"):
        disk.look(step)
    with pytest.raises(ConnectionError, match="is asked again in"):
        disk.look(step)
    listening.close()
    until(lambda: disk._silent_until < time.monotonic())
    with pytest.raises(ConnectionError, match="refused"):
        disk.look(step)


def test_silence_within_an_answer(server: PeerServer, step: str) -> None:
    def behave(wire: PeerWire) -> None:
        wire.take()
        wire.wait()  # until the client leaves

    with impostor(server.endpoint.secret, behave) as address:
        disk = PeerDisk(at(server.endpoint, address), "node17", stall_s=0.3)
        with pytest.raises(ConnectionError, match="node17 does not answer"):
            disk.look(step)
        with pytest.raises(ConnectionError, match="it was silent, and is asked again"):
            disk.look(step)
        disk.close()


def test_all_addresses_are_tried(server: PeerServer, step: str) -> None:
    """One that does not answer, one that refuses, and one of a stranger; then only the one that has answered."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = [socket.socket() for _ in range(4)]
    for each in fillers:  # its queue is full: further packets get no answer
        each.setblocking(False)
        each.connect_ex(silent.getsockname())
    refusing = socket.create_server(("127.0.0.1", 0))
    addresses = [silent.getsockname(), refusing.getsockname(), *server.endpoint.addresses]
    refusing.close()
    disk = PeerDisk(server.endpoint._replace(addresses=addresses), "node17", stall_s=1)
    assert all_of(opened(disk, step)) == CONTENTS
    assert disk._endpoint.addresses == server.endpoint.addresses
    disk.close()
    for each in (silent, *fillers):
        each.close()


def test_address_of_another_network_is_not_tried(server: PeerServer, step: str) -> None:
    disk = PeerDisk(server.endpoint._replace(namespace="elsewhere"), "node17")
    with pytest.raises(ConnectionError, match="addresses of another network only"):
        disk.look(step)


_SERVER = """
import json, os, sys
from aiockpt.storage import LocalStorage
from aiockpt.storage.peers import PeerServer
server = PeerServer(LocalStorage(), sys.argv[1], hosts=["127.0.0.1"])
endpoint = server.endpoint
print(json.dumps([endpoint.addresses, endpoint.secret.hex(), endpoint.namespace]), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize("fork", [False, True])
def test_server_that_is_killed(step: str, tmp_path: Path, fork: bool) -> None:
    """It is dead at once, though a fork of it lives on."""
    arguments = [sys.executable, "-c", _SERVER, str(tmp_path / "run"), "fork" if fork else ""]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        addresses, secret, namespace = json.loads(process.stdout.readline())
        endpoint = Endpoint([tuple(each) for each in addresses], bytes.fromhex(secret), namespace, "node17", 0)
        disk = PeerDisk(endpoint, "node17")
        source = opened(disk, step)
        assert all_of(source) == CONTENTS
        process.send_signal(signal.SIGKILL)
        process.wait(_LIMIT_S)
        for _ in range(2):
            with pytest.raises(aiockpt.LoadError, match=r"refused|closed|reset|Broken pipe"):
                all_of(source)
        disk.close()


def test_frozen_server_is_left_after_a_limit(step: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _SERVER, str(tmp_path / "run"), ""]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        addresses, secret, namespace = json.loads(process.stdout.readline())
        endpoint = Endpoint([tuple(each) for each in addresses], bytes.fromhex(secret), namespace, "node17", 0)
        disk = PeerDisk(endpoint, "node17", stall_s=0.5)
        source = opened(disk, step)
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(aiockpt.LoadError, match="is frozen"):
                all_of(source)
            with pytest.raises(aiockpt.LoadError, match="is asked again"):
                all_of(source)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
        disk.close()


def test_forked_client_makes_connections_of_its_own(disk: PeerDisk, step: str) -> None:
    source = opened(disk, step)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all_of(source) == CONTENTS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all_of(source) == CONTENTS


def test_server_waits_for_those_that_read(server: PeerServer, disk: PeerDisk, step: str) -> None:
    source = opened(disk, step)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.wait, _LIMIT_S)
        assert all_of(source) == CONTENTS
        assert not waiting.done()
        disk.close()
        waiting.result(_LIMIT_S)


def test_connection_that_has_ended_is_made_anew(disk: PeerDisk, step: str) -> None:
    source = opened(disk, step)
    (wire,) = disk._idle
    wire.end()
    assert all_of(source) == CONTENTS
    assert wire not in disk._idle


def test_no_address_to_listen_at(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"assign|address"):
        PeerServer(LocalStorage(), str(tmp_path), hosts=["127.0.0.1", "203.0.113.7"])


def test_proof_is_not_repeated_to_its_sender() -> None:
    """A side that sends back what it gets proves nothing."""
    proving = proof(b"secret", "one")
    nonce, count = next(proving)
    assert len(nonce) == count == 32
    with pytest.raises(LinkBrokenError, match="repeats"):
        proving.send(nonce)
