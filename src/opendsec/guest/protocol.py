"""The guest protocol's numbers and the coding of its fields (docs/reference/guest-protocol.md).

Pure: bytes in, values out.

Whatever a guest sends is hostile until checked: every decoder raises `FieldError` for bytes that do not fit and never
reads beyond them. Text is UTF-8 with `surrogateescape`, so any file name survives the way out and back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

from opendsec.guest.base import Exit, GuestError, GuestStat, KnownCommand, StartCommand

VERSION: Final = 1
WINDOW_BYTES: Final = 256 * 1024
MAX_FROM_GUEST: Final = 256 * 1024
MAX_TO_GUEST: Final = 4 * 1024 * 1024
FIRST_CALL_ID: Final = 1 << 31
"""Ids below belong to commands, from here on to calls (files, dials, sessions)."""

HELLO: Final = 1
PING: Final = 2
PONG: Final = 3
START: Final = 10
STARTED: Final = 11
OUT: Final = 12
ACK: Final = 13
STDIN: Final = 14
STDIN_ACK: Final = 15
EXIT: Final = 16
ATTACH: Final = 17
KILL: Final = 18
SIGNAL: Final = 19
RESIZE: Final = 20
RELEASE: Final = 21
LIST: Final = 22
COMMAND: Final = 23
FS: Final = 30
OK: Final = 31
DATA: Final = 32
END: Final = 33
CREDIT: Final = 34
CANCEL: Final = 35
DIAL: Final = 36
SESSION_END: Final = 40
SHUTDOWN: Final = 41
SETUP: Final = 42
RENEW: Final = 43
USAGE: Final = 44
ERROR: Final = 50

T_VERSION: Final = 1
T_AGENT: Final = 2
T_BOOT_ID: Final = 3
T_CAPS: Final = 4
T_FLAGS: Final = 5
T_PID: Final = 6
T_SCRIPT: Final = 7
T_ARGV: Final = 8
T_ENV: Final = 9
T_CWD: Final = 10
T_USER: Final = 11
T_ROWS: Final = 12
T_COLS: Final = 13
T_TIMEOUT_MS: Final = 14
T_GRACE_MS: Final = 15
T_SESSION: Final = 16
T_EXIT_CODE: Final = 17
T_SIGNAL: Final = 18
T_REASON: Final = 19
T_STDOUT_TOTAL: Final = 20
T_STDERR_TOTAL: Final = 21
T_DURATION_NS: Final = 22
T_UTIME_US: Final = 23
T_STIME_US: Final = 24
T_MAXRSS_KB: Final = 25
T_STDOUT_BASE: Final = 26
T_STDERR_BASE: Final = 27
T_OP: Final = 30
T_PATH: Final = 31
T_TARGET: Final = 32
T_MODE: Final = 33
T_OFFSET: Final = 34
T_LENGTH: Final = 35
T_SIZE: Final = 36
T_MTIME_NS: Final = 37
T_UID: Final = 38
T_GID: Final = 39
T_KIND: Final = 40
T_LINK: Final = 41
T_NAME: Final = 42
T_COUNT: Final = 43
T_HOST: Final = 44
T_PORT: Final = 45
T_EVENT: Final = 46
T_XATTR: Final = 47
T_DEVICE: Final = 48
T_HARD_LINK: Final = 49
T_CODE: Final = 50
T_ERRNO: Final = 51
T_MESSAGE: Final = 52
T_LAYER: Final = 60
T_WRITABLE: Final = 61
T_DISK: Final = 62
T_PIDS_LIMIT: Final = 63
T_CLOCK_NS: Final = 64
T_ENTROPY: Final = 65
T_HOST_NAME: Final = 66
T_MACHINE_ID: Final = 67
T_GENERATION: Final = 68
T_MAC: Final = 69
T_ADDRESS: Final = 70
T_GATEWAY: Final = 71
T_RESOLVER: Final = 72
T_OOM_KILLS: Final = 73
T_PIDS_DENIED: Final = 74
T_MEMORY: Final = 75
T_CPU_US: Final = 76

START_STDIN: Final = 1
START_PTY: Final = 2
STARTED_KNOWN: Final = 1
COMMAND_ENDED: Final = 1
EXIT_SESSION_STARTED: Final = 1
EXIT_SESSION_GONE: Final = 2
RENEW_IS_NEW: Final = 1
USAGE_DISK_FULL: Final = 1

_FIELD = struct.Struct("<HHI")
_INTEGER_FIELD = struct.Struct("<HHIQ")
_U64 = struct.Struct("<Q")
_U64_MAX = (1 << 64) - 1
FILE_KINDS: Final = frozenset({"file", "directory", "symlink", "fifo", "socket", "char_device", "block_device"})
EVENT_KINDS: Final = frozenset({"created", "modified", "removed", "moved_from", "moved_to", "overflow"})

FieldValue = bytes | str | int
Fields = dict[int, bytes]


class FieldError(ValueError):
    """The bytes are not the fields that belong here."""


def text_to_bytes(text: str) -> bytes:
    """A path or other text as the guest has it."""
    return text.encode("utf-8", "surrogateescape")


def bytes_to_text(data: bytes) -> str:
    """The inverse of `text_to_bytes`, for any bytes."""
    return data.decode("utf-8", "surrogateescape")


def pack_fields(fields: Iterable[tuple[int, FieldValue]]) -> bytes:
    """Fields in this order; integers as u64 (negative ones as i64). Raises ValueError for integers beyond 64 bits."""
    parts: list[bytes] = []
    for tag, value in fields:
        if isinstance(value, int):
            if not -(1 << 63) <= value <= _U64_MAX:
                raise ValueError(f"field {tag}: {value} does not fit into 64 bits")
            parts.append(_INTEGER_FIELD.pack(tag, 0, 8, value & _U64_MAX))
            continue
        data = text_to_bytes(value) if isinstance(value, str) else value
        parts.append(_FIELD.pack(tag, 0, len(data)))
        parts.append(data)
    return b"".join(parts)


def iter_fields(payload: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Tags and bytes in order. Raises FieldError."""
    position, end = 0, len(payload)
    while position < end:
        if end - position < _FIELD.size:
            raise FieldError("a field's header is cut")
        tag, zero, length = _FIELD.unpack_from(payload, position)
        position += _FIELD.size
        if zero or length > end - position:
            raise FieldError(f"field {tag} announces {length} bytes, {end - position} are left")
        yield tag, bytes(payload[position : position + length])
        position += length


