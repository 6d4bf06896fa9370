"""Read an unpacked archive of `docker save`: a manifest.json that lists images, their configurations and layers.

Old Docker wrote each layer as DIRECTORY/layer.tar, with links between equal ones; newer writes the blobs of an OCI
layout beside manifest.json, and is read as that layout. Layers carry no digest of their own: the configuration's
digests of the uncompressed layers are what they are checked against, and the configuration against its name.

Refused by name: archives of Docker before 1.10, which have no manifest.json.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.store.importers.files import ImageFiles, decode_json, decode_object
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import ImageLayer, OciImage, check_layer_count
from opendsec.store.importers.oci_config import Platform, check_platform, diff_ids, parse_config

MANIFEST = "manifest.json"
_NAMED = re.compile(r"(?:.*/)?([0-9a-f]{64})(?:\.json)?\Z")
_LISTED = 20


def looks_like_docker(root: Path) -> bool:
    """Whether an unpacked archive is of `docker save`, and no file system that has a manifest.json."""
    files = ImageFiles(root)
    if not files.has(MANIFEST) or (root / "usr").exists() or (root / "bin").exists():
        return False
    with files.open(MANIFEST) as manifest:
        return manifest.read(64).lstrip()[:1] == b"["


def find_docker(root: Path, ref: str, *, platform: Platform, limits: Limits) -> OciImage:
    """The image of that name, tag or configuration digest; empty: the only one.

    Raises ImageInvalidError, DigestMismatchError.
    """
    files = ImageFiles(root, links=True)
    entry = _choose(decode_json(files.small(MANIFEST, limit=limits.max_json_bytes), where=MANIFEST), ref)
    config_name = _text(entry, "Config")
    content = files.small(config_name, limit=limits.max_json_bytes, label="the configuration")
    named = _NAMED.match(config_name)
    if named is not None and hashlib.sha256(content).hexdigest() != named[1]:
        raise DigestMismatchError(f"the configuration {config_name[-80:]} does not have the digest it is named by")
    config = decode_object(content, where="the configuration")
    check_platform(config, platform=platform)
    names = entry.get("Layers")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ImageInvalidError(f"{MANIFEST}: Layers is not a list of names")
    check_layer_count(len(names), where=MANIFEST, limits=limits)
    layers = tuple(
        ImageLayer(label=f"layer {number} of {len(names)} ({diff_id[:19]})", diff_id=diff_id, name=name)
        for number, (name, diff_id) in enumerate(zip(names, diff_ids(config, count=len(names)), strict=True), 1)
    )
    for layer in layers:
        files.open(layer.name, label=layer.label).close()
    return OciImage(files=files, layers=layers, config=parse_config(config))


def _choose(entries: object, ref: str) -> dict[str, Any]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ImageInvalidError(f"{MANIFEST} is not a list of images")
    fitting = [entry for entry in entries if not ref or ref in _names(entry)]
    if len(fitting) == 1:
        return dict(fitting[0])
    there = ", ".join(name for entry in entries[:_LISTED] for name in _names(entry)[:1]) or "nothing"
    how = "several images fit" if fitting else "nothing fits"
    raise ImageInvalidError(
        f"{MANIFEST}: {how} {ref!r}; it holds {there}",
        detail={"field": "source"},
        remedy="name one with docker-archive:FILE:NAME:TAG",
    )


def _names(entry: dict[str, Any]) -> Sequence[str]:
    """Tags in full and short, then the digest of the configuration."""
    tags = [tag for tag in entry.get("RepoTags") or [] if isinstance(tag, str)]
    named = _NAMED.match(str(entry.get("Config")))
    short = [tag.rpartition("/")[2] for tag in tags]
    return [*tags, *short, *([f"sha256:{named[1]}"] if named else [])]


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise ImageInvalidError(f"{MANIFEST}: {key} is not a name")
    return value
