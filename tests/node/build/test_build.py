"""Dockerfiles and templates built in real sandboxes."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.capabilities import STATE_DIR
from tests.node.build.conftest import CAPABILITY, OPENDSEC, Platform

import opendsec
from opendsec.apiserver.database import open_database
from opendsec.apiserver.iam import insert_key
from opendsec.apiserver.settings import database_file
from opendsec.build import BuildOptions, BuiltImage, StepBegun, StepOutput, Template, build
from opendsec.build.taking import TTL_S
from opendsec.errors import (
    CommandFailedError,
    ExecError,
    FileError,
    ForbiddenError,
    ImageNotFoundError,
    InvalidSpecError,
)
from opendsec.model.access import Role
from opendsec.model.image import BUILD_CACHE
from opendsec.model.image_view import TreeEntry
from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.cgroup,
    pytest.mark.overlay,
    pytest.mark.erofs,
]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context with something of everything COPY may meet."""
    root = tmp_path / "context"
    (root / "app" / "sub").mkdir(parents=True)
    (root / "app" / "run.sh").write_text("#!/bin/sh\necho run\n")
    (root / "app" / "run.sh").chmod(0o755)
    (root / "app" / "sub" / "data").write_text("data")
    (root / "app" / "link").symlink_to("run.sh")
    (root / "app").chmod(0o750)
    (root / "one.txt").write_text("one")
    (root / "two.txt").write_text("two")
    (root / "second" / "sub").mkdir(parents=True)
    (root / "second" / "sub").chmod(0o700)
    (root / "second" / "run.sh").write_text("another")
    (root / "left.out").write_text("left out")
    (root / ".dockerignore").write_text("*.out\n")
    with tarfile.open(root / "packed.tgz", "w:gz") as tar:
        tar.add(root / "app", "inside", filter=lambda one: one.replace(uid=7, gid=8, deep=False))
    return root


async def built(client: opendsec.DSecClient, text: str, name: str = "result", **more: Any) -> BuiltImage:
    return await build(client, text, name=name, **more)


async def tree(client: opendsec.DSecClient, name: str, path: str = "/") -> dict[str, TreeEntry]:
    return {entry.path: entry async for entry in client.images.tree(name, path)}


async def said(client: opendsec.DSecClient, image: str, command: str) -> str:
    async with client.container(opendsec.DSecContainerRunArgs(container_image=image)) as sandbox:
        return (await sandbox.run_shell(command, check=True)).stdout


async def test_variables_users_and_directories(client: opendsec.DSecClient) -> None:
    text = """\
ARG BASE=nowhere
FROM $BASE
ARG WHO=nobody
ENV GREETING="hello $WHO" PATH=/extra:$PATH
WORKDIR /work/deep
RUN echo "$GREETING" > greeting; echo "$PATH $WHO" > path; pwd > where
USER agent:video
WORKDIR mine
RUN id -un > who; id -gn >> who; touch mine; echo $HOME >> who
RUN <<EOF
echo one > lines
echo two >> lines
EOF
CMD ["sh", "-c", "x"]
"""
    options = BuildOptions(arguments={"BASE": "busybox", "WHO": "you"})
    image = await built(client, text, options=options)
    assert (image.config.user, image.config.workdir) == ("agent:video", "/work/deep/mine")
    assert image.config.env["GREETING"] == "hello you"
    out = await said(
        client, "result", "cd /work/deep; cat greeting where; cat mine/who mine/lines; echo $GREETING; pwd"
    )
    assert out == ("hello you\n/work/deep\nagent\nvideo\n/home/agent\none\ntwo\nhello you\n/work/deep\n")
    found = await tree(client, "result", "/work")
    assert {path: (entry.uid, entry.gid) for path, entry in found.items() if entry.kind == "directory"} == {
        "/work": (0, 0),
        "/work/deep": (0, 0),
        "/work/deep/mine": (1000, 44),
    }