def unpack_fields(payload: bytes | memoryview) -> Fields:
    """The last value of every tag. Raises FieldError."""
    return dict(iter_fields(payload))


def unsigned(fields: Fields, tag: int, default: int | None = None) -> int:
    """An integer field. Raises FieldError when it is missing (without default) or not 8 bytes."""
    data = fields.get(tag)
    if data is None:
        if default is None:
            raise FieldError(f"field {tag} is missing")
        return default
    if len(data) != _U64.size:
        raise FieldError(f"field {tag} is not an integer")
    return int(_U64.unpack(data)[0])


def text(fields: Fields, tag: int) -> str:
    """A text field. Raises FieldError when it is missing."""
    try:
        return bytes_to_text(fields[tag])
    except KeyError:
        raise FieldError(f"field {tag} is missing") from None


def encode_start(command: StartCommand) -> bytes:
    """START's payload."""
    fields: list[tuple[int, FieldValue]] = []
    if command.script is not None:
        fields.append((T_SCRIPT, command.script))
    fields += [(T_ARGV, argument) for argument in command.argv]
    fields += [(T_ENV, f"{name}={value}") for name, value in command.env.items()]
    flags = START_STDIN if command.stdin else 0
    if command.pty is not None:
        flags |= START_PTY
        fields += [(T_ROWS, command.pty[0]), (T_COLS, command.pty[1])]
    fields += [(T_CWD, command.cwd), (T_USER, command.user), (T_FLAGS, flags)]
    fields += [(T_TIMEOUT_MS, command.timeout_ms), (T_GRACE_MS, command.grace_ms)]
    if command.session:
        fields.append((T_SESSION, command.session))
    return pack_fields(fields)


