"""Images out of a real registry: with an account, for several platforms, cut off, killed, and never fetched twice."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.oci_layout import INDEX, LayoutMaker, directory, file, make_layout, tar_of
from tests.registry import PASSWORD, USER, Registry, running_registry
from tests.tree_facts import difference, tree_of

from opendsec.errors import (
    ConnectError,
    DigestMismatchError,
    DiskFullError,
    ImageInvalidError,
    ImageNotFoundError,
    UnauthorizedError,
)
from opendsec.store.images import ImageStore
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci_config import Platform
from opendsec.store.importers.skopeo import RegistryAccess
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay, pytest.mark.registry]

ACCESS = RegistryAccess(creds=f"{USER}:{PASSWORD}", tls_verify=False, attempts=1)
BOTTOM = [[directory("d"), file("d/a", os.urandom(200_000))], [file("d/b", os.urandom(3000))]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "data") as running:
        yield running


def test_it_is_the_image_that_was_pushed(store: ImageStore, disk: Path, registry: Registry) -> None:
    layout = make_layout(disk / "layout", BOTTOM, compress=True, config={"User": "7"})
    reference = registry.push(layout, "lib/exact:1")
    pulled = imported(store, "pulled", f"docker://{reference}", access=ACCESS, collapse_bytes=0)
    local = imported(ImageStore(disk / "other"), "local", layout, collapse_bytes=0)
    assert (pulled.digest, pulled.source) == (local.digest, f"docker://{reference}")
    with shown(store, pulled.layers) as tree:
        assert (tree / "d/b").read_bytes() == BOTTOM[1][0].content


def test_layers_that_are_there_are_not_fetched(store: ImageStore, disk: Path, registry: Registry) -> None:
    first = registry.push(make_layout(disk / "first", BOTTOM), "lib/first:1")
    more = [*BOTTOM, [file("d/c", os.urandom(5000))]]
    second = registry.push(make_layout(disk / "second", more), "lib/second:1")
    imported(store, "first", f"docker://{first}", access=ACCESS, collapse_bytes=0)
    before = len(registry.fetched())
    image = imported(store, "second", f"docker://{second}", access=ACCESS, collapse_bytes=0)
    layers = [one for one in registry.fetched()[before:] if one not in configs(registry, more)]
    assert len(set(layers)) == 1
    assert image.layers[:2] == store.get("first").layers
    with shown(store, image.layers) as tree:
        assert (tree / "d/a").read_bytes() == BOTTOM[0][1].content
        assert (tree / "d/c").read_bytes() == more[2][0].content
    before = len(registry.fetched())
    imported(store, "again", f"docker://{second}", access=ACCESS, collapse_bytes=0)
    assert all(one in configs(registry, more) for one in registry.fetched()[before:])


def configs(registry: Registry, _layers: object) -> set[str]:
    """Digests of blobs that are JSON."""
    found = set()
    for path in (registry.root / "data/docker/registry/v2/blobs/sha256").glob("*/*/data"):
        with path.open("rb") as blob:
            if blob.read(1) == b"{":
                found.add(f"sha256:{path.parent.name}")
    return found


def test_an_index_for_several_platforms(store: ImageStore, disk: Path, registry: Registry) -> None:
    maker = LayoutMaker(disk / "layout")
    entries = []
    for architecture, variant in (("amd64", ""), ("arm64", "v8"), ("arm", "v7"), ("arm", "v6")):
        tar = tar_of([file("which", f"{architecture}{variant}".encode())])
        manifest = maker.image([tar], architecture=architecture, compress=True)  # Else skopeo compresses, and renames.
        platform = {"os": "linux", "architecture": architecture} | ({"variant": variant} if variant else {})
        entries.append({**manifest, "platform": platform})
    inner = maker.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, INDEX)
    maker.index([maker.tagged(inner, "latest")])
    reference = registry.push(maker.root, "lib/many:1", every_platform=True)
    for text, found in (("linux/amd64", b"amd64"), ("linux/arm64", b"arm64v8"), ("linux/arm/v6", b"armv6")):
        image = imported(
            store, text, f"docker://{reference}", access=ACCESS, platform=Platform.parse(text), replace=True
        )
        with shown(store, image.layers) as tree:
            assert (tree / "which").read_bytes() == found
    with pytest.raises(ImageInvalidError, match=r"nothing fits linux/mips; it holds .*linux/arm/v6"):
        imported(store, "x", f"docker://{reference}", access=ACCESS, platform=Platform.parse("linux/mips"))
    digest = entries[0]["digest"]
    pinned = f"docker://{reference}@{digest}"
    assert imported(store, "pinned", pinned, access=ACCESS).layers == store.get("linux/amd64").layers


def test_accounts(store: ImageStore, disk: Path, registry: Registry) -> None:
    reference = registry.push(make_layout(disk / "layout", BOTTOM), "lib/secret:1")
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (disk / "auth.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    by_file = RegistryAccess(authfile=disk / "auth.json", tls_verify=False)
    by_environment = RegistryAccess(environment={"REGISTRY_AUTH_FILE": str(disk / "auth.json")}, tls_verify=False)
    for number, access in enumerate((by_file, by_environment)):
        assert imported(store, f"x{number}", f"docker://{reference}", access=access).layers
    for access in (RegistryAccess(tls_verify=False), RegistryAccess(creds=f"{USER}:wrong", tls_verify=False)):
        with pytest.raises(UnauthorizedError, match="refuses") as caught:
            imported(store, "no", f"docker://{reference}", access=access)
        assert "creds-file" in caught.value.remedy
        assert "wrong" not in str(caught.value) + repr(access)


def test_what_is_not_there(store: ImageStore, disk: Path, registry: Registry) -> None:
    reference = registry.push(make_layout(disk / "layout", BOTTOM), "lib/there:1")
    absent = (f"{registry.host}/lib/there:2", f"{registry.host}/lib/404:1", f"{reference}@sha256:{'0' * 64}")
    for one in absent:
        with pytest.raises(ImageNotFoundError):
            imported(store, "x", f"docker://{one}", access=ACCESS)
    with pytest.raises(ConnectError, match="cannot be trusted") as caught:
        imported(store, "x", f"docker://{reference}", access=RegistryAccess(creds=ACCESS.creds))
    assert not caught.value.retryable
    assert leftovers(store) == []
    assert not list((store.root / "staging").iterdir())


@contextmanager
def lying(registry: Registry, digest: str, other: str) -> Iterator[str]:
    """The registry behind somebody who gives the manifest of `other` when asked for that of `digest`."""
    host, _, port = registry.host.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=carry, args=(client,), daemon=True).start()

    def carry(client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection((host, int(port))) as server:
            question = b""
            while b"\r\n\r\n" not in question and (more := client.recv(65536)):
                question += more
                if question.startswith(b"\x16"):
                    return  # TLS, which skopeo tries first
            question = question.replace(digest.encode(), other.encode())
            server.sendall(question.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            while more := server.recv(65536):
                client.sendall(more.replace(other.encode(), digest.encode(), 1) if more.startswith(b"HTTP") else more)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        listener.close()


def test_a_registry_that_gives_something_else_for_a_digest(store: ImageStore, disk: Path, registry: Registry) -> None:
    digests = []
    for number, entries in enumerate((BOTTOM, [*BOTTOM, [file("evil")]])):
        name = registry.push(make_layout(disk / f"layout{number}", entries), f"lib/pinned:{number}")
        command = ["skopeo", "inspect", "--tls-verify=false", f"--creds={USER}:{PASSWORD}", "--raw", f"docker://{name}"]
        raw = subprocess.run(command, check=True, timeout=120, capture_output=True).stdout
        digests.append(f"sha256:{hashlib.sha256(raw).hexdigest()}")
    with lying(registry, *digests) as host, pytest.raises(DigestMismatchError):
        imported(store, "x", f"docker://{host}/lib/pinned@{digests[0]}", access=ACCESS)
    assert store.names() == []


def test_nobody_at_home(store: ImageStore) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    seen: list[Progress] = []
    with pytest.raises(ConnectError, match="does not answer"):
        imported_with_progress(store, f"docker://127.0.0.1:{port}/x:1", seen)
    assert [step.phase for step in seen if "again" in step.phase] == ["trying again in 1 s"]


def imported_with_progress(store: ImageStore, source: str, seen: list[Progress]) -> None:
    from opendsec.store.importers import ImportRequest, import_image
    from opendsec.store.importers.source import parse_source

    access = RegistryAccess(creds=ACCESS.creds, tls_verify=False, attempts=2)
    request = ImportRequest(name="x", source=parse_source(source), access=access)
    import_image(store, request, on_progress=seen.append)


@contextmanager
def cut_off(registry: Registry, *, after_bytes: int, times: int) -> Iterator[str]:
    """The registry behind a way that breaks: so many connections end after so many bytes."""
    host, _, port = registry.host.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    left = [times]

    def carry(source: socket.socket, target: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (content := source.recv(min(65536, most))):
                target.sendall(content)
                most -= len(content)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                opened.extend((client, server))
                for source, target, most in ((client, server, 1 << 40), (server, client, budget())):
                    thread = threading.Thread(target=carry, args=(source, target, most))
                    thread.start()
                    threads.append(thread)

    def budget() -> int:
        left[0] -= 1
        return after_bytes if left[0] >= 0 else 1 << 40

    opened: list[socket.socket] = []
    threads = [threading.Thread(target=serve)]
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for one in (listener, *opened):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in threads:
            thread.join(timeout=10)


LARGE = [[file("large", os.urandom(8 << 20))], [file("other", os.urandom(1 << 20))]]


def test_a_way_that_breaks_is_gone_again(store: ImageStore, disk: Path, registry: Registry) -> None:
    layout = make_layout(disk / "layout", LARGE)
    name = registry.push(layout, "lib/large:1").partition("/")[2]
    access = RegistryAccess(creds=ACCESS.creds, tls_verify=False, attempts=5)
    with cut_off(registry, after_bytes=3 << 20, times=6) as host:
        image = imported(store, "x", f"docker://{host}/{name}", access=access)
    with shown(store, image.layers) as tree, shown(store, imported(store, "y", layout).layers) as expected:
        assert not difference(tree_of(tree), tree_of(expected))


def test_a_way_that_is_broken_for_good(store: ImageStore, disk: Path, registry: Registry) -> None:
    name = registry.push(make_layout(disk / "layout", LARGE), "lib/large:2").partition("/")[2]
    with cut_off(registry, after_bytes=2 << 20, times=1000) as host, pytest.raises(ConnectError):
        imported(store, "x", f"docker://{host}/{name}", access=ACCESS)
    assert leftovers(store) == []
    assert not list((store.root / "staging").iterdir())


def test_a_registry_that_says_nothing_is_given_up(store: ImageStore, registry: Registry, disk: Path) -> None:
    name = registry.push(make_layout(disk / "layout", LARGE), "lib/large:3").partition("/")[2]
    access = RegistryAccess(creds=ACCESS.creds, tls_verify=False, attempts=1, stalled_s=1.0)
    with stopped_way(registry, after_bytes=1 << 20) as host, pytest.raises(ConnectError, match="nothing for 1 s"):
        imported(store, "x", f"docker://{host}/{name}", access=access)
    assert not list((store.root / "staging").iterdir())


@contextmanager
def stopped_way(registry: Registry, *, after_bytes: int) -> Iterator[str]:
    """As `cut_off`, but the connection stays and nothing more comes."""
    host, _, port = registry.host.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def carry(source: socket.socket, target: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (content := source.recv(min(65536, most))):
                target.sendall(content)
                most -= len(content)
        over.wait(60)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                opened.extend((client, server))
                for source, target, most in ((client, server, 1 << 40), (server, client, after_bytes)):
                    threads.append(threading.Thread(target=carry, args=(source, target, most)))
                    threads[-1].start()

    threads.append(threading.Thread(target=serve))
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        for one in (listener, *opened):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in threads:
            thread.join(timeout=10)


KILLED = """
import os, signal, sys
from pathlib import Path
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.skopeo import RegistryAccess
from opendsec.store.importers.source import parse_source

