"""What a store does not take is an OSError, however large it is."""

from __future__ import annotations

import http.server
import threading

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


@pytest.mark.parametrize("size", [100, 12 << 20], ids=["small", "larger than a part of an upload"])
def test_a_web_server_that_takes_nothing(size: int) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ReadOnly) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        files = open_files(f"http://127.0.0.1:{server.server_port}", attempt_s=5)
        try:
            with pytest.raises(OSError, match=r".+"):
                files.write("profiles/x.pack", bytes(size))
        finally:
            files.close()
            server.shutdown()
            thread.join()
