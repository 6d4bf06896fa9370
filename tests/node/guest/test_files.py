"""File operations: names of every kind, atomic writes, honest errors, the user's own rights."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.guest.agents import Shell, until

from opendsec.client.tree_format import TreeEntry, pack_entry, unpack_entry
from opendsec.guest.base import GuestError
from opendsec.guest.channel import Channel
from opendsec.model.file import FileKind

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

NAMES = [
    "plain", "with space", "new\nline", "emoji 😀", "%2F", "-rf", "quote'\"`$(x)", "x" * 255, "\udcff\udcfe not utf-8",
    ".hidden", "tab\t", "back\\slash",
]  # fmt: skip


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def content(channel: Channel, path: str, **more: object) -> bytes:
    _, chunks = await channel.open_read(path, **more)  # type: ignore[arg-type]
    return b"".join([chunk async for chunk in chunks])


@pytest.fixture
def channel(shell: Shell) -> Channel:
    return shell.channel


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory inside the sandbox; its own mount namespace shares the file system with us."""
    folder = tmp_path / "place"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    return folder


async def test_names_of_every_kind(channel: Channel, place: Path) -> None:
    for name in NAMES:
        path = f"{place}/{name}"
        made = await channel.write_file(path, pieces(name.encode("utf-8", "surrogateescape")))
        assert (made.path, made.kind) == (path, "file")
        assert await content(channel, path) == name.encode("utf-8", "surrogateescape")
    assert {entry.path for entry in await channel.list_dir(str(place))} == set(NAMES)
    for name in NAMES:
        await channel.move(f"{place}/{name}", f"{place}/target")
        await channel.remove(f"{place}/target")
    assert await channel.list_dir(str(place)) == []


async def test_stat_is_lstat(channel: Channel, place: Path) -> None:
    (place / "file").write_bytes(b"12345")
    os.utime(place / "file", ns=(1, -5_000_000_001))
    os.chown(place / "file", 5, 6)
    (place / "file").chmod(0o4750)
    found = await channel.stat(f"{place}/file")
    assert (found.kind, found.mode, found.size, found.mtime_ns, found.uid, found.gid) == (
        "file",
        0o4750,
        5,
        -5_000_000_001,
        5,
        6,
    )
    (place / "link").symlink_to("/no/where")
    assert (await channel.stat(f"{place}/link")).link == "/no/where"
    os.mkfifo(place / "fifo")
    kinds = {entry.path: entry.kind for entry in await channel.list_dir(str(place))}
    assert kinds == {"file": "file", "link": "symlink", "fifo": "fifo"}
    assert (await channel.stat("/dev/null")).kind == "char_device"


async def test_a_directory_of_many_entries(channel: Channel, place: Path) -> None:
    names = {f"{'n' * 200}{i}" for i in range(3000)}
    for name in names:
        (place / name).touch()
    assert {entry.path for entry in await channel.list_dir(str(place))} == names


async def test_large_contents_both_ways(channel: Channel, place: Path) -> None:
    data = os.urandom(1 << 20) * 24 + b"tail"
    step = 300_000
    parts = [data[i : i + step] for i in range(0, len(data), step)]
    assert (await channel.write_file(f"{place}/big", pieces(*parts))).size == len(data)
    assert await content(channel, f"{place}/big") == data
    assert await content(channel, f"{place}/big", offset=1_000_001, length=70_001) == data[1_000_001:1_070_002]
    assert await content(channel, f"{place}/big", offset=len(data) + 5) == b""


async def test_writing_replaces_at_once_and_keeps_mode_and_owner(channel: Channel, place: Path) -> None:
    target = place / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    os.chown(target, 12, 34)
    before = target.open("rb")
    await channel.write_file(str(target), pieces(b"new"))
    info = target.stat()
    assert (info.st_mode & 0o7777, info.st_uid, info.st_gid) == (0o640, 12, 34)
    assert (target.read_bytes(), before.read()) == (b"new", b"old")
    before.close()
    await channel.write_file(str(target), pieces(), mode=0o600)
    assert (target.stat().st_mode & 0o7777, target.read_bytes()) == (0o600, b"")
    await channel.write_file(f"{place}/fresh", pieces(b"x"))
    assert (place / "fresh").stat().st_mode & 0o7777 == 0o644
    await channel.write_file(f"{place}/a/b/c", pieces(b"x"), parents=True)
    assert (place / "a/b/c").read_bytes() == b"x"


