"""What an OCI image configuration and its descriptors mean for us. Pure: JSON values in, model values out.

Environment, working directory, user, entry point, command and labels are taken exactly; anything malformed is refused
by field name, nothing is repaired silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendsec.errors import ImageInvalidError
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
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})\Z")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}


def oci_architecture(machine: str) -> str:
    """What OCI calls the processor uname(2) calls `machine`."""
    return _ARCHITECTURES.get(machine, machine)


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


def choose(entries: Sequence[Descriptor], *, ref: str, machine: str, where: str) -> Descriptor:
    """The one entry of an index meant by `ref` (its ref name or digest; empty: any) for Linux on this machine.

    `machine` is as uname(2) has it. ImageInvalidError lists what there is when none or several fit.
    """
    usable = [entry for entry in entries if entry.media_type in INDEX_TYPES | MANIFEST_TYPES]
    if ref:
        usable = [entry for entry in usable if ref in (entry.annotations.get(REF_NAME), entry.digest)]
    architecture = oci_architecture(machine)
    fitting = [entry for entry in usable if _fits(entry.platform, architecture)]
    best = [entry for entry in fitting if entry.platform] or fitting
    if len(best) > 1 and len({entry.digest for entry in best}) == 1:
        best = best[:1]
    if len(best) == 1:
        return best[0]
    there = ", ".join(_describe(entry) for entry in entries) or "nothing"
    wanted = f"{ref!r} for linux/{architecture}" if ref else f"linux/{architecture}"
    how = "nothing fits" if not best else "several images fit"
    raise ImageInvalidError(
        f"{where}: {how} {wanted}; it holds {there}",
        detail={"field": "source"},
        remedy="name one with oci:DIR:REF",
    )


def _fits(platform: Mapping[str, str], architecture: str) -> bool:
    """An entry without a platform is taken for ours; its configuration is checked later."""
    if not platform:
        return True
    return platform.get("os", "linux") == "linux" and platform.get("architecture", architecture) == architecture


def _describe(entry: Descriptor) -> str:
    name = entry.annotations.get(REF_NAME) or entry.digest[:19]
    platform = "/".join(entry.platform[key] for key in ("os", "architecture", "variant") if key in entry.platform)
    return f"{name} ({platform})" if platform else name


def check_platform(fields: Mapping[str, Any], *, machine: str) -> None:
    """Refuse the image of another operating system or processor: it would fail later and less clearly."""
    architecture = oci_architecture(machine)
    found = (fields.get("os") or "linux", fields.get("architecture") or architecture)
    if found != ("linux", architecture):
        raise ImageInvalidError(f"the image is for {found[0]}/{found[1]}, this machine is linux/{architecture}")


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
