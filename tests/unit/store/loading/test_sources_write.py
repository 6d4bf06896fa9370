"""What a store does not take is an OSError, however large it is; a server without ranges is named as one."""

from __future__ import annotations

import errno
import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.store.loading.sources import open_files


class _ReadOnly(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(405)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """Python's own server gives the whole file, whatever part was asked for."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler] | functools.partial[_WithoutRanges]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_web_server_without_ranges_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    with served(functools.partial(_WithoutRanges, directory=str(tmp_path))) as address:
        files = open_files(address, attempt_s=5)
        with pytest.raises(OSError, match="must answer Range requests") as caught:
            files.read("file", 100, 10)
        files.close()
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize("size", [100, 12 << 20], ids=["small", "larger than a part of an upload"])
def test_a_web_server_that_takes_nothing(size: int) -> None:
    with served(_ReadOnly) as address:
        files = open_files(address, attempt_s=5)
        with pytest.raises(OSError, match=r".+"):
            files.write("profiles/x.pack", bytes(size))
        files.close()
