"""Creating, finding and stopping sandboxes through the SDK, on a good and on a bad way there."""

from __future__ import annotations

import ssl
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from tests.cluster.client import fake_server
from tests.cluster.client.fake_server import KEY, FakeServer, Fault, Program

import opendsec
import opendsec.sync
from opendsec import DSecContainerRunArgs, SandboxState

pytestmark = pytest.mark.anyio

ARGS = DSecContainerRunArgs(container_image="debian")
CREATE = r"POST /v1/sandboxes$"


async def test_create_carries_the_whole_spec(server: FakeServer, client: opendsec.DSecClient) -> None:
    args = DSecContainerRunArgs(
        container_image="debian",
        memory_limit_mb=512,
        cpu_cores_limit=1.5,
        ttl_running_stop=60,
        ttl_max_stop=600,
        network_rules={"*": True},
        init_user="app",
        pids_limit=64,
        disk_limit_mb=100,
        env={"A": "b"},
        workdir="/srv",
        labels={"team": "x"},
    )
    sandbox = await client.run_container(args, timeout=20)
    assert server.sandboxes[sandbox.id].spec == args.to_spec()
    create = next(r for r in server.requests if r.path == "/v1/sandboxes")
    assert create.headers["x-opendsec-timeout"].startswith(("20.", "19.9"))
    assert (await sandbox.status()).state is SandboxState.RUNNING


async def test_create_repeats_under_one_key(server: FakeServer, client: opendsec.DSecClient) -> None:
    server.faults = [Fault(CREATE, kind="swallow", times=2), Fault(CREATE, kind="refuse"), Fault(CREATE, after=20)]
    await client.run_container(ARGS)
    assert len(server.sandboxes) == 1
    assert len({r.headers["idempotency-key"] for r in server.requests if r.path == "/v1/sandboxes"}) == 1


async def test_a_create_that_is_given_up_leaves_no_sandbox(server: FakeServer, client: opendsec.DSecClient) -> None:
    server.faults = [Fault(CREATE, kind="mute")]
    with anyio.move_on_after(0.2) as given_up:
        await client.run_container(ARGS)
    assert given_up.cancelled_caught
    assert [one.state for one in server.sandboxes.values()] == [SandboxState.STOPPED]
    server.faults = [Fault(CREATE, kind="mute")]
    with anyio.move_on_after(0.2) as given_up:
        await client.run_container(ARGS, idempotency_key="shared")
    assert given_up.cancelled_caught
    assert [one.state for one in server.sandboxes.values()] == [SandboxState.STOPPED, SandboxState.RUNNING]


async def test_create_whose_sandbox_was_reclaimed_gets_another(server: FakeServer, client: opendsec.DSecClient) -> None:
    server.orphans = 2
    sandbox = await client.run_container(ARGS)
    assert list(server.sandboxes) == [sandbox.id]
    assert len({r.headers["idempotency-key"] for r in server.requests if r.path == "/v1/sandboxes"}) == 3
    server.orphans = 1
    with pytest.raises(opendsec.SandboxExitedError):
        await client.run_container(ARGS, idempotency_key="mine")


async def test_same_key_other_arguments_is_a_conflict(client: opendsec.DSecClient) -> None:
    first = await client.run_container(ARGS, idempotency_key="k")
    assert (await client.run_container(ARGS, idempotency_key="k")).id == first.id
    with pytest.raises(opendsec.ConflictError):
        await client.run_container(DSecContainerRunArgs(container_image="other"), idempotency_key="k")


async def test_refusals_are_typed_and_not_repeated(server: FakeServer, client: opendsec.DSecClient) -> None:
    with pytest.raises(opendsec.ImageNotFoundError) as caught:
        await client.run_container(DSecContainerRunArgs(container_image="missing"))
    assert (caught.value.detail["field"], caught.value.retryable) == ("image", False)
    assert caught.value.request_id
    assert server.count("POST", "/v1/sandboxes$") == 1


async def test_deadline_bounds_all_repeats(server: FakeServer, client: opendsec.DSecClient) -> None:
    server.faults = [Fault(CREATE, kind="mute", times=99)]
    with anyio.fail_after(5):
        with pytest.raises(opendsec.DeadlineError):
            await client.run_container(ARGS, timeout=0.3)
    server.faults = [Fault(CREATE, kind="refuse", times=999)]
    with anyio.fail_after(5):
        with pytest.raises(opendsec.TransportError):
            await client.run_container(ARGS, timeout=0.3)


async def test_run_many_yields_each_index_once_though_cut(server: FakeServer, client: opendsec.DSecClient) -> None:
    server.batch_failures = {3: opendsec.StartError("no room for 3")}
    server.faults = [Fault("POST .*batches", after=9_000), Fault("POST .*batches", kind="swallow")]
    items = [item async for item in client.run_many(ARGS, 50)]
    assert sorted(item.index for item in items) == list(range(50))
    failed = [item for item in items if isinstance(item, opendsec.Failed)]
    assert [(item.index, type(item.error)) for item in failed] == [(3, opendsec.StartError)]
    assert len(server.sandboxes) == 50
    with pytest.raises(opendsec.InvalidSpecError):
        await anext(client.run_many(ARGS, 0))


