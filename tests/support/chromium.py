"""A headless Chromium that opens files: it runs scripts in the page, notes every error, and takes pictures."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Page:
    """One page over the DevTools protocol.

    Example: page.open(path); page.run("document.title"); page.problems
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._next_id = 0
        self.problems: list[str] = []  # uncaught errors, console errors, refused loads and scripts
        self.requests: dict[str, str] = {}  # addresses the page loaded from, but for those its policy stopped
        self.stopped: list[str] = []  # addresses that its policy stopped
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, fragment: str = "") -> None:
        """Open a file and wait until the page says that it is ready (or that it failed)."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        deadline = time.monotonic() + 60
        state = "document.querySelector('#app')?.dataset.state"
        while self.run(f"document.readyState === 'complete' && {state}") not in ("ready", "error"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} is {self.run(state)!r} after a minute; {self.problems}")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what has come into view is filled then."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))))")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, as a keyboard does."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def look(self, *, width: int = 1500, height: int = 1000, dark: bool = False, scale: float = 1) -> None:
        """The window's size, and which colours its user likes."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """The window as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol; events that come before its answer are noted."""
        self._next_id += 1
        self._connection.send(json.dumps({"id": self._next_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == self._next_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{values['type']}: {values['args']}")
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a script opened a dialog: {values['message']}")
            self._connection.send(
                json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )
        elif method == "Network.requestWillBeSent":
            self.requests[values["requestId"]] = values["request"]["url"]
        elif method == "Network.loadingFailed" and values.get("blockedReason") == "csp":
            self.stopped.append(self.requests.pop(values["requestId"]))


@contextlib.contextmanager
def chromium_page(profile: Path) -> Iterator[Page]:
    """A browser with one page; skips the test where no Chromium is installed. It is ended with the block."""
    command = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if command is None:
        pytest.skip("no Chromium is installed (apt-get install --no-install-recommends chromium)")
    profile.mkdir(parents=True, exist_ok=True)
    log = (profile / "chromium.log").open("wb")
    with (
        log,
        subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        ) as browser,
    ):
        try:
            with connect(_page_address(browser, profile), max_size=None, open_timeout=30) as connection:
                yield Page(connection)
        finally:
            browser.terminate()
            try:
                browser.wait(timeout=20)
            except subprocess.TimeoutExpired:
                browser.kill()


def _page_address(browser: subprocess.Popen[bytes], profile: Path) -> str:
    """Where the page's protocol is; the browser writes its port into the profile once it listens."""
    deadline = time.monotonic() + 60
    port_file = profile / "DevToolsActivePort"
    while time.monotonic() < deadline and browser.poll() is None:
        with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
            port = int(port_file.read_text().partition("\n")[0])  # a ValueError while the file is still empty
            for target in httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=10, trust_env=False).json():
                if target["type"] == "page":
                    return target["webSocketDebuggerUrl"]
    raise RuntimeError("Chromium did not start: " + (profile / "chromium.log").read_text(errors="replace")[-1500:])
