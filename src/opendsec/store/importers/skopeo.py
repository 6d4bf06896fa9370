"""Run skopeo, which speaks to registries for us: with accounts and certificates as its caller has them, tried again
when a registry cannot be reached, breaks off, or wants to be left alone for a moment.

Passwords go to it in a file of mode 0600, never as arguments. What it says becomes an error of ours. It dies with the
process that runs it: a push that was killed must not go on by itself.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from opendsec.errors import CapacityError, ConnectError, InvalidSpecError, OpenDSecError
from opendsec.store.durable import write_synced
from opendsec.store.importers.registry_words import registry_error
from opendsec.store.programs import ENVIRONMENT, find_program, run_program
from opendsec.store.progress import OnProgress, Progress

R = TypeVar("R")

STALLED_S = 120.0
TIMEOUT_S = 6 * 3600.0
PASSED_ON = frozenset(
    {"HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "SSL_CERT_FILE"}
    | {"SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)
"""Variables of its caller that skopeo should see: where accounts, certificates and proxies are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAccess:
    """How to speak to registries."""

    authfile: Path | None = None
    """As `skopeo login` writes it; None: where skopeo itself looks."""
    creds: str = field(default="", repr=False)
    """`user:password` for the registry of the image."""
    tls_verify: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """See PASSED_ON."""
    attempts: int = 4
    """In all; the waits between are 1, 2, 4, … seconds."""
    stalled_s: float = STALLED_S


class Skopeo:
    """skopeo for one image of a registry. `work`: an empty directory; `on_retry` is called before each new try."""

    def __init__(
        self,
        reference: str,
        access: RegistryAccess,
        work: Path,
        *,
        on_progress: OnProgress,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._reference = reference
        self._access = access
        self._work = work
        self._on_progress = on_progress
        self._on_retry = on_retry
        if access.creds:
            self._write_creds()

    def options(self, *, prefix: str = "") -> Iterator[str]:
        """How to speak to the registry; `prefix` is `src-` or `dest-` for `skopeo copy`."""
        yield f"--{prefix}tls-verify={'true' if self._access.tls_verify else 'false'}"
        if self._access.creds:
            yield f"--authfile={self._work / 'auth.json'}"
        elif self._access.authfile is not None:
            yield f"--authfile={self._access.authfile}"

    def run(self, *arguments: str, output: Path | None = None, on_tick: Callable[[], None] | None = None) -> None:
        """Once. Raises as `registry_error` says."""
        environment = {key: value for key, value in self._access.environment.items() if key in PASSED_ON}
        ended = run_program(
            [find_program("setpriv"), "--pdeathsig", "KILL", find_program("skopeo"), *arguments],
            timeout_s=TIMEOUT_S,
            environment={**environment, **ENVIRONMENT},
            on_tick=on_tick,
            output=output,
        )
        if ended.status != 0:
            raise registry_error(self._reference, ended.status, ended.tail)

    def tried(self, call: Callable[[], R]) -> R:
        """As often as the access says, while it may help."""
        wait_s = 1.0
        for attempt in range(1, self._access.attempts + 1):
            try:
                return call()
            except (ConnectError, CapacityError) as error:
                if attempt == self._access.attempts or not error.retryable:
                    raise
                self._wait(wait_s, error)
                wait_s *= 2
        raise AssertionError("unreachable")

    def _wait(self, wait_s: float, error: OpenDSecError) -> None:
        self._on_retry()
        self._on_progress(Progress(phase=f"trying again in {wait_s:.0f} s", detail=error.message))
        threading.Event().wait(wait_s)

    def _write_creds(self) -> None:
        user, separator, _ = self._access.creds.partition(":")
        if not separator or not user:
            raise InvalidSpecError("creds: not USER:PASSWORD", detail={"field": "creds"})
        auth = base64.b64encode(self._access.creds.encode()).decode("ascii")
        content = json.dumps({"auths": {self._reference.partition("/")[0]: {"auth": auth}}})
        write_synced(self._work / "auth.json", content.encode(), mode=0o600)
