"""A real browser, driven through its debugging pipe: one start answers every question about a page."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
WHY_NOT = "no Chromium is installed, so no page can be looked at"
_PATIENCE_SECONDS = 60.0


class Browser:
    """`with Browser(folder) as browser: browser.open(page)`. `folder` is for the browser's own files."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self.troubles: list[str] = []
        """Errors on the console, exceptions, refused loads."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self._number = 0
        self._session: str | None = None
        self._unread = b""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def wire() -> None:
            # The browser reads at 3 and writes at 4; the pipes may lie at these very numbers.
            high = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (to_browser, from_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=wire, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Self:
        self._session = self.call("Target.attachToTarget", targetId=self._first_page(), flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def _first_page(self) -> str:
        """It comes a moment after the browser's first word."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            for each in self.call("Target.getTargets")["targetInfos"]:
                if each["type"] == "page":
                    return str(each["targetId"])
            time.sleep(0.05)
        raise AssertionError("the browser shows no page")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._out)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.resolve().as_uri())
        # Asked of the page itself: an event may still be that of the empty page before it.
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.evaluate("[location.href, document.readyState].join(' ')") != f"{page.resolve().as_uri()} complete":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9, "Enter": 13}.get(key, 0),
                      **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}))  # fmt: skip

    def screenshot(self, file: Path, *, whole: bool = True, clip: dict[str, float] | None = None) -> Path:
        extra: dict[str, Any] = {"captureBeyondViewport": whole}
        if clip is not None:
            extra["clip"] = {"scale": 1, **clip}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            extra["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **extra)["data"]))
        return file

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def _read(self) -> dict[str, Any]:
        """The next message; what concerns the page's health is written down on the way."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._unread:
            assert time.monotonic() < until, "the browser does not answer"
            if not select.select([self._in], [], [], 1.0)[0]:
                continue
            block = os.read(self._in, 1 << 16)
            assert block, "the browser has gone away"
            self._unread += block
        text, _zero, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        method, values = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.troubles.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in {"error", "warning", "assert"}:
            self.troubles.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in {"error", "warning"}:
            self.troubles.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        return found
