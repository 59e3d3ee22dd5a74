"""Drives a headless Chromium through its debugging pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    " ": 32,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
_FLAGS = (
    "no-sandbox",  # Chromium refuses to run as root inside its sandbox
    "disable-gpu",
    "disable-dev-shm-usage",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
)

# The browser reads commands from descriptor 3 and writes to 4.
_MOVE_PIPES = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page in a headless Chromium; its methods block."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._dark = dark
        self._numbers = itertools.count(1)
        self._received = b""
        self.logged: list[str] = []  # by the console and by errors
        self.requests: list[str] = []  # addresses that the page requested

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._home = stack.enter_context(tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True))
            to_read, self._to_write = os.pipe()
            self._to_read, to_write = os.pipe()
            stack.callback(os.close, self._to_write)
            stack.callback(os.close, self._to_read)
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
            flags = ("headless", "remote-debugging-pipe", f"user-data-dir={self._home}", *_FLAGS)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MOVE_PIPES, *map(str, ends), CHROMIUM, *(f"--{flag}" for flag in flags)],
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for end in (to_read, to_write, *ends):
                os.close(end)
            stack.callback(self._process.wait)
            stack.callback(self._kill)
            self._session = None
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._call(f"{domain}.enable")
            self._call("Emulation.setDeviceMetricsOverride", **self._view)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
            self._call("Emulation.setEmulatedMedia", features=[scheme])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._call("Browser.close")
        self._stack.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to_write, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._to_read, 1 << 16)
            if not part:
                raise OSError("the browser has closed the pipe")
            self._received += part
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        method, of = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])
        elif method == "Log.entryAdded":
            self.logged.append(of["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.logged.append(str([each.get("value") for each in of["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.logged.append(str(of["exceptionDetails"]))
        return message

    def open(self, file: Path) -> None:
        """Load a page, and wait until its script has run."""
        self._call("Page.navigate", url=file.as_uri())
        self.wait("document.readyState === 'complete'")

    def get(self, expression: str) -> Any:
        """Return the value of an expression; if that is a promise, its value."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; it is evaluated before each frame that the page draws."""
        self.get(
            "new Promise(done => { const ask = () => { let is = false; try { is = (" + condition + ") } catch {} "
            "is ? done() : requestAnimationFrame(ask) }; ask() })"
        )

    def press(self, *keys: str, shift: bool = False) -> None:
        """Press and release keys one after the other, in the focused element."""
        for key in keys:
            event: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
            if key in _KEYS:
                event |= {"windowsVirtualKeyCode": _KEYS[key], "code": "Space" if key == " " else key}
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            self._call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
            self._call("Input.dispatchKeyEvent", type="keyUp", **event)
        self.get("new Promise(requestAnimationFrame)")

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.get("new Promise(requestAnimationFrame)")

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a point of the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.get("new Promise(requestAnimationFrame)")

    def screenshot(self, file: Path, *, full: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        file.write_bytes(base64.b64decode(data))
