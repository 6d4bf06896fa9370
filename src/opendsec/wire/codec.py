"""Model values and errors ↔ bytes (JSON by msgspec), in one place.

Decoding is strict: unknown fields, wrong types and trailing bytes raise InvalidSpecError naming the field.
Errors travel as `{"error": {"code", "message", "detail", "remedy", "retryable", "request_id", "sandbox_id"}}`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from opendsec import errors

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_FIELD = re.compile(r"at `\$\.?([^`]*)`|unknown field `([^`]+)`|required field `([^`]+)`")


def encode(value: object) -> bytes:
    """Any model value (dataclass, enum, mapping, …) as compact JSON."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """JSON → a model value. Raises InvalidSpecError with `detail["field"]` when the bytes do not fit."""
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise errors.InvalidSpecError(_sentence(str(exc)), detail={"field": _field(str(exc))}) from exc


def to_builtins(value: object) -> Any:
    """A model value as plain dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def _field(text: str) -> str:
    found = [group for match in _FIELD.finditer(text) for group in match.groups() if group]
    return ".".join(reversed(found)) if found else "body"


def _sentence(text: str) -> str:
    return f"{_field(text)}: {text}"


def encode_error(error: errors.OpenDSecError) -> bytes:
    """An error as the JSON body every server of ours answers with."""
    return encode({"error": error_fields(error)})


def error_fields(error: errors.OpenDSecError) -> dict[str, object]:
    """The error's wire fields."""
    return {
        "code": error.code,
        "message": error.message,
        "detail": error.detail,
        "remedy": error.remedy,
        "retryable": error.retryable,
        "request_id": error.request_id,
        "sandbox_id": error.sandbox_id,
    }


def decode_error(data: bytes | memoryview, *, fallback: str = "") -> errors.OpenDSecError:
    """Rebuild an error by its code. Bytes that are no error of ours become ProtocolError carrying `fallback`."""
    try:
        fields = msgspec.json.decode(data)["error"]
        return error_from_fields(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        text = fallback or bytes(data[:200]).decode("utf-8", "replace")
        return errors.ProtocolError(f"the server answered with something that is not an OpenDSec error: {text}")


def error_from_fields(fields: dict[str, Any]) -> errors.OpenDSecError:
    """Wire fields → exception. An unknown code becomes OpenDSecError with the code kept in `detail`."""
    code = str(fields["code"])
    cls = errors.CODES.get(code, errors.OpenDSecError)
    detail = dict(fields.get("detail") or {})
    if code not in errors.CODES:
        detail["unknown_code"] = code
    return cls(
        str(fields["message"]),
        detail=detail,
        remedy=str(fields.get("remedy") or ""),
        retryable=bool(fields.get("retryable", False)),
        request_id=str(fields.get("request_id") or ""),
        sandbox_id=str(fields.get("sandbox_id") or ""),
    )
