"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of a browser. To be used as a context, which ends the browser."""

    def __init__(self, url: str, seconds: float = 90, window: str = "900,760"):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        # The protocol reads from descriptor 3 and writes to 4; the shell moves the pipes there.
        command = [
            *("bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", str(CHROMIUM), "--headless", "--no-sandbox"),
            *("--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
            *("--no-first-run", "--disable-background-networking", f"--window-size={window}"),
            f"--user-data-dir={self._profile.name}",
        ]
        self._process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session, self._seconds = b"", 0, "", seconds
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + self._seconds
        while self.value(script) is not True:
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                piece = os.read(self._read, 1 << 16)
                assert piece, "the browser has ended"
                self._buffer += piece
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
