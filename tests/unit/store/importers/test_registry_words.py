"""What skopeo says becomes the right error, whatever the image is called."""

from __future__ import annotations

import pytest

from opendsec.errors import (
    CapacityError,
    ConnectError,
    DigestMismatchError,
    DiskFullError,
    HostCapabilityError,
    ImageNotFoundError,
    NodeError,
    OpenDSecError,
    UnauthorizedError,
)
from opendsec.store.importers.registry_words import registry_error

HOST = "registry.test:5000"
PING = 'pinging container registry H: Get \\"https://H/v2/\\": '
SAID: list[tuple[str, type[OpenDSecError], bool]] = [
    ("reading manifest 1 in R: manifest unknown: manifest unknown", ImageNotFoundError, False),
    ("reading manifest 1 in R: unauthorized: authentication required", UnauthorizedError, False),
    ("reading manifest 1 in R: requested access to the resource is denied", UnauthorizedError, False),
    ("reading manifest 1 in R: toomanyrequests: You have reached your pull rate limit", CapacityError, True),
    ("invalid status code from registry 429 (Too Many Requests)", CapacityError, True),
    (PING + "dial tcp 1.2.3.4:5000: connect: connection refused", ConnectError, True),
    (PING + "dial tcp: lookup H: no such host", ConnectError, True),
    (PING + "x509: certificate signed by unknown authority", ConnectError, False),
    ("http: server gave HTTP response to HTTPS client", ConnectError, False),
    ("reading blob sha256:0: Get: unexpected EOF", ConnectError, True),
    ("received unexpected HTTP status: 503 Service Unavailable", ConnectError, True),
    ("writing blob: storing blob to file: write /x: no space left on device", DiskFullError, True),
    ("writing blob: Digest did not match, expected sha256:0, got sha256:1", DigestMismatchError, False),
    ("Error loading trust policy: open /etc/containers/policy.json: no such file", HostCapabilityError, False),
    ("Source image rejected: Running image is rejected by policy.", NodeError, False),
    ("something new", NodeError, False),
]


@pytest.mark.parametrize(("words", "kind", "retryable"), SAID)
@pytest.mark.parametrize("name", ["lib/x:1", "unauthorized/404:429", "lib/timeout:x509", "x/policy.json:eof"])
def test_meanings(words: str, kind: type[OpenDSecError], retryable: bool, name: str) -> None:
    reference = f"{HOST}/{name}"
    said = words.replace("R", reference).replace("H/", f"{HOST}/")
    line = f'time="2026-01-01T00:00:00Z" level=fatal msg="Error parsing image name \\"docker://{reference}\\": {said}"'
    error = registry_error(reference, 1, ["Getting image source", line])
    assert type(error) is kind
    assert (error.retryable, error.detail["image"]) == (retryable, reference)
    assert "Error parsing" not in error.message


def test_nothing_said() -> None:
    assert "it said nothing" in registry_error(f"{HOST}/x", -9, []).message
