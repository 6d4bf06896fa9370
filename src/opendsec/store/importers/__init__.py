"""Make images from what people have: a directory, a tar archive, an OCI image layout (also packed as one archive).

Whatever the source, it becomes one tree, then one base layer, then one published image. Everything on the way lies in
a staging directory of the store, which is gone afterwards, also after a failure. An archive that `docker save` wrote
in its old format is refused by name rather than taken for a file system.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from opendsec.errors import UnsupportedError
from opendsec.model.image import Image, ImageConfig
from opendsec.model.spec import check_env, check_path
from opendsec.store.images import ImageStore
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import Layout
from opendsec.store.importers.source import Source, SourceKind
from opendsec.store.importers.tar import opened_archive, position
from opendsec.store.importers.unpack import TreeWriter
from opendsec.store.layers import make_layer
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
    limits: Limits = field(default_factory=Limits)


def import_image(store: ImageStore, request: ImportRequest, *, on_progress: OnProgress = quietly) -> Image:
    """Import and publish. ImageInvalidError, DigestMismatchError, ConflictError, DiskFullError, InvalidSpecError."""
    if request.config is not None:
        check_env(request.config.env)
        check_path(request.config.workdir, "workdir")
    with store.staging() as work:
        tree, config = _prepare(request, work, on_progress)
        layer = make_layer(store, work, tree, on_progress=on_progress)
        on_progress(Progress(phase="publishing"))
        return store.publish(
            request.name, layers=[layer], config=config, source=str(request.source), replace=request.replace
        )


def _prepare(request: ImportRequest, work: Path, on_progress: OnProgress) -> tuple[Path, ImageConfig]:
    """The tree to make the layer from, and the defaults of commands."""
    source = request.source
    config = request.config or ImageConfig()
    match source.kind:
        case SourceKind.DIRECTORY:
            return source.path, config
        case SourceKind.OCI:
            return _from_layout(source.path, request, work, on_progress)
        case SourceKind.TAR:
            tree = work / "archive"
            _unpack_tar(source.path, tree, request.limits, on_progress)
            if (tree / "oci-layout").is_file():
                return _from_layout(tree, request, work, on_progress)
            _refuse_docker_archive(tree, source)
            return tree, config


def _from_layout(
    layout_path: Path, request: ImportRequest, work: Path, on_progress: OnProgress
) -> tuple[Path, ImageConfig]:
    if request.config is not None:
        raise UnsupportedError(
            "an OCI image brings its own env, workdir and user; they cannot be changed while importing it",
            detail={"field": "config"},
        )
    layout = Layout(layout_path, limits=request.limits)
    image = layout.find(request.source.ref)
    layout.apply_layers(image, work / "tree", on_progress=on_progress)
    return work / "tree", image.config


def _unpack_tar(path: Path, tree: Path, limits: Limits, on_progress: OnProgress) -> None:
    """A plain archive has no lower layers, so names that look like whiteouts are files like any other."""
    writer = TreeWriter(tree, limits=limits, whiteouts=False)
    total = path.stat().st_size
    with (
        path.open("rb") as file,
        opened_archive(file, label=path.name, limits=limits) as archive,
        writer.layer(path.name),
    ):
        for member in archive.entries():
            writer.apply(archive, member)
            on_progress(Progress(phase="unpacking", done=position(file), total=total, detail=member.name))


def _refuse_docker_archive(tree: Path, source: Source) -> None:
    if (tree / "manifest.json").is_file() and not (tree / "bin").exists() and not (tree / "usr").exists():
        raise UnsupportedError(
            f"{source.path.name} is an archive of `docker save`, not a file system",
            detail={"field": "source"},
            remedy=f"skopeo copy docker-archive:{source.path} oci:DIR, then import oci:DIR",
        )
