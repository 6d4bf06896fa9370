"""A real edge process, and plain HTTP to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from opendsec.wire.contracts import EXEC_ERROR, EXEC_RESULT, EXEC_STARTED, EXEC_STDERR, EXEC_STDOUT
from opendsec.wire.frames import FrameParser

SOURCE = Path(__file__).parents[3] / "src"


class EdgeProcess:
    """`python -m opendsec.edge` over its own directories; may be killed and started again."""

    def __init__(self, root: Path, run_dir: Path, *, backends: str = "dummy", **settings: str) -> None:
        self.socket = run_dir / "edge-local.sock"
        self.cgroup = settings.get("OPENDSEC_EDGE_CGROUP", "")
        self._environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")},
            "PYTHONPATH": str(SOURCE),
            "OPENDSEC_STATE_DIR": str(root),
            "OPENDSEC_RUN_DIR": str(run_dir),
            "OPENDSEC_EDGE_BACKENDS": backends,
            "OPENDSEC_EDGE_MEMORY_FLOOR_MB": "0",
            "OPENDSEC_EDGE_DISK_FLOOR_MB": "0",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.log = root / "edge.log"
        self.client = self.fresh_client()

    def fresh_client(self) -> httpx.AsyncClient:
        """With connections of its own."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=httpx.Limits(max_connections=600))
        return httpx.AsyncClient(transport=transport, base_url="http://edge", timeout=60)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opendsec.edge"], env=self._environment, stderr=log, stdin=subprocess.DEVNULL
            )
        async with asyncio.timeout(60):
            while not await self._answers():
                assert self._process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            return (await self.client.get("/healthz")).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """As the kernel would under pressure: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As a supervisor would; the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)

    async def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        await self.client.aclose()

    # Requests

    async def create(self, **spec: Any) -> str:
        answer = await self.client.post("/v1/sandboxes", json={"spec": spec})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["sandbox_id"])

    async def delete(self, sandbox_id: str) -> dict[str, Any]:
        answer = await self.client.delete(f"/v1/sandboxes/{sandbox_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def delete_all(self) -> None:
        items = (await self.client.get("/v1/sandboxes?limit=10000")).json()["items"]
        await asyncio.gather(*(self.delete(item["sandbox_id"]) for item in items))

    async def run(self, sandbox_id: str, script: str, **fields: Any) -> Exec:
        answer = await self.client.post(f"/v1/sandboxes/{sandbox_id}/commands", json={"script": script, **fields})
        return read_exec(answer)

    async def begin(self, sandbox_id: str, script: str, **fields: Any) -> str:
        answer = await self.client.post(
            f"/v1/sandboxes/{sandbox_id}/commands?detach=true", json={"script": script, **fields}
        )
        assert answer.status_code == 201, answer.text
        return str(answer.json()["command_id"])

    async def output(self, sandbox_id: str, command_id: str, *, stdout: int = 0, stderr: int = 0) -> Exec:
        path = f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/output?stdout={stdout}&stderr={stderr}"
        return read_exec(await self.client.get(path))


class Exec:
    """An exec stream, read to its end."""

    def __init__(self, body: bytes, *, stdout_at: int = 0, stderr_at: int = 0) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.started: dict[str, Any] = {}
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        at: dict[int, int] = {}
        for frame in FrameParser().feed(body):
            if frame.type in (EXEC_STDOUT, EXEC_STDERR):
                offset = int.from_bytes(frame.payload[:8], "little")
                data = bytes(frame.payload[8:])
                assert at.get(frame.type, offset) == offset, "a gap"
                at[frame.type] = offset + len(data)
                (self.stdout if frame.type == EXEC_STDOUT else self.stderr).extend(data)
            elif frame.type == EXEC_STARTED:
                self.started = msgspec.json.decode(frame.payload)
            elif frame.type == EXEC_RESULT:
                self.result = msgspec.json.decode(frame.payload)
            elif frame.type == EXEC_ERROR:
                self.error = msgspec.json.decode(frame.payload)["error"]


def read_exec(answer: httpx.Response) -> Exec:
    assert answer.status_code == 200, answer.text
    return Exec(answer.content)


@contextlib.asynccontextmanager
async def edge_process(root: Path, run_dir: Path, **settings: str) -> AsyncIterator[EdgeProcess]:
    edge = EdgeProcess(root, run_dir, **settings)
    try:
        await edge.start()
        yield edge
    finally:
        await edge.close()
