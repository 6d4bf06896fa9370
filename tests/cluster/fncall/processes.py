"""Two edges and an apiserver as processes of their own, which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
from tests.cluster.edge.processes import SOURCE, EdgeProcess
from tests.ports import free_port

from opendsec.apiserver.__main__ import new_key
from opendsec.apiserver.settings import from_environment


class Apiserver:
    """`python -m opendsec.apiserver` on a TCP port of its own."""

    def __init__(self, folder: Path, edges: Mapping[str, Path], **settings: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")},
            "PYTHONPATH": str(SOURCE),
            "OPENDSEC_STATE_DIR": str(folder / "api"),
            "OPENDSEC_RUN_DIR": str(folder / "api-run"),
            "OPENDSEC_LISTEN": self.address,
            "OPENDSEC_EDGES": ",".join(f"{name}=unix:{path}" for name, path in edges.items()),
            **settings,
        }
        self.key = new_key(from_environment(self._environment), "default")
        self._log = folder / "api.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def start(self) -> None:
        """Until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opendsec.apiserver"],
                env=self._environment,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        async with asyncio.timeout(30), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(f"{self.url}/healthz")
                    return
                assert self._process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """As the kernel would under pressure."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(60)


class Cluster:
    """Edges that answer calls from memory, and an apiserver before them."""

    def __init__(self, folder: Path, *names: str, **settings: str) -> None:
        self.edges: dict[str, EdgeProcess] = {}
        for name in names:
            run_dir = folder / f"run-{name}"
            run_dir.mkdir(parents=True)
            (folder / name).mkdir()
            self.edges[name] = EdgeProcess(
                folder / name,
                run_dir,
                backends="dummy,fncall",
                OPENDSEC_EDGE=name,
                OPENDSEC_EDGE_LISTEN=f"unix:{run_dir}/edge-local.sock",
            )
        self.apiserver = Apiserver(folder, {name: edge.socket for name, edge in self.edges.items()}, **settings)


@contextlib.asynccontextmanager
async def cluster(folder: Path, *names: str, **settings: str) -> AsyncIterator[Cluster]:
    """All of it, started."""
    made = Cluster(folder, *names, **settings)
    try:
        async with asyncio.TaskGroup() as group:
            for edge in made.edges.values():
                group.create_task(edge.start())
            group.create_task(made.apiserver.start())
        yield made
    finally:
        made.apiserver.kill()
        for edge in made.edges.values():
            await edge.close()
