"""Links between ranks: who may connect, where rank 0 listens, and what is said if it can't be reached."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.coordination import link
from aiockpt.coordination.link import Endpoint, Link, LinkBrokenError, connect, listen, reachable
from tests.ranks.world import RankFailure, World

SECRET = bytes(range(32))


async def pair(theirs: bytes = SECRET) -> tuple[asyncio.Server, Link, Link]:
    joined: asyncio.Queue[tuple[str, Link]] = asyncio.Queue()
    server = await listen(["127.0.0.1"], SECRET, "0\nleader", lambda hello, made: joined.put_nowait((hello, made)))
    host, port = server.sockets[0].getsockname()
    hello, mine = await connect(host, port, theirs, "1\nfollower")
    assert hello == "0\nleader"
    told, other = await joined.get()
    assert told == "1\nfollower"
    return server, mine, other


@pytest.mark.asyncio
async def test_messages_arrive_whole_and_in_order_and_heartbeats_are_no_messages() -> None:
    server, mine, other = await pair()
    large = os.urandom(5_000_003)
    for message in (b"a", large, b"b" * 70_000):
        mine.beat()
        mine.send(message)
    mine.beat()
    assert [await other.receive() for _ in range(3)] == [b"a", large, b"b" * 70_000]
    other.send(b"back")
    await other.flush()
    assert await mine.receive() == b"back"
    mine.close()
    with pytest.raises(LinkBrokenError):
        await other.receive()
    other.close()
    server.close()


@pytest.mark.asyncio
async def test_only_a_side_that_knows_the_secret_is_let_in() -> None:
    joined: list[str] = []
    server = await listen(["127.0.0.1"], SECRET, "0\nleader", lambda hello, _: joined.append(hello))
    address = server.sockets[0].getsockname()
    with pytest.raises(LinkBrokenError):
        await connect(*address, bytes(32), "1\nstranger")
    reader, writer = await asyncio.open_connection(*address)
    nonce = await reader.readexactly(32)
    writer.write(nonce)  # what it has sent itself proves nothing
    assert await reader.read() == b""
    writer.close()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(os.urandom(32) + os.urandom(32) + (1 << 60).to_bytes(8, "big"))
    rest = await reader.read()
    assert len(rest) < 200
    writer.close()
    assert joined == []
    server.close()


@pytest.mark.asyncio
async def test_a_side_that_has_not_proven_itself_holds_no_socket_when_the_loop_ends() -> None:
    server = await listen(["127.0.0.1"], SECRET, "0\nleader", lambda *_: None)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.readexactly(32)  # its task waits for the proof now
    (waiting,) = [task for task in asyncio.all_tasks() if "welcome" in repr(task)]
    waiting.cancel()
    assert await reader.read() == b""  # closed
    writer.close()
    server.close()


def endpoint(*hosts: str) -> Endpoint:
    return Endpoint([(host, 1000 + number) for number, host in enumerate(hosts)], SECRET, "here", "rank 0 on host a", 2)


def test_loopback_is_for_the_same_host_alone() -> None:
    both = endpoint("10.0.0.7", "127.0.0.1")
    assert reachable(both, "here") == [("127.0.0.1", 1001), ("10.0.0.7", 1000)]
    assert reachable(both, "there") == [("10.0.0.7", 1000)]
    assert reachable(endpoint("127.0.1.1", "127.0.0.1"), "there") == []


def test_rank_0_listens_where_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert link.addresses_of_this_host(None) == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(OSError, match=r"GLOO_SOCKET_IFNAME is 'nothing0', an interface .*; there are .*lo"):
        link.addresses_of_this_host(None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert link.addresses_of_this_host("127.0.0.1") == ["127.0.0.1"]
    others = [(0, 0, 0, "", (address, 0)) for address in ("192.0.2.1", "2001:db8::1")]  # of documentation: nobody's
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: others)
    assert link.addresses_of_this_host("127.0.0.1") == ["127.0.0.1"]


def save_with_wrong_interface(rank: int, size: int, folder: Path) -> list[str]:
    """Save while the variable of rank 0 is wrong, and again when it is right."""
    told = []
    with aiockpt.SyncCheckpointer(coordination_timeout=20) as ckpt:
        for number, interface in enumerate(("nothing0", "lo")):
            if rank == 0:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            try:
                ckpt.save({f"w{rank}": torch.full((5_000,), float(rank))}, folder / str(number))
            except aiockpt.CoordinationError as exc:
                told.append(str(exc))
            dist.barrier()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return told


def test_a_wrong_interface_on_rank_0_is_named_on_every_rank_and_the_next_save_works(tmp_path: Path) -> None:
    with World(3) as world:
        outcomes = world.results(save_with_wrong_interface, tmp_path)
    assert [len(told) for told in outcomes] == [1, 1, 1]
    (text,) = {text for told in outcomes for text in told}
    assert text.startswith(
        f"rank 0 can't be reached for the save of {tmp_path / '0'}: GLOO_SOCKET_IFNAME is 'nothing0'"
    )
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        loaded = ckpt.load(tmp_path / "1")
    assert sorted(loaded) == ["w0", "w1", "w2"]
    assert all(torch.equal(loaded[f"w{rank}"], torch.full((5_000,), float(rank))) for rank in range(3))


_STORE_ENDS = """
import os, sys, time, torch, torch.distributed as dist, aiockpt
rank, path = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
dist.barrier()
if rank == 0:
    os._exit(0)
