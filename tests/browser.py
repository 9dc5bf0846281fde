"""A headless Chromium, told what to do over its DevTools pipe: nothing but the browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--remote-debugging-pipe", "--window-size=1400,1000",
)  # fmt: skip
ANSWER_S = 300.0
# The browser reads commands from descriptor 3 and answers on 4; what is given here may have these very numbers.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.close(read), os.close(write)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser is gone, does not answer, or the page's script failed."""


class Page:
    """One page; `problems` are what its console said of errors and warnings, and requests it made."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._read = b""
        self._next = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._back, 1 << 16) if ready else b""
            if not more:
                raise BrowserError("the browser does not answer")
            self._read += more
        first, _, self._read = self._read.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, path: Path) -> float:
        """Seconds until the page says that it is ready and answers."""
        started = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.ask("document.documentElement?.dataset.ready || ''") == "":
            if time.monotonic() - started > ANSWER_S:
                raise BrowserError(f"the page is not ready: {self.problems}")
            time.sleep(0.01)
        return time.monotonic() - started

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def frame(self) -> None:
        """Waits until what was changed is drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def at(self, selector: str) -> tuple[float, float]:
        """The middle of an element, once it is in view."""
        found = self.ask(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return found[0], found[1]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y = self.at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.ask(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, **of: Any) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, **of)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def opened() -> Iterator[Page]:
    browser = find_browser()
    assert browser is not None
    theirs, to = os.pipe()
    back, ours = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [browser, *FLAGS, *sandbox, f"--user-data-dir={folder}"]
        starter = [sys.executable, "-S", "-c", START, str(theirs), str(ours), *command]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(starter, pass_fds=(theirs, ours), **quiet)
        os.close(theirs)
        os.close(ours)
        try:
            page = Page(to, back)
            page.attach()
            yield page
        finally:
            with contextlib.suppress(BrowserError, OSError):
                os.write(to, b'{"id": 0, "method": "Browser.close"}\0')
            os.close(to)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(back)
