"""The SDK against a real edge process (dummy backend): both sides mean the same by the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

import opendsec
from opendsec import BackendKind, DSecContainerRunArgs, EndReason, SandboxEnd, SandboxState

pytestmark = pytest.mark.anyio

ARGS = DSecContainerRunArgs(container_image="any", backend=BackendKind.DUMMY, labels={"a": "b"})
BIG = bytes(range(256)) * 8192


@pytest.fixture
def edge_url(tmp_path: Path) -> Iterator[str]:
    source = str(Path(opendsec.__file__).parents[1])
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": source,
        "OPENDSEC_EDGE_BACKENDS": "dummy",
        "OPENDSEC_STATE_DIR": str(tmp_path / "state"),
        "OPENDSEC_RUN_DIR": str(tmp_path / "run"),
    }
    (tmp_path / "state").mkdir()
    (tmp_path / "run").mkdir()
    with (tmp_path / "log").open("wb") as log:
        edge = subprocess.Popen([sys.executable, "-m", "opendsec.edge"], env=environment, stdout=log, stderr=log)
        try:
            yield f"unix:{tmp_path}/run/edge-local.sock"
        finally:
            edge.terminate()
            edge.wait(60)


@pytest.fixture
async def client(edge_url: str) -> AsyncIterator[opendsec.DSecClient]:
    client = opendsec.DSecClient(edge_url, timeout=20)
    with anyio.fail_after(20):
        while True:
            try:
                await client.open()
                break
            except opendsec.ConnectError:
                await anyio.sleep(0.05)
    yield client
    await client.close()


async def test_commands(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as sandbox:
        result = await sandbox.run_shell("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert (await sandbox.run_shell("cat", stdin=BIG)).stdout_bytes == BIG
        assert (await sandbox.run_shell("true", stdin=BIG)).ok
        assert (await sandbox.run_shell("sleep 9", timeout=0.2)).end_reason is EndReason.TIMEOUT
        noisy = await sandbox.run_shell("yes", timeout=0.3, max_output_bytes=1000)
        assert (len(noisy.stdout_bytes), noisy.truncated) == (1000, True)
        assert (await sandbox.run_shell("echo x", operation_id="o")).command_id == (
            await sandbox.run_shell("echo x", operation_id="o")
        ).command_id


async def test_processes(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as sandbox:
        process = await sandbox.commands.start("cat", stdin=True)
        await process.stdin.write("one\n")
        assert await anext(aiter(process.stdout)) == b"one\n"
        again = await sandbox.commands.attach(process.id, stdout_offset=2)
        await process.stdin.close()
        assert (await process.wait(timeout=60)).exit_code == 0
        assert await again.stdout.read() == b"e\n"
        sleeper = await sandbox.commands.start("sleep 60")
        await sleeper.kill(grace=0.1)
        assert (await sleeper.wait(timeout=60)).end_reason is EndReason.CANCELLED
        with anyio.move_on_after(0.3):
            await sandbox.run_shell("sleep 60")
        cancelled = (await sandbox.commands.list())[-1]
        follow = await sandbox.commands.attach(cancelled.command_id)
        assert (await follow.wait(timeout=60)).end_reason is EndReason.CANCELLED


async def test_files(client: opendsec.DSecClient, tmp_path: Path) -> None:
    async with client.container(ARGS) as sandbox:
        files = sandbox.files
        assert (await files.write("/d/a b\udcff\n%2F😀", BIG, mode=0o640)).mode == 0o640
        assert [stat.path for stat in await files.list("/d")] == ["/d/a b\udcff\n%2F😀"]
        assert await files.read_bytes("/d/a b\udcff\n%2F😀", offset=5, length=10) == BIG[5:15]
        assert not await files.exists("/d/none")
        local = tmp_path / "local"
        (local / "sub").mkdir(parents=True)
        (local / "sub" / "big").write_bytes(BIG)
        (local / "link").symlink_to("sub/big")
        await files.upload(str(local), "/tree")
        assert (await files.download("/tree", str(tmp_path / "back"))).bytes == len(BIG)
        assert (tmp_path / "back" / "link").read_bytes() == BIG
        await files.move("/tree/sub/big", "/tree/moved")
        await files.remove("/tree", recursive=True)
        assert not await files.exists("/tree")


async def test_life(client: opendsec.DSecClient) -> None:
    items = [item async for item in client.run_many(ARGS, 10)]
    started = [item.sandbox for item in items if isinstance(item, opendsec.Started)]
    assert len(started) == 10
    found = [status.sandbox_id async for status in client.list(labels={"a": "b"}, state="running", page_size=3)]
    assert sorted(found) == sorted(sandbox.id for sandbox in started)
    sandbox = started[0]
    assert (await sandbox.update(ttl_running_stop=77)).spec.lifetime.ttl_running_stop == 77
    assert (await sandbox.renew()).idle_expires_at is not None
    assert (await sandbox.pause()).state is SandboxState.PAUSED
    assert (await sandbox.resume()).state is SandboxState.RUNNING
    for one in started:
        assert (await one.stop()).end_reason is SandboxEnd.STOPPED
    with pytest.raises(opendsec.SandboxExitedError):
        await sandbox.run_shell("true")
    with pytest.raises(opendsec.NotFoundError):
        await client.connect("sbx-local-aaaaaaaaaaaaaaaa")
