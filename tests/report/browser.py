"""Chromium without a window, driven over its DevTools protocol on a pair of pipes: no package is needed.

`--remote-debugging-pipe` makes it read commands from descriptor 3 and write answers and events to 4, each a JSON text
that ends in a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_PATIENCE = 60  # seconds for an answer; a busy machine starts a browser slowly


class Browser:
    """A running browser: sends commands, keeps events."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._rest = commands, answers, b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            found = self._read(end - time.monotonic())
            if found is None:
                continue
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)
        raise TimeoutError(method)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        if b"\0" not in self._rest:
            if not select.select([self._answers], [], [], max(0, seconds))[0]:
                return None
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        head, zero, rest = self._rest.partition(b"\0")
        if not zero:
            return None
        self._rest = rest
        return json.loads(head)

    def open(self, address: str) -> "Page":
        """Return a new page at an address, once it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.go(address)
        return page


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self._browser.send(method, self._session, **params)

    def go(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self.send("Page.navigate", url=address)
        self.wait(
            f"location.href !== 'about:blank' && document.readyState === 'complete' || {json.dumps(address)} === 0"
        )

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = _PATIENCE) -> float:
        """Wait until an expression is true; return how long that took."""
        began = time.monotonic()
        while not self.evaluate(script):
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:g} s: {script}")
            time.sleep(0.02)
        return time.monotonic() - began

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Set the size of the window, in CSS pixels, and light or dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer, and click."""
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self, file: Path) -> None:
        """Write the whole page as an image, however long it is."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _events(self, method: str) -> Iterator[dict[str, Any]]:
        self.evaluate("0")  # what was sent before has arrived
        for event in self._browser.events:
            if event.get("sessionId") == self._session and event["method"] == method:
                yield event["params"]

    @property
    def problems(self) -> list[str]:
        """Errors and warnings in the console, and exceptions, since the page was opened."""
        found = [str(event["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        found += [str(event["args"]) for event in self._events("Runtime.consoleAPICalled")]
        return found + [str(event["entry"]) for event in self._events("Log.entryAdded")]

    @property
    def requests(self) -> list[str]:
        """All addresses that were asked for since the page was opened."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)


def _moved(end: int) -> int:
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(end)
    return moved


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with an empty profile, and end it."""
    assert PROGRAM is not None
    # Moved out of the way of 3 and 4, over which they are copied in the new process.
    read, to_browser, from_browser, write = (_moved(end) for pair in (os.pipe(), os.pipe()) for end in pair)
    null = os.open(os.devnull, os.O_RDWR)
    places = ((null, 0), (null, 1), (null, 2), (read, 3), (write, 4))
    process = os.posix_spawn(
        PROGRAM,
        [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        os.environ | {"HOME": str(profile)},
        file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in places],
        setpgroup=0,
    )
    for end in (read, write, null):
        os.close(end)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(to_browser)
        os.close(from_browser)
