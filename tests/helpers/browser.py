"""A real browser for tests of pages: Debian's Chromium without a window, controlled over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import debian

FLAGS = (
    "--headless",
    "--no-sandbox",  # root has no sandbox; all pages come from the tests
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

PATIENCE = 60.0
"""Seconds to wait for one message."""


def chromium() -> str:
    """Return the browser's path; as root, install it from Debian if it is missing.

    Without a browser the test is skipped; under CI it fails.
    """
    if not shutil.which("chromium") and os.geteuid() == 0 and shutil.which("apt-get"):
        with suppress(subprocess.CalledProcessError):
            debian.install({"chromium": "chromium"}, Path(tempfile.gettempdir()) / "vlmflow-apt.log")
    if found := shutil.which("chromium"):
        return found
    reason = "there is no Chromium: apt install chromium"
    debian.lacking(reason)


class Browser:
    """One page in its own browser (the Chrome DevTools Protocol over a pipe).

    profile: an empty folder for the browser's files.
    requests: every address that the page requested, except data addresses. complaints: its console messages,
    exceptions and refused requests.
    """

    def __init__(self, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; the shell moves ours there, whatever their numbers are.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        words = [chromium(), *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._out, self._in = os.fdopen(from_us, "wb", buffering=0), os.fdopen(to_us, "rb")
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._in.close()

    def open(self, page: Path, width: int = 1280, dark: bool = False) -> None:
        """Open a file, and wait until everything in it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=page.as_uri())
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        said = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def check_page(self, page: Path, title: str) -> None:
        """Open a page, wide and narrow; check that it loads nothing, runs nothing, and does not scroll sideways."""
        for width in (1280, 400):
            self.requests.clear()
            self.complaints.clear()
            self.open(page, width=width)
            assert self.requests == [page.as_uri()]
            assert self.complaints == []
            assert self.evaluate("document.title") == title, "a script may have set it"
            assert self.evaluate("document.scripts.length") == 0
            assert self.evaluate("document.documentElement.scrollWidth") <= width

    def screenshot(self, file: Path) -> None:
        """Write the whole page as PNG."""
        said = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(said["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                if "navigated or closed" in str(said.get("error")):  # the page has just loaded itself again
                    return self._call(method, **params)
                assert "error" not in said, said
                return said["result"]
            self._note(said)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser says nothing any more"
            more = os.read(self._in.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._waiting += more
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"), event.get("params"):
            case "Network.requestWillBeSent", {"request": {"url": url}} if not url.startswith("data:"):
                self.requests.append(url)
            case "Log.entryAdded", {"entry": entry}:
                self.complaints.append(entry["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown", params:
                self.complaints.append(json.dumps(params))
