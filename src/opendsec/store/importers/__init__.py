"""Make images from what people have: a directory, an archive, an OCI image layout, a Docker archive, a registry.

Layers of an image that has layers stay apart (`grouping` says how), so what two images share is stored once, and what
was converted before is neither unpacked nor fetched again (`conversions`). A directory or an archive of files becomes
one layer. Everything on the way lies in a staging directory of the store, which is gone afterwards, also after a
failure.

An image may be put on a base (`on`): its layers are then made as seen from there, and refer to it. An image that
begins with the base's own layers gives only those above; any other lies on it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opendsec.errors import InvalidSpecError, UnsupportedError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.model.spec import check_env, check_path
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.importers.conversions import Conversions
from opendsec.store.importers.convert import Below, Converted, Plan, Work, convert, plan
from opendsec.store.importers.docker import find_docker, looks_like_docker
from opendsec.store.importers.grouping import COLLAPSE_BYTES
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import Layout, OciImage
from opendsec.store.importers.oci_config import Platform
from opendsec.store.importers.registry import RegistryImage
from opendsec.store.importers.skopeo import RegistryAccess
from opendsec.store.importers.source import Source, SourceKind
from opendsec.store.importers.tree import check_tree, layer_of_archive, layer_of_directory, unpack_tar
from opendsec.store.progress import OnProgress, Progress, quietly

__all__ = ["ImportRequest", "import_image"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import and under which name."""

    name: str
    source: Source
    config: ImageConfig | None = None
    """Defaults of commands for a directory or an archive, which have none of their own; an OCI image keeps its."""
    replace: bool = False
    role: LayerRole | None = None
    """Of all layers; None: as the image itself says, else base."""
    on: str = ""
    """Reference of the image this one lies on."""
    toolkits: Sequence[str] = ()
    """References to the toolkits a sandbox gets when it asks for no others, lowest first."""
    platform: Platform | None = None
    """Of an image with several; None: this machine's."""
    collapse_bytes: int = COLLAPSE_BYTES
    """Layers are taken together until they have so much; see `grouping`."""
    access: RegistryAccess = field(default_factory=RegistryAccess)
    limits: Limits = field(default_factory=Limits)


def import_image(store: ImageStore, request: ImportRequest, *, on_progress: OnProgress = quietly) -> Image:
    """Import and publish.

    Raises ImageInvalidError, DigestMismatchError, ImageNotFoundError, ConflictError, DiskFullError, InvalidSpecError,
    HostCapabilityError; from a registry also UnauthorizedError, ConnectError, CapacityError.
    """
    if request.config is not None:
        check_env(request.config.env)
        check_path(request.config.workdir, "workdir")
    if request.role in (LayerRole.WORKSPACE, LayerRole.TOOLKIT) and request.toolkits:
        raise InvalidSpecError("toolkits: only a base asks for toolkits", detail={"field": "toolkits"})
    with store.staging() as directory, store.scratch() as trees:
        return _Import(store, request, directory, trees, on_progress).run()


