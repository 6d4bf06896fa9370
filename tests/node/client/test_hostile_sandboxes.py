"""Sandboxes that do their worst: they harm themselves, are told why, can be stopped, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pytest
from tests.node.client.conftest import EDGE, Kill

import opendsec
from opendsec import DSecContainerRunArgs, EndReason, SandboxEnd
from opendsec.guest import protocol
from opendsec.wire.frames import pack_frame

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.image,
    pytest.mark.erofs,
    pytest.mark.overlay,
    pytest.mark.memcg,
]

ARGS = DSecContainerRunArgs(container_image="debian", pids_limit=128, memory_limit_mb=128)
BOMB = "python3 -c 'kept = []\nwhile True: kept.append(bytearray(8 << 20))'"
HELLO = pack_frame(
    protocol.HELLO,
    0,
    protocol.pack_fields(
        [
            (protocol.T_VERSION, protocol.VERSION),
            (protocol.T_AGENT, "liar"),
            (protocol.T_BOOT_ID, bytes(16)),
            (protocol.T_CAPS, "files"),
        ]
    ),
)
MIB = 1024 * 1024


async def test_a_fork_bomb_fills_its_own_limit_only(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as neighbour, client.container(ARGS) as bomb:
        await bomb.commands.start("bomb() { bomb | bomb & }; bomb; sleep 1000")
        while (await bomb.run_shell("true")).end_reason is not EndReason.PIDS_LIMIT:
            pass
        for _ in range(15):
            assert (await neighbour.run_shell("true | true")).ok
        assert (await bomb.stop(timeout=60)).end_reason is SandboxEnd.STOPPED


@pytest.mark.parametrize(
    ("script", "session"),
    [(BOMB, None), (f"exec {BOMB}", None), ("x=aaaaaaaa; while :; do x=$x$x; done", "s"), (f"{BOMB} & wait $!", None)],
)
async def test_a_memory_bomb_is_named_and_survived(
    client: opendsec.DSecClient, script: str, session: str | None
) -> None:
    async with client.container(ARGS) as sandbox:
        result = await sandbox.run_shell(script, session=session, timeout=60)
        assert (result.exit_code, result.end_reason) == (137, EndReason.OOM)
        assert (await sandbox.run_shell("echo alive", session=session)).stdout == "alive\n"


async def test_a_flood_nobody_reads_costs_no_memory(client: opendsec.DSecClient, platform: Mapping[str, str]) -> None:
    def servers_mib() -> float:
        pids = [int((Path(platform["OPENDSEC_RUN_DIR"]) / f"{name}.pid").read_text().split()[0]) for name in SERVERS]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096 / MIB

    async with client.container(ARGS) as sandbox, client.container(ARGS) as neighbour:
        floods = [await sandbox.commands.start("yes", max_output_bytes=MIB) for _ in range(3)]
        for flood in floods:
            await anext(aiter(flood.stdout))
            await flood.aclose()
        before = servers_mib()
        total = 0
        while total < 500 * MIB:
            total = sum(status.stdout_bytes for status in await sandbox.commands.list())
            assert (await neighbour.run_shell("true")).ok
        assert servers_mib() - before < 40
        for flood in floods:
            await flood.kill(grace=0)
            assert (await flood.wait(timeout=60)).truncated


SERVERS = ("edge", "apiserver")


async def test_the_agent_cannot_be_reached_from_inside(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as sandbox:
        script = (
            "for s in $(seq 1 64); do kill -$s 1; done 2>/dev/null; cat /proc/1/environ /proc/1/maps; ls /proc/1/fd"
        )
        result = await sandbox.run_shell(script)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("ermission denied") == 3
        everything = await sandbox.run_shell("(sleep 1000 &); sleep 1000 & kill -9 -1; echo still here")
        assert everything.end_reason in (EndReason.EXITED, EndReason.SIGNALED)
        traced = (
            "import ctypes; c = ctypes.CDLL(None); "
            "print(c.ptrace(16, 1, 0, 0), c.syscall(438, c.syscall(434, 1, 0), 3, 0))"
        )
        assert (await sandbox.run_shell(f"python3 -c '{traced}'")).stdout == "-1 -1\n"


async def test_sandboxes_do_not_meet_in_abstract_sockets_or_shared_memory(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as one, client.container(ARGS) as other:
        listening = (
            "import socket, time; s = socket.socket(1); s.bind(chr(0) + 'x'); s.listen(); "
            "print(1, flush=True); time.sleep(99)"
        )
        server = await one.commands.start(["python3", "-c", listening])
        assert await anext(aiter(server.stdout)) == b"1\n"
        asking = "import socket; s = socket.socket(1); print(s.connect_ex(chr(0) + 'x'))"
        assert (await one.commands.run(["python3", "-c", asking])).stdout == "0\n"
        assert (await other.commands.run(["python3", "-c", asking])).stdout == "111\n"
        await one.run_shell("ipcmk -M 4096; echo x > /dev/shm/x", check=True)
        assert "0x" not in (await other.run_shell("ipcs -m; ls /dev/shm")).stdout.replace("0x00000000", "")


async def test_a_tree_that_is_hard_to_remove_goes_with_its_sandbox(
    client: opendsec.DSecClient, platform: Mapping[str, str]
) -> None:
    deep = "import os\nfor i in range(3000): os.mkdir('d' * 200); os.chdir('d' * 200)"
    sandbox = await client.run_container(ARGS)
    await sandbox.commands.run(["python3", "-c", deep], cwd="/tmp", check=True)
    await sandbox.run_shell(
        "mkdir /farm; cd /farm; ln -s / up; for i in $(seq 2000); do : > $i; done; chmod 0 .", check=True
    )
    assert (await sandbox.stop(timeout=60)).end_reason is SandboxEnd.STOPPED
    assert not (Path(platform["OPENDSEC_STATE_DIR"]) / "edge" / EDGE / "sandboxes" / sandbox.id / "box").exists()
    assert not (Path(platform["OPENDSEC_RUN_DIR"]) / "sbx" / sandbox.id).exists()


# ── a guest that lies ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def lying(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """In the place of an agent's socket: whoever connects is told this."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        listener.settimeout(0.1)
        over = False

        def serve() -> None:
            while not over:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5)
                    try:
                        answer(connection)
                    except OSError:
                        continue

        with anyio.from_thread.start_blocking_portal() as portal:
            serving = portal.start_task_soon(anyio.to_thread.run_sync, serve)
            try:
                yield
            finally:
                over = True
                serving.result(60)


