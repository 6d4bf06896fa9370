"""What was converted before: which layer of the store a group of image layers became.

    <root>/conversions/layers/<key>.json   the layer; the key covers all that decides its bytes
    <root>/conversions/sizes/<digest>      bytes of an uncompressed image layer, by its digest
    <root>/conversions/chains/<key>.json   digests of the image layers that a whole stack of layers was made of

A hint and nothing more: an entry whose layer is gone, or that cannot be read, is a miss and is deleted. Nothing refers
to an entry, so anyone may delete any of them at any time. What is found is linked into the asker's staging directory
at once; from then on no garbage collection can take it away.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Blob, Layer, LayerRole
from opendsec.store.chunks import DIGEST_BYTES, chunk_count
from opendsec.store.durable import NO_LINKS, appearing
from opendsec.store.erofs import mkfs_version
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.manifest import hex_of, two_file_layer

FORMAT = 1
"""Raised when the same input would give other bytes than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """All that decides the bytes of one converted group."""

    below: tuple[str, ...]
    """Digests of what lies under it: layers of the store it was put on, then uncompressed image layers."""
    group: tuple[str, ...]
    """Digests of its own uncompressed image layers."""

    def key(self, *, mkfs: tuple[int, ...]) -> str:
        """Hex name of the entry."""
        fields = [FORMAT, list(mkfs), list(self.below), list(self.group)]
        return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layer that was made before, and files to mount it from."""

    publishable: StagedLayer | Layer
    meta: Path
    data: Path | None

    @property
    def layer(self) -> Layer:
        """The layer itself."""
        return self.publishable.layer if isinstance(self.publishable, StagedLayer) else self.publishable


class Conversions:
    """The entries of one store."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._layers = store.root / "conversions" / "layers"
        self._sizes = store.root / "conversions" / "sizes"
        self._chains = store.root / "conversions" / "chains"
        self._mkfs = mkfs_version()

    def find(self, conversion: Conversion, work: Path, *, name: str, role: LayerRole) -> Found | None:
        """The layer, or None when it was never made or is gone. Its files are linked into `work` where possible."""
        path = self._path(conversion)
        try:
            layer = _decode(json.loads(path.read_bytes()), role)
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, ImageInvalidError):
            path.unlink(missing_ok=True)
            return None
        found = self._linked(layer, work, name)
        if found is None:
            path.unlink(missing_ok=True)
        return found

    def record(self, conversion: Conversion, layer: Layer, sizes: Mapping[str, int]) -> None:
        """Remember a published layer, and the sizes of the image layers it was made of."""
        for digest, size in sizes.items():
            _replace(self._sizes / digest.replace(":", "-"), str(size))
        _replace(self._path(conversion), json.dumps(_encode(layer) | {"group": list(sizes)}))

    def record_chain(self, layers: Sequence[Layer], diff_ids: Sequence[str]) -> None:
        """Remember what a whole stack of published layers was made of."""
        top = layers[-1].mounted.digest if layers else ""
        _replace(self._chain(layers), json.dumps({"top": top, "diff_ids": list(diff_ids)}))

    def origin(self, layers: Sequence[Layer]) -> tuple[str, ...]:
        """Digests of the uncompressed image layers a whole stack was made of; empty when nobody knows."""
        try:
            return tuple(str(one) for one in json.loads(self._chain(layers).read_bytes())["diff_ids"])
        except (FileNotFoundError, ValueError, TypeError, LookupError):
            return ()

    def sweep(self) -> int:
        """Delete the entries whose layer is gone, and sizes no entry needs; how many there were."""
        gone: list[Path] = []
        needed: set[str] = set()
        for path in _files(self._layers):
            fields = _read(path)
            try:
                layer = _decode(fields, LayerRole.BASE)
                group = [str(one).replace(":", "-") for one in fields["group"]]
            except (ValueError, LookupError, TypeError, ImageInvalidError):
                gone.append(path)
                continue
            if self._has(layer.mounted.digest):
                needed.update(group)
            else:
                gone.append(path)
        gone += (path for path in _files(self._sizes) if path.name not in needed)
        gone += (path for path in _files(self._chains) if not self._has(_read(path).get("top")))
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def _has(self, digest: object) -> bool:
        try:
            return self._store.blob_path(str(digest)).exists()
        except ImageInvalidError:
            return False

    def _chain(self, layers: Sequence[Layer]) -> Path:
        text = "\n".join(layer.digest for layer in layers)
        return self._chains / f"{hashlib.sha256(text.encode('ascii')).hexdigest()}.json"

    def sizes(self, diff_ids: Sequence[str]) -> list[int | None]:
        """Bytes of each uncompressed image layer, where known."""
        return [self._size(digest) for digest in diff_ids]

    def _size(self, digest: str) -> int | None:
        try:
            return int((self._sizes / digest.replace(":", "-")).read_text("ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def _path(self, conversion: Conversion) -> Path:
        return self._layers / f"{conversion.key(mkfs=self._mkfs)}.json"

    def _linked(self, layer: Layer, work: Path, name: str) -> Found | None:
        """All files of a layer, of the right size, under names that stay; None when one is missing."""
        stored = [(self._store.blob_path(layer.mounted.digest), layer.mounted.size_bytes)]
        if layer.data is not None:
            stored.append((self._store.data_path(layer.data.digest), layer.data.size_bytes))
            table_bytes = chunk_count(layer.data.size_bytes) * DIGEST_BYTES
            stored.append((self._store.table_path(layer.data.digest), table_bytes))
        links = [work / f"{name}.{number}" for number in range(len(stored))]
        try:
            for (source, _), link in zip(stored, links, strict=True):
                os.link(source, link, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            links = [source for source, _ in stored]
        if any(
            not path.is_file() or path.stat().st_size != size for path, (_, size) in zip(links, stored, strict=True)
        ):
            return None
        meta, data, table = (*links, None, None)[:3]
        assert meta is not None
        if meta == stored[0][0]:
            return Found(publishable=layer, meta=meta, data=data)  # Publishing looks whether it is still there.
        return Found(publishable=StagedLayer(layer=layer, meta=meta, data=data, table=table), meta=meta, data=data)


def _encode(layer: Layer) -> dict[str, object]:
    fields: dict[str, object] = {"digest": layer.digest, "size_bytes": layer.size_bytes}
    if layer.meta is not None and layer.data is not None:
        fields["meta"] = [layer.meta.digest, layer.meta.size_bytes]
        fields["data"] = [layer.data.digest, layer.data.size_bytes]
    return fields


def _decode(fields: Mapping[str, Any], role: LayerRole) -> Layer:
    hex_of(fields["digest"])
    if "meta" not in fields:
        return Layer(digest=fields["digest"], size_bytes=int(fields["size_bytes"]), role=role)
    meta, data = (Blob(digest=fields[key][0], size_bytes=int(fields[key][1])) for key in ("meta", "data"))
    hex_of(meta.digest)
    hex_of(data.digest)
    layer = two_file_layer(meta, data, role=role)
    if layer.digest != fields["digest"]:
        raise ValueError("the digest is not of these files")
    return layer


def _files(directory: Path) -> list[Path]:
    """Entries, and none that is just being written."""
    return sorted(path for path in directory.iterdir() if path.name[0] != ".") if directory.is_dir() else []


def _read(path: Path) -> dict[str, Any]:
    """Its JSON object; empty when it is none."""
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _replace(path: Path, text: str) -> None:
    """Whole or not at all for readers; a crash may leave an entry nobody can read, which is a miss."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with appearing(path) as partial:
        partial.write_text(text, encoding="ascii")
