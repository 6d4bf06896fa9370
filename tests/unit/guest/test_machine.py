"""Fields of machines, and the raw tree stream in any cut and with any lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.guest import protocol as p
from opendsec.guest.machine import ExtraDisk, GuestSetup, Identity, RootLayer
from opendsec.guest.machine_fields import decode_usage, encode_identity, encode_setup
from opendsec.guest.protocol import FieldError, FieldValue, iter_fields, pack_fields
from opendsec.guest.raw_tree import MAX_ENTRY, RawContentEnd, RawEntry, RawEvent, RawPiece, RawTreeReader


def entry(kind: str, name: bytes, *more: tuple[int, FieldValue], size: int = 0) -> bytes:
    fields: list[tuple[int, FieldValue]] = [(p.T_KIND, kind), (p.T_NAME, name), (p.T_MODE, 0o644), (p.T_MTIME_NS, -5)]
    data = pack_fields([*fields, (p.T_SIZE, size), (p.T_UID, 1), (p.T_GID, 2), *more])
    return len(data).to_bytes(4, "little") + data


def piece(offset: int, data: bytes) -> bytes:
    return offset.to_bytes(8, "little") + len(data).to_bytes(4, "little") + data


END = bytes(4)
STREAM = b"".join(
    (
        entry("directory", b""),
        entry("file", b"a", (p.T_XATTR, b"user.x\0value"), size=100),
        piece(3, b"text"),
        piece(50, b"more"),
        piece(0, b""),
        entry("symlink", b"l", (p.T_LINK, b"\xff/there")),
        entry("char_device", b"w", (p.T_DEVICE, 7 << 32 | 300)),
        entry("file", b"h", (p.T_HARD_LINK, b"a")),
        END,
    )
)


def read(stream: bytes, cuts: list[int]) -> list[RawEvent]:
    reader, events, at = RawTreeReader(), [], 0
    for cut in [*cuts, len(stream)]:
        events += list(reader.feed(stream[at:cut]))
        at = cut
    assert reader.finished
    return events


@given(st.lists(st.integers(0, len(STREAM)), max_size=40).map(sorted))
@settings(max_examples=200)
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    root, file, one, two, end, link, device, hard = read(STREAM, cuts)
    assert isinstance(root, RawEntry)
    assert root.name == b""
    assert isinstance(file, RawEntry)
    assert (file.xattrs, file.mtime_ns, file.uid) == (((b"user.x", b"value"),), -5, 1)
    assert (one, two, end) == (RawPiece(3, b"text"), RawPiece(50, b"more"), RawContentEnd())
    assert isinstance(link, RawEntry)
    assert link.link == b"\xff/there"
    assert isinstance(device, RawEntry)
    assert device.device == (7, 300)
    assert isinstance(hard, RawEntry)
    assert hard.hard_link == b"a"


@pytest.mark.parametrize(
    "stream",
    [
        entry("directory", b"") + END + b"x",
        (MAX_ENTRY + 1).to_bytes(4, "little"),
        entry("nothing", b"a"),
        entry("file", b"a\0b"),
        entry("symlink", b"a"),
        entry("file", b"a", (p.T_LINK, b"there")),
        entry("file", b"a", (p.T_XATTR, b"no value")),
        entry("file", b"a", (p.T_UID, (1 << 32) - 1)),
        entry("file", b"a", (p.T_MODE, 0o10000)),
        entry("file", b"a", size=10) + piece(8, b"abc"),
        entry("file", b"a", size=10) + piece(5, b"a") + piece(5, b"a"),
        entry("file", b"a", size=1 << 63) + piece(0, b"a" * 65537),
        (8).to_bytes(4, "little") + b"\1" * 8,
    ],
    ids=range(13),
)
def test_what_cannot_be_is_refused(stream: bytes) -> None:
    with pytest.raises(FieldError):
        list(RawTreeReader().feed(stream))


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_are_events_or_refused(stream: bytes) -> None:
    try:
        list(RawTreeReader().feed(stream))
    except FieldError:
        return


def test_setup_and_identity_say_everything() -> None:
    setup = GuestSetup(
        layers=(RootLayer(meta="m0", data="d0"), RootLayer(meta="part@x")),
        writable="rw",
        disks=(ExtraDisk(drive="d", mount_point="/data"),),
        identity=Identity(machine_id="ab", address="10.0.0.2/30", gateway="10.0.0.1", resolvers=("1.1.1.1", "9.9.9.9")),
        pids_limit=7,
    )
    fields = list(iter_fields(encode_setup(setup, clock_ns=123, entropy=b"seed")))
    assert [data for tag, data in fields if tag == p.T_LAYER] == [b"m0\0d0", b"part@x"]
    assert [data for tag, data in fields if tag == p.T_RESOLVER] == [b"1.1.1.1", b"9.9.9.9"]
    assert dict(fields)[p.T_DISK] == b"d\0/data"
    assert dict(fields)[p.T_ENTROPY] == b"seed"
    assert dict(fields)[p.T_CLOCK_NS] == (123).to_bytes(8, "little")
    assert encode_identity(setup.identity, clock_ns=123, entropy=b"seed") in encode_setup(
        setup, clock_ns=123, entropy=b"seed"
    )


def test_usage_is_decoded_or_refused() -> None:
    tags = (p.T_OOM_KILLS, p.T_PIDS_DENIED, p.T_FLAGS, p.T_MEMORY, p.T_CPU_US)
    usage = decode_usage(pack_fields([(tag, number) for number, tag in enumerate(tags)]))
    assert (usage.oom_kills, usage.pids_denied, usage.disk_full, usage.memory_bytes, usage.cpu_us) == (
        0,
        1,
        False,
        3,
        4,
    )
    with pytest.raises(FieldError):
        decode_usage(pack_fields([(p.T_OOM_KILLS, 1)]))
