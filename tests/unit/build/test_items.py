"""Items, archives, owners, and streams that pass through."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from opendsec.build.context import Context, digest_sources
from opendsec.build.items import Changes, Item, Owner, archive_items, context_items, inline_item, is_archive, stream
from opendsec.build.owners import needs_accounts, resolve_owner
from opendsec.build.relay import Relay
from opendsec.client.tree_format import TreeEntry, pack_entry, unpack_entry
from opendsec.errors import FileError, InvalidSpecError, TransportError, UnsupportedError
from opendsec.model.file import FileKind

PASSWD = "root:x:0:0::/root:/bin/sh\nagent:x:1000:1001::/:/bin/sh\nbad\n"
GROUP = "root:x:0:\nvideo:x:44:agent\n"


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("agent", Owner(uid=1000, gid=1001)),
        ("agent:video", Owner(uid=1000, gid=44)),
        ("55", Owner(uid=55, gid=55)),
        ("55:video", Owner(uid=55, gid=44)),
        ("0:7", Owner(uid=0, gid=7)),
    ],
)
def test_owners(text: str, owner: Owner) -> None:
    assert resolve_owner(text, passwd=PASSWD, group=GROUP, where="line 1") == owner


@pytest.mark.parametrize("text", ["nobody", "agent:none", "4294967295", "agent:", ":video"])
def test_unknown_owners_are_named(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="line 1"):
        resolve_owner(text, passwd=PASSWD, group=GROUP, where="line 1")


def test_numbers_need_no_accounts() -> None:
    assert not needs_accounts("1:2")
    assert needs_accounts("1:video")


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    sources = Context(tmp_path).sources("f")
    _, files = digest_sources(sources)
    items = context_items(sources[0], "f", Changes(), files)
    assert b"before" in b"".join(stream(items))
    for content in ("after!", "longer than before", "short"):
        (tmp_path / "f").write_text(content)
        with pytest.raises(FileError, match="changed"):
            b"".join(stream(items))


def archive(path: Path, members: list[tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.uid, info.mode = kind, link, size, 12, 0o640
    return info


def entries(items: list[Item]) -> dict[bytes, TreeEntry]:
    return {item.entry.name: item.entry for item in items}


def test_archives(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz",
        [
            member("./"),
            member("d/", tarfile.DIRTYPE),
            member("./d/f", size=3),
            member("d/again", tarfile.LNKTYPE, "d/f"),
            member("l", tarfile.SYMTYPE, "d/f"),
        ],
    )
    assert is_archive(path)
    items = archive_items(path, Changes())
    found = entries(items)
    assert sorted(found) == [b"d", b"d/again", b"d/f", b"l"]
    assert (found[b"d/f"].uid, found[b"d/f"].mode, found[b"d/again"].size) == (12, 0o640, 3)
    assert found[b"l"].link == b"d/f"
    assert b"".join(stream(items)).count(b"xxx") == 2
    assert entries(archive_items(path, Changes(owner=Owner(uid=5, gid=6))))[b"d"].uid == 5


@pytest.mark.parametrize(
    "bad", [member("../x"), member("a/../../x"), member("dev", tarfile.CHRTYPE), member("l", tarfile.LNKTYPE, "none")]
)
def test_what_an_archive_may_not_hold(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    with pytest.raises(InvalidSpecError, match=r"a\.tar"):
        archive_items(archive(tmp_path / "a.tar", [bad]), Changes())


@pytest.mark.parametrize("compression", ["w:", "w:gz", "w:xz"])
def test_an_archive_is_unpacked_once_however_many_files_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Literal["w:", "w:gz", "w:xz"]
) -> None:
    path = tmp_path / "many.tar"
    with tarfile.open(path, compression) as made:
        for number in range(50):
            info = tarfile.TarInfo(f"f{number:02}")
            info.size = 3
            made.addfile(info, io.BytesIO(b"%03d" % number))
    items = archive_items(path, Changes(), status=path.stat())
    opened: list[object] = []
    open_one = tarfile.open

    def counted(*arguments: Any, **more: Any) -> tarfile.TarFile:
        opened.append(arguments)
        return open_one(*arguments, **more)

    monkeypatch.setattr(tarfile, "open", counted)
    assert [b"".join(item.content()) for item in items if item.content] == [b"%03d" % number for number in range(50)]
    assert len(opened) == 1


def test_an_archive_that_changed_after_its_digest_was_taken(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", [member("x")])
    status = path.stat()
    items = archive_items(path, Changes(), status=status)
    path.write_bytes(archive(tmp_path / "b.tar", [member("y"), member("x")]).read_bytes())
    with pytest.raises(FileError, match="changed while"):
        b"".join(stream(items))
    with pytest.raises(FileError, match="changed while"):
        archive_items(path, Changes(), status=status)


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    assert not is_archive(tmp_path / "text")
    (tmp_path / "z").write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(UnsupportedError, match="zstd"):
        is_archive(tmp_path / "z")


def test_modes_are_not_for_links() -> None:
    changes = Changes(mode=0o600, owner=Owner(uid=1, gid=2))
    link = changes.applied(TreeEntry(kind=FileKind.SYMLINK, name=b"l", mode=0o777, link=b"x"))
    assert (link.mode, link.uid, link.gid) == (0o777, 1, 2)
    assert inline_item("x", "n", changes).entry.mode == 0o600


def relayed(data: bytes, piece: int, target: str = "to/here") -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), piece):
            yield data[start : start + piece]

    async def main() -> bytes:
        relay = Relay(target, Changes(owner=Owner(uid=9, gid=9)))
        return b"".join([one async for one in relay.run(chunks())])

    return asyncio.run(main())


ATTRIBUTES = ((b"user.a", b"\0x"), (b"security.capability", b"c"))
FILE = TreeEntry(kind=FileKind.FILE, name=b"f", mode=0o4755, size=300, uid=1, gid=1, xattrs=ATTRIBUTES)


@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
def test_a_stream_passes_through(piece: int) -> None:
    directory = TreeEntry(kind=FileKind.DIRECTORY, name=b"d", mode=0o700, uid=1, gid=1)
    data = pack_entry(FILE) + b"c" * 300 + pack_entry(directory) + bytes(4)
    out = relayed(data, piece)
    length = int.from_bytes(out[:4], "little")
    entry = unpack_entry(out[4 : 4 + length])
    assert (entry.name, entry.uid, entry.mode, entry.xattrs) == (b"to/here/f", 9, 0o4755, ATTRIBUTES)
    assert out[4 + length : 304 + length] == b"c" * 300
    rest = out[304 + length :]
    assert int.from_bytes(rest[:4], "little") == len(rest) - 4  # One more entry, and no mark of the end.
    assert unpack_entry(rest[4:]).name == b"to/here/d"


def test_a_stream_that_is_cut_is_an_error() -> None:
    data = pack_entry(FILE) + b"c" * 300 + bytes(4)
    for end in (len(data) - 1, len(data) - 4, 100, 2):
        with pytest.raises(TransportError):
            relayed(data[:end], 64)
