"""What a key's role allows: an edge is told by the apiserver, and by nobody else."""

from __future__ import annotations

import pytest
from tests.cluster.apiserver.conftest import Start

pytestmark = pytest.mark.anyio
SPEC = {"spec": {"image": "debian"}}


@pytest.mark.parametrize(
    ("role", "rights"), [("admin", "administer,build"), ("member", "build"), ("builder", "build"), ("runner", "")]
)
async def test_the_edge_is_told_what_the_role_allows(start: Start, role: str, rights: str) -> None:
    async with start("local") as platform:
        made = (await platform.client.post("/v1/keys", json={"role": role})).json()
        assert made["record"]["role"] == role
        who = {"Authorization": f"Bearer {made['key']}"}
        created = await platform.client.post("/v1/sandboxes", json=SPEC, headers=who)
        assert created.status_code == 201, "every role may run sandboxes"
        forged = {**who, "X-OpenDSec-Rights": "administer,build", "x-opendsec-rights": "build"}
        target = f"/v1/sandboxes/{created.json()['sandbox_id']}"
        await platform.client.get(target, headers=forged)
        method, seen, headers = platform.edges["local"].requests[-1]
        assert (method, seen) == ("GET", f"{target}?")
        assert headers["x-opendsec-rights"] == rights


async def test_a_runner_changes_no_image_and_makes_no_key(start: Start) -> None:
    async with start("local") as platform:
        made = (await platform.client.post("/v1/keys", json={"role": "runner"})).json()
        who = {"Authorization": f"Bearer {made['key']}"}
        for method, target, body in (
            ("POST", "/v1/images/tag", {"image": "busybox", "name": "mine"}),
            ("POST", "/v1/images/compose", {"name": "mine", "base": "busybox"}),
            ("DELETE", "/v1/images?image=busybox", None),
            ("POST", "/v1/keys", {"role": "admin"}),
            ("POST", "/v1/projects", {"name": "mine"}),
        ):
            answer = await platform.client.request(method, target, json=body, headers=who)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), target
