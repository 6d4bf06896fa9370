"""A batch of calls taken apart without reading the calls: each is decoded where it is carried out, and fails alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from opendsec.errors import InvalidSpecError
from opendsec.model.fncall import MAX_CALLS
from opendsec.wire import codec


class _RawBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A FnCallBatch."""

    calls: list[msgspec.Raw]
    indexes: list[int] = []


class _PlainBatch(msgspec.Struct, forbid_unknown_fields=True):
    """The same, where text that is no Unicode (lone surrogates) keeps msgspec from passing over it."""

    calls: list[object]
    indexes: list[int] = []


def split_batch(body: bytes) -> tuple[Sequence[bytes], Sequence[int]]:
    """The JSON of every call, and `indexes`. Raises InvalidSpecError naming the field."""
    calls, indexes = _split(body)
    if not 1 <= len(calls) <= MAX_CALLS:
        raise InvalidSpecError(f"calls: {len(calls)} is not between 1 and {MAX_CALLS}", detail={"field": "calls"})
    if indexes and len(set(indexes)) != len(calls):
        raise InvalidSpecError(
            f"indexes: {len(set(indexes))} different ones for {len(calls)} calls", detail={"field": "indexes"}
        )
    return calls, indexes


def join_batch(calls: Sequence[bytes], indexes: Sequence[int]) -> bytes:
    """What `split_batch` takes apart."""
    return b"".join((b'{"calls":[', b",".join(calls), b'],"indexes":', msgspec.json.encode(list(indexes)), b"}"))


def _split(body: bytes) -> tuple[Sequence[bytes], Sequence[int]]:
    try:
        raw = msgspec.json.decode(body, type=_RawBatch)
    except msgspec.DecodeError as exc:
        if not codec.has_stray_bytes(body):
            raise codec.refusal(exc) from exc
    else:
        return [bytes(one) for one in raw.calls], raw.indexes
    try:
        plain = msgspec.convert(json.loads(body), _PlainBatch)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise codec.refusal(exc) from exc
    return [json.dumps(one).encode("ascii") for one in plain.calls], plain.indexes