async def test_writing_through_a_link_replaces_what_it_names(channel: Channel, place: Path) -> None:
    (place / "dir").mkdir()
    (place / "dir/real").write_bytes(b"old")
    (place / "link").symlink_to("dir/real")
    await channel.write_file(f"{place}/link", pieces(b"new"))
    assert (place / "link").is_symlink()
    assert (place / "dir/real").read_bytes() == b"new"
    (place / "loop").symlink_to("loop")
    with pytest.raises(GuestError) as caught:
        await channel.write_file(f"{place}/loop", pieces(b""))
    assert caught.value.errno == 40


async def test_a_cut_upload_leaves_the_old_file_and_nothing_else(channel: Channel, place: Path) -> None:
    (place / "target").write_bytes(b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield b"half" * 100_000
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        await channel.write_file(f"{place}/target", broken())
    await asyncio.to_thread(until, lambda: os.listdir(place) == ["target"], "no temporary file")
    assert (place / "target").read_bytes() == b"old"


async def test_a_lost_connection_leaves_the_old_file(shell: Shell, place: Path) -> None:
    (place / "target").write_bytes(b"old")

    async def slow() -> AsyncIterator[bytes]:
        yield b"half" * 50_000
        await asyncio.to_thread(until, lambda: len(os.listdir(place)) == 2, "a temporary file")
        await shell.channel.aclose()
        yield b"more"

    with pytest.raises(Exception, match="closed"):
        await shell.channel.write_file(f"{place}/target", slow())
    await asyncio.to_thread(until, lambda: os.listdir(place) == ["target"], "no temporary file")


async def test_errors_name_the_path_and_the_number(channel: Channel, place: Path) -> None:
    (place / "file").touch()
    (place / "dir/sub").mkdir(parents=True)
    os.mkfifo(place / "fifo")
    for attempt, number in [
        (channel.stat(f"{place}/none"), 2),
        (channel.open_read(f"{place}/dir"), 21),
        (channel.open_read(f"{place}/fifo"), 22),
        (channel.list_dir(f"{place}/file"), 20),
        (channel.mkdir(f"{place}/dir"), 17),
        (channel.mkdir(f"{place}/none/x"), 2),
        (channel.mkdir(f"{place}/file/x", parents=True), 20),
        (channel.remove(f"{place}/dir"), 39),
        (channel.remove(f"{place}/none", recursive=True), 2),
        (channel.write_file(f"{place}/dir", pieces(b"")), 21),
        (channel.write_file(f"{place}/fifo", pieces(b"")), 22),
        (channel.write_file(f"{place}/none/x", pieces(b"data" * 500_000)), 2),
        (channel.move(f"{place}/file", f"{place}/fifo", overwrite=False), 17),
        (channel.stat("/" + "x" * 256), 36),
        (channel.stat("/x" * 5000), 36),
        (channel.stat("a\0b"), 22),
        (channel.stat(""), 2),
        (channel.unpack(f"{place}/file", pieces(b"\0\0\0\0")), 17),
    ]:
        with pytest.raises(GuestError) as caught:
            await attempt
        assert (caught.value.code, caught.value.errno) == ("file", number), caught.value


async def test_directories(channel: Channel, place: Path) -> None:
    await channel.mkdir(f"{place}/a/b/c", parents=True, mode=0o1777)
    await channel.mkdir(f"{place}/a/b/c", parents=True)
    assert (place / "a/b/c").stat().st_mode & 0o7777 == 0o1777
    (place / "a/link").symlink_to("/etc")
    (place / "a/b/file").touch()
    await channel.remove(f"{place}/a", recursive=True)
    assert os.listdir(place) == []
    assert Path("/etc/passwd").exists()
    await channel.mkdir("/tmp", parents=True)
    await channel.mkdir(f"{place}/m", mode=0)
    await channel.chmod(f"{place}/m", 0o2711)
    assert (place / "m").stat().st_mode & 0o7777 == 0o2711


async def test_operations_have_the_users_rights(channel: Channel, place: Path) -> None:
    (place / "secret").write_bytes(b"x")
    (place / "secret").chmod(0o600)
    for attempt in (
        channel.open_read(f"{place}/secret", user="nobody"),
        channel.write_file(f"{place}/secret", pieces(b"y"), user="nobody"),
        channel.list_dir("/root", user="65534:65534"),
        channel.remove("/etc/passwd", user="nobody"),
    ):
        with pytest.raises(GuestError) as caught:
            await attempt
        assert caught.value.errno == 13
    await channel.write_file(f"{place}/theirs", pieces(b"z"), user="12:34")
    assert ((place / "theirs").stat().st_uid, (place / "theirs").stat().st_gid) == (12, 34)
    with pytest.raises(GuestError) as caught:
        await channel.stat("/", user="no such user")
    assert caught.value.code == "no_user"


async def test_a_full_disk_is_named(make_agent: object, connect: object) -> None:
    agent = make_agent(setup="mount -t tmpfs -o size=1m none /mnt")  # type: ignore[operator]
    channel = await connect(agent)  # type: ignore[operator]
    with pytest.raises(GuestError) as caught:
        await channel.write_file("/mnt/x", pieces(*[bytes(1 << 20)] * 8))
    assert caught.value.errno == 28
    assert await channel.list_dir("/mnt") == []


async def test_a_reader_that_stops_costs_nothing_and_abandoning_ends_it(channel: Channel, place: Path) -> None:
    (place / "big").write_bytes(bytes(8 << 20))
    readers = [await channel.open_read(f"{place}/big") for _ in range(40)]
    await channel.ping()
    for _, chunks in readers:
        assert await anext(aiter(chunks))
        await chunks.aclose()  # type: ignore[attr-defined]
    assert len(await content(channel, f"{place}/big")) == 8 << 20


async def test_too_many_at_once_are_refused_by_name(channel: Channel, place: Path) -> None:
    (place / "big").write_bytes(bytes(1 << 20))
    readers = [await channel.open_read(f"{place}/big") for _ in range(256)]
    with pytest.raises(GuestError) as caught:
        await channel.stat("/")
    assert caught.value.code == "limit"
    for _, chunks in readers:
        await chunks.aclose()  # type: ignore[attr-defined]
    assert (await channel.stat("/")).kind == "directory"


async def test_a_file_is_there_for_the_next_command(shell: Shell, place: Path) -> None:
    for i in range(20):
        await shell.channel.write_file(f"{place}/f", pieces(b"%d" % i))
        assert (await shell.run(f"cat {place}/f")).stdout == b"%d" % i


async def test_watching(channel: Channel, place: Path) -> None:
    (place / "sub/deep").mkdir(parents=True)
    events = channel.watch(str(place), recursive=True)
    seen: list[tuple[str, str]] = []

    async def wait_for(kind: str, name: str) -> None:
        async with asyncio.timeout(30):
            while (kind, f"{place}/{name}") not in seen:
                seen.append(await anext(events))

    async def begin() -> None:
        """The watch is there once something was seen."""
        for number in itertools.count():
            (place / f"{number}").touch()
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        beginning = group.create_task(begin())
        seen.append(await anext(events))
        beginning.cancel()
    (place / "sub/deep/a\nb").write_bytes(b"x")
    await wait_for("modified", "sub/deep/a\nb")
    assert ("created", f"{place}/sub/deep/a\nb") in seen
    (place / "new/er").mkdir(parents=True)
    (place / "new/er/file").touch()
    await wait_for("created", "new/er/file")
    (place / "new").rename(place / "moved")
    await wait_for("moved_to", "moved")
    assert ("moved_from", f"{place}/new") in seen
    (place / "moved/er/file2").touch()
    await wait_for("created", "moved/er/file2")
    (place / "moved/er/file2").unlink()
    await wait_for("removed", "moved/er/file2")
    await events.aclose()  # type: ignore[attr-defined]
    with pytest.raises(GuestError) as caught:
        await anext(channel.watch(f"{place}/none"))
    assert caught.value.errno == 2


async def tree(channel: Channel, path: Path) -> bytes:
    return b"".join([chunk async for chunk in channel.pack(str(path))])


def facts(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        body: object = os.readlink(path) if stat.S_ISLNK(info.st_mode) else path.read_bytes() if path.is_file() else ""
        found[str(path.relative_to(root))] = (stat.filemode(info.st_mode), info.st_mtime_ns, body)
    return found


async def test_trees_go_there_and_back(channel: Channel, place: Path) -> None:
    source = place / "source"
    (source / "read only/deep").mkdir(parents=True)
    for name in NAMES:
        (source / "read only" / name).write_text(name, errors="surrogateescape")
    (source / "read only/deep/big").write_bytes(os.urandom(3_000_000))
    (source / "empty").touch(mode=0o4755)
    (source / "link").symlink_to("read only/deep")
    (source / "dangling").symlink_to("/no/where")
    os.mkfifo(source / "fifo")
    (source / "read only").chmod(0o555)
    os.utime(source / "read only", ns=(1, 1_000_000_007))
    stream = await tree(channel, source)
    assert await channel.unpack(f"{place}/made/target", pieces(stream)) == (
        len(NAMES) + 2,
        3_000_000 + sum(len(n.encode("utf-8", "surrogateescape")) for n in NAMES),
    )
    (source / "fifo").unlink()
    assert facts(place / "made/target") == facts(source)
    assert await tree(channel, place / "made/target") == await tree(channel, place / "made/target")
    for cut in (len(stream) - 1, len(stream) // 2, 7):
        with pytest.raises(GuestError) as caught:
            await channel.unpack(f"{place}/cut", pieces(stream[:cut]))
        assert caught.value.errno == 32


async def test_unpacking_replaces_files_and_links_but_no_directory(channel: Channel, place: Path) -> None:
    source, target = place / "source", place / "target"
    source.mkdir()
    target.mkdir()
    (source / "a").write_bytes(b"new")
    (source / "b").write_bytes(b"new")
    (source / "d").mkdir()
    (target / "a").write_bytes(b"old")
    (place / "outside").write_bytes(b"safe")
    (target / "b").symlink_to(place / "outside")
    (target / "d").symlink_to("/etc")
    await channel.unpack(str(target), pieces(await tree(channel, source)))
    assert (target / "b").read_bytes() == b"new"
    assert (place / "outside").read_bytes() == b"safe"
    assert not (target / "d").is_symlink()
    (target / "a").unlink()
    (target / "a").mkdir()
    with pytest.raises(GuestError) as caught:
        await channel.unpack(str(target), pieces(await tree(channel, source)))
    assert caught.value.errno == 21


def entry(kind: str, name: str, content: bytes = b"", link: str = "", size: int | None = None) -> bytes:
    from opendsec.guest import protocol as p

    fields = p.pack_fields(
        [
            (p.T_KIND, kind),
            (p.T_NAME, name),
            (p.T_MODE, 0o644),
            (p.T_MTIME_NS, 0),
            (p.T_SIZE, len(content) if size is None else size),
            (p.T_LINK, link),
        ]
    )
    return len(fields).to_bytes(4, "little") + fields + content


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ".", "..", "a//b", "a/", "", "./a", "a\0b"])
async def test_unpacking_refuses_names_that_lead_away(channel: Channel, place: Path, name: str) -> None:
    with pytest.raises(GuestError) as caught:
        await channel.unpack(f"{place}/in", pieces(entry("file", name, b"bad") + bytes(4)))
    assert caught.value.errno in {22, 74}
    assert list(place.rglob("x")) == []


async def test_unpacking_never_follows_a_link_on_the_way(channel: Channel, place: Path) -> None:
    (place / "outside").mkdir()
    stream = entry("symlink", "way", link=str(place / "outside")) + entry("file", "way/x", b"bad") + bytes(4)
    with pytest.raises(GuestError) as caught:
        await channel.unpack(f"{place}/in", pieces(stream))
    assert caught.value.errno == 40
    assert os.listdir(place / "outside") == []
    for bad in (entry("fifo", "f"), entry("char_device", "c"), b"\xff\xff\xff\x7f", b"\x08\0\0\0garbage!"):
        with pytest.raises(GuestError):
            await channel.unpack(f"{place}/in", pieces(bad + bytes(4)))


async def test_owners_and_attributes_go_both_ways(channel: Channel, place: Path) -> None:
    source = place / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"f")
    (source / "link").symlink_to("d")
    os.setxattr(source / "d" / "f", "user.note", b"\0n\xff")
    os.setxattr(source / "d", "user.dir", b"")
    for path in (source / "d" / "f", source / "d", source / "link"):
        os.chown(path, 70_001, 70_002, follow_symlinks=False)
    (source / "d" / "f").chmod(0o6751)
    (source / "d").chmod(0o3750)
    await channel.unpack(f"{place}/target", pieces(await tree(channel, source)))
    for name in ("d/f", "d", "link"):
        before, after = os.lstat(source / name), os.lstat(place / "target" / name)
        assert (before.st_uid, before.st_gid, before.st_mode) == (after.st_uid, after.st_gid, after.st_mode)
    assert os.getxattr(place / "target" / "d" / "f", "user.note") == b"\0n\xff"
    assert os.listxattr(place / "target" / "d") == ["user.dir"]


async def test_one_file_is_a_stream_of_one_entry_without_a_name(channel: Channel, place: Path) -> None:
    (place / "file").write_bytes(b"content")
    (place / "link").symlink_to("file")
    stream = await tree(channel, place / "link")
    head = int.from_bytes(stream[:4], "little")
    assert stream[4 + head :] == b"content" + bytes(4)
    assert unpack_entry(stream[4 : 4 + head]).name == b""


async def test_only_root_gives_files_away(channel: Channel, place: Path) -> None:
    named = pack_entry(TreeEntry(kind=FileKind.FILE, name=b"x", mode=0o644, uid=0, gid=0)) + bytes(4)
    with pytest.raises(GuestError) as raised:
        await channel.unpack(str(place), pieces(named), user="70003:70003")
    assert raised.value.errno == errno.EPERM
