"""Get an image out of a registry, with skopeo: first what describes it, then only the layers that are needed.

Manifests and configuration come with `skopeo inspect --raw` and are verified here, digest by digest, from the tag's
manifest down. Layers come with `skopeo copy` into a directory of blobs; those that were converted before are given to
skopeo as files of the right size full of holes, so it takes them for already copied. Nobody reads them, and if
somebody did, their digest would be wrong.

Transfers are tried again (`attempts`) when the registry cannot be reached, breaks off, or wants to be left alone for a
moment; layers that came whole stay. One that says nothing for `STALLED_S` is given up. What the registry sends beyond
the sizes its manifest names is refused. skopeo's own trust policy holds. Passwords go to skopeo in a file of mode
0600, never as arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opendsec.errors import ConnectError, DigestMismatchError, ImageInvalidError
from opendsec.store.importers.files import ImageFiles, decode_object
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import OciImage, find_manifest, read_manifest
from opendsec.store.importers.oci_config import INDEX_TYPES, MANIFEST_TYPES, Descriptor, Platform
from opendsec.store.importers.skopeo import RegistryAccess, Skopeo
from opendsec.store.progress import OnProgress, Progress

_BEYOND_BYTES = 16 << 20


class RegistryImage:
    """One image of a registry, while it is fetched into `work`, an empty directory."""

    def __init__(
        self, reference: str, access: RegistryAccess, work: Path, *, limits: Limits, on_progress: OnProgress
    ) -> None:
        self._reference = _without_tag_beside_digest(reference)
        self._skopeo = Skopeo(self._reference, access, work, on_progress=on_progress, on_retry=self._drop_partial)
        self._stalled_s = access.stalled_s
        self._work = work
        self._limits = limits
        self._on_progress = on_progress
        self._files = work / "pulled"
        self._pinned = self._reference

    def find(self, platform: Platform) -> OciImage:
        """The image for a platform; its layers are not there yet. Raises as `registry_error` and `read_manifest` do."""
        self._on_progress(Progress(phase=f"asking {self._reference.partition('/')[0]}"))
        content = self._inspect(self._reference)
        self._pin(self._digest_of(content))  # The tag may move before its layers are fetched.
        fields: Mapping[str, Any] = decode_object(content, where=self._reference)
        where = self._reference
        if _kind(fields) in INDEX_TYPES:
            fields, where = find_manifest(fields, where, self._manifest, ref="", platform=platform)
        elif _kind(fields) not in MANIFEST_TYPES:
            raise ImageInvalidError(f"{where}: the media type {_kind(fields)[:90]!r} is not known")
        files = ImageFiles(self._files)
        return read_manifest(fields, where, self._config, files, platform=platform, limits=self._limits)

    def fetch(self, image: OciImage, *, start: int) -> None:
        """Get the layers from number `start` (counted from 0) up; nothing is asked when there are none."""
        wanted = {layer.name: layer.blob.size_bytes for layer in image.layers[start:] if layer.blob is not None}
        total = sum(wanted.values())
        if not wanted:
            return
        if total > self._limits.max_total_bytes:
            raise ImageInvalidError(f"its layers have {total} bytes, at most {self._limits.max_total_bytes} are taken")
        for layer in image.layers[:start]:
            if layer.blob is not None and layer.name not in wanted:
                _write_hole(self._files / layer.name, layer.blob.size_bytes)
        watch = _Watch(self._work, self._files, total, self._stalled_s, self._on_progress)
        target = self._work / "layout"
        self._skopeo.tried(
            lambda: self._skopeo.run(
                "copy",
                "--quiet",
                "--dest-oci-accept-uncompressed-layers",
                f"--dest-shared-blob-dir={self._files / 'blobs'}",
                *self._skopeo.options(prefix="src-"),
                f"docker://{self._pinned}",
                f"oci:{target}:image",
                on_tick=watch.look,
            )
        )

    def _manifest(self, descriptor: Descriptor) -> bytes:
        self._pin(descriptor.digest)
        return self._inspect(self._pinned)

    def _digest_of(self, content: bytes) -> str:
        """Of what the reference means. DigestMismatchError: it says a digest itself, and got something else."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        wanted = self._reference.partition("@")[2]
        if wanted not in ("", digest):
            raise DigestMismatchError(
                f"{self._reference}: the registry answers with {digest}", detail={"image": self._reference}
            )
        return digest

    def _pin(self, digest: str) -> None:
        self._pinned = f"{_without_tag(self._reference).partition('@')[0]}@{digest}"

    def _config(self, _descriptor: Descriptor) -> bytes:
        return self._inspect(self._pinned, "--config")

    def _inspect(self, reference: str, *options: str) -> bytes:
        output = self._work / f"answer-{secrets.token_hex(4)}"

        def ask() -> bytes:
            output.unlink(missing_ok=True)
            arguments = ("inspect", "--raw", *options, *self._skopeo.options(), f"docker://{reference}")
            self._skopeo.run(*arguments, output=output)
            return output.read_bytes()

        content = self._skopeo.tried(ask)
        if len(content) > self._limits.max_json_bytes:
            raise ImageInvalidError(f"{reference}: its description has {len(content)} bytes")
        return content

    def _drop_partial(self) -> None:
        for partial in (self._work / "layout").glob("oci-put-blob*"):
            partial.unlink()


class _Watch:
    """Looks at what has arrived."""

    def __init__(self, work: Path, files: Path, total: int, stalled_s: float, on_progress: OnProgress) -> None:
        self._places = (files / "blobs", work / "layout")
        self._total = total
        self._stalled_s = stalled_s
        self._on_progress = on_progress
        self._before = self._found()
        self._most = 0
        self._moved_at = time.monotonic()

    def look(self) -> None:
        """Tell how much is there. ConnectError when nothing moved for long, ImageInvalidError when it is too much."""
        done = self._found() - self._before
        if done != self._most:
            self._most, self._moved_at = done, time.monotonic()
        if done > self._total + _BEYOND_BYTES:
            raise ImageInvalidError(f"the registry sends more than the {self._total} bytes its manifest names")
        if time.monotonic() - self._moved_at > self._stalled_s:
            self._moved_at = time.monotonic()
            raise ConnectError(f"the registry has sent nothing for {self._stalled_s:.0f} s")
        self._on_progress(Progress(phase="fetching layers", done=min(done, self._total), total=self._total))

    def _found(self) -> int:
        total = 0
        for place in self._places:
            for top, _, names in os.walk(place):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        total += Path(top, name).stat().st_size
        return total


def _kind(fields: Mapping[str, Any]) -> str:
    """Its media type; OCI manifests need not say it."""
    said = fields.get("mediaType")
    if isinstance(said, str):
        return said
    if "manifests" in fields:
        return "application/vnd.oci.image.index.v1+json"
    return "application/vnd.oci.image.manifest.v1+json" if "layers" in fields else "schema 1"


def _write_hole(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


def _without_tag_beside_digest(reference: str) -> str:
    """skopeo takes one of them; the digest says more."""
    name, at, digest = reference.partition("@")
    return f"{_without_tag(name)}@{digest}" if at else reference


def _without_tag(reference: str) -> str:
    head, slash, last = reference.rpartition("/")
    name, at, digest = last.partition("@")
    return f"{head}{slash}{name.partition(':')[0]}{at}{digest}"