BUILDAH = """\
FROM {base} AS first
ARG X=5
ENV A="value $X"
WORKDIR /work/x
RUN echo "$A" > out && rm /bin/wget && rm -r /app && mkdir /app && echo new > /app/file && ln /bin/sh /hard
COPY app /dir
COPY app one.txt /many/
COPY one.txt /renamed
COPY one.txt /kept/
COPY *.txt /all/
COPY --chown=agent:video --chmod=640 two.txt /owned/two
COPY --chown=1000 app /numbers
COPY one.txt .
COPY app/link /followed
COPY app second /merged/
ADD packed.tgz /unpacked
USER agent
RUN echo mine > /home/agent/f; mkdir -p /tmp/d; chmod 700 /tmp/d
FROM {base}
COPY --from=first /dir /dir2
COPY --from=first /work/x/out /owned/two /together/
COPY --from=first /many/*.t?t /globbed/
COPY --from=first /merged /dir /both/
RUN mv /bin/cat /bin/dog; chmod 600 /etc/passwd; : > /etc/group
LABEL l="m n"
EXPOSE 80
ENTRYPOINT ["/init"]
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_same_tree_as_buildah(
    client: opendsec.DSecClient, platform: Platform, context: Path, tmp_path: Path
) -> None:
    """Another builder of the same file, in a chroot; nothing but times differs."""
    disk = Path(platform.variables["OPENDSEC_STATE_DIR"]) / "buildah"
    disk.mkdir()
    try:
        theirs = await anyio.to_thread.run_sync(by_buildah, platform, context, disk)
        image = await built(client, BUILDAH.format(base="busybox"), context=context, name="ours")
        differences = [one async for one in client.images.diff("theirs", "ours", times=False)]
        assert [(one.path, one.what) for one in differences] == []
    finally:
        shutil.rmtree(disk)
    assert image.config.labels["l"] == theirs["Labels"]["l"] == "m n"
    assert [f"{key}={value}" for key, value in image.config.env.items()] == theirs["Env"]
    assert (list(image.config.entrypoint), image.config.cmd) == (theirs["Entrypoint"], ())
    assert "Cmd" not in theirs


def by_buildah(platform: Platform, context: Path, disk: Path) -> dict[str, Any]:
    """Builds with buildah and imports the result as `theirs`; its configuration."""

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, env=platform.variables, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    buildah = ("buildah", "--storage-driver=vfs", f"--root={disk / 'root'}", f"--runroot={disk / 'run'}")
    run(*OPENDSEC, "image", "export", "busybox", f"docker-archive:{disk / 'base'}")
    base = run(*buildah, "pull", "-q", f"docker-archive:{disk / 'base'}")
    (disk / "Dockerfile").write_text(BUILDAH.format(base=base))
    options = ("-q", "--isolation=chroot", "--pull-never", "--format=oci", "-t", "result", "-f", disk / "Dockerfile")
    run(*buildah, "build", *options, context)
    run(*buildah, "push", "-q", "result", f"oci:{disk / 'out'}")
    run(*OPENDSEC, "image", "import", "theirs", f"oci:{disk / 'out'}")
    config: dict[str, Any] = json.loads(run("skopeo", "inspect", "--config", f"oci:{disk / 'out'}"))["config"]
    return config


async def test_what_another_image_has_is_copied_with_all_of_it(client: opendsec.DSecClient) -> None:
    await built(client, "FROM scratch\nCOPY --from=capable /d /copy\nCOPY --from=capable /d/link /d/note /x/\n")
    before = await tree(client, "capable", "/d")
    after = await tree(client, "result", "/copy")
    assert (after["/copy"].mode, after["/copy"].uid) == (0o755, 0)  # It is not copied: what is in it is.
    for path, entry in list(before.items())[1:]:
        copied = after[path.replace("/d", "/copy", 1)]
        assert dataclasses.replace(copied, path=path, layer=entry.layer) == entry
    assert after["/copy/ping"].xattrs["security.capability"] == base64.b64encode(CAPABILITY).decode()
    files = await tree(client, "result", "/x")
    assert (files["/x/link"].kind, files["/x/link"].mode) == ("file", 0o4755)
    assert files["/x/note"].xattrs == {"user.note": base64.b64encode(b"\0\xff").decode()}
    assert sorted(await tree(client, "result")) == sorted(["/", *after, *files])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("FROM equipped\nRUN cat /opt/tool > /seen\n", "cat /opt/tool /seen; echo $TOOL"),
        ("FROM equipped\nENV A=1\n", "cat /opt/tool /opt/tool; echo $TOOL"),
        (
            "FROM busybox\nCOPY --from=equipped /opt /opt\nCOPY --from=equipped /opt/tool /seen\nENV TOOL=here\n",
            "cat /opt/tool /seen; echo $TOOL",
        ),
    ],
    ids=["run", "configuration alone", "copy"],
)
async def test_what_an_image_refers_to_is_there_and_stays(client: opendsec.DSecClient, text: str, shown: str) -> None:
    await built(client, text)
    assert await said(client, "result", shown) == "tooltoolhere\n"


async def test_steps_are_taken_once(client: opendsec.DSecClient, context: Path) -> None:
    text = "FROM busybox\nRUN echo 1 > /1\nCOPY one.txt two.txt /d/\nRUN cat /d/one.txt > /2\nCMD x\n"
    steps: list[str] = []

    def on_event(event: object) -> None:
        if isinstance(event, StepOutput | StepBegun):
            steps.append(str(event))

    first = await built(client, text, context=context, name="once", on_event=on_event)
    assert (first.steps, first.cached, len(steps)) == (3, 0, 3)
    again = await built(client, text, context=context, name="twice")
    assert (again.cached, again.digest) == (3, first.digest)
    os.utime(context / "one.txt", (5, 5))
    assert (await built(client, text, context=context)).cached == 3
    (context / "left.out").write_text("does not count")
    assert (await built(client, text, context=context)).cached == 3
    (context / "one.txt").write_text("changed")
    changed = await built(client, text, context=context)
    assert changed.cached == 1
    assert await said(client, "result", "cat /2") == "changed"
    assert (await built(client, text.replace("CMD x", "CMD y"), context=context)).cached == 3
    assert (await built(client, text, context=context, cache=False)).cached == 0
    assert await said(client, "once", "cat /2") == "one"


async def test_only_the_last_known_step_is_needed(client: opendsec.DSecClient) -> None:
    text = (
        "FROM busybox AS a\nRUN echo a > /a\nFROM busybox\nRUN echo b > /b\nCOPY --from=a /a /c\nRUN cat /b /c > /d\n"
    )
    before = {one.name async for one in client.images.list(prefix=BUILD_CACHE)}
    first = await built(client, text)
    steps = [one async for one in client.images.list(prefix=BUILD_CACHE) if one.name not in before]
    *others, last = sorted(steps, key=lambda one: one.created_at)
    for one in others:
        await client.images.remove(one.name, force=True)
    again = await built(client, text)
    assert (len(steps), again.cached, again.digest) == (4, 4, first.digest)
    await client.images.remove(last.name, force=True)
    assert (await built(client, text)).cached == 0
    assert await said(client, "result", "cat /d") == "b\na\n"


async def test_a_step_that_changes_nothing_is_remembered(client: opendsec.DSecClient) -> None:
    text = "FROM busybox\nRUN true\nWORKDIR /etc\n"
    first = await built(client, text)
    before, after = [await client.images.inspect(name) for name in ("busybox", "result")]
    assert before.layers == after.layers
    assert (first.cached, (await built(client, text)).cached) == (0, 2)


async def test_a_step_that_fails(client: opendsec.DSecClient) -> None:
    with pytest.raises(CommandFailedError, match=r"Dockerfile, line 4: RUN echo out.*: exit status 3") as raised:
        await built(client, "FROM busybox\nRUN echo first > /first\n\nRUN echo out; echo err >&2; exit 3\n", "failed")
    detail = raised.value.detail
    assert (detail["line"], detail["exit_code"]) == (4, 3)
    assert sorted(str(detail["output"]).split()) == ["err", "out"]
    with pytest.raises(ImageNotFoundError):
        await client.images.inspect("failed")
    assert [one async for one in client.list(state="running")] == []
    with pytest.raises(ExecError, match="line 2"):
        await built(client, 'FROM busybox\nRUN ["/no/such/program"]\n', "failed")
    with pytest.raises(CommandFailedError, match=r"line 2.*exit status 137, signaled"):
        await built(client, "FROM busybox\nRUN kill -9 $$\n", "failed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM busybox\nCOPY none /\n", "line 2: 'none' is not in the build context"),
        ("FROM busybox\nCOPY left.out /\n", "dockerignore"),
        ("FROM busybox\nCOPY *.txt /file\n", "line 2: several sources"),
        ("FROM busybox\nCOPY --chown=stranger one.txt /\n", "line 2: the image has no user 'stranger'"),
        ("FROM busybox\nCOPY --from=capable /none /\n", "line 2: '/none' is not in the image"),
    ],
)
async def test_what_cannot_be_copied_is_named(
    client: opendsec.DSecClient, context: Path, text: str, words: str
) -> None:
    with pytest.raises(InvalidSpecError, match=words):
        await built(client, text, "failed", context=context)
    assert [one async for one in client.list(state="running")] == []


async def test_a_file_in_the_way_is_named(client: opendsec.DSecClient, context: Path) -> None:
    with pytest.raises(FileError, match=r"line 3: "):
        await built(client, "FROM busybox\nRUN touch /file\nWORKDIR /file/below\n", "failed")
    for copy in ("COPY app /file", "COPY one.txt /file/", "COPY one.txt /file/below", "ADD packed.tgz /file"):
        with pytest.raises(FileError, match=r"line 3: .*in the way"):
            await built(client, f"FROM busybox\nRUN touch /file\n{copy}\n", "failed", context=context)
    await built(client, "FROM busybox\nRUN touch /file\nCOPY one.txt /file\n", context=context)
    assert await said(client, "result", "cat /file") == "one"
    with pytest.raises(FileError, match="line 3: "):
        await built(client, "FROM busybox\nRUN mkdir -p /d/one.txt\nCOPY one.txt /d/\n", "failed", context=context)


async def test_a_context_is_needed_only_to_copy_from(client: opendsec.DSecClient) -> None:
    with pytest.raises(InvalidSpecError, match="no build context"):
        await built(client, "FROM busybox\nCOPY a /\n")
    await built(client, "FROM busybox\nCOPY <<EOF /in/place\n$PATH\nEOF\n")
    assert (
        await said(client, "result", "cat /in/place")
        == f"{(await client.images.inspect('busybox')).config.env['PATH']}\n"
    )


async def test_a_template(client: opendsec.DSecClient, context: Path) -> None:
    template = (
        Template()
        .from_image("busybox")
        .copy("app", "/srv/app", owner="agent")
        .env(NAME="a $b")
        .user("agent")
        .workdir("/srv/app")
        .run('echo "$NAME" > named')
        .run(["touch", "$x"])
    )
    image = await build(client, template, name="from-template", context=context)
    assert await said(client, image.reference, "cat named; ls") == "a $b\n$x\nlink\nnamed\nrun.sh\nsub\n"


@pytest.mark.image
async def test_a_program_compiled_in_one_stage_runs_in_another(
    client: opendsec.DSecClient, platform: Platform, tmp_path: Path
) -> None:
    borrow(platform.store, "debian")
    (tmp_path / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    text = (
        "FROM debian AS compiler\nCOPY hello.c /src/\nRUN gcc -O2 -static -o /src/hello /src/hello.c\n"
        'FROM scratch\nCOPY --from=compiler /src/hello /bin/\nCMD ["/bin/hello"]\n'
    )
    image = await built(client, text, context=tmp_path)
    async with client.container(opendsec.DSecContainerRunArgs(container_image=image.reference)) as sandbox:
        result = await sandbox.commands.run(list(image.config.cmd))
    assert (result.stdout, result.exit_code) == ("hello\n", 0)
    assert sorted(await tree(client, "result")) == ["/", "/bin", "/bin/hello"]


def borrow(store: ImageStore, name: str) -> None:
    """An image of this machine's store, by links to its files."""
    other = ImageStore(STATE_DIR / "store")
    image = other.get(name)
    for layer in image.layers:
        pairs = [(other.blob_path(layer.mounted.digest), store.blob_path(layer.mounted.digest))]
        if layer.data is not None:
            pairs += [(other.data_path(layer.data.digest), store.data_path(layer.data.digest))]
            pairs += [(other.table_path(layer.data.digest), store.table_path(layer.data.digest))]
        for source, target in pairs:
            if not target.exists():
                os.link(source, target)
    store.publish(name, layers=image.layers, config=image.config, replace=True)


