"""Commands see the image's ENV, USER and WORKDIR as `docker exec` shows them, through the edge's own planning."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import CONFIGURED, Place, Result, Sandbox

from opendsec.edge.command import start_plan
from opendsec.model.command import ExecRequest
from opendsec.model.spec import SandboxSpec

pytestmark = pytest.mark.anyio
REAL_ONLY = True


@pytest.fixture
async def box(place: Place) -> AsyncIterator[Sandbox]:
    async with place.sandbox("configured") as made:
        yield made


async def run(box: Sandbox, request: ExecRequest, spec: SandboxSpec | None = None) -> Result:
    box.last_command += 1
    plan = start_plan(request, spec or box.plan.spec, box.plan.image.config)
    await box.guest.start(box.last_command, plan)
    return await box.finish(box.last_command)


async def test_the_image_decides(box: Sandbox) -> None:
    result = await run(box, ExecRequest(argv=("env", "-0")))
    env = dict(item.split("=", 1) for item in result.stdout.decode().split("\0") if item)
    assert env == {**box.plan.image.config.env, "HOME": "/home/agent"}
    assert env["GREETING"] == CONFIGURED["env"]["GREETING"]
    assert (await run(box, ExecRequest(script="pwd"))).stdout == b"/work dir\n"
    ids = (await run(box, ExecRequest(script="id"))).stdout
    assert ids == b"uid=1000(agent) gid=1000(agent) groups=44(video),1000(agent)\n"


async def test_the_sandbox_decides_over_the_image(box: Sandbox) -> None:
    spec = SandboxSpec(image="configured", env={"EMPTY": "no"}, workdir="/etc", init_user="0")
    result = await run(box, ExecRequest(script='pwd; id -u; echo "$EMPTY|$GREETING"; echo $HOME'), spec)
    assert result.stdout.decode() == f"/etc\n0\nno|{CONFIGURED['env']['GREETING']}\n/root\n"


async def test_the_request_decides_over_all(box: Sandbox) -> None:
    spec = SandboxSpec(image="configured", env={"A": "sandbox"}, workdir="/etc", init_user="0")
    request = ExecRequest(script='pwd; id -u; echo "$A"', cwd="/tmp", user="nobody", env={"A": "request"})
    assert (await run(box, request, spec)).stdout == b"/tmp\n65534\nrequest\n"
