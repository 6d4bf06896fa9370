"""What a person is told about a pack."""

from __future__ import annotations

from dataclasses import replace

from opendsec.cli.packing import sentences
from opendsec.wire.contracts import PackResult

RESULT = PackResult(
    image="x@sha256:0", name="x", digest="sha256:0", changed=True, files=3, bytes=2048, frozen_ms=12.3, duration_s=0.456
)


def test_what_was_packed() -> None:
    assert sentences(RESULT) == ["packed 3 entries, 2.0 KiB in 0.46 s; it stood still for 12 ms"]


def test_nothing_changed() -> None:
    assert sentences(replace(RESULT, changed=False)) == [
        "nothing has changed: no image was made, what follows is the source's"
    ]


def test_what_was_left_out_and_what_is_old_again() -> None:
    paths = tuple(f"/tmp/{number}" for number in range(12))
    told = sentences(replace(RESULT, left_out=40, left_out_paths=paths, fell_back=1, fell_back_paths=("/root/.netrc",)))
    assert told[1].startswith("left out 40: /tmp/0, /tmp/1, ")
    assert told[1].endswith("/tmp/9, …")
    assert told[2] == "as in the source image again, not as in the sandbox: /root/.netrc"