class _Import:
    """One import, in its staging directory."""

    def __init__(
        self, store: ImageStore, request: ImportRequest, directory: Path, trees: Path, on_progress: OnProgress
    ) -> None:
        self._store = store
        self._request = request
        self._trees = trees
        self._on_progress = on_progress
        self._platform = request.platform or Platform.here()
        self._conversions = Conversions(store)
        self._work = Work(
            store=store,
            directory=directory,
            trees=trees,
            limits=request.limits,
            limit_bytes=request.collapse_bytes,
            on_progress=on_progress,
            below=self._below(),
        )

    def run(self) -> Image:
        source, limits = self._request.source, self._request.limits
        match source.kind:
            case SourceKind.DIRECTORY:
                return self._directory_tree()
            case SourceKind.OCI:
                return self._image(Layout(source.path, limits=limits).find(source.ref, platform=self._platform))
            case SourceKind.REGISTRY:
                return self._registry()
            case SourceKind.TAR:
                return self._archive_tree()
            case SourceKind.ARCHIVE | SourceKind.OCI_ARCHIVE | SourceKind.DOCKER_ARCHIVE:
                return self._archive()

    def _below(self) -> Below:
        if not self._request.on:
            return Below()
        layers = self._store.compose(self._request.on, toolkits=()).layers
        return Below(layers=layers, diff_ids=self._conversions.origin(layers))

    # trees

    def _directory_tree(self) -> Image:
        source = self._request.source
        check_tree(source.path)
        layer = layer_of_directory(self._work, source.path, role=self._role())
        return self._publish([layer], self._request.config or ImageConfig())

    def _archive_tree(self, unpacked: Path | None = None) -> Image:
        """`unpacked`: where the archive was unpacked to already, seen from nowhere."""
        layer = layer_of_archive(self._work, self._request.source.path, unpacked, role=self._role())
        return self._publish([layer], self._request.config or ImageConfig())

    def _role(self) -> LayerRole:
        return self._request.role or LayerRole.BASE

    # images

    def _archive(self) -> Image:
        source, limits = self._request.source, self._request.limits
        tree = self._trees / "archive"
        unpack_tar(source.path, tree, limits=limits, on_progress=self._on_progress)
        if (tree / "oci-layout").is_file() and (tree / "index.json").is_file():
            return self._image(Layout(tree, limits=limits).find(source.ref, platform=self._platform))
        if source.kind is SourceKind.DOCKER_ARCHIVE or looks_like_docker(tree):
            return self._image(find_docker(tree, source.ref, platform=self._platform, limits=limits))
        if source.kind is SourceKind.OCI_ARCHIVE:
            return self._image(Layout(tree, limits=limits).find(source.ref, platform=self._platform))
        return self._archive_tree(tree)

    def _registry(self) -> Image:
        place = self._trees / "registry"
        place.mkdir(mode=0o700)
        request = self._request
        pull = RegistryImage(
            request.source.ref, request.access, place, limits=request.limits, on_progress=self._on_progress
        )
        return self._image(pull.find(self._platform), pull)

    def _image(self, image: OciImage, pull: RegistryImage | None = None) -> Image:
        if self._request.config is not None:
            raise UnsupportedError(
                "an OCI image brings its own env, workdir and user; they cannot be changed while importing it",
                detail={"field": "config"},
            )
        image = self._above_base(image)
        prepared = plan(self._work, self._conversions, image, role=self._request.role)
        if prepared.start < len(image.layers) and not self._request.replace:
            # A layer of it is new to the store, so what the name means now is another image: said before any work.
            self._store.check_free(self._request.name)
        if pull is not None:
            pull.fetch(image, start=prepared.start)
        converted = convert(self._work, image, prepared)
        layers = [*(one.publishable for one in prepared.found), *(one.layer for one in converted)]
        published = self._publish(layers, image.config)
        try:
            self._remember(image, prepared, converted)
        except OSError as error:  # The image is there; the next one will be converted anew.
            self._on_progress(Progress(phase=f"what was converted could not be remembered: {error.strerror}"))
        return published

    def _remember(self, image: OciImage, prepared: Plan, converted: Sequence[Converted]) -> None:
        for one in converted:
            self._conversions.record(one.conversion, one.layer.layer, one.sizes)
        below = self._work.below
        if below.diff_ids or not below.layers:
            diff_ids = [*below.diff_ids, *(layer.diff_id for layer in image.layers)]
            own = [*(one.layer for one in prepared.found), *(one.layer.layer for one in converted)]
            self._conversions.record_chain([*below.layers, *own], diff_ids)

    def _above_base(self, image: OciImage) -> OciImage:
        """Without the layers its base has, when it begins with all of those."""
        below = self._work.below.diff_ids
        if not self._request.on:
            return image
        if not below or tuple(layer.diff_id for layer in image.layers[: len(below)]) != below:
            self._on_progress(Progress(phase=f"it does not begin with the layers of {self._request.on}: all go on top"))
            return image
        if len(image.layers) == len(below):
            raise InvalidSpecError(
                f"on: {self._request.source} has no layer beyond those of {self._request.on}", detail={"field": "on"}
            )
        return replace(image, layers=image.layers[len(below) :])

    def _publish(self, layers: Sequence[StagedLayer | Layer], config: ImageConfig) -> Image:
        self._on_progress(Progress(phase="publishing"))
        request = self._request
        return self._store.publish(
            request.name,
            layers=layers,
            config=config,
            base=request.on,
            toolkits=tuple(request.toolkits),
            source=str(request.source),
            replace=request.replace,
        )
