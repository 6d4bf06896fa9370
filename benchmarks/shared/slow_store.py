"""A store that is far away: its files behind HTTP, or its data as a mounted file system, at so many MB/s and no more.

    python -m benchmarks.shared.slow_store http ROOT --port-file FILE --count FILE --mb 50 --latency-ms 1
    python -m benchmarks.shared.slow_store fuse ROOT/data/sha256 --target DIR --count FILE --mb 50 --latency-ms 1

One token bucket for everything that process sends, in pieces of 64 KiB, however many ask at once; `--latency-ms` is
waited for before each answer. The bytes of files sent so far stand in the file `--count`. A process of its own, so
that its CPU is not counted with what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

from opendsec.linux import fuse

PIECE_BYTES = 65_536
BURST_BYTES = 131_072
_RANGE = re.compile(r"bytes=(\d+)-(\d*)\Z")
_COUNT = struct.Struct("<Q")


class Bucket:
    """Bytes at a rate; counts them."""

    def __init__(self, bytes_per_s: float, latency_s: float, count: Path) -> None:
        self.latency_s = latency_s
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        with count.open("w+b") as file:
            file.truncate(_COUNT.size)
            self._count = mmap.mmap(file.fileno(), 0)

    def take(self, size: int) -> None:
        """Wait until so many may be sent."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_BYTES / self._rate) + size / self._rate
            wait = self._free_at - now
            _COUNT.pack_into(self._count, 0, _COUNT.unpack_from(self._count)[0] + size)
        if wait > 0:
            time.sleep(wait)


def sent(count: Path) -> int:
    """Bytes that process has sent so far."""
    return int(_COUNT.unpack(count.read_bytes())[0])


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: Path, bucket: Bucket) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.root = root
        self.bucket = bucket

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are meant."""


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        if self.server.bucket.latency_s:
            time.sleep(self.server.bucket.latency_s)
        try:
            fd = os.open(self.server.root / unquote(self.path).lstrip("/"), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, IsADirectoryError):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            self._send(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _send(self, fd: int, size: int) -> None:
        wanted = _RANGE.match(self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1, size) if wanted and wanted[2] else size
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - first))
        self.send_header("Last-Modified", "Tue, 15 Nov 1994 12:45:26 GMT")
        self.end_headers()
        self.wfile.flush()
        while first < end:
            piece = min(PIECE_BYTES, end - first)
            self.server.bucket.take(piece)
            while piece:
                done = os.sendfile(self.connection.fileno(), fd, first, piece)
                first, piece = first + done, piece - done


class _Flat:
    """The files of a directory, for `linux.fuse`."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(32)
        self._files: dict[int, tuple[fuse.File, int]] = {}
        for number, path in enumerate(sorted(root.iterdir()), fuse.ROOT + 1):
            file = fuse.File(number=number, name=path.name, size_bytes=path.stat().st_size)
            self._files[number] = (file, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def by_name(self, name: str) -> fuse.File | None:
        return next((file for file, _ in self._files.values() if file.name == name), None)

    def by_number(self, number: int) -> fuse.File | None:
        found = self._files.get(number)
        return found[0] if found else None

    def all(self) -> Iterable[fuse.File]:
        return [file for file, _ in self._files.values()]

    def read(self, file: fuse.File, offset: int, size: int, reply: fuse.Reply) -> None:
        self._pool.submit(self._read, file, offset, size, reply)

    def _read(self, file: fuse.File, offset: int, size: int, reply: fuse.Reply) -> None:
        if self._bucket.latency_s:
            time.sleep(self._bucket.latency_s)
        self._bucket.take(size)
        reply.give(os.pread(self._files[file.number][1], size, offset))


def _serve_fuse(root: Path, target: Path, bucket: Bucket) -> None:
    fd = fuse.open_device()
    fuse.mount(fd, target)
    threads = [threading.Thread(target=fuse.serve, args=(fd, _Flat(root, bucket))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Until it is killed, or its file system unmounted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("http", "fuse"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--count", type=Path, required=True)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--mb", type=float, default=50)
    parser.add_argument("--latency-ms", type=float, default=0)
    options = parser.parse_args()
    bucket = Bucket(options.mb * 1e6, options.latency_ms / 1000, options.count)
    if options.how == "fuse":
        _serve_fuse(options.root, options.target, bucket)
        return
    with contextlib.suppress(KeyboardInterrupt), _Server(options.root, bucket) as server:
        new = options.port_file.with_suffix(".new")
        new.write_text(str(server.server_port), encoding="ascii")
        new.rename(options.port_file)
        server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
