"""Two platforms on one store of a distributed file system, each with its own client of it: what is packed on one starts
on the other, and sandboxes read on, wait or fail as they should while its servers are gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tests.images import make_busybox_image
from tests.node.shared.conftest import NodeView
from tests.shared_store.moosefs import Cluster

import opendsec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.cgroup,
    pytest.mark.erofs,
    pytest.mark.overlay,
    pytest.mark.moosefs,
    pytest.mark.timeout(120),
]

Nodes = tuple[NodeView, NodeView]
OPENDSEC = (sys.executable, "-m", "opendsec.main")
PARTS = {f"/data/{number}": random.Random(number).randbytes(4 << 20) for number in range(4)}
PATIENT = pytest.mark.parametrize("nodes", [()], indirect=True, ids=["patient client"])


@contextmanager
def platform(node: NodeView) -> Iterator[tuple[str, str]]:
    """A running one: address and key."""
    run = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/tmp"))  # paths of sockets are short
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")} | {
        "OPENDSEC_STATE_DIR": str(node.local / "state"),
        "OPENDSEC_STORE": str(node.shared / "store"),
        "OPENDSEC_RUN_DIR": str(run),
        "OPENDSEC_LISTEN": f"unix:{run}/api.sock",
        "OPENDSEC_EDGE": node.name,
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }
    try:
        subprocess.run([*OPENDSEC, "up", "-d"], env=environment, check=True, timeout=120)
        key = json.loads((run / "local.json").read_bytes())["api_key"]
        yield f"unix:{run}/api.sock", key
    finally:
        subprocess.run([*OPENDSEC, "down"], env=environment, check=True, timeout=120)
        shutil.rmtree(run, ignore_errors=True)


@asynccontextmanager
async def on_platform(node: NodeView) -> AsyncIterator[opendsec.DSecClient]:
    with platform(node) as (address, key):
        async with opendsec.DSecClient(address, key) as client:
            yield client


def publish(node: NodeView) -> None:
    make_busybox_image(node.store(), "shared", files=PARTS)


class Echo:
    """A command that answers lines: what it needs is mapped, so it stays in memory whatever becomes of the store."""

    def __init__(self, process: opendsec.Process) -> None:
        self._process = process
        self._output = aiter(process.stdout)

    @classmethod
    async def begin(cls, sandbox: opendsec.Sandbox) -> Echo:
        made = cls(await sandbox.commands.start(["sh", "-c", "while read -r line; do echo here; done"], stdin=True))
        await made.answers()
        return made

    async def answers(self) -> None:
        """Within two seconds, or ten on a busy machine."""
        async with asyncio.timeout(60):
            await self._process.stdin.write(b"line\n")
            assert await anext(self._output) == b"here\n"

    async def end(self) -> None:
        await self._process.stdin.close()
        await self._process.wait()
        await self._process.aclose()


async def digest(sandbox: opendsec.Sandbox, path: str) -> str:
    done = await sandbox.run_shell(f"sha256sum {path}", check=True, timeout=120)
    return done.stdout.split()[0]


async def test_what_one_platform_packs_the_other_starts(nodes: Nodes) -> None:
    publish(nodes[0])
    args = opendsec.DSecContainerRunArgs(container_image="shared")
    async with on_platform(nodes[0]) as first, on_platform(nodes[1]) as second:
        async with first.container(args) as source:
            await source.run_shell("rm /data/0; echo built > /data/1; mkdir /work; echo new > /work/file", check=True)
            packed = await source.pack_diff("packed")
            await source.run_shell("echo later > /work/file", check=True)
        async with second.container(opendsec.DSecContainerRunArgs(container_image=str(packed))) as restored:
            done = await restored.run_shell("ls /data; cat /data/1 /work/file", check=True)
            assert done.stdout.split() == ["1", "2", "3", "built", "new"]
            assert await digest(restored, "/data/2") == hashlib.sha256(PARTS["/data/2"]).hexdigest()


@PATIENT
async def test_sandboxes_wait_for_servers_that_come_back(nodes: Nodes, cluster: Cluster) -> None:
    publish(nodes[0])
    args = opendsec.DSecContainerRunArgs(container_image="shared")
    async with (
        on_platform(nodes[1]) as client,
        client.container(args) as one,
        client.container(args) as other,
    ):
        echo = await Echo.begin(other)
        cluster.chunkservers[0].kill()
        assert await digest(one, "/data/0") == hashlib.sha256(PARTS["/data/0"]).hexdigest()
        for server in cluster.chunkservers[1:]:
            server.kill()
        reading = asyncio.create_task(digest(one, "/data/1"))
        try:
            for _ in range(10):
                await echo.answers()
                await asyncio.sleep(0.1)
            assert not reading.done()
        finally:
            for server in cluster.chunkservers:
                server.start()
        await echo.end()
        assert await reading == hashlib.sha256(PARTS["/data/1"]).hexdigest()


async def test_without_servers_a_command_fails_and_the_others_go_on(nodes: Nodes, cluster: Cluster) -> None:
    publish(nodes[0])
    args = opendsec.DSecContainerRunArgs(container_image="shared")
    async with (
        on_platform(nodes[1]) as client,
        client.container(args) as one,
        client.container(args) as other,
    ):
        echo = await Echo.begin(other)
        cluster.master.kill()
        for server in cluster.chunkservers:
            server.kill()
        try:
            failing = asyncio.create_task(one.run_shell("cat /data/2 | wc -c; cat /data/2 >/dev/null", timeout=50))
            refused = asyncio.create_task(client.run_container(opendsec.DSecContainerRunArgs(container_image="later")))
            while not (failing.done() and refused.done()):
                await echo.answers()
                await asyncio.sleep(0.2)
            result = await failing
            assert "Input/output error" in result.stderr or "Bus error" in result.stderr
            assert str(len(PARTS["/data/2"])) not in result.stdout
            assert result.exit_code != 0
            with pytest.raises(opendsec.OpenDSecError) as caught:
                await refused
            assert caught.value.code == "node"
            assert caught.value.retryable
        finally:
            cluster.master.start()
            for server in cluster.chunkservers:
                server.start()
        cluster.wait_for_chunkservers(nodes[1].shared)
        await echo.end()
        async with client.container(args) as new:
            assert (await new.run_shell("echo new", check=True)).stdout == "new\n"