sys.stdin.read()  # until rank 0 has ended, and with it the store
with aiockpt.SyncCheckpointer(coordination_timeout=3) as ckpt:
    for _ in range(2):
        try:
            ckpt.save({"w": torch.ones(5)}, f"{path}/c")
        except aiockpt.CoordinationError as exc:
            print(exc, flush=True)
"""


@pytest.mark.slow
def test_a_store_that_has_ended_with_rank_0_ends_the_wait(python: list[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    first, second = (
        subprocess.Popen(
            [*python, "-c", _STORE_ENDS, str(tmp_path)],
            env=common | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    )
    try:
        assert first.wait(timeout=120) == 0
        told = second.communicate(timeout=60)[0].splitlines()  # torch alone would try for five minutes
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert len(told) == 2
    for text in told:
        assert text.startswith("the store of the process group on 127.0.0.1 failed during the save of")
        assert text.endswith("it is served by rank 0 or by the launcher of the job, which may have ended")
    assert not list(tmp_path.iterdir())


def save_while_one_hangs(rank: int, size: int, folder: Path) -> list[Any]:
    """Hang in a write on rank 1, which gives its save up; then save again."""
    from aiockpt.storage import LocalStorage
    from aiockpt.testing import GatedStorage

    gated = GatedStorage(LocalStorage(), ["write"])
    told: list[Any] = []
    with aiockpt.SyncCheckpointer(save_timeout=2.0 if rank == 1 else None, coordination_timeout=60) as ckpt:
        ckpt.save({f"w{rank}": torch.ones(3_000)}, folder / "0")
        try:
            ckpt.save({f"w{rank}": torch.ones(3_000)}, folder / "1", storage=gated if rank == 1 else None)
        except aiockpt.SaveError as exc:
            told.append(f"{type(exc).__name__}: {exc}")
        told.append(ckpt.save({f"w{rank}": torch.ones(3_000)}, folder / "2").tensors)
        gated.open("write")
    return told


@pytest.mark.slow
def test_a_save_that_is_given_up_on_one_rank_fails_on_all_and_the_next_works(tmp_path: Path) -> None:
    with World(2) as world:
        outcomes = world.run(save_while_one_hangs, tmp_path)
    assert not any(isinstance(outcome, RankFailure) for outcome in outcomes), outcomes
    for text, tensors in outcomes:
        assert "SaveTimeoutError" in text
        assert "save_timeout = 2 s and was given up" in text
        assert tensors == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "2"}
