"""Servers of object stores for tests, on the loopback interface: moto for s3://, the emulator for gs://, and faults."""

import http.server
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megajax.storage import stores

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_REGION": "us-east-1",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test-token",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def s3_server() -> Generator[dict[str, str]]:
    """moto's server with a bucket -> environment variables with which s3://bucket is in it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST"))
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"))
        yield CREDENTIALS | {"AWS_ENDPOINT_URL": url}
    finally:
        server.stop()


@contextmanager
def gcs_server() -> Generator[dict[str, str]]:
    """The emulator with a bucket, in a process of its own -> environment variables with which gs://bucket is in it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    script = Path(__file__).with_name("gcs_emulator.py")
    process = subprocess.Popen(
        [sys.executable, script, str(port), BUCKET], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/storage/v1/b/{BUCKET}", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None
                time.sleep(0.1)
        yield CREDENTIALS | {"TENSORSTORE_GCS_HTTP_URL": url}
    finally:
        process.kill()
        process.wait()


SERVERS = {"s3": s3_server, "gs": gcs_server}
ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "TENSORSTORE_GCS_HTTP_URL"}
"""Variable with the address of a server."""


def cut_connection(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def answer(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes = b"") -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/xml")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def say_nothing(handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(4)  # the tests cut connections after 1 s
    handler.close_connection = True


def refuse(handler: http.server.BaseHTTPRequestHandler, status: int, code: str) -> None:
    text = f"<Error><Code>{code}</Code><Message>No.</Message><AWSAccessKeyId>AKIATESTKEY</AWSAccessKeyId></Error>"
    body = json.dumps({"error": {"code": status, "message": f"{code}: No."}}) if status == 401 else text
    answer(handler, status, body.encode())


FAULTS = {
    "503": lambda handler: answer(handler, 503),
    "500": lambda handler: answer(handler, 500),
    "cut": cut_connection,
    "slow": say_nothing,
    "expired": lambda handler: refuse(handler, 400, "ExpiredToken"),
    "denied": lambda handler: refuse(handler, 403, "AccessDenied"),
}


class FaultyProxy:
    """Forwards requests to a server; the next `count` requests meet a fault instead, at a share of them drawn."""

    def __init__(self, url: str):
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy.lock:
                    faulty, proxy.count = proxy.count > 0, proxy.count - (proxy.count > 0)
                    proxy.requests += 1
                    proxy.log.append((self.command, self.path, self.headers.get("Range", "")))
                if faulty:
                    return FAULTS[proxy.fault](self)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                request = urllib.request.Request(url + self.path, body or None, headers, method=self.command)
                try:
                    reply = urllib.request.urlopen(request, timeout=100)
                except urllib.error.HTTPError as error:
                    reply = error
                content = reply.read()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                        self.send_header(name, value)
                size = reply.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", size or "0")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        self.fault, self.count, self.requests, self.lock = "503", 0, 0, threading.Lock()
        self.log = list[tuple[str, str, str]]()
        """Method, path and range of each request."""
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def inject(self, fault: str, count: int) -> None:
        with self.lock:
            self.fault, self.count, self.requests = fault, count, 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Of a child process that uses a server."""
    return os.environ | {"JAX_PLATFORMS": "cpu"} | variables


@contextmanager
def serving(kind: str, cache: Path) -> Generator[str]:
    """The URL of a bucket of a server that this process uses, with its files' cache in a folder."""
    with pytest.MonkeyPatch.context() as patch, SERVERS[kind]() as variables:
        for name, value in (variables | {"XDG_CACHE_HOME": str(cache)}).items():
            patch.setenv(name, value)
        stores._objects.cache_clear()
        yield f"{kind}://{BUCKET}"
    stores._objects.cache_clear()


@contextmanager
def faulty(bucket: str, retries: int) -> Generator[FaultyProxy]:
    """A proxy before the server of `serving`, which is asked again at once."""
    endpoint = ENDPOINT[bucket[:2]]
    with pytest.MonkeyPatch.context() as patch:
        proxy = FaultyProxy(os.environ[endpoint])
        patch.setenv(endpoint, proxy.url)
        patch.setattr(stores, "FIRST_WAIT", 0.01)
        patch.setattr(stores, "RETRIES", retries)
        stores._objects.cache_clear()
        try:
            yield proxy
        finally:
            stores._objects.cache_clear()
            proxy.close()
