"""How others on this node talk to the loader process: one question and one answer, each a line of JSON, through
<run>/loader.sock (mode 0600: who may ask may have everything of the store read).

    ask(socket, "attach", layer=…)     the answer's fields, or the error the other side raised, as its class here

A caller waits no longer than it says; the other side goes on with what it was asked.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from opendsec.errors import NodeError, OpenDSecError, RequestError
from opendsec.wire import codec

_MOST_BYTES = 1 << 20
_MOST_ANSWER_BYTES = 64 << 20
"""A status has some 250 bytes for each layer, and nodes may have attached many thousands."""

Answerer = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""What to do, and with what; raises OpenDSecError."""


class NobodyAnswersError(NodeError):
    """No loader has the socket open, or the one that was asked ended before it said anything."""

    default_retryable = True


def ask(path: Path, what: str, *, timeout_s: float, **fields: Any) -> Mapping[str, Any]:
    """Raises what the other side raised; NobodyAnswersError; NodeError (retryable) when the answer takes too long."""
    question = msgspec.json.encode({"do": what, **fields}) + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(str(path))
            link.sendall(question)
            with link.makefile("rb") as answers:
                line = answers.readline(_MOST_ANSWER_BYTES)
    except TimeoutError as error:
        raise NodeError(
            f"the loader of this node did not answer within {timeout_s:g} s", detail={"path": str(path)}, retryable=True
        ) from error
    except OSError as error:
        raise NobodyAnswersError(
            f"the loader of this node does not answer: {error.strerror}",
            detail={"path": str(path)},
            remedy="it is started again by itself; without `opendsec up`, run `python -m opendsec.host.loader`",
        ) from error
    if not line.endswith(b"\n"):
        raise NobodyAnswersError("the loader of this node ended while it was asked")
    answer: dict[str, Any] = msgspec.json.decode(line)
    if "error" in answer:
        raise codec.error_from_fields(answer["error"])
    return answer


class ControlServer(socketserver.ThreadingUnixStreamServer):
    """Answers, each connection in a thread of its own. `start` it, `close` it; the socket file goes with it."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, path: Path, answer: Answerer) -> None:
        self.path = path
        self.answer = answer
        path.unlink(missing_ok=True)
        super().__init__(str(path), _Connection)
        path.chmod(0o600)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self.shutdown()
        self.server_close()
        self.path.unlink(missing_ok=True)


class _Connection(socketserver.StreamRequestHandler):
    server: ControlServer

    def handle(self) -> None:
        for line in iter(lambda: self.rfile.readline(_MOST_BYTES), b""):
            try:
                answer = self._answer(line)
            except OpenDSecError as error:
                answer = {"error": codec.error_fields(error)}
            try:
                self.wfile.write(msgspec.json.encode(answer) + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                return

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            question: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            what = str(question.pop("do"))
        except (msgspec.DecodeError, KeyError) as error:
            raise RequestError(f"not a question: {error}") from error
        try:
            return self.server.answer(what, question)
        except OSError as error:
            raise NodeError(f"{what}: {error}") from error