def decode_exit(payload: bytes | memoryview) -> Exit:
    """EXIT. An exit without code and without signal is refused: it must never look like success."""
    fields = unpack_fields(payload)
    code = unsigned(fields, T_EXIT_CODE) if T_EXIT_CODE in fields else None
    signal = unsigned(fields, T_SIGNAL, 0)
    if (code is None) == (signal == 0) or (code or 0) > 255 or signal > 64:
        raise FieldError("EXIT has neither or both of exit code and signal, or impossible ones")
    flags = unsigned(fields, T_FLAGS, 0)
    return Exit(
        exit_code=code,
        signal=signal,
        reason=unsigned(fields, T_REASON, 0),
        stdout_total=unsigned(fields, T_STDOUT_TOTAL),
        stderr_total=unsigned(fields, T_STDERR_TOTAL),
        duration_ns=unsigned(fields, T_DURATION_NS, 0),
        user_us=unsigned(fields, T_UTIME_US, 0),
        system_us=unsigned(fields, T_STIME_US, 0),
        max_rss_kb=unsigned(fields, T_MAXRSS_KB, 0),
        session_started=bool(flags & EXIT_SESSION_STARTED),
        session_gone=bool(flags & EXIT_SESSION_GONE),
    )


def decode_command(command_id: int, payload: bytes | memoryview) -> KnownCommand:
    """One COMMAND of a LIST."""
    fields = unpack_fields(payload)
    return KnownCommand(
        id=command_id,
        pid=unsigned(fields, T_PID),
        ended=bool(unsigned(fields, T_FLAGS, 0) & COMMAND_ENDED),
        stdout_base=unsigned(fields, T_STDOUT_BASE),
        stderr_base=unsigned(fields, T_STDERR_BASE),
        stdout_total=unsigned(fields, T_STDOUT_TOTAL),
        stderr_total=unsigned(fields, T_STDERR_TOTAL),
    )


def decode_error(payload: bytes | memoryview) -> GuestError:
    """ERROR, as the exception to raise."""
    fields = unpack_fields(payload)
    return GuestError(text(fields, T_CODE), text(fields, T_MESSAGE), unsigned(fields, T_ERRNO, 0))


def decode_stat(payload: bytes | memoryview, path: str = "") -> GuestStat:
    """The fields of one path; `path` when NAME is not among them. Raises FieldError, also for an unknown kind."""
    fields = unpack_fields(payload)
    return GuestStat(
        path=text(fields, T_NAME) if T_NAME in fields else path,
        kind=_one_of(FILE_KINDS, fields, T_KIND),
        mode=unsigned(fields, T_MODE),
        size=unsigned(fields, T_SIZE),
        mtime_ns=_signed(unsigned(fields, T_MTIME_NS)),
        uid=unsigned(fields, T_UID),
        gid=unsigned(fields, T_GID),
        link=text(fields, T_LINK) if T_LINK in fields else None,
    )


def decode_event(payload: bytes | memoryview) -> tuple[str, str]:
    """Kind and path of one change. Raises FieldError, also for an unknown kind."""
    fields = unpack_fields(payload)
    return _one_of(EVENT_KINDS, fields, T_EVENT), text(fields, T_PATH)


def _one_of(known: frozenset[str], fields: Fields, tag: int) -> str:
    found = text(fields, tag)
    if found not in known:
        raise FieldError(f"field {tag}: {found[:40]!r} is not of {', '.join(sorted(known))}")
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
