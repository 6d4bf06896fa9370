"""The sync twin meets the same server: the same promises, from several threads, without an event loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.cluster.client.fake_server import FakeServer, Fault, Program

import opendsec.sync
from opendsec.sync import DSecContainerRunArgs, EndReason

ARGS = DSecContainerRunArgs(container_image="debian")
BIG = bytes(range(256)) * 4096
COMMANDS = r"POST .*/commands$"
OUTPUT = r"GET .*/output$"


@pytest.mark.parametrize("after", [0, 200, 70_000])
def test_cut_stream_is_continued(server: FakeServer, sync_sandbox: opendsec.sync.Sandbox, after: int) -> None:
    server.programs["x"] = Program(stdout=BIG, stderr=b"e" * 1000, exit_code=7)
    server.faults = [Fault(COMMANDS, after=after), Fault(OUTPUT, times=2, after=300_000)]
    result = sync_sandbox.run_shell("x")
    assert (result.exit_code, result.stdout_bytes, result.stderr) == (7, BIG, "e" * 1000)
    assert len(server.commands) == 1


def test_stdin_and_streams(server: FakeServer, sync_sandbox: opendsec.sync.Sandbox) -> None:
    server.programs["cat"] = Program(copies_stdin=True)
    server.faults = [Fault(r"POST .*/stdin$", kind="swallow")]
    assert sync_sandbox.run_shell("cat", stdin=BIG).stdout_bytes == BIG
    process = sync_sandbox.commands.start("cat", stdin=True)
    process.stdin.write("é")
    process.stdin.close()
    assert list(process.stdout.text()) == ["é"]
    assert process.wait().exit_code == 0


def test_wait_keeps_its_deadline(server: FakeServer, sync_sandbox: opendsec.sync.Sandbox) -> None:
    server.programs["x"] = Program(holds=True)
    process = sync_sandbox.commands.start("x")
    begin = time.monotonic()
    with pytest.raises(opendsec.DeadlineError):
        process.wait(timeout=0.25)
    assert time.monotonic() - begin < 30
    process.kill()
    assert process.wait(timeout=60).end_reason is EndReason.CANCELLED


def test_create_many_list_and_stop(server: FakeServer, sync_client: opendsec.sync.DSecClient) -> None:
    server.faults = [Fault("POST .*batches", after=5_000)]
    started = [item for item in sync_client.run_many(ARGS, 20) if isinstance(item, opendsec.sync.Started)]
    assert len(started) == len(server.sandboxes) == 20
    with sync_client.container(ARGS) as inside:
        assert sync_client.connect(inside.id).id == inside.id
    for item in started:
        item.sandbox.stop()
    assert all(status.state == "stopped" for status in sync_client.list(page_size=7))


def test_threads_share_one_client(server: FakeServer, sync_sandbox: opendsec.sync.Sandbox) -> None:
    results: list[str] = []

    def work() -> None:
        results.extend(sync_sandbox.run_shell("x").stdout for _ in range(10))

    server.programs["x"] = Program(stdout=b"same")
    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == ["same"] * 200
    assert server.connections <= 25


def test_files(server: FakeServer, sync_sandbox: opendsec.sync.Sandbox, tmp_path: Path) -> None:
    server.faults = [Fault("PUT", kind="swallow"), Fault("GET .*(tree|content)", after=100_000, times=2)]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(BIG)
    sync_sandbox.files.upload(str(tmp_path / "source"), "/tree")
    assert sync_sandbox.files.download("/tree", str(tmp_path / "back")).bytes == len(BIG)
    assert (tmp_path / "back" / "big").read_bytes() == BIG
    sync_sandbox.files.write("/f", BIG)
    assert b"".join(sync_sandbox.files.read_stream("/f", offset=1)) == BIG[1:]
    assert not sync_sandbox.files.exists("/none")
