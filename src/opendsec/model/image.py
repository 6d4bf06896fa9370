"""Images as values: ordered layers, references to other images, and the defaults commands run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BUILD_CACHE = "build-cache/"
"""Names that begin so are of steps of builds (`opendsec.build`): removing them costs time, and nothing else."""


class LayerRole(StrEnum):
    """What a layer is for."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DISK = "disk"
    """A whole disk of a machine, as one file that is no file system of ours (`ImageConfig.machine`)."""


class FileRole(StrEnum):
    """Roles of layers that hold files: what a command line offers, and all roles but disk."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


class DiskFormat(StrEnum):
    """How a disk lies in its file."""

    QCOW2 = "qcow2"
    RAW = "raw"


class Firmware(StrEnum):
    """What a machine starts from its disk with."""

    BIOS = "bios"
    UEFI = "uefi"


class Graphics(StrEnum):
    """The display adapter a machine is built with."""

    STD = "std"
    """Plain VGA with VESA modes: every operating system can draw on it."""
    VIRTIO = "virtio"
    """virtio-gpu behind the same VGA: for guests with the driver."""


class Devices(StrEnum):
    """Disk, network card and pointer a machine is built with."""

    PC = "pc"
    """SATA, e1000e and a USB tablet: what operating systems have drivers for by themselves."""
    VIRTIO = "virtio"
    """All of virtio, and faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the disk of an image was made for. A machine is always of the PC kind (q35)."""

    format: DiskFormat
    virtual_bytes: int
    """Size of the disk as the guest sees it."""
    firmware: Firmware = Firmware.BIOS
    tpm: bool = False
    """It has a TPM 2.0."""
    agent: bool = False
    """Our guest agent is inside and answers on the port `org.opendsec.agent`."""
    graphics: Graphics = Graphics.STD
    devices: Devices = Devices.PC
    memory_mb: int = 1024
    """MiB, where the sandbox's own limit says nothing."""
    cpus: int = 1
    """Where the sandbox's own limit says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One immutable file of the store."""

    digest: str
    """`sha256:<hex>`: of the bytes of metadata; of the chunk table of data (`opendsec.store.chunks`)."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One immutable slice of an image: an EROFS file system.

    `meta` holds every name, mode and attribute and is copied to the node; `data` holds the bytes of the files, stays
    on the store and is read on demand. A layer of one file has neither, and is that file.
    """

    digest: str
    """`sha256:<hex>` that names the layer: of its one file, or of both digests (`opendsec.store.manifest`)."""
    size_bytes: int
    """Of all its files."""
    role: LayerRole = LayerRole.BASE
    meta: Blob | None = None
    data: Blob | None = None
    """Both or neither."""

    @property
    def mounted(self) -> Blob:
        """The file the kernel is given as the file system."""
        return self.meta or Blob(digest=self.digest, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Defaults for commands, exactly as the OCI configuration has them."""

    env: Mapping[str, str] = field(default_factory=dict)
    """In order; PATH is whatever the image says, or the usual default when it says nothing."""
    workdir: str = "/"
    user: str = ""
    """As OCI: "", name, uid, or user:group. "" is root."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    """Of an image that is a whole disk, and starts in a full VM only; its one layer has the role disk."""


class PartKind(StrEnum):
    """How an image came into a composition."""

    BASE = "base"
    """Another image's layers lie on it."""
    IMAGE = "image"
    """The one that was named as the image."""
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """One image of a composition, with the exact content its name meant then."""

    kind: PartKind
    name: str
    digest: str
    """Of its manifest: `name@digest` means this content for ever."""
    layers: tuple[str, ...] = ()
    """Digests of its own layers, lowest first."""

    @property
    def pinned(self) -> str:
        """A reference that will always mean this very content."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A named, immutable file tree."""

    name: str
    digest: str
    """`sha256:<hex>` of the canonical manifest: layers, references and config."""
    layers: tuple[Layer, ...]
    """Its own, lowest first."""
    config: ImageConfig
    created_at: float
    """Unix time, seconds."""
    source: str = ""
    """Where it came from, for people: `oci:/path`, `mmdebstrap bookworm`."""
    base: str = ""
    """Reference to the image its layers lie on. A name means whatever it means at a start; `name@sha256:…` is fixed."""
    toolkits: tuple[str, ...] = ()
    """References to the toolkits a sandbox gets when it asks for no others, lowest first."""
    parts: tuple[ImagePart, ...] = ()
    """Of a composition only: the images it was made of, lowest first."""
