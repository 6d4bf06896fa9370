"""What a builder leaves in a sandbox does not reach a sandbox that somebody starts from the packed image."""

from __future__ import annotations

import subprocess

import pytest
from tests.cluster.edge.packs import ok, pack, store_of
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
SECRET = "xyzzy-the-answer-is-42"
PLACES = "/etc /home /root /run /srv /tmp /var"
RESIDUE = f"""
set -e
cd /root
for name in .bash_history .python_history .netrc .git-credentials .viminfo .pgpass; do echo {SECRET} > $name; done
mkdir -p .ssh .aws .docker .config/gh .cache/pip .npm/_cacache /home/agent/.cache /srv/project/__pycache__
printf -- '-----BEGIN OPENSSH PRIVATE KEY-----\\n{SECRET}\\n' > .ssh/key_of_mine
echo '{SECRET}' > .ssh/known_hosts
echo '{SECRET}' > .aws/credentials
mkdir -p /srv/home/.aws
echo '{SECRET}' > /srv/home/.aws/credentials
echo '{{"auths": "{SECRET}"}}' > .docker/config.json
echo '{SECRET}' > .config/gh/hosts.yml
echo '//registry/:_authToken={SECRET}' > .npmrc
echo 'password = {SECRET}' > .pypirc
echo '{SECRET}' > .cache/pip/http
echo '{SECRET}' > .npm/_cacache/x
echo '{SECRET}' > /home/agent/.cache/x
echo '{SECRET}' > /srv/project/__pycache__/answer.pyc
echo '{SECRET}' > /srv/project/.answer.py.swp
echo '{SECRET}' > /tmp/answer
echo '{SECRET}' > /var/tmp/answer
echo '{SECRET}' > /run/answer
echo '10.0.0.1 {SECRET}' >> /etc/hosts
echo '{SECRET}' > "/srv/project/part.opendsec-0123456789abcdef"
echo work > /srv/project/work
"""


async def test_nothing_a_builder_left_is_in_a_runners_sandbox(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    spec = {"init_user": "root", "lifetime": {"ttl_running_stop": None}}
    builder = await edge.create(
        image="busybox", env={"TOKEN": SECRET, "HOME": "/srv/home"}, labels={"note": SECRET}, **spec
    )
    await ok(edge, builder, RESIDUE)
    await ok(edge, builder, "echo $ONCE > /dev/null", env={"ONCE": SECRET}, session="shell", user=None)
    found = await ok(edge, builder, f"grep -rl {SECRET} {PLACES} | wc -l")
    assert int(found) > 20, "the builder has it in many places"
    made = await pack(edge, builder, "handed-over")
    assert made["left_out"] >= 20
    runner = await edge.create(image=made["image"], **spec)
    assert await ok(edge, runner, "cat /srv/project/work; ls -A /srv/project") == "work\nwork\n"
    for script in (
        f"grep -rl {SECRET} {PLACES} || true",
        f"env | grep {SECRET} || true",
        f"cat /proc/*/environ 2>/dev/null | grep -c {SECRET} || true",
    ):
        assert (await ok(edge, runner, script)).strip() in ("", "0"), script
    assert SECRET not in str((await edge.client.get(f"/v1/sandboxes/{runner}")).json())
    for file in store_of(edge).rglob("*"):
        if file.is_file():
            done = subprocess.run(["grep", "-q", SECRET, str(file)], check=False, timeout=120)
            assert done.returncode == 1, f"{file} holds it"
