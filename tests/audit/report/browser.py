"""A browser without a window, spoken to over a pipe: no driver and no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60


def find_browser():
    """The path of a browser, or None."""
    given = os.environ.get("CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page at a time, with what it has asked the network for and said on the console."""

    def __init__(self, path, profile):
        ours_read, theirs_write = os.pipe()
        theirs_read, self._to = os.pipe()
        self._from = ours_read
        self._rest = b""
        self._number = 0
        self.requests, self.complaints = [], []

        def take_pipes():
            # The browser reads from 3 and writes to 4. Neither may be overwritten too early.
            reading, writing = os.dup(theirs_read), os.dup(theirs_write)
            high_read, high_write = os.dup2(reading, 60), os.dup2(writing, 61)
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--disable-dev-shm-usage", "--disable-background-networking"]
        options += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(  # noqa: S603
            [path, *options, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=take_pipes,
        )
        os.close(theirs_write)
        os.close(theirs_read)
        self._session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def open(self, path, width=1100, height=900, media=""):
        """Show a file, and wait until it is there."""
        self.requests, self.complaints = [], []
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.ask("Emulation.setEmulatedMedia", media=media)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + SECONDS
        while self.run("document.readyState + location.protocol") != "completefile:":
            if time.monotonic() > until:
                raise TimeoutError(f"{path} was not shown")
            time.sleep(0.02)

    def run(self, script):
        """What a piece of script gives on the page that is shown."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def picture(self, path, whole=True):
        """A picture of the page, as PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def paper(self):
        """The page as PDF."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])

    def ask(self, method, **parameters):
        """One command of the protocol, and its answer; events are kept on the way."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def close(self):
        """End it."""
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _note(self, event):
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str(event["params"]["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]))
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])

    def _receive(self):
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser has gone")
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)
