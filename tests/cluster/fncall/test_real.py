"""The whole road with real containers: SDK and SandboxFusion's client → apiserver → edge → pools; kill -9 on the way;
and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sandbox_fusion as fusion  # type: ignore[import-untyped]
from tests.cluster.edge.processes import EdgeProcess
from tests.cluster.fncall.processes import Apiserver
from tests.node.fncall.places import borrow

import opendsec
from opendsec.errors import ImageNotFoundError, OpenDSecError, UnsupportedError
from opendsec.linux import libc
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.linux.mount import mountinfo
from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "userns", "netns", "cgroup", "memcg", "overlay", "native")),
    pytest.mark.erofs,
    pytest.mark.image,
    pytest.mark.timeout(180),
]


@dataclass(frozen=True, slots=True)
class Road:
    """A platform with one edge."""

    edge: EdgeProcess
    apiserver: Apiserver
    root: Path
    cgroup: str

    def containers(self) -> list[str]:
        """Control groups of pools, and processes in them."""
        top = Path("/sys/fs/cgroup")
        groups = [str(path) for end in ("*/", "") for path in top.glob(f"{end}{self.cgroup}/*/fnc-*")]
        return groups + [pid for pid in filter(str.isdigit, os.listdir("/proc")) if self.cgroup in _groups_of(pid)]


def _groups_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextlib.asynccontextmanager
async def road() -> AsyncIterator[Road]:
    name = secrets.token_hex(4)
    root, run_dir = Path(f"/var/lib/opendsec-fncall-{name}"), Path(f"/run/ods-{name}")
    cgroup = f"opendsec-test-{name}"
    root.mkdir()
    run_dir.mkdir()
    borrow(ImageStore(root / "store"), "debian")
    edge = EdgeProcess(
        root,
        run_dir,
        backends="container,fncall",
        OPENDSEC_EDGE_CGROUP=cgroup,
        OPENDSEC_FNCALL_CONTAINERS="4",
    )
    apiserver = Apiserver(root, {"local": edge.socket})
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(edge.start())
            group.create_task(apiserver.start())
        yield Road(edge, apiserver, root, cgroup)
    finally:
        apiserver.kill()
        if edge.runs:
            edge.stop()  # it ends its containers
        await edge.close()
        for entry in reversed(mountinfo()):
            if Path(entry.target).is_relative_to(run_dir):
                libc.umount2(entry.target, libc.MNT_DETACH)
        choose_driver(find_mounts(), root=cgroup).remove_root()
        shutil.rmtree(run_dir)
        shutil.rmtree(root)


def greet(name: str, *, loud: bool = False) -> dict[str, str]:
    return {"greeting": f"hello {name}".upper() if loud else f"hello {name}"}


async def test_the_whole_road() -> None:
    async with road() as way:
        async with opendsec.DSecClient(way.apiserver.url, way.apiserver.key) as client:
            await one_of_each(client)
            await as_sandbox_fusion(way)
            await killed_in_the_middle(way, client)
        assert way.edge.stop() == 0
        async with asyncio.timeout(60):
            while way.containers():  # the host's init reaps in its own time
                await asyncio.sleep(0.05)
        assert list((way.root / "edge/local/fncall/containers").iterdir()) == []


async def one_of_each(client: opendsec.DSecClient) -> None:
    script = await client.fncall(opendsec.DSecFnCallArgs(code="print(input()[::-1])", stdin="abc\n"))
    assert (script.ok, script.stdout) == (True, "cba\n")
    function = opendsec.DSecFnCallArgs.of_function(greet, ["you"], {"loud": True})
    assert (await client.fncall(function)).returned == {"greeting": "HELLO YOU"}
    adding = '#include <stdio.h>\nint main(){int a,b;scanf("%d%d",&a,&b);printf("%d",a+b);return 0;}'
    judged = await client.fncall(
        opendsec.DSecFnCallArgs(
            task_type="judge", language="c", code=adding, cases=[("1 2", "3"), ("2 2", "5"), ("20 22", "42\n")]
        )
    )
    assert [case.verdict.value for case in judged.cases] == ["AC", "WA", "AC"]
    built = await client.fncall(opendsec.DSecFnCallArgs(task_type="compile", language="c", code=adding))
    run = await client.fncall(opendsec.DSecFnCallArgs(language="c", artifact=built.artifact, stdin="4 5"))
    assert run.stdout == "9"
    wrong = await client.fncall(opendsec.DSecFnCallArgs(language="c", code="int main( {"))
    assert (wrong.status, wrong.run) == (opendsec.CallStatus.COMPILE_ERROR, None)
    assert "error" in wrong.stderr
    with pytest.raises(UnsupportedError) as refused:
        await client.fncall(opendsec.DSecFnCallArgs(language="fortran", code="end"))
    assert refused.value.detail["field"] == "language"
    with pytest.raises(ImageNotFoundError):
        await client.fncall(opendsec.DSecFnCallArgs(code="1", image="nowhere"))


async def as_sandbox_fusion(way: Road) -> None:
    endpoint = f"{way.apiserver.url}/fusion/{way.apiserver.key}"

    async def run(code: str, language: str, **fields: Any) -> Any:
        request = fusion.RunCodeRequest(code=code, language=language, **fields)
        return await asyncio.to_thread(fusion.run_code, request, endpoint, 1, 60)

    done = await run("open('out', 'w').write(open('in').read() * 2); print(input())", "python",
                     files={"in": "YWI="}, fetch_files=["out"], stdin="x")  # fmt: skip
    assert (done.status, done.run_result.stdout, done.files) == ("Success", "x\n", {"out": "YWJhYg=="})
    killed = await run("import os; os.kill(os.getpid(), 11)", "python")
    assert (killed.status, killed.run_result.return_code) == ("Failed", -11)
    late = await run("while True: pass", "python", run_timeout=0.5)
    assert (late.status, late.run_result.status) == ("Failed", "TimeLimitExceeded")


async def killed_in_the_middle(way: Road, client: opendsec.DSecClient) -> None:
    calls = [opendsec.DSecFnCallArgs(language="bash", code=f"sleep 0.02; echo {index}") for index in range(120)]
    told: list[int] = []
    restarting: asyncio.Task[None] | None = None
    async for index, outcome in client.fncall_many(calls, timeout=120):
        assert not isinstance(outcome, OpenDSecError), outcome
        assert (outcome.ok, outcome.stdout) == (True, f"{index}\n")
        told.append(index)
        if len(told) == 30:
            way.edge.kill()
            restarting = asyncio.create_task(way.edge.start())
    assert restarting is not None
    await restarting
    assert sorted(told) == list(range(120))
    assert len({group.rpartition("/")[2] for group in way.containers() if "/" in group}) <= 4
