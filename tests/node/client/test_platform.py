"""The SDK on a real platform: apiserver, edge, container, guest agent. Kills anything in between and loses nothing."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from tests.node.client.conftest import Kill

import opendsec
import opendsec.sync
from opendsec import DSecContainerRunArgs, EndReason

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.image,
    pytest.mark.erofs,
    pytest.mark.overlay,
]

ARGS = DSecContainerRunArgs(container_image="debian")
BIG = bytes(range(256)) * 8192
COUNTING = "for i in $(seq 1 250); do echo {n} $i; sleep 0.01; done; exit {n}"


async def test_commands(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as sandbox:
        result = await sandbox.run_shell("printf 'a\\0b\\r\\n\\n\\303'; printf '\\251' ; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout_bytes, result.stderr) == (3, b"a\0b\r\n\n\xc3\xa9", "err\n")
        assert (await sandbox.run_shell("cat", stdin=BIG)).stdout_bytes == BIG
        assert (await sandbox.run_shell("true", stdin=BIG)).ok
        assert (await sandbox.run_shell("cat; echo end")).stdout == "end\n"
        assert (await sandbox.run_shell("sleep 60 & echo hi", timeout=10)).stdout == "hi\n"
        late = await sandbox.run_shell("setsid sh -c 'trap \"\" TERM; sleep 60' & wait", timeout=0.3)
        assert late.end_reason is EndReason.TIMEOUT
        assert (await sandbox.commands.run(["printf", "%s|", "a b", "$HOME"])).stdout == "a b|$HOME|"
        large = await sandbox.run_shell(f": {'x' * 1_000_000}; echo ${{#A}}", env={"A": "y" * 100_000})
        assert large.stdout == "100000\n"
        assert (await sandbox.run_shell("cd /usr; X=1", session="s")).session_started
        assert (await sandbox.run_shell("echo $X $PWD", session="s")).stdout == "1 /usr\n"
        with pytest.raises(opendsec.ExecError):
            await sandbox.run_shell("true", user="nobody-of-that-name")


async def test_processes_and_terminals(client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as sandbox:
        process = await sandbox.commands.start("read x; echo got $x; sleep 60", stdin=True)
        await process.stdin.write("one\n")
        assert await anext(aiter(process.stdout)) == b"got one\n"
        await process.send_signal(9)
        assert (await process.wait(timeout=60)).signal == 9
        terminal = await sandbox.pty("bash", rows=30, cols=99)
        await terminal.stdin.write("stty size; exit 4\n")
        assert b"30 99" in await terminal.stdout.read()
        assert (await terminal.wait(timeout=60)).exit_code == 4


async def test_files(client: opendsec.DSecClient, tmp_path: Path) -> None:
    async with client.container(ARGS) as sandbox:
        for name in ("/w/a b", "/w/new\nline", "/w/😀", "/w/%2F&x=y", "/w/" + "n" * 255, "/w/raw\udcff"):
            await sandbox.files.write(name, "text")
            assert await sandbox.files.read(name) == "text"
        local = tmp_path / "local"
        (local / "sub").mkdir(parents=True)
        (local / "sub" / "big").write_bytes(BIG)
        (local / "sub" / "run").write_bytes(b"#!/bin/sh\necho ran\n")
        (local / "sub" / "run").chmod(0o755)
        (local / "link").symlink_to("sub/run")
        await sandbox.files.upload(str(local), "/tree")
        assert (await sandbox.run_shell("/tree/link; ln -s /etc/passwd /tree/out")).stdout == "ran\n"
        done = await sandbox.files.download("/tree", str(tmp_path / "back"))
        assert (done.files, done.skipped_links) == (2, ("out",))
        assert (tmp_path / "back" / "sub" / "big").read_bytes() == BIG
        with pytest.raises(opendsec.FileError) as caught:
            await sandbox.files.read("/etc/shadow", user="nobody")
        assert caught.value.detail["errno"] == "EACCES"


@pytest.mark.parametrize("victim", ["edge", "apiserver"])
async def test_killed_on_the_way_nothing_is_lost(client: opendsec.DSecClient, kill: Kill, victim: str) -> None:
    results: dict[int, opendsec.ShellResult] = {}
    appended = 0

    async def count(sandbox: opendsec.Sandbox, number: int) -> None:
        results[number] = await sandbox.run_shell(COUNTING.format(n=number))

    async with client.container(ARGS) as sandbox:
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(count, sandbox, number)
            with anyio.fail_after(30):
                while sum(status.running for status in await sandbox.commands.list()) < 5:
                    await anyio.sleep(0.02)
            for _ in range(2):
                await anyio.to_thread.run_sync(kill, victim)
                for _ in range(10):
                    await sandbox.run_shell("echo x >> /tmp/appended", check=True)
                    appended += 1
        for number, result in results.items():
            assert result.exit_code == number
            assert result.stdout == "".join(f"{number} {i}\n" for i in range(1, 251))
        assert len(results) == 5
        assert (await sandbox.run_shell("wc -l < /tmp/appended")).stdout == f"{appended}\n"


async def test_many_and_the_sync_twin(client: opendsec.DSecClient) -> None:
    started = [item async for item in client.run_many(ARGS, 20)]
    assert all(isinstance(item, opendsec.Started) for item in started)
    assert len([status async for status in client.list(state="running", page_size=7)]) == 20
    await anyio.to_thread.run_sync(_sync_visit, 20)


def _sync_visit(expected: int) -> None:
    with opendsec.sync.DSecClient() as client:
        live = [status.sandbox_id for status in client.list(state="running")]
        assert len(live) == expected
        for sandbox_id in live:
            assert client.connect(sandbox_id).run_shell("echo $((6 * 7))").stdout == "42\n"
            client.stop(sandbox_id)