def seen(step):
    if step.phase == "fetching layers" and step.done > 0:
        os.kill(os.getpid(), signal.SIGKILL)

access = RegistryAccess(creds=sys.argv[3], tls_verify=False)
request = ImportRequest(name="x", source=parse_source(sys.argv[2]), access=access)
import_image(ImageStore(Path(sys.argv[1])), request, on_progress=seen)
"""


def test_killed_while_it_fetches_it_leaves_nothing(disk: Path, registry: Registry) -> None:
    name = registry.push(make_layout(disk / "layout", LARGE), "lib/large:4").partition("/")[2]
    with stopped_way(registry, after_bytes=4 << 20) as host:
        command = [sys.executable, "-c", KILLED, str(disk / "store"), f"docker://{host}/{name}", ACCESS.creds]
        assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
        assert list((disk / "store/staging").iterdir())
    store = ImageStore(disk / "store")
    assert (store.names(), leftovers(store)) == ([], [])


def test_an_image_beyond_the_limits_is_not_fetched(store: ImageStore, disk: Path, registry: Registry) -> None:
    reference = registry.push(make_layout(disk / "layout", LARGE), "lib/large:5")
    before = registry.fetched()
    with pytest.raises(ImageInvalidError, match="at most 1000000 are taken"):
        imported(store, "x", f"docker://{reference}", access=ACCESS, limits=Limits(max_total_bytes=1_000_000))
    assert set(registry.fetched()[len(before) :]) <= configs(registry, ())


def test_a_full_disk_is_named(registry: Registry, disk: Path) -> None:
    reference = registry.push(make_layout(disk / "layout", LARGE), "lib/large:6")
    (disk / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk / "small"], check=True, timeout=120)
    try:
        with pytest.raises(DiskFullError):
            imported(ImageStore(disk / "store", scratch=disk / "small"), "x", f"docker://{reference}", access=ACCESS)
    finally:
        subprocess.run(["umount", disk / "small"], check=True, timeout=120)
