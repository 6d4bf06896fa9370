"""Serves an ASGI app over a Unix socket or host:port with uvicorn, uvloop and httptools.

A Unix socket is published by rename, mode 0600, so a restart after kill -9 replaces the old one and never leaves a
moment without a path.
Stopping (SIGTERM, SIGINT, or cancelling `serve`) closes the listener, lets answers in progress finish for `grace_s`,
then cuts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from opendsec.errors import InvalidSpecError, RequestError
from opendsec.linux.libc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, mallopt
from opendsec.server.asgi import ASGIApp
from opendsec.wire import codec

log = logging.getLogger(__name__)
T = TypeVar("T")

WRITE_BUFFER = 512 * 1024
"""Bytes of an answer waiting in this process above which its source is held back."""
SEND_BUFFER = 1024 * 1024
"""Bytes of a Unix socket waiting in the kernel; used only while they wait."""
HEAD_S = 30.0
"""Seconds from the connection, or from a request's first byte, to the end of its headers."""
MAX_HEAD = 64 * 1024
"""Bytes of request line and headers; a path of 4095 bytes, percent-encoded, takes 12 KiB."""
COLLECT_AFTER_OBJECTS = 20_000
"""Objects more than freed since the last look for cycles; Python's own 700 is for programs of another size."""
MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes of one message of a WebSocket."""
LARGE_BLOCK = 4 * 1024 * 1024
"""Bytes from which a block of memory is the kernel's own business; pieces of streams are smaller."""
KEEP_FREED = 32 * 1024 * 1024
"""Bytes of freed memory at the heap's end that stay with the process."""
SO_SNDBUFFORCE = 32
"""asm-generic/socket.h"""
BACKLOG = 4096
"""Connections waiting to be accepted; the kernel caps it at net.core.somaxconn."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a Unix socket path, or a host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, field: str = "listen") -> Address:
    """`unix:/path`, `/path`, `host:port` or `[v6]:port`. Raises InvalidSpecError naming `field`."""
    if text.startswith(("unix:", "/")):
        path = Path(text.removeprefix("unix:"))
        if not path.is_absolute() or len(os.fsencode(path)) > 90:
            raise InvalidSpecError(
                f"{field}: {text!r} is not an absolute path of at most 90 bytes", detail={"field": field}
            )
        return Address(path=path)
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidSpecError(f"{field}: {text!r} is neither host:port nor unix:/path", detail={"field": field})
    return Address(host=host.strip("[]"), port=int(port))


def listen(address: Address) -> socket.socket:
    """A listening socket. Raises OSError; the file name of a Unix socket or the host is in its message."""
    if address.path is not None:
        return _listen_unix(address.path)
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise OSError(exc.errno, f"cannot listen on {address}: {os.strerror(exc.errno or 0)}") from exc


def _listen_unix(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(fresh))
        fresh.chmod(0o600)
        sock.listen(BACKLOG)
        fresh.rename(path)
    except OSError:
        sock.close()
        fresh.unlink(missing_ok=True)
        raise
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which the runner owns, and with a word when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn."""
        await super().startup(sockets)
        _settle_memory()
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_off(self) -> None:
        """Close connections whose requests are still not over: a cut answer is asked for again, where uvicorn's own
        `500` for a request it cancels would be taken for the request's outcome."""
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()


def _settle_memory() -> None:
    """What was imported stays for ever and need not be looked at again; what requests leave is mostly freed without the
    collector, which with its usual threshold takes a tenth of a busy server's time. Freed buffers of streams stay with
    the process: given back to the kernel and faulted in again for each piece, they cost as much as the rest of the way.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)
    mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    mallopt(M_TRIM_THRESHOLD, KEEP_FREED)


class Connection(HttpToolsProtocol):
    """uvicorn's, with room for a large chunk on its way, a bound on request heads, and our errors for broken HTTP.

    With the small default buffers every chunk of a stream waits twice.
    """

    _in_head = True
    _head_bytes = 0
    _heads = 0
    _awaited_head = -1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        widen(transport.get_extra_info("socket"))
        self._await_head()

    def _await_head(self) -> None:
        """Close the connection unless the headers now begun are complete in time: who sends them byte by byte would
        hold a descriptor for ever."""
        if self._awaited_head != self._heads:
            self._awaited_head = self._heads
            self.loop.call_later(HEAD_S, self._look_for_head, self._heads)

    def _look_for_head(self, heads: int) -> None:
        if self._heads == heads and not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._head_bytes += len(data)  # before parsing, which sets it back at the end of a request
        heads = self._heads if self._in_head else -1
        super().data_received(data)
        if not self._in_head or self._heads != heads:
            self._head_bytes = 0  # what came belongs to a body, at least in part
        elif not self.transport.is_closing():
            self._head_bytes += len(data)
            self._await_head()
            if self._head_bytes > MAX_HEAD:
                self.send_400_response(f"the request's headers are larger than {MAX_HEAD} bytes")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._heads += 1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """The request is no HTTP (any more): say so, unless an answer is under way, and close."""
        cycle: Any = self.cycle  # None before the first request, whatever its annotation says
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = codec.encode_error(RequestError(msg.rstrip("."), remedy="send HTTP/1.1"))
            head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode("ascii") + body)
        self.transport.close()


def widen(sock: socket.socket) -> None:
    """Ask for SEND_BUFFER in the kernel on a Unix socket (TCP sizes its own); less is granted without the right to
    more."""
    if sock.family == socket.AF_UNIX:
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def _is_news(record: logging.LogRecord) -> bool:
    """uvicorn complains of every WebSocket that was refused with an answer, which is no fault of anybody's here."""
    return not record.getMessage().startswith("ASGI callable returned without completing handshake")


async def serve(
    app: ASGIApp, sock: socket.socket, *, grace_s: float = 5.0, on_listening: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled; then shut down gracefully: what is not over after `grace_s` is
    cut off without an answer. Closes `sock`.

    `on_listening` is called once, when requests are answered.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE,
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, math.ceil(grace_s)) + 1,
    )
    server = _Server(config, on_listening)
    logging.getLogger("uvicorn.error").addFilter(_is_news)

    def stop() -> None:
        if not server.should_exit:
            server.should_exit = True
            asyncio.get_running_loop().call_later(grace_s, server.cut_off)

    with _on_signals(stop):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(server.serve(sockets=[sock]))
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                stop()
                await running
                raise


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's main coroutine on uvloop."""
    return uvloop.run(main)
