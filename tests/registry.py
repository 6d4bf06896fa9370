"""A real OCI registry on the loopback address: the distribution's docker-registry, with an account, in a directory.

Needs the packages docker-registry and apache2-utils (htpasswd), and skopeo to put images into it.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

USER, PASSWORD = "someone", "pass:word"
_CONFIG = """\
version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {root}/data}}, delete: {{enabled: true}}}}
http: {{addr: 127.0.0.1:{port}}}
auth: {{htpasswd: {{realm: test, path: {root}/htpasswd}}}}
"""


def missing() -> str | None:
    """Why there can be no registry here."""
    absent = [name for name in ("docker-registry", "htpasswd", "skopeo") if shutil.which(name) is None]
    return f"{', '.join(absent)} is not installed; run scripts/packages" if absent else None


@dataclass(frozen=True, kw_only=True)
class Registry:
    """A registry that runs."""

    host: str
    root: Path

    def push(self, layout: Path, name: str, *, every_platform: bool = False) -> str:
        """Put the image `latest` of an OCI layout there; its reference."""
        reference = f"{self.host}/{name}"
        command = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"--dest-creds={USER}:{PASSWORD}"]
        command += ["--all"] if every_platform else []
        subprocess.run(
            [*command, f"oci:{layout}:latest", f"docker://{reference}"], check=True, timeout=120, capture_output=True
        )
        return reference

    def fetched(self) -> list[str]:
        """Digests of the blobs that were sent so far."""
        lines = (self.root / "log").read_text().splitlines()
        gets = [line for line in lines if '"GET /v2/' in line and "/blobs/sha256:" in line]
        return [line.partition("/blobs/")[2].split(" ")[0] for line in gets]


@contextmanager
def running_registry(root: Path) -> Iterator[Registry]:
    """Start one, wait until it answers, and end it."""
    port = free_port()
    root.mkdir()
    (root / "config.yml").write_text(_CONFIG.format(root=root, port=port))
    command = ["htpasswd", "-Bbn", USER, PASSWORD]
    (root / "htpasswd").write_text(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    )
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", root / "config.yml"], stdout=log, stderr=log)
    try:
        _wait(port, server)
        yield Registry(host=f"127.0.0.1:{port}", root=root)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/v2/")
            if connection.getresponse().status == 401:
                return
        except OSError:
            pass
        finally:
            connection.close()
    raise RuntimeError("docker-registry did not start")
