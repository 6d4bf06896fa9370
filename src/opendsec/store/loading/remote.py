"""Names, manifests and compositions of a store behind HTTP or S3: what an edge needs of one, and not a word more.

    <address>/tags/<quoted name>, manifests/sha256/<hex>.json      as in a directory store
    <address>/names.json                                           names of a store that cannot be listed (plain HTTP)

It is read-only: images get there with `opendsec image sync`, which puts data first and the tag last. A manifest is
kept in memory, for its digest names it; a name is asked for again each time. A store that does not answer is a
NodeError within PATIENCE_S, never an image that is not there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from opendsec.errors import ImageInvalidError, ImageNotFoundError, UnsupportedError
from opendsec.model.ids import check_image_name
from opendsec.model.image import Image
from opendsec.store.compose import compose, split_reference
from opendsec.store.layout import manifest_file
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.sources import StoreFiles
from opendsec.store.manifest import Tag, decode_tag, digest_of, name_of_tag_file, tag_file_name, to_image
from opendsec.store.names import NAMES_FILE

PATIENCE_S = 10.0
_MANIFESTS = 256
_TAG_BYTES = 65_536
_MANIFEST_BYTES = 16 << 20
_NAMES_BYTES = 64 << 20


class RemoteStore:
    """The images of a remote store. Threads may share it."""

    def __init__(self, files: StoreFiles, *, patience_s: float = PATIENCE_S) -> None:
        self.files = files
        self._source = ChunkSource(files, patience_s=patience_s)
        self._lock = threading.Lock()
        self._manifests: OrderedDict[str, bytes] = OrderedDict()

    def get(self, name: str) -> Image:
        """The image a name, or `name@sha256:…`, means now.

        Raises ImageNotFoundError, InvalidSpecError, ImageInvalidError (damaged), NodeError (it cannot be reached).
        """
        check_image_name(name)
        plain, digest = split_reference(name)
        try:
            if digest:
                tag = Tag(digest=digest, created_at=0.0, source="")
            else:
                tag = decode_tag(self._source.small(f"tags/{tag_file_name(plain)}", most=_TAG_BYTES), name=name)
            return to_image(name, tag, self._manifest(tag.digest, name))
        except FileNotFoundError as error:
            raise ImageNotFoundError(
                f"no image {name!r} in the store {self.files.address}",
                detail={"image": name},
                remedy="`opendsec image sync` brings images there",
            ) from error

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """What a sandbox starts from; see `opendsec.store.compose`."""
        return compose(self.get, image, workspace=workspace, toolkits=toolkits)

    def names(self) -> list[str]:
        """Of all images, sorted; none where the store can neither be listed nor has a list. NodeError."""
        listed = self._source.listed("tags")
        if listed is not None:
            return sorted(name_of_tag_file(name) for name in listed if not name.startswith("."))
        try:
            content = self._source.small(NAMES_FILE, most=_NAMES_BYTES)
            return sorted(msgspec.json.decode(content, type=list[str]))
        except FileNotFoundError:
            return []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ImageInvalidError(f"{NAMES_FILE} of the store {self.files.address} is damaged: {error}") from error

    def publish(self, name: str, **_: object) -> Image:
        """UnsupportedError, always."""
        raise UnsupportedError(
            f"image {name!r} cannot be published in {self.files.address}: this node only reads that store",
            remedy="publish in a directory and bring it there with `opendsec image sync`",
        )

    def close(self) -> None:
        """Give back connections."""
        self._source.close()

    def _manifest(self, digest: str, name: str) -> bytes:
        with self._lock:
            known = self._manifests.get(digest)
            if known is not None:
                self._manifests.move_to_end(digest)
                return known
        content = self._source.small(manifest_file(digest), most=_MANIFEST_BYTES)
        if digest_of(content) != digest:
            raise ImageInvalidError(
                f"the manifest of image {name!r} does not have the digest its tag says", detail={"image": name}
            )
        with self._lock:
            self._manifests[digest] = content
            if len(self._manifests) > _MANIFESTS:
                self._manifests.popitem(last=False)
        return content
