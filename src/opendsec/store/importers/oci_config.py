"""What an OCI image configuration and its descriptors mean for us. Pure: JSON values in, model values out.

Environment, working directory, user, entry point, command and labels are taken exactly; anything malformed is refused
by field name, nothing is repaired silently.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import ImageConfig

INDEX_TYPES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
MANIFEST_TYPES = frozenset(
    {
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)
LAYER_TYPE = re.compile(
    r"application/vnd\.oci\.image\.layer\.(?:nondistributable\.)?v1\.tar(?:\+(?:gzip|zstd))?\Z"
    r"|application/vnd\.docker\.image\.rootfs\.(?:foreign\.)?diff\.tar(?:\.gzip|\.zstd)?\Z"
)
REF_NAME = "org.opencontainers.image.ref.name"
_DOCKER_NAME = "io.containerd.image.name"
"""What `docker save` calls the image in full; its ref name is the tag alone."""
_LISTED = 20
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})\Z")
_PLATFORM = re.compile(r"(?P<os>[a-z0-9]+)/(?P<architecture>[a-z0-9_]+)(?:/(?P<variant>[a-z0-9.]+))?\Z")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}


def oci_architecture(machine: str) -> str:
    """What OCI calls the processor uname(2) calls `machine`."""
    return _ARCHITECTURES.get(machine, machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What an image must be made for, in the words of OCI: linux/amd64, linux/arm/v7."""

    architecture: str
    variant: str = ""
    """Empty: any."""

    def __str__(self) -> str:
        return f"linux/{self.architecture}" + (f"/{self.variant}" if self.variant else "")

    @classmethod
    def here(cls) -> Platform:
        """This machine's."""
        return cls.of(platform.machine())

    @classmethod
    def of(cls, machine: str) -> Platform:
        """Of a machine as uname(2) names it."""
        return cls(architecture=_ARCHITECTURES.get(machine, machine))

    @classmethod
    def parse(cls, text: str) -> Platform:
        """`linux/arm64`, `linux/arm/v7`. InvalidSpecError naming the field `platform`."""
        match = _PLATFORM.match(text)
        if match is None or match["os"] != "linux":
            raise InvalidSpecError(
                f"platform: {text[:60]!r} is not one of Linux",
                detail={"field": "platform"},
                remedy="say linux/amd64, linux/arm64, linux/arm/v7, …",
            )
        return cls(architecture=match["architecture"], variant=match["variant"] or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """A reference to a blob: what it is, its digest, and its size in bytes."""

    media_type: str
    digest: str
    size_bytes: int
    platform: Mapping[str, str]
    annotations: Mapping[str, str]


def parse_descriptor(fields: object, *, where: str) -> Descriptor:
    """A descriptor out of JSON. ImageInvalidError saying where it stood."""
    if not isinstance(fields, dict):
        raise ImageInvalidError(f"{where} is no descriptor")
    digest, size = fields.get("digest"), fields.get("size")
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise ImageInvalidError(f"{where}: the digest {str(digest)[:90]!r} is none of sha256 or sha512")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageInvalidError(f"{where}: the size {str(size)[:40]!r} is not a number of bytes")
    return Descriptor(
        media_type=str(fields.get("mediaType") or ""),
        digest=digest,
        size_bytes=size,
        platform=_strings(fields.get("platform"), where=f"{where}: platform"),
        annotations=_strings(fields.get("annotations"), where=f"{where}: annotations"),
    )


def parse_list(fields: Mapping[str, Any], key: str, *, where: str) -> list[Descriptor]:
    """The descriptors under a key."""
    items = fields.get(key)
    if not isinstance(items, list):
        raise ImageInvalidError(f"{where}: {key} is not a list")
    return [parse_descriptor(item, where=f"{where}: {key}[{number}]") for number, item in enumerate(items)]


def choose(entries: Sequence[Descriptor], *, ref: str, platform: Platform, where: str) -> Descriptor:
    """The one entry of an index meant by `ref` (its ref name, Docker name or digest; empty: any) for the platform.

    ImageInvalidError lists what there is when none or several fit.
    """
    usable = [entry for entry in entries if entry.media_type in INDEX_TYPES | MANIFEST_TYPES]
    if ref:
        usable = [entry for entry in usable if ref in _names(entry)]
    fitting = [entry for entry in usable if _fits(entry.platform, platform)]
    best = [entry for entry in fitting if entry.platform] or fitting
    if len(best) > 1 and len({entry.digest for entry in best}) == 1:
        best = best[:1]
    if len(best) == 1:
        return best[0]
    listed = [_describe(entry) for entry in entries[:_LISTED]] + ["…"] * (len(entries) > _LISTED)
    wanted = f"{ref!r} for {platform}" if ref else str(platform)
    how = "nothing fits" if not best else "several images fit"
    raise ImageInvalidError(
        f"{where}: {how} {wanted}; it holds {', '.join(listed) or 'nothing'}",
        detail={"field": "source"},
        remedy="name one with oci:DIR:REF, and its platform with --platform",
    )


def _names(entry: Descriptor) -> tuple[str | None, ...]:
    return (entry.annotations.get(REF_NAME), entry.annotations.get(_DOCKER_NAME), entry.digest)


def _fits(found: Mapping[str, str], platform: Platform) -> bool:
    """An entry without a platform is taken for the right one; its configuration is checked later."""
    if not found:
        return True
    return (
        found.get("os", "linux") == "linux"
        and found.get("architecture", platform.architecture) == platform.architecture
        and platform.variant in ("", found.get("variant", ""))
    )


def _describe(entry: Descriptor) -> str:
    name = entry.annotations.get(REF_NAME) or entry.digest[:19]
    platform = "/".join(entry.platform[key] for key in ("os", "architecture", "variant") if key in entry.platform)
    return f"{name} ({platform})" if platform else name


def check_platform(fields: Mapping[str, Any], *, platform: Platform) -> None:
    """Refuse the image of another operating system or processor: it would fail later and less clearly."""
    found = (fields.get("os") or "linux", fields.get("architecture") or platform.architecture)
    if found != ("linux", platform.architecture):
        raise ImageInvalidError(
            f"the image is for {str(found[0])[:40]}/{str(found[1])[:40]}, wanted is {platform}",
            remedy="say --platform for an image this machine itself cannot run",
        )


def parse_config(fields: Mapping[str, Any]) -> ImageConfig:
    """The defaults of commands out of an image configuration's `config` object (which may be missing)."""
    config = fields.get("config") or {}
    if not isinstance(config, dict):
        raise ImageInvalidError("config.config is not an object")
    workdir = _text(config, "WorkingDir") or "/"
    return ImageConfig(
        env=_environment(config.get("Env")),
        workdir=workdir if workdir.startswith("/") else f"/{workdir}",
        user=_text(config, "User"),
        entrypoint=_arguments(config, "Entrypoint"),
        cmd=_arguments(config, "Cmd"),
        labels=_strings(config.get("Labels"), where="config.Labels"),
    )


def diff_ids(fields: Mapping[str, Any], *, count: int) -> list[str]:
    """Digests of the uncompressed layers, lowest first; as many as there are layers, or ImageInvalidError."""
    rootfs = fields.get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, str) and _DIGEST.match(one) for one in found):
        raise ImageInvalidError("config.rootfs.diff_ids is not a list of digests")
    if len(found) != count:
        raise ImageInvalidError(f"config.rootfs.diff_ids names {len(found)} layers, the manifest {count}")
    return found


def _environment(entries: object) -> dict[str, str]:
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise ImageInvalidError("config.Env is not a list")
    env: dict[str, str] = {}
    for entry in entries:
        name, separator, value = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        if not name or not separator or "\0" in entry:
            raise ImageInvalidError(f"config.Env: {str(entry)[:80]!r} is not NAME=value", detail={"field": "Env"})
        env[name] = value
    return env


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise ImageInvalidError(f"config.{key} is not a text without NULs", detail={"field": key})
    return value


def _arguments(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise ImageInvalidError(f"config.{key} is not a list of texts without NULs", detail={"field": key})
    return tuple(value)


def _strings(value: object, *, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ImageInvalidError(f"{where} is not an object")
    return {str(key): item for key, item in value.items() if isinstance(item, str)}
