"""Storages of fsspec: its memory, a web server of this host, and one with the Hub's requests."""

from __future__ import annotations

import json
import pickle
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import aiockpt
from aiockpt.storage import storage_for
from tests.states import assert_same

pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Allow all: fsspec keeps its thread, and connections."""


def state_of(seed: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.arange(300_000.0) + seed, "b": torch.arange(7)}, "step": 17 + seed}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory of checkpoints of several formats."""
    with aiockpt.SyncCheckpointer() as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), tmp_path / f"run/step-{step:08d}")
        model = state_of()["model"]
        ckpt.save(model, tmp_path / "m.safetensors")
        ckpt.save(state_of(), tmp_path / "m.pt")
        ckpt.save(model, tmp_path / "export", format="safetensors", shard_bytes=1_000_000)
    return tmp_path


class _Files(BaseHTTPRequestHandler):
    """A web server of a folder, with lists of directories and with ranges."""

    server: _Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.status:
            self._send(self.server.status, b"", "text/plain")
            return
        url = unquote(self.path.partition("?")[0])
        path = self.server.folder / url.lstrip("/")
        if self.server.is_hub:
            api = re.fullmatch(r"/api/models/org/repo/?(?:(revision|tree)/main)?(.*)", url)
            if api is not None:
                self._describe(api[1], api[2].strip("/"))
                return
            path = self.server.folder / url.removeprefix("/org/repo/resolve/main/")
        if path.is_dir():
            names = [each.name + "/" * each.is_dir() for each in path.iterdir()]
            self._send(200, "".join(f'<a href="{name}">{name}</a>' for name in names).encode(), "text/html")
        elif not path.exists():
            self._send(404, b"", "text/plain")
        else:
            data, given = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if given is None or self.server.ignores_ranges:
                self._send(200, data, "application/octet-stream")
            else:
                self._send(206, data[int(given[1]) : int(given[2]) + 1], "application/octet-stream")

    def _describe(self, what: str | None, name: str) -> None:
        path = self.server.folder / name
        if what != "tree":
            found: Any = {"id": "org/repo", "modelId": "org/repo", "sha": "0" * 40, "private": False, "tags": []}
            found |= {"downloads": 0, "likes": 0, "siblings": []}
        elif not path.is_dir():
            self._send(404, b"{}", "application/json", **{"X-Error-Code": "EntryNotFound"})
            return
        else:
            found = [
                {
                    "type": "directory" if each.is_dir() else "file",
                    "oid": "0" * 40,
                    "size": 0 if each.is_dir() else each.stat().st_size,
                    "path": str(each.relative_to(self.server.folder)),
                }
                for each in path.iterdir()
            ]
        self._send(200, json.dumps(found).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server.sent.append(len(data))  # before the client can go on
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, *, is_hub: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Files)
        self.folder, self.is_hub = folder, is_hub
        self.sent: list[int] = []  # bytes of bodies
        self.ignores_ranges = False
        self.status = 0  # of all answers, if it is not 0


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[_Server]:
    with _Server(folder, is_hub="hf" in request.node.name) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture(params=["memory", "http", "hf"])
def place(request: pytest.FixtureRequest, folder: Path, server: _Server) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the URL of the folder, and the options with which it is read."""
    url = f"http://127.0.0.1:{server.server_port}"
    if request.param == "http":
        yield url, {}
    elif request.param == "hf":
        pytest.importorskip("huggingface_hub")
        yield "hf://org/repo", {"endpoint": url, "token": False}
    else:
        memory = fsspec.filesystem("memory")
        memory.put(str(folder), "/files", recursive=True)
        yield "memory://files", {}
        memory.rm("/files", recursive=True)


@pytest.mark.slow
def test_checkpoints_are_read(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        for name, expected in {
            "run/step-00000002": state_of(2),
            "m.safetensors": state_of()["model"],
            "m.pt": state_of(),
            "export": state_of()["model"],
        }.items():
            loaded = ckpt.load(f"{url}/{name}")
            assert_same(expected, {key: loaded[key] for key in expected})  # safetensors has an order of its own
            assert ckpt.verify(f"{url}/{name}").ok
        target = {"w": torch.zeros(300_000)}
        ckpt.load(f"{url}/run/step-00000001", {"model": target})
        assert torch.equal(target["w"], state_of(1)["model"]["w"])
        with pytest.raises(aiockpt.CheckpointNotFoundError, match="step-00000007"):
            ckpt.load(f"{url}/run/step-00000007")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run/step-00000002", "m.safetensors"])
def test_a_slice_reads_only_its_bytes(name: str, place: tuple[str, dict[str, Any]], server: _Server) -> None:
    url, options = place
    key = "w" if name == "m.safetensors" else "model.w"
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt, ckpt.open(f"{url}/{name}") as reader:
        server.sent.clear()
        rows = reader.read(key, slice(100_000, 101_000))
    assert rows[0] % 100_000 in (0, 2)
    assert sum(server.sent) == (0 if url.startswith("memory") else 4000)


@pytest.mark.slow
def test_runs_are_looked_at(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    with aiockpt.SyncCheckpointManager(f"{url}/run", read_only=True, storage_options=options) as run:
        assert run.steps() == [1, 2]
        latest = run.latest()
        assert latest is not None
        assert latest.step == 2
    storage, path = storage_for(f"{url}/run/step-00000001", **options)
    before = storage.stamp(path)
    assert before is not None
    assert pickle.loads(pickle.dumps(storage)).stamp(path) == before


@pytest.mark.slow
def test_what_writes_is_refused(place: tuple[str, dict[str, Any]], server: _Server) -> None:
    url, options = place
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        server.sent.clear()
        for name in ("new", "m.safetensors"):
            with pytest.raises(aiockpt.SaveError, match="save to a directory"):
                ckpt.save(state_of(), f"{url}/{name}")
        assert server.sent == [], "it is refused at the call"
        with pytest.raises(aiockpt.DeleteError, match="can't delete"):
            ckpt.delete(f"{url}/m.pt")
        assert ckpt.load(f"{url}/m.pt")["step"] == 17


def test_a_server_without_ranges_is_refused(folder: Path, server: _Server) -> None:
    server.ignores_ranges = True
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.LoadError, match="sent as a whole"):
        ckpt.load(f"http://127.0.0.1:{server.server_port}/m.safetensors")


def test_a_server_that_is_away_is_not_a_missing_checkpoint(server: _Server) -> None:
    """A run in it would count as new."""
    url = f"http://127.0.0.1:{server.server_port}"
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.load(f"{url}/none.pt")
        server.status = 503
        with pytest.raises(aiockpt.LoadError, match=r"can't be read.*503") as caught:
            ckpt.load(f"{url}/m.pt")
        assert not isinstance(caught.value, aiockpt.CheckpointNotFoundError)
        with (
            aiockpt.SyncCheckpointManager(f"{url}/run", read_only=True) as run,
            pytest.raises(aiockpt.AiockptError, match="503"),
        ):
            run.restore(state_of())
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            with pytest.raises(aiockpt.LoadError, match=r"can't be read.*[Cc]onnect"):
                ckpt.load(f"http://127.0.0.1:{unused.getsockname()[1]}/m.pt")


def test_a_scheme_whose_package_is_missing_says_so() -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.AiockptError, match=r"smb:// can't be used.*smb"):
        ckpt.load("smb://host/share/c")
