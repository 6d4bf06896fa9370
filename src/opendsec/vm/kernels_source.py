"""A guest kernel built from the distribution's source with our configuration: everything built in, no modules.

Takes some minutes of all processors, 2 GiB of disk while it is built, and the compiler's packages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from opendsec.errors import HostCapabilityError, ImageInvalidError
from opendsec.store.programs import find_program
from opendsec.vm.kernels_found import DOWNLOAD_S, Found, Say, needs_programs, run

DEFAULT_PACKAGE: Final = "linux-source-6.12"
CONFIG: Final = Path(__file__).with_name("microvm.config")
BUILD_S: Final = 4 * 3600.0
_PROGRAMS = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
    "tar": "tar",
    "perl": "perl",
}
_SEE = "see what the compiler said"
_LIBELF = Path("/usr/include/libelf.h")
_UPDATE = "apt-get update, and look for sources with `apt-cache search linux-source`"


def build(work: Path, package: str, environment: Mapping[str, str], say: Say) -> Found:
    """Raises HostCapabilityError (what has to be installed), NodeError (with the compiler's last words)."""
    needs_programs(_PROGRAMS)
    if not _LIBELF.is_file():
        raise HostCapabilityError(
            "libelf.h is missing", detail={"packages": ["libelf-dev"]}, remedy="apt-get install libelf-dev"
        )
    name = package or DEFAULT_PACKAGE
    source = _unpacked(work, name, environment, say)
    make = [find_program("nice"), "-n19", find_program("make"), "-C", str(source), "-s", f"-j{os.cpu_count() or 1}"]
    fragment = source / "opendsec.config"
    fragment.write_text(CONFIG.read_text())
    quiet = dict(environment) | {"KBUILD_BUILD_TIMESTAMP": "1970-01-01", "KBUILD_BUILD_USER": "opendsec"}
    quiet |= {"KBUILD_BUILD_HOST": "opendsec", "KCONFIG_ALLCONFIG": str(fragment)}
    run([*make, "allnoconfig"], what="make allnoconfig", timeout_s=600, remedy=_SEE, environment=quiet)
    lost = unmet(CONFIG.read_text(), (source / ".config").read_text())
    if lost:
        raise ImageInvalidError(f"this source does not know, or does not allow: {', '.join(lost)}")
    say("building; this takes some minutes")
    run([*make, "vmlinux"], what="make vmlinux", timeout_s=BUILD_S, remedy=_SEE, environment=quiet)
    stripped = work / "vmlinux"
    strip = [find_program("objcopy"), "--strip-all", str(source / "vmlinux"), str(stripped)]
    run(strip, what="objcopy", timeout_s=300, remedy="apt-get install binutils", environment=environment)
    return Found(
        vmlinux=stripped.read_bytes(), source=f"built from the Debian package {name} (GPL-2.0)", prefix="built"
    )


def _unpacked(work: Path, name: str, environment: Mapping[str, str], say: Say) -> Path:
    say(f"downloading {name}")
    apt = [find_program("apt-get"), "download", "-q", "-o", "APT::Sandbox::User=root", name]
    run(apt, what="apt-get download", timeout_s=DOWNLOAD_S, remedy=_UPDATE, environment=environment, cwd=work)
    archive, tree = next(work.glob("*.deb")), work / "tree"
    unpack = [find_program("dpkg-deb"), "--extract", str(archive), str(tree)]
    run(unpack, what="dpkg-deb", timeout_s=600, remedy="the package is damaged", environment=environment)
    archive.unlink()
    tars = sorted((tree / "usr/src").glob("linux-source-*.tar.*"))
    if not tars:
        raise ImageInvalidError(f"the package {name} holds no kernel source", remedy=_UPDATE)
    say("unpacking the source")
    source = work / "source"
    source.mkdir()
    tar = [find_program("tar"), "-xf", str(tars[0]), "-C", str(source), "--strip-components=1"]
    run(tar, what="tar", timeout_s=1800, remedy="the package is damaged", environment=environment)
    tars[0].unlink()
    return source


def unmet(wanted: str, made: str) -> list[str]:
    """Options set in `wanted` that are not so in `made`, a .config. Pure."""
    have = {line for line in made.splitlines() if line.startswith("CONFIG_")}
    return [line for line in wanted.splitlines() if line.startswith("CONFIG_") and line not in have]
