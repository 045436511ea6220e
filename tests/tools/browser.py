"""A headless Chromium, driven over a pipe: opens pages, evaluates JavaScript and takes pictures."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 60.0  # seconds for a page to show what is waited for


class Browser:
    """One page in a headless Chromium, as a context manager."""

    def __init__(self, program: str = "chromium") -> None:
        self._numbers = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={self._folder.name}", "--hide-scrollbars", "--force-color-profile=srgb"]
        # Chromium reads descriptor 3 and writes to 4; the copies are made high, so that neither covers the other
        shell = f'exec {theirs}<&{theirs} {ours}>&{ours} 3<&{theirs} 4>&{ours}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self._rest = b""
        self.problems: list[str] = []  # uncaught exceptions, errors and refused resources of the page
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(str(event["params"]["entry"]["text"]))

    def look(self, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and the color scheme; narrow windows are a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Open a page from the start, even if only what follows # is new."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true; one that fails is not, since its page may not be there yet."""
        until = time.monotonic() + PATIENCE
        while not self.value(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < until, f"{expression} did not become true: {self.problems}"
            time.sleep(0.02)

    def mouse(self, kind: str, across: float, down: float, clicks: int = 1) -> None:
        """Move, press or release the mouse at a place of the window, in CSS pixels."""
        button = {"button": "none"} if kind == "mouseMoved" else {"button": "left", "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", type=kind, x=across, y=down, **button)

    def press(self, text: str) -> None:
        """Press the first button with this text."""
        wanted = json.dumps(text)
        self.value(f"[...document.querySelectorAll('button')].find((one) => one.textContent === {wanted}).click()")

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page, as PNG."""
        size = self.value("({width: innerWidth, height: document.documentElement.scrollHeight})")
        more = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, **size, "scale": 1}} if whole else {}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(data))