async def test_leaving_run_many_early_keeps_what_was_yielded(server: FakeServer, client: opendsec.DSecClient) -> None:
    yielded: set[str] = set()

    async def take(limit: int, key: str | None = None, timeout: float | None = None) -> None:
        yielded.clear()
        async with aclosing(client.run_many(ARGS, 50, idempotency_key=key, timeout=timeout)) as items:
            async for item in items:
                assert isinstance(item, opendsec.Started)
                yielded.add(item.sandbox.id)
                if len(yielded) == limit:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await take(7)
    assert yielded == set(server.sandboxes)
    with pytest.raises(ZeroDivisionError):
        await take(7, key="mine")
    assert len(server.sandboxes) == 7 + 50
    assert server.count("POST", "abandon") == 1
    server.sandboxes.clear()
    server.faults = [Fault("POST .*batches$", after=9_000), Fault("POST .*batches$", times=99, kind="mute", after=0)]
    with pytest.raises(opendsec.DeadlineError):
        await take(50, timeout=0.5)
    assert 0 < len(yielded) < 50
    assert yielded == set(server.sandboxes)


async def test_leaving_a_block_stops_only_where_it_says_so(server: FakeServer, client: opendsec.DSecClient) -> None:
    async with client.container(ARGS) as inside:
        assert server.sandboxes[inside.id].state is SandboxState.RUNNING
    assert server.sandboxes[inside.id].state is SandboxState.STOPPED
    kept = await client.run_container(ARGS)
    with pytest.raises(ZeroDivisionError):
        async with kept.stopping():
            raise ZeroDivisionError
    assert server.sandboxes[kept.id].state is SandboxState.STOPPED
    stays = await client.run_container(ARGS)
    await client.close()
    assert server.sandboxes[stays.id].state is SandboxState.RUNNING
    with pytest.raises(opendsec.ConnectError, match="closed"):
        await stays.status()


async def test_cancelled_block_still_stops(server: FakeServer, client: opendsec.DSecClient) -> None:
    with anyio.move_on_after(0.2):
        async with client.container(ARGS):
            await anyio.sleep(30)
    assert [status.state for status in server.sandboxes.values()] == [SandboxState.STOPPED]


async def test_list_follows_cursors_and_filters(server: FakeServer, client: opendsec.DSecClient) -> None:
    for number in range(5):
        labels = {"n": str(number % 2), "group": "a/b"}
        await client.run_container(DSecContainerRunArgs(container_image="debian", labels=labels))
    assert len([status async for status in client.list(page_size=2)]) == 5
    assert len([status async for status in client.list(labels={"n": "0", "group": "a/b"})]) == 3
    assert [status async for status in client.list(state="stopped")] == []
    with pytest.raises(opendsec.InvalidSpecError, match="creating, running"):
        await anext(client.list(state="up"))


async def test_update_keeps_what_is_not_given(client: opendsec.DSecClient) -> None:
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian", ttl_max_stop=50))
    status = await sandbox.update(ttl_running_stop=None)
    assert (status.spec.lifetime.ttl_running_stop, status.spec.lifetime.ttl_max_stop) == (None, 50)
    assert (await sandbox.renew()).spec == status.spec


async def test_connect_checks_the_id(client: opendsec.DSecClient) -> None:
    sandbox = await client.run_container(ARGS)
    assert (await client.connect(sandbox.id)).id == sandbox.id
    with pytest.raises(opendsec.InvalidSpecError):
        await client.connect("../secret")
    with pytest.raises(opendsec.NotFoundError):
        await client.connect("sbx-local-aaaaaaaaaaaaaaaa")
    await client.stop(sandbox.id)
    assert (await client.stop(sandbox.id)).state is SandboxState.STOPPED


async def test_nothing_listens_fails_at_once() -> None:
    client = opendsec.DSecClient("http://127.0.0.1:9", KEY)
    with anyio.fail_after(5):
        with pytest.raises(opendsec.ConnectError, match="opendsec up"):
            await client.open()
        with pytest.raises(opendsec.ConnectError):
            await client.run_container(ARGS)


async def test_wrong_key(server: FakeServer) -> None:
    async with opendsec.DSecClient(server.url, "wrong") as client:
        with pytest.raises(opendsec.UnauthorizedError):
            await client.run_container(ARGS)


async def test_unix_socket(tmp_path: Path) -> None:
    with fake_server.running(str(tmp_path / "edge.sock")) as server:
        async with opendsec.DSecClient(server.url, KEY) as client:
            server.programs["x"] = Program(stdout=b"hi")
            sandbox = await client.run_container(ARGS)
            assert (await sandbox.run_shell("x")).stdout == "hi"


async def test_tls_checks_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent / "tls"
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(folder / "localhost.crt", folder / "localhost.key")
    with fake_server.running(tls=server_side) as server:
        stranger = opendsec.DSecClient(server.url, KEY)
        with pytest.raises(opendsec.ConnectError, match="certificate"):
            await stranger.open()
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "localhost.crt"))
        async with opendsec.DSecClient(server.url, KEY) as client:
            server.programs["x"] = Program(stdout=b"z" * 1_000_000)
            sandbox = await client.run_container(ARGS)
            assert len((await sandbox.run_shell("x")).stdout) == 1_000_000
            await sandbox.run_shell("x")
        await client.close()
        await anyio.to_thread.run_sync(_sync_over_tls, server.url)


def _sync_over_tls(url: str) -> None:
    with opendsec.sync.DSecClient(url, KEY) as client:
        assert client.run_container(ARGS).run_shell("x").exit_code == 0


async def test_idle_connection_closed_by_the_server_is_no_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    for writer in tuple(server._writers):
        assert server._loop is not None
        server._loop.call_soon_threadsafe(writer.transport.abort)
    assert (await sandbox.run_shell("x")).exit_code == 0
    await sandbox.files.write("/a", b"1")
    await sandbox.files.remove("/a")
