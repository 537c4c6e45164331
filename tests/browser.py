"""Chromium without a window, told what to do through its own protocol over a pair of pipes.

Needs nothing but the browser: no driver, no port, no package.  The protocol: one JSON object per
message, each ended by a zero byte (https://chromedevtools.github.io/devtools-protocol/).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SILENCE = 60.0  # seconds
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab, and everything that it said or asked for."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, receive
        self.heard = b""  # of a message that is not whole yet, or of those behind it
        self.last = 0
        self.session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for its answer."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self.last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._hear(answer.get("method"), answer.get("params", {}))

    def _message(self) -> bytes:
        while b"\0" not in self.heard:
            ready, _, _ = select.select([self.receive], [], [], SILENCE)
            assert ready, f"the browser has said nothing for {SILENCE} seconds"
            more = os.read(self.receive, 1 << 20)
            assert more, "the browser has ended"
            self.heard += more
        message, _, self.heard = self.heard.partition(b"\0")
        return message

    def _hear(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    def show(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open an address as a screen of this width shows it; a narrow one is a phone's."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=phone)  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression is, in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, *, seconds: float = 20) -> None:
        until = time.monotonic() + seconds
        while not self.value(condition):
            assert time.monotonic() < until, (condition, self.complaints)
            time.sleep(0.05)

    def move_to(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self) -> bytes:
        """The whole page, as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A browser with a profile of its own, for as long as the block lasts."""
    chromium = find_chromium()
    assert chromium is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    words = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
        *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--hide-scrollbars", f"--user-data-dir={profile}"),
        "about:blank",
    ]
    # The browser reads from 3 and writes to 4; a shell is the simplest to put pipes there.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    browser = subprocess.Popen(
        ["bash", "-c", shell, "bash", *words],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(ours_out, ours_in)
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        attached = page.call("Target.attachToTarget", targetId=target, flatten=True)
        page.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        browser.kill()
        browser.wait()
        os.close(ours_out)
        os.close(ours_in)
