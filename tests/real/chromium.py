"""A real browser, driven through its debugging pipe: no driver, no websocket, two file descriptors.

Covers: opening a page, running an expression in it, the console, the requests it made, pictures of it.
Where there is no browser, ``why_not`` says so.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

ELSEWHERE = "elsewhere.example"  # a foreign name that its owner has pointed at this machine
_PATIENCE = 90.0  # seconds; only a failure takes that long


def program() -> str | None:
    """Where the browser is, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def why_not() -> str | None:
    """Why no page can be looked at here, or None."""
    return None if program() else "chromium is not installed (make chromium, as root where there is apt-get)"


def could_be_installed() -> bool:
    """Whether this machine would only have had to install it: then a skip in CI is a mistake."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    tried = ["apt-get", "install", "--dry-run", "-qq", "--no-install-recommends", "chromium"]
    return subprocess.run(tried, capture_output=True).returncode == 0


class Page:
    """One tab. ``console`` and ``requests`` fill as the page works."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._answers: dict[int, dict[str, Any]] = {}
        self._heard = threading.Condition()
        self._number = 0
        self._session: str | None = None
        self._gone = False
        self.console: list[str] = []
        self.requests: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, and wait for its answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        with self._heard:
            if not self._heard.wait_for(lambda: number in self._answers or self._gone, _PATIENCE):
                raise TimeoutError(f"the browser did not answer {method}")
            answer = self._answers.pop(number, {"error": "the browser is gone"})
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str) -> None:
        """Go there, and wait until it is read."""
        loader = self.call("Page.navigate", url=url)
        assert "errorText" not in loader, loader
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What the expression is worth in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait for the expression to be true."""
        deadline = time.monotonic() + _PATIENCE
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}\n{self.value('document.body.innerText')}")
            time.sleep(0.05)
        return found

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the screen, and whether its owner likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, *, whole: bool = False) -> bytes:
        """What it looks like, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                piece = os.read(self._from, 1 << 16)
            except OSError:
                piece = b""
            if not piece:
                with self._heard:
                    self._gone = True
                    self._heard.notify_all()
                return
            *whole, rest = (rest + piece).split(b"\0")
            for one in whole:
                self._take(json.loads(one))

    def _take(self, message: dict[str, Any]) -> None:
        said = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.console.append(f"{said['type']}: {[one.get('value') for one in said['args']]}")
            case "Runtime.exceptionThrown":
                self.console.append(f"exception: {said['exceptionDetails']}")
            case "Log.entryAdded":
                self.console.append(f"{said['entry']['level']}: {said['entry']['text']} {said['entry'].get('url')}")
            case None:
                with self._heard:
                    self._answers[message["id"]] = message
                    self._heard.notify_all()


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with a profile of its own, gone at the end."""
    found = program()
    assert found is not None, why_not()
    with tempfile.TemporaryDirectory(prefix="legroom-chromium-", ignore_cleanup_errors=True) as profile:
        theirs_to_read, to_browser = os.pipe()
        from_browser, theirs_to_write = os.pipe()
        command = [
            found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        # It reads descriptor 3 and writes 4. High numbers first, so that neither copy falls on the other's place.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_to_read, theirs_to_write)]
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        given = [(os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(ends, (3, 4), strict=True)]
        pid = os.posix_spawn(found, command, dict(os.environ), file_actions=[*quiet, *given])
        for end in (theirs_to_read, theirs_to_write, *ends):
            os.close(end)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)  # it ends when its pipe does
            _wait(pid)
            os.close(from_browser)


def _wait(pid: int) -> None:
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.02)
