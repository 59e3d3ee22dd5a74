"""Servers of other authors that speak the protocols of object stores: ministack (S3) and azurite (Azure)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

# The account that each azurite has: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_API_VERSION = "2023-11-03"
_START_S = 60.0


@contextlib.contextmanager
def _running(command: Sequence[str], port: int, **environment: str) -> Iterator[None]:
    """Run a server within the context, from when it takes connections."""
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{command[0]} does not serve: {process.poll()}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def ministack() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of a bucket in a new server, and the options of its storage; skip where it is not installed."""
    command = Path(sys.executable).parent / "ministack"
    if not command.exists():
        pytest.skip("needs the package ministack")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with _running([str(command)], port, BIND_HOST="127.0.0.1", GATEWAY_PORT=str(port)):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/ckpt", method="PUT"), timeout=_START_S).close()
        yield (
            "s3://ckpt",
            {
                "endpoint": endpoint,
                "region": "us-east-1",
                "access_key_id": "test",
                "secret_access_key": "testtest",
                "client_options": {"allow_http": True},
            },
        )


@contextlib.contextmanager
def azurite() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of a container in a new server, and the options of its storage; skip where it is not installed."""
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("needs azurite-blob of the npm package azurite")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    arguments = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    with _running([command, *arguments, "--blobHost", "127.0.0.1", "--blobPort", str(port)], port):
        _make_container(endpoint, "ckpt")
        yield (
            "az://ckpt",
            {
                "endpoint": endpoint,
                "account_name": _ACCOUNT,
                "account_key": _ACCOUNT_KEY,
                "client_options": {"allow_http": True},
            },
        )


def _make_container(endpoint: str, name: str) -> None:
    """Create a container; what is signed: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key"""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API_VERSION}
    signed = "\n".join(f"{header}:{value}" for header, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{signed}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    mac = hmac.digest(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(mac).decode()}"
    url = f"{endpoint}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=_START_S).close()