LIES: Mapping[str, Callable[[socket.socket], None]] = {
    "garbage": lambda peer: peer.sendall(os.urandom(100_000)),
    "a huge frame": lambda peer: peer.sendall(b"\xff\xff\xff\x7f" + bytes(8) + bytes(1_000_000)),
    "nothing": lambda peer: peer.close(),
    "garbage after its greeting": lambda peer: peer.sendall(HELLO + os.urandom(100_000)),
    "greetings without end": lambda peer: peer.sendall(HELLO * 100_000),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_agent_that_lies_is_lost_by_name_and_nobody_else_is(
    client: opendsec.DSecClient, kill: Kill, platform: Mapping[str, str], lie: str
) -> None:
    async with client.container(ARGS) as good:
        bad = await client.run_container(ARGS)
        waiting = await bad.commands.start("sleep 1000")
        with lying(Path(platform["OPENDSEC_RUN_DIR"]) / "sbx" / bad.id / "agent.sock", LIES[lie]):
            await anyio.to_thread.run_sync(kill, "edge")
            assert (await good.run_shell("echo here")).stdout == "here\n"
            assert (await waiting.wait(timeout=60)).end_reason is EndReason.SANDBOX_ENDED
            with pytest.raises(opendsec.SandboxExitedError):
                await bad.run_shell("true")
        assert (await bad.status()).end_reason is SandboxEnd.GUEST_LOST
        assert not list(Path("/sys/fs/cgroup").glob(f"*/*/latency/{bad.id}"))
        await asyncio.wait_for(bad.stop(), 60)
