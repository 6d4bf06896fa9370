"""Files through the SDK: exact bytes, whole copies, never a short file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.client.fake_server import FakeServer, Fault

import opendsec
from opendsec.client.tree_format import END, TreeEntry, pack_entry
from opendsec.model.file import FileKind

pytestmark = pytest.mark.anyio

BIG = os.urandom(3 * 1024 * 1024 + 17)
NAMES = ["/a b", "/new\nline", "/😀", "/per%2Fcent&x=y+z#?", "/" + "n" * 255, "/raw\udcff"]


@pytest.mark.parametrize("name", NAMES)
async def test_names_survive(server: FakeServer, sandbox: opendsec.Sandbox, name: str) -> None:
    await sandbox.files.write(name, "text é")
    assert list(server.files) == [name]
    assert [found.path for found in await sandbox.files.list("/")] == [name]
    assert await sandbox.files.read(name) == "text é"


async def test_read_is_whole_or_an_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.files["/big"] = BIG
    server.faults = [Fault("GET .*content", after=1_000_000, times=2)]
    assert await sandbox.files.read_bytes("/big") == BIG
    assert await sandbox.files.read_bytes("/big", offset=5, length=10) == BIG[5:15]
    server.faults = [Fault("GET .*content", after=1_000_000)]
    with pytest.raises(opendsec.TransportError):
        [data async for data in sandbox.files.read_stream("/big")]


async def test_absent_file(sandbox: opendsec.Sandbox) -> None:
    with pytest.raises(opendsec.FileError) as caught:
        await sandbox.files.read("/none")
    assert caught.value.detail["errno"] == "ENOENT"
    assert not await sandbox.files.exists("/none")


async def test_write_is_repeated_and_streams_are_not(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.faults = [Fault("PUT .*content", kind="swallow", times=2)]
    await sandbox.files.write("/a", BIG, mode=0o600)
    assert server.files["/a"] == BIG

    async def chunks() -> AsyncIterator[bytes]:
        yield BIG[:1000]
        yield BIG[1000:]

    await sandbox.files.write_stream("/b", chunks())
    assert server.files["/b"] == BIG
    await sandbox.files.write_stream("/b", [b"1", b"2"])
    assert server.files["/b"] == b"12"
    server.faults = [Fault("PUT .*content", kind="swallow")]
    with pytest.raises(opendsec.TransportError):
        await sandbox.files.write_stream("/b", chunks())
    assert server.count("PUT", "content") == 6


async def test_move_and_remove_are_never_repeated(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    await sandbox.files.write("/a", b"")
    server.faults = [Fault("POST .*/move", kind="swallow")]
    with pytest.raises(opendsec.TransportError):
        await sandbox.files.move("/a", "/b")
    await sandbox.files.remove("/b")
    assert server.count("POST", "/move$") == 1


async def test_verbs(sandbox: opendsec.Sandbox) -> None:
    await sandbox.files.mkdir("/d", parents=True)
    await sandbox.files.chmod("/d", 0o700)
    await sandbox.files.write("/d/x", b"123")
    assert [(s.path, s.size_bytes) for s in await sandbox.files.list("/d")] == [("/d/x", 3)]
    assert (await sandbox.files.stat("/d/x")).size_bytes == 3
    stream = sandbox.files.watch("/d")
    assert (await anext(stream)).path == "/d/new"
    await stream.aclose()


async def test_file_copies(server: FakeServer, sandbox: opendsec.Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "in", tmp_path / "below" / "out"
    source.write_bytes(BIG)
    source.chmod(0o750)
    told: list[opendsec.TransferProgress] = []
    server.faults = [Fault("PUT", kind="swallow"), Fault("GET .*content", after=1_000_000)]
    await sandbox.files.upload(str(source), "/up", progress=told.append)
    assert server.files["/up"] == BIG
    assert (told[-1].bytes_done, told[-1].bytes_total, told[-1].files_done) == (len(BIG), len(BIG), 1)
    assert any(("mode", "750") in r.query for r in server.requests)
    assert (await sandbox.files.download("/up", str(back))).bytes == len(BIG)
    assert back.read_bytes() == BIG
    assert os.listdir(back.parent) == ["out"]


async def test_failed_download_leaves_the_old_file(
    server: FakeServer, sandbox: opendsec.Sandbox, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"old")
    server.files["/big"] = BIG
    server.faults = [Fault("GET .*content", after=100, times=99)]
    with pytest.raises(opendsec.TransportError):
        await sandbox.files.download("/big", str(old))
    server.faults = []
    with pytest.raises(opendsec.FileError, match="more than"):
        await sandbox.files.download("/big", str(old), limits=opendsec.TreeLimits(max_bytes=10))
    assert old.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"]


async def test_tree_there_and_back(server: FakeServer, sandbox: opendsec.Sandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "a b\n").write_bytes(BIG)
    (source / "sub" / "none").write_bytes(b"")
    (source / "sub" / "none").chmod(0o755)
    (source / os.fsdecode(b"raw\xff")).write_bytes(b"1")
    (source / "link").symlink_to("sub/none")
    os.mkfifo(source / "pipe")
    os.utime(source / "sub", ns=(10**18, 10**18))
    server.faults = [Fault("PUT .*tree", kind="swallow"), Fault("GET .*tree", after=2_000_000)]
    await sandbox.files.upload(str(source), "/tree")
    done = await sandbox.files.download("/tree", str(back))
    assert (done.files, done.bytes, done.skipped_links) == (3, len(BIG) + 1, ())
    assert sorted(os.listdir(back)) == sorted(set(os.listdir(source)) - {"pipe"})
    assert (back / "sub" / "a b\n").read_bytes() == BIG
    assert (back / "link").readlink() == Path("sub/none")
    assert (back / "sub" / "none").stat().st_mode & 0o777 == 0o755
    assert (back / "sub").stat().st_mtime_ns == 10**18
    assert (back / "sub" / "empty").is_dir()


async def test_cut_tree_is_an_error(server: FakeServer, sandbox: opendsec.Sandbox, tmp_path: Path) -> None:
    server.tree = pack_entry(TreeEntry(kind=FileKind.FILE, name=b"x", size=5, mode=0o644)) + b"123"
    with pytest.raises(opendsec.TransportError):
        await sandbox.files.download("/tree", str(tmp_path))
    server.tree = pack_entry(TreeEntry(kind=FileKind.FILE, name=b"x", size=3, mode=0o644)) + b"123"
    with pytest.raises(opendsec.TransportError):
        await sandbox.files.download("/tree", str(tmp_path))
    server.tree += END
    await sandbox.files.download("/tree", str(tmp_path))
    assert os.listdir(tmp_path) == ["x"]