def key_of(platform: Platform, role: Role) -> str:
    engine = open_database(f"sqlite:///{database_file(Path(platform.variables['OPENDSEC_STATE_DIR']))}")
    try:
        with engine.begin() as connection:
            return insert_key(connection, project="default", role=role, title="test").key
    finally:
        engine.dispose()


async def test_who_may_build(client: opendsec.DSecClient, platform: Platform) -> None:
    text = "FROM busybox\nRUN echo who > /who\n"
    begun: list[object] = []
    async with opendsec.DSecClient(api_key=key_of(platform, Role.RUNNER)) as runner:
        with pytest.raises(ForbiddenError):
            await built(runner, text, on_event=begun.append)
    assert begun == []
    async with opendsec.DSecClient(api_key=key_of(platform, Role.BUILDER)) as builder:
        assert (await built(builder, text)).cached == 0


def start_cli(platform: Platform, dockerfile: Path) -> subprocess.Popen[bytes]:
    command = [*OPENDSEC, "image", "build", "-t", "cut", "-f", str(dockerfile), str(dockerfile.parent)]
    builder = subprocess.Popen(command, env=platform.variables, stderr=subprocess.PIPE)
    assert builder.stderr is not None
    deadline = time.monotonic() + 30
    while b"begun" not in builder.stderr.readline():
        assert time.monotonic() < deadline
    return builder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_builder_that_ends_early(
    client: opendsec.DSecClient, platform: Platform, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nRUN echo beg''un; sleep 300\n")
    builder = await anyio.to_thread.run_sync(start_cli, platform, tmp_path / "Dockerfile")
    try:
        builder.send_signal(number)
        status = await anyio.to_thread.run_sync(builder.wait, 20)
    finally:
        assert builder.stderr is not None
        builder.stderr.close()
    left = [one async for one in client.list(state="running")]
    if number is signal.SIGKILL:
        (sandbox,) = left
        assert sandbox.spec.lifetime.ttl_max_stop == TTL_S
        await client.stop(sandbox.sandbox_id)
    else:
        assert (left, status) == ([], 128 + number)
    with pytest.raises(ImageNotFoundError):
        await client.images.inspect("cut")
