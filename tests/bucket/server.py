"""A real S3-speaking server on loopback, and a proxy before it that behaves as badly as it is told to."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "everystep-tests"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """moto's server with one bucket in it; gives its port."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
                urllib.request.urlopen(make, timeout=10).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server does not come up"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


class Proxy(ThreadingHTTPServer):
    """Passes requests on. Faults are drawn for each: `errors`, `drops` and `lost` are probabilities of a 500,
    of a connection closed before the request is passed on, and of one closed after it; `delay_seconds`
    is the longest pause, so that answers overtake each other."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.random = random.Random(7)
        self.requests = 0
        self.heal()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def heal(self) -> None:
        self.errors = self.drops = self.lost = self.delay_seconds = 0.0
        self.refuses = False

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, *_: object) -> None:
        """Connections break here on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        proxy = self.server
        proxy.requests += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(proxy.random.uniform(0, proxy.delay_seconds))
        drawn = proxy.random.random()
        if proxy.refuses:
            self._answer(503, {}, b"<Error><Code>ServiceUnavailable</Code></Error>")
        elif drawn < proxy.errors:
            self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
        elif drawn < proxy.errors + proxy.drops:
            self._hang_up()
        else:
            status, headers, answer = self._ask(body)
            if drawn < proxy.errors + proxy.drops + proxy.lost:
                self._hang_up()
            else:
                self._answer(status, headers, answer)

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        onward = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=30)
        try:
            onward.request(self.command, self.path, body, dict(self.headers))
            answer = onward.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            onward.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        known = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", known or str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *_: object) -> None:
        pass


def point_at(port: int) -> dict[str, str]:
    """The environment in which an s3:// URL means this server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": ",".join({"127.0.0.1", *os.environ.get("NO_PROXY", "").split(",")} - {""}),
    }
