"""A web server of a store's files that lies, fails, hangs and drops connections as it is told, and an S3 server."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from tests.ports import free_port

_RANGE = re.compile(r"bytes=(\d+)-(\d*)\Z")


class Served(http.server.ThreadingHTTPServer):
    """`fault` is asked for each request of data: "", "zeros", "noise", "short", "500", "hang", "drop", "whole",
    "endless"."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.root = root
        self.faults: list[str] = [""]
        """One of these, by chance, for each request of data."""
        self.everything = False
        """Faults are for tables, metadata, manifests and tags too."""
        self.release = threading.Event()
        self.chance = random.Random(3)
        self.seen: Counter[str] = Counter()
        self.bytes_sent = 0
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are meant."""


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Served

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        name = unquote(self.path).lstrip("/")
        folder = name.partition("/")[0]
        self.server.seen[folder] += 1
        faulty = folder == "data" or self.server.everything
        fault = self.server.chance.choice(self.server.faults) if faulty else ""
        try:
            content = (self.server.root / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            self._answer(404, b"")
            return
        if self.server.delay_s:
            time.sleep(self.server.delay_s)
        wanted = _RANGE.match(self.headers.get("Range", ""))
        if fault == "500":
            self._answer(500, b"")
        elif fault == "hang":
            self.server.release.wait(60)
            self.close_connection = True
        elif fault == "endless":
            self._never_end(wanted, len(content))
        elif wanted is None or fault == "whole":
            self._answer(200, _spoilt(fault, content, self.server.chance))
        else:
            first = int(wanted[1])
            part = content[first : int(wanted[2]) + 1 if wanted[2] else None]
            self._answer(
                206,
                _spoilt(fault, part, self.server.chance),
                place=(first, len(part), len(content)),
                cut=fault == "drop",
            )

    def _never_end(self, wanted: re.Match[str] | None, size: int) -> None:
        """The right head of an answer but for its length, and zeros for as long as anybody takes them."""
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{size}")
        self.send_header("Content-Length", str(1 << 50))
        self.send_header("Last-Modified", "Tue, 15 Nov 1994 12:45:26 GMT")
        self.end_headers()
        self.close_connection = True
        piece = bytes(1 << 20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not self.server.release.is_set():
                self.wfile.write(piece)
                self.server.bytes_sent += len(piece)

    def _answer(
        self, status: int, body: bytes, *, place: tuple[int, int, int] | None = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        if place is not None:
            self.send_header("Content-Range", f"bytes {place[0]}-{place[0] + place[1] - 1}/{place[2]}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Tue, 15 Nov 1994 12:45:26 GMT")
        self.end_headers()
        if cut:
            body = body[: len(body) // 2]
            self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)
            self.server.bytes_sent += len(body)


def _spoilt(fault: str, content: bytes, chance: random.Random) -> bytes:
    match fault:
        case "zeros":
            return bytes(len(content))
        case "noise":
            place = chance.randrange(max(1, len(content)))
            return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] if content else b""
        case "short":
            return content[: len(content) // 3]
        case _:
            return content


@contextlib.contextmanager
def web_server(root: Path) -> Iterator[Served]:
    """Serves the files below `root` while inside."""
    with Served(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """A real S3 API (moto) with one bucket; the environment in which clients find it."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"]},
    )
    try:
        _make_bucket(port, bucket)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait(60)


def _make_bucket(port: int, bucket: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("PUT", f"/{bucket}", headers={"Host": f"127.0.0.1:{port}"})
            assert connection.getresponse().status == 200
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise AssertionError("moto did not start")
