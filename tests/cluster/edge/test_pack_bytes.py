"""The bytes of a pack are those of one moment, however they are being written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.cluster.edge.packs import ok, pack, store_of
from tests.cluster.edge.processes import EdgeProcess
from tests.images import make_busybox_image

from opendsec.store.images import ImageStore

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
PAGE = 4096


@pytest.fixture(scope="module")
def writers(containers_process: EdgeProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of an image with the program of writers.c."""
    program = tmp_path_factory.mktemp("program") / "writers"
    source = Path(__file__).with_name("writers.c")
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Wextra", "-o", program, source], check=True, timeout=120)
    make_busybox_image(
        ImageStore(store_of(containers_process)), "writers", files={"/bin/writers": program.read_bytes()}
    )
    return "writers"


def rounds(content: bytes) -> list[int]:
    """The number in each page."""
    return [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), PAGE)]


async def read(edge: EdgeProcess, sandbox_id: str, path: str) -> bytes:
    answer = await edge.client.get(f"/v1/sandboxes/{sandbox_id}/files/content?path={path}&user=root")
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("disk_limit_mb", [None, 64])
async def test_files_that_are_written_all_the_time(
    shared_containers: EdgeProcess, writers: str, disk_limit_mb: int | None
) -> None:
    edge = shared_containers
    spec = {"init_user": "root", "lifetime": {"ttl_running_stop": None}}
    source = await edge.create(image=writers, resources={"disk_limit_mb": disk_limit_mb}, **spec)
    for way in ("mapped", "direct"):
        await edge.begin(source, f"exec writers {way} /{way}")
    await ok(edge, source, "until [ -s /mapped ] && [ -s /direct ]; do sleep 0.05; done; sleep 0.3")
    seen = {"mapped": 0, "direct": 0}
    for number in range(3):
        made = await pack(edge, source, f"moment-{disk_limit_mb}-{number}")
        again = await edge.create(image=made["image"], **spec)
        for way, before in seen.items():
            found = rounds(await read(edge, again, f"/{way}"))
            assert len(found) == 1024
            assert found == sorted(found, reverse=True), "written from the first page on"
            assert found[0] - found[-1] <= 1, "one moment lies in one round"
            assert sum(found) > before, "and it goes on between packs"
            seen[way] = sum(found)
