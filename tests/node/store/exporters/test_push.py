"""A push to a real registry, and what comes back from there."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node.store.exporters.test_export import image as image  # noqa: PLC0414  # A fixture.
from tests.node.store.exporters.test_export import merged
from tests.registry import PASSWORD, USER, Registry, running_registry
from tests.tree_facts import difference, tree_of

from opendsec.errors import ConnectError, InvalidSpecError, UnauthorizedError
from opendsec.model.image import Image
from opendsec.store.exporters.registry import push_image
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.skopeo import RegistryAccess
from opendsec.store.importers.source import parse_source

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]
ACCESS = RegistryAccess(creds=f"{USER}:{PASSWORD}", tls_verify=False)


@pytest.fixture
def registry(disk: Path) -> Iterator[Registry]:
    with running_registry(disk / "registry") as found:
        yield found


def tags(registry: Registry, name: str) -> bytes:
    connection = http.client.HTTPConnection(registry.host, timeout=5)
    account = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    try:
        connection.request("GET", f"/v2/{name}/tags/list", headers={"Authorization": f"Basic {account}"})
        return connection.getresponse().read()
    finally:
        connection.close()


def uploads(registry: Registry) -> int:
    return (registry.root / "log").read_text().count('"PUT /v2/')


def programs_with(argument: str) -> list[bytes]:
    """Command lines of processes that were given it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(path.read_bytes())
    return [line for line in found if argument.encode() in line]


def test_pushed_and_pulled_it_is_the_same(store: ImageStore, image: Image, disk: Path, registry: Registry) -> None:
    target = f"docker://{registry.host}/some/image:1"
    pushed = push_image(store, image.name, target, access=ACCESS)
    again = import_image(store, ImportRequest(name="again", source=parse_source(target), access=ACCESS))
    assert (again.config, [one.role for one in again.layers]) == (image.config, [one.role for one in image.layers])
    with merged(store, image, disk) as tree:
        before = tree_of(tree)
    with merged(store, again, disk) as tree:
        assert not difference(before, tree_of(tree))
    assert tags(registry, "some/image") == b'{"name":"some/image","tags":["1"]}\n'
    sent = uploads(registry)
    assert push_image(store, image.name, target, access=ACCESS) == pushed
    assert uploads(registry) == sent + 1  # the manifest, and no blob
    assert not list(store.root.glob("staging/*"))


def test_a_wrong_password_is_named(store: ImageStore, image: Image, registry: Registry) -> None:
    wrong = RegistryAccess(creds=f"{USER}:wrong", tls_verify=False)
    with pytest.raises(UnauthorizedError, match="refuses"):
        push_image(store, image.name, f"docker://{registry.host}/a:1", access=wrong)


def test_no_registry_is_named(store: ImageStore, image: Image) -> None:
    nobody = RegistryAccess(tls_verify=False, attempts=1)
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:9"):
        push_image(store, image.name, "docker://127.0.0.1:9/a:1", access=nobody)


@pytest.mark.parametrize("target", ["docker://h/a@sha256:" + "0" * 64, "h/a:1", "oci:x"])
def test_what_is_no_tag_is_refused(store: ImageStore, image: Image, target: str) -> None:
    with pytest.raises(InvalidSpecError, match="no tag of a registry"):
        push_image(store, image.name, target, access=ACCESS)


def test_killed_it_leaves_no_tag(store: ImageStore, image: Image, disk: Path, registry: Registry) -> None:
    """The registry is stopped in the middle, so that the push is certainly under way when it is killed."""
    shutil.copytree(store.root, disk / "state" / "store", symlinks=True)
    (disk / "creds").write_text(f"{USER}:{PASSWORD}")
    command = [sys.executable, "-m", "opendsec", "image", "push", image.name, f"docker://{registry.host}/cut:1"]
    environment = {**os.environ, "OPENDSEC_STATE_DIR": str(disk / "state")}
    push = subprocess.Popen(
        [*command, f"--creds-file={disk / 'creds'}", "--no-tls-verify"],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert push.stderr is not None
    try:
        deadline = time.monotonic() + 30
        while b"sending" not in push.stderr.readline():
            assert time.monotonic() < deadline
    finally:
        os.killpg(push.pid, signal.SIGKILL)
        push.wait()
        push.stderr.close()
    assert not programs_with(str(disk / "state"))
    assert b'"tags"' not in tags(registry, "cut")
    ImageStore(disk / "state" / "store")
    assert not list((disk / "state" / "store").glob("staging/*"))
