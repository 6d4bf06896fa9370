"""`/run_code` as SandboxFusion's own client package finds it, over TCP."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox_fusion as fusion  # type: ignore[import-untyped]
from tests.cluster.fncall.conftest import Start
from tests.cluster.fncall.processes import Cluster, cluster

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def open_cluster() -> AsyncIterator[Cluster]:
    """Whoever has no key is a runner of `default` here."""
    with tempfile.TemporaryDirectory(prefix="ods-") as folder:
        async with cluster(Path(folder), "a", OPENDSEC_RUN_CODE_PROJECT="default") as made:
            yield made


async def run_code(endpoint: str, code: str, language: str = "bash", **fields: Any) -> Any:
    request = fusion.RunCodeRequest(code=code, language=language, **fields)
    return await asyncio.to_thread(fusion.run_code, request, endpoint, 1, 20)


async def test_run_code(open_cluster: Cluster) -> None:
    url = open_cluster.apiserver.url
    done = await run_code(
        url,
        "cat; echo err >&2; cat ./d/f > out",
        stdin="in\n",
        files={"./d/f": base64.b64encode(b"\xff\0").decode(), "skipped": None},
        fetch_files=["./out", "missing"],
    )
    assert (done.status, done.message, done.compile_result) == ("Success", "", None)
    assert (done.run_result.status, done.run_result.return_code) == ("Finished", 0)
    assert (done.run_result.stdout, done.run_result.stderr) == ("in\n", "err\n")
    assert done.run_result.execution_time >= 0
    assert done.files == {"./out": base64.b64encode(b"\xff\0").decode()}
    failed = await run_code(url, "echo before; exit 3")
    assert (failed.status, failed.run_result.status, failed.run_result.return_code) == ("Failed", "Finished", 3)
    late = await run_code(url, "echo before; sleep 9", run_timeout=0.2)
    assert (late.status, late.run_result.status) == ("Failed", "TimeLimitExceeded")
    assert (late.run_result.return_code, late.run_result.stdout) == (None, "before\n")
    wrong = await run_code(url, "echo 'unclosed")
    assert (wrong.status, wrong.run_result) == ("Failed", None)
    assert (wrong.compile_result.status, wrong.compile_result.return_code) == ("Finished", 2)
    mapping = fusion.SummaryMapping(CompileFailed="CE", RunFailed="RE", RunTimeout="TLE", Success="AC")
    told = [fusion.summary_run_code_result(one, mapping) for one in (done, failed, late, wrong)]
    assert told == ["AC", "RE", "TLE", "CE"]


async def test_its_async_twin_many_at_once(open_cluster: Cluster) -> None:
    async def one(number: int) -> str:
        request = fusion.RunCodeRequest(code=f"echo {number}", language="bash")
        return str((await fusion.run_code_async(request, open_cluster.apiserver.url, 1, 20)).run_result.stdout)

    assert await asyncio.gather(*map(one, range(20))) == [f"{number}\n" for number in range(20)]


async def test_as_verl_asks(open_cluster: Cluster) -> None:
    payload = {
        "compile_timeout": 5,
        "run_timeout": 5,
        "code": "allocate 300",
        "stdin": None,
        "memory_limit_MB": 256,
        "language": "bash",
        "files": {},
        "fetch_files": [],
        "unknown_to_everybody": 1,
    }
    async with httpx.AsyncClient(base_url=open_cluster.apiserver.url) as client:
        told = (await client.post("/run_code", json=payload)).json()
        assert (told["status"], told["run_result"]["return_code"]) == ("Failed", -9)
        told = (await client.post("/run_code", json={**payload, "memory_limit_MB": 512})).json()
        assert told["status"] == "Success"


async def test_ways_in(open_cluster: Cluster, tmp_path: Path) -> None:
    host, key = open_cluster.apiserver.address, open_cluster.apiserver.key
    for endpoint in (f"http://:{key}@{host}", f"http://{key}@{host}", f"http://{host}/fusion/{key}", f"http://{host}/"):
        assert (await run_code(endpoint, "echo in")).run_result.stdout == "in\n"
    for endpoint in (f"http://:wrong@{host}", f"http://{host}/fusion/odk_wrong"):
        with pytest.raises(Exception, match="code 401"):
            await run_code(endpoint, "echo in")
    async with httpx.AsyncClient(base_url=f"http://{host}") as nobody:
        assert (await nobody.post("/v1/fncalls", json={"code": "x"})).status_code == 401
        assert (await nobody.get("/v1/sandboxes")).status_code == 401
        assert (await nobody.get("/v1/sandboxes", auth=("x", key))).status_code == 401
        assert (await nobody.post(f"/fusion/{key}/v1/sandboxes", json={})).status_code == 404
        assert key not in (await nobody.post(f"/fusion/{key}/v1/keys", json={})).text
        assert key not in (await nobody.get(f"/fusion/{key}/run_code")).text


async def test_when_the_platform_cannot_say(start: Start) -> None:
    async with start("a", patience_s=0.2) as platform:
        (platform.folder / "a.sock").unlink()
        told = await platform.client.post("/run_code", json={"code": "echo in", "language": "bash"})
        assert (told.status_code, told.json()["status"]) == (200, "SandboxError")
        assert told.json()["message"].startswith("connect: ")


async def test_what_is_refused(open_cluster: Cluster) -> None:
    url = open_cluster.apiserver.url
    with pytest.raises(Exception, match=r"code 501.*pytest"):
        await run_code(url, "x", language="pytest")
    with pytest.raises(Exception, match=r"code 501.*language"):
        await run_code(url, "x", language="rust")
    with pytest.raises(Exception, match=r'code 422.*"field":"files"'):
        await run_code(url, "x", files={"../../etc/passwd": ""})
    with pytest.raises(Exception, match=r'code 422.*"field":"files"'):
        await run_code(url, "x", files={"a": "no base64"})
    with pytest.raises(Exception, match=r'code 422.*"field":"run_timeout"'):
        await run_code(url, "x", run_timeout=1e9)
    with pytest.raises(Exception, match=r'code 422.*"field":"fetch_files"'):
        await run_code(url, "x", fetch_files=["/etc/shadow"])
    for body in (
        b"",
        b"[]",
        b"{}",
        b'{"code": 1, "language": "bash"}',
        b'{"code": "x", "language": "bash", "files": []}',
    ):
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{url}/run_code", content=body)
            assert (answer.status_code, bool(answer.json()["error"]["detail"]["field"])) == (422, True)
    config = fusion.TestConfig()
    with pytest.raises(Exception, match="code 501"):
        await asyncio.to_thread(
            fusion.submit, fusion.SubmitRequest(dataset="d", id=1, completion="c", config=config), url, 1
        )
    with pytest.raises(Exception, match="code 501"):
        await asyncio.to_thread(fusion.get_prompts, fusion.GetPromptsRequest(dataset="d", config=config), url)
    with pytest.raises(Exception, match="code 501"):
        await asyncio.to_thread(fusion.run_jupyter, fusion.RunJupyterRequest(cells=["1"]), url, 1)
