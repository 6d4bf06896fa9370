"""Model values and errors ↔ bytes (JSON by msgspec), in one place.

Decoding is strict: unknown fields, wrong types and trailing bytes raise InvalidSpecError naming the field. Answers
of a server are read with `decode_answer`, which passes over fields a newer server may have added.
Errors travel as `{"error": {"code", "message", "detail", "remedy", "retryable", "request_id", "sandbox_id"}}`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from opendsec import errors

T = TypeVar("T")


def _plain(value: object) -> str:
    """Kinds of text of our own, such as a packed image's reference, travel as text."""
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is no model value")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_SURROGATE = b"\\ud"
_FIELD = re.compile(r"at `\$\.?([^`]*)`|unknown field `([^`]+)`|required field `([^`]+)`")


def encode(value: object) -> bytes:
    """Any model value (dataclass, enum, mapping, …) as compact JSON.

    File names that are no UTF-8 (surrogates, PEP 383) travel as JSON escapes such as `\\udcff` and come back the same.
    """
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":")).encode("ascii")


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """JSON → a model value. Raises InvalidSpecError with `detail["field"]` when the bytes do not fit, unknown
    fields included."""
    shape: Any = kind
    plan = _plan(shape)
    if plan is None:
        return decode_answer(data, kind)
    try:
        raw = parse(data)
        value = msgspec.convert(raw, kind, strict=True)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise refusal(exc) from exc
    for field in _unknown(raw, plan, ""):
        raise errors.InvalidSpecError(f"{field}: no such field in {kind.__name__}", detail={"field": field})
    return value


def decode_answer(data: bytes | memoryview, kind: type[T]) -> T:
    """As `decode`, but fields this version does not know are passed over."""
    try:
        if has_stray_bytes(data):
            return msgspec.convert(parse(data), kind, strict=True)
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise refusal(exc) from exc


def refusal(exc: Exception) -> errors.InvalidSpecError:
    """What msgspec says of bytes that do not fit, with the field named."""
    return errors.InvalidSpecError(_sentence(str(exc)), detail={"field": _field(str(exc))})


def has_stray_bytes(data: bytes | memoryview) -> bool:
    """Whether this JSON may hold bytes that are no UTF-8, as escapes of lone surrogates, which msgspec refuses."""
    return _SURROGATE in bytes(data)


def parse(data: bytes | memoryview) -> Any:
    """JSON as plain dicts, lists, strings and numbers, stray bytes included. Raises ValueError, msgspec.DecodeError."""
    return json.loads(bytes(data)) if has_stray_bytes(data) else msgspec.json.decode(data)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Where in a decoded value dataclasses sit: `fields` of this one, or those of every item of a list or mapping."""

    fields: Mapping[str, _Plan | None] | None = None
    items: _Plan | None = None


@functools.cache
def _plan(kind: Any) -> _Plan | None:
    """None: nothing below can have an unknown field. msgspec refuses them for its own structs only, not for
    dataclasses."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return _Plan(fields={field.name: _plan(hints[field.name]) for field in dataclasses.fields(kind)})
    if get_origin(kind) in (Union, types.UnionType):
        return next((plan for plan in map(_plan, get_args(kind)) if plan is not None), None)
    inner = [plan for plan in map(_plan, get_args(kind)) if plan is not None]
    return _Plan(items=inner[0]) if inner else None


def _unknown(raw: Any, plan: _Plan, path: str) -> Iterator[str]:
    if plan.fields is not None and isinstance(raw, dict):
        for name, value in raw.items():
            if name not in plan.fields:
                yield f"{path}{name}" if name else f'{path}""'
            elif (below := plan.fields[name]) is not None:
                yield from _unknown(value, below, f"{path}{name}.")
    elif plan.items is not None and isinstance(raw, (dict, list)):
        for value in raw.values() if isinstance(raw, dict) else raw:
            yield from _unknown(value, plan.items, path)


def to_builtins(value: object) -> Any:
    """A model value as plain dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=_plain)


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
        fields = parse(data)["error"]
        return error_from_fields(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        text = fallback or bytes(data[:200]).decode("utf-8", "replace")
        return errors.ProtocolError(f"the server answered with something that is not an OpenDSec error: {text}")


def received_error(fields: Mapping[str, object]) -> errors.OpenDSecError:
    """`error_from_fields` of what another process sent within an answer; ProtocolError for what is no error of ours."""
    try:
        return error_from_fields(dict(fields))
    except (KeyError, TypeError, ValueError):
        return errors.ProtocolError("the server answered with something that is not an OpenDSec error")


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
