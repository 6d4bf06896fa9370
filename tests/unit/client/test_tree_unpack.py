"""Trees of a hostile sandbox: whatever the stream says, nothing appears outside the target and nothing half made
stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.client.progress import Meter
from opendsec.client.tree_format import END, TreeEntry, pack_entry
from opendsec.client.tree_pack import pack_tree
from opendsec.client.tree_unpack import DownloadedTree, TreeLimits, TreeUnpacker
from opendsec.errors import FileError, OpenDSecError, ProtocolError
from opendsec.model.file import FileKind


def file(name: bytes, content: bytes = b"x", mode: int = 0o644) -> bytes:
    return pack_entry(TreeEntry(kind=FileKind.FILE, name=name, size=len(content), mode=mode)) + content


def directory(name: bytes, mode: int = 0o755) -> bytes:
    return pack_entry(TreeEntry(kind=FileKind.DIRECTORY, name=name, mode=mode))


def link(name: bytes, to: bytes) -> bytes:
    return pack_entry(TreeEntry(kind=FileKind.SYMLINK, name=name, link=to))


def unpack(target: Path, stream: bytes, *, piece: int = 1 << 20, limits: TreeLimits | None = None) -> DownloadedTree:
    with TreeUnpacker(target, meter=Meter(), limits=limits) as unpacker:
        for start in range(0, len(stream), piece):
            unpacker.feed(stream[start : start + piece])
        return unpacker.finish()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize(
    "name", [b"", b"/etc/x", b"..", b"../x", b"a/../x", b"a//x", b"./x", b"a/", b"a\0b", b"a/" * 300 + b"x"]
)
def test_bad_names_are_refused(target: Path, name: bytes) -> None:
    for entry in (file(name), directory(name), link(name, b"y")):
        with pytest.raises(ProtocolError):
            unpack(target, directory(b"a") + entry + END)
    assert os.listdir(target.parent / "outside") == []
    assert set(os.listdir(target)) <= {"a"}


@pytest.mark.parametrize("kind", [FileKind.FIFO, FileKind.SOCKET, FileKind.CHAR_DEVICE, FileKind.BLOCK_DEVICE])
def test_other_kinds_are_refused(target: Path, kind: FileKind) -> None:
    with pytest.raises(ProtocolError):
        unpack(target, pack_entry(TreeEntry(kind=kind, name=b"x")) + END)


def test_no_path_leads_through_a_link(target: Path) -> None:
    (target / "planted").symlink_to(target.parent / "outside")
    for stream in (file(b"planted/x"), directory(b"planted/d"), link(b"planted/l", b"x"), directory(b"planted")):
        with pytest.raises(FileError) as raised:
            unpack(target, stream + END)
        assert raised.value.detail["errno"] in {"ELOOP", "ENOTDIR"}
    with pytest.raises(FileError):
        unpack(target, directory(b"sub") + link(b"sub/up", b"../sub") + file(b"sub/up/x") + END)
    assert os.listdir(target.parent / "outside") == []


def test_a_file_replaces_a_link_and_never_writes_through_it(target: Path) -> None:
    victim = target.parent / "outside" / "victim"
    victim.write_text("safe")
    (target / "x").symlink_to(victim)
    unpack(target, file(b"x", b"new") + END)
    assert victim.read_text() == "safe"
    assert not (target / "x").is_symlink()


@pytest.mark.parametrize("to", [b"/etc/passwd", b"../x", b"a/../../x", b"a/../x", b"", b".//../../x"])
def test_links_that_lead_out_are_left_out_and_named(target: Path, to: bytes) -> None:
    assert unpack(target, link(b"l", to) + END).skipped_links == ("l",)
    assert os.listdir(target) == []


@pytest.mark.parametrize("to", [b"../x", b"./y", b"../sub/y", b"y z", b"../../out\xff"])
def test_links_inside_are_made(target: Path, to: bytes) -> None:
    done = unpack(target, directory(b"sub") + directory(b"sub/b") + link(b"sub/b/l", to) + END)
    assert done.skipped_links == ()
    assert os.readlink(os.fsencode(target / "sub" / "b" / "l")) == to


def test_set_id_bits_are_dropped(target: Path) -> None:
    unpack(target, directory(b"d", 0o7777) + file(b"d/x", mode=0o6755) + END)
    assert (target / "d" / "x").stat().st_mode & 0o7777 == 0o755
    assert (target / "d").stat().st_mode & 0o7777 == 0o777


def test_directories_without_write_permission_get_their_files(target: Path) -> None:
    unpack(target, directory(b"d", 0o500) + file(b"d/x") + END)
    assert (target / "d" / "x").read_bytes() == b"x"
    assert (target / "d").stat().st_mode & 0o777 == 0o500


def test_limits(target: Path) -> None:
    with pytest.raises(FileError, match="bytes"):
        unpack(target, file(b"a", b"12345") + file(b"b", b"678") + END, limits=TreeLimits(max_bytes=7))
    with pytest.raises(FileError, match="entries"):
        unpack(target, directory(b"c") + directory(b"d") + END, limits=TreeLimits(max_entries=1))
    huge = pack_entry(TreeEntry(kind=FileKind.FILE, name=b"h", size=2**63))
    with pytest.raises(FileError):
        unpack(target, huge + END)


def test_a_path_that_is_too_long_is_named(target: Path) -> None:
    with pytest.raises(FileError, match="65537") as raised:
        unpack(target, (65_537).to_bytes(4, "little"))
    assert raised.value.detail["errno"] == "ENAMETOOLONG"


def test_half_a_file_is_not_left(target: Path) -> None:
    with TreeUnpacker(target, meter=Meter()) as unpacker:
        unpacker.feed(file(b"x", b"0123456789")[:-5])
        assert len(os.listdir(target)) == 1
    assert os.listdir(target) == []


def test_directory_in_the_way_of_a_file(target: Path) -> None:
    (target / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        unpack(target, file(b"x") + END)
    assert os.listdir(target) == ["x"]


def test_bytes_after_the_end_are_refused(target: Path) -> None:
    with pytest.raises(ProtocolError):
        unpack(target, file(b"x") + END + b"more")


@given(stream=st.binary(max_size=200), piece=st.integers(1, 50))
def test_noise_is_a_named_error(tmp_path_factory: pytest.TempPathFactory, stream: bytes, piece: int) -> None:
    target = tmp_path_factory.mktemp("noise")
    try:
        unpack(target, stream, piece=piece)
    except (OpenDSecError, OSError):
        pass


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_pack_and_unpack_are_inverse(tmp_path: Path, piece: int) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "d" / "e").mkdir(parents=True)
    back.mkdir()
    (source / "d" / "f").write_bytes(b"content" * 100)
    (source / "d" / "e" / "l").symlink_to("../f")
    stream = b"".join(pack_tree(source, Meter()))
    done = unpack(back, stream, piece=piece)
    assert done == DownloadedTree(files=1, bytes=700)
    assert b"".join(pack_tree(back, Meter())) == stream


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * 2_000_000)
    pieces = pack_tree(tmp_path, Meter())
    next(pieces)
    os.truncate(big, 600_000)
    with pytest.raises(FileError, match="changed"):
        list(pieces)
