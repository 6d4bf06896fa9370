"""What only a real kernel can show: limits by name, sessions, users, sizes, images without a shell."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.cluster.edge.processes import EdgeProcess

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.userns,
    pytest.mark.netns,
    pytest.mark.cgroup,
    pytest.mark.erofs,
    pytest.mark.overlay,
    pytest.mark.native,
]


async def test_image_user_directory_and_environment_are_honoured(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")
    done = await edge.run(sandbox_id, 'id -un; pwd; echo "$GREETING"')
    assert done.stdout.decode().splitlines() == ["agent", "/home/agent", "hello 'world'  x"]
    done = await edge.run(sandbox_id, 'id -u; pwd; echo "$GREETING"', user="root", cwd="/etc", env={"GREETING": "ü"})
    assert done.stdout.decode().splitlines() == ["0", "/etc", "ü"]


async def test_session_keeps_its_state_and_takes_what_a_command_names(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")

    async def say(script: str, **fields: object) -> list[str]:
        done = await edge.run(sandbox_id, script, session="s", **fields)
        assert done.result is not None
        assert done.result["exit_code"] == 0, done.stderr
        return done.stdout.decode().splitlines()

    await say("cd /tmp; kept='a  b'; greet() { echo hi $1; }")
    assert await say('pwd; echo "$kept"; greet you') == ["/tmp", "a  b", "hi you"]
    assert await say('pwd; echo "$NEW"', cwd="/etc", env={"NEW": 'it\'s "new"'}) == ["/etc", 'it\'s "new"']
    assert await say('pwd; echo "$NEW"') == ["/etc", 'it\'s "new"']
    done = await edge.run(sandbox_id, "echo never", session="s", cwd="/missing")
    assert done.result is not None
    assert (done.result["exit_code"] != 0, bytes(done.stdout)) == (True, b"")
    assert await say("pwd") == ["/etc"]


async def test_limits_are_named(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox", resources={"memory_limit_mb": 64, "pids_limit": 32})
    done = await edge.run(sandbox_id, "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}")
    assert done.result is not None
    assert done.result["end_reason"] == "oom"
    done = await edge.run(sandbox_id, "for i in $(seq 100); do sleep 5 & done; exit 1", timeout_s=20)
    assert done.result is not None
    assert done.result["end_reason"] == "pids_limit"
    done = await edge.run(sandbox_id, "echo alive; exit 1")
    assert done.result is not None
    assert (bytes(done.stdout), done.result["end_reason"]) == (b"alive\n", "exited")


async def test_timeout_ends_the_whole_tree_and_says_so(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")
    script = "trap '' TERM; setsid sleep 1000 & (setsid sleep 1001 &) ; sleep 1002"
    done = await edge.run(sandbox_id, script, timeout_s=0.3, grace_s=0.1)
    assert done.result is not None
    assert done.result["end_reason"] == "timeout"
    done = await edge.run(sandbox_id, "ps | grep -c 'sleep 100[0-9]' | head -1", user="root")
    assert int(done.stdout) <= 1


async def test_background_child_does_not_hold_the_command(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")
    done = await asyncio.wait_for(edge.run(sandbox_id, "sleep 1000 & echo tail; exit 4"), 30)
    assert done.result is not None
    assert (bytes(done.stdout), done.result["exit_code"]) == (b"tail\n", 4)


async def test_large_scripts_and_environments(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")
    filler = "# " + "x" * 1_000_000 + "\n"
    env = {f"V{n}": "y" * 100_000 for n in range(5)}
    done = await edge.run(sandbox_id, filler + "echo ${#V0} ${#V4}", env=env)
    assert bytes(done.stdout) == b"100000 100000\n"


async def test_image_without_a_shell(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="scratch")
    url = f"/v1/sandboxes/{sandbox_id}/commands"
    answer = await edge.client.post(url, json={"script": "true"})
    assert answer.json()["error"]["code"] == "no_shell"
    answer = await edge.client.post(url, json={"argv": ["/app/echo", "fine"]})
    assert b"fine\n" in answer.content
    answer = await edge.client.post(url, json={"argv": ["missing"]})
    assert answer.json()["error"]["code"] == "exec_failed"


async def test_unknown_image_is_named_and_leaves_nothing(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    before = (await edge.client.get("/v1/node")).json()["live"]
    answer = await edge.client.post("/v1/sandboxes", json={"spec": {"image": "nothing-of-that-name"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "image_not_found")
    assert (await edge.client.get("/v1/node")).json()["live"] == before


async def test_500_commands_with_orphans_lose_no_exit(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox", resources={"pids_limit": 4000})
    orphans = asyncio.ensure_future(edge.run(sandbox_id, "for i in $(seq 200); do (sleep 0.2 &) ; done; exit 9"))
    done = await asyncio.gather(*(edge.run(sandbox_id, f"exit {n % 250}") for n in range(500)))
    assert [one.result["exit_code"] for one in done if one.result] == [n % 250 for n in range(500)]
    last = (await orphans).result
    assert last is not None
    assert last["exit_code"] == 9


async def test_flood_with_the_client_gone_is_capped_and_blocks_nobody(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox")
    flood = await edge.begin(sandbox_id, "yes", max_output_bytes=1_000_000)
    for _ in range(20):
        quick = await asyncio.wait_for(edge.run(sandbox_id, "echo quick"), 30)
        assert bytes(quick.stdout) == b"quick\n"
    with open(f"/proc/{edge.pid}/status", encoding="ascii") as status:
        resident_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident_kib < 300_000
    await edge.client.delete(f"/v1/sandboxes/{sandbox_id}/commands/{flood}?grace=0")
    done = await edge.output(sandbox_id, flood)
    assert done.result is not None
    assert (len(done.stdout), done.result["truncated"]) == (1_000_000, True)
    assert done.result["stdout_bytes_total"] > 1_000_000


async def test_names_of_every_kind(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await edge.create(image="busybox", init_user="root")
    url = f"/v1/sandboxes/{sandbox_id}/files"
    await edge.client.post(f"{url}/mkdir", json={"path": "/names"})
    names = ["a b", "new\nline", "🙂", "%2F", "x" * 255, "q'\"`$\\"]
    for name in names:
        put = await edge.client.put(f"{url}/content", params={"path": f"/names/{name}"}, content=name.encode())
        assert put.status_code == 200, put.text
        got = await edge.client.get(f"{url}/content", params={"path": f"/names/{name}"})
        assert got.content == name.encode()
    listed = await edge.client.post(f"{url}/list", json={"path": "/names"})
    found = [one["path"].removeprefix("/names/") for one in json.loads(listed.content)["items"]]
    assert found == sorted(names, key=str.encode)
    missing = await edge.client.get(f"{url}/content", params={"path": "/names/none"})
    assert missing.json()["error"]["detail"]["errno"] == "ENOENT"
