"""Make OCI image layouts by hand, nasty ones included, for tests of the importer and its reference."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYER = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
TIME = 1_600_000_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tar entry; `kind` is a tarfile type."""

    name: str
    kind: bytes = tarfile.REGTYPE
    content: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = TIME
    link: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further pax headers."""


def directory(name: str, *, mode: int = 0o755, **more: Any) -> Entry:
    """A directory entry."""
    return Entry(name=name, kind=tarfile.DIRTYPE, mode=mode, **more)


def file(name: str, content: bytes = b"", **more: Any) -> Entry:
    """A regular file."""
    return Entry(name=name, content=content, **more)


def symlink(name: str, target: str, **more: Any) -> Entry:
    """A symbolic link."""
    return Entry(name=name, kind=tarfile.SYMTYPE, link=target, mode=0o777, **more)


def hardlink(name: str, target: str) -> Entry:
    """A hard link to an earlier entry."""
    return Entry(name=name, kind=tarfile.LNKTYPE, link=target)


def tar_of(entries: Sequence[Entry]) -> bytes:
    """The entries as an uncompressed pax archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.uid, info.gid = entry.kind, entry.mode, entry.uid, entry.gid
            info.mtime, info.linkname = entry.mtime, entry.link
            info.devmajor, info.devminor = entry.device
            info.size = len(entry.content)
            info.pax_headers = {
                f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in entry.xattrs.items()
            } | dict(entry.headers)
            tar.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()


class LayoutMaker:
    """Writes blobs and indexes below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        """Store bytes; their descriptor."""
        encoded = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / "sha256" / encoded).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{encoded}", "size": len(content)}

    def json(self, fields: Mapping[str, Any], media_type: str) -> dict[str, Any]:
        """Store a JSON value; its descriptor."""
        return self.blob(json.dumps(fields).encode(), media_type)

    def read(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON object that was stored."""
        fields: dict[str, Any] = json.loads((self.root / "blobs/sha256" / descriptor["digest"][7:]).read_bytes())
        return fields

    def image(
        self,
        layers: Sequence[bytes],
        *,
        config: Mapping[str, Any] | None = None,
        architecture: str = "amd64",
        compress: bool = False,
        media_type: str | None = None,
    ) -> dict[str, Any]:
        """An image of uncompressed tars, lowest first; the descriptor of its manifest."""
        descriptors = [
            self.blob(
                gzip.compress(tar, 1) if compress else tar, media_type or (f"{LAYER}+gzip" if compress else LAYER)
            )
            for tar in layers
        ]
        diff_ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in layers]
        fields = {
            "os": "linux",
            "architecture": architecture,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "config": dict(config or {}),
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.json(fields, CONFIG),
            "layers": descriptors,
        }
        return self.json(manifest, MANIFEST)

    def index(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Write index.json."""
        fields = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)}
        (self.root / "index.json").write_text(json.dumps(fields))

    def tagged(self, descriptor: Mapping[str, Any], ref: str = "latest", **more: Any) -> dict[str, Any]:
        """A descriptor with its ref name."""
        return {**descriptor, "annotations": {"org.opencontainers.image.ref.name": ref}, **more}


def make_layout(root: Path, layers: Sequence[Sequence[Entry]], **more: Any) -> Path:
    """A layout with one image called `latest`; each layer is a list of entries, lowest first."""
    maker = LayoutMaker(root)
    maker.index([maker.tagged(maker.image([tar_of(entries) for entries in layers], **more))])
    return root
