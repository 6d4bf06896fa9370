"""The coding of fields and frames: round trips, and nothing but FieldError for bytes that do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.guest import protocol
from opendsec.guest.base import StartCommand


@given(st.lists(st.tuples(st.integers(1, 60), st.binary(max_size=200))))
def test_fields_round_trip(fields: list[tuple[int, bytes]]) -> None:
    assert list(protocol.iter_fields(protocol.pack_fields(fields))) == fields


@given(st.binary(max_size=64).map(protocol.bytes_to_text))
def test_any_name_survives(name: str) -> None:
    packed = protocol.pack_fields([(protocol.T_NAME, name)])
    assert protocol.text(protocol.unpack_fields(packed), protocol.T_NAME) == name


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_fields(data: bytes) -> None:
    for decode in (
        protocol.decode_exit,
        protocol.decode_stat,
        protocol.decode_event,
        protocol.decode_error,
        lambda d: protocol.decode_command(1, d),
    ):
        try:
            decode(data)
        except protocol.FieldError:
            pass


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [(protocol.T_EXIT_CODE, 0), (protocol.T_SIGNAL, 9)],
        [(protocol.T_EXIT_CODE, 256)],
        [(protocol.T_EXIT_CODE, -1)],
        [(protocol.T_SIGNAL, 65)],
        [(protocol.T_EXIT_CODE, b"\0\0\0\0")],
    ],
)
def test_an_exit_that_says_nothing_true_is_refused(fields: list[tuple[int, protocol.FieldValue]]) -> None:
    totals: list[tuple[int, protocol.FieldValue]] = [(protocol.T_STDOUT_TOTAL, 0), (protocol.T_STDERR_TOTAL, 0)]
    with pytest.raises(protocol.FieldError):
        protocol.decode_exit(protocol.pack_fields(fields + totals))


def test_an_exit_keeps_its_facts() -> None:
    fields: list[tuple[int, protocol.FieldValue]] = [
        (protocol.T_SIGNAL, 15),
        (protocol.T_REASON, 1),
        (protocol.T_STDOUT_TOTAL, 7),
        (protocol.T_STDERR_TOTAL, 8),
        (protocol.T_FLAGS, 2),
    ]
    event = protocol.decode_exit(protocol.pack_fields(fields))
    assert (event.exit_code, event.signal, event.reason, event.stdout_total, event.stderr_total) == (None, 15, 1, 7, 8)
    assert (event.session_started, event.session_gone) == (False, True)


def test_integers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        protocol.pack_fields([(protocol.T_SIZE, 1 << 64)])


def test_start_says_everything() -> None:
    command = StartCommand(
        argv=("a", "b c"),
        env={"X": "1=2"},
        cwd="/w",
        user="u",
        stdin=True,
        pty=(3, 4),
        timeout_ms=5,
        grace_ms=6,
        session="s",
    )
    fields = list(protocol.iter_fields(protocol.encode_start(command)))
    assert [data for tag, data in fields if tag == protocol.T_ARGV] == [b"a", b"b c"]
    assert dict(fields)[protocol.T_ENV] == b"X=1=2"
    assert protocol.unsigned(dict(fields), protocol.T_FLAGS) == protocol.START_STDIN | protocol.START_PTY
    assert protocol.T_SCRIPT not in dict(fields)


@pytest.mark.parametrize("kind", ["", "door", "FILE", "file\0", "\udcff", "x" * 10_000])
def test_a_kind_nobody_knows_is_refused(kind: str) -> None:
    tags = (protocol.T_MODE, protocol.T_SIZE, protocol.T_MTIME_NS, protocol.T_UID, protocol.T_GID)
    numbers: list[tuple[int, protocol.FieldValue]] = [(tag, 0) for tag in tags]
    assert protocol.decode_stat(protocol.pack_fields([(protocol.T_KIND, "fifo"), *numbers])).kind == "fifo"
    with pytest.raises(protocol.FieldError, match=r"field 40: .* is not of") as told:
        protocol.decode_stat(protocol.pack_fields([(protocol.T_KIND, kind), *numbers]))
    assert len(str(told.value)) < 250
    assert protocol.decode_event(protocol.pack_fields([(protocol.T_EVENT, "moved_to"), (protocol.T_PATH, "/a")])) == (
        "moved_to",
        "/a",
    )
    with pytest.raises(protocol.FieldError):
        protocol.decode_event(protocol.pack_fields([(protocol.T_EVENT, kind), (protocol.T_PATH, "/a")]))
