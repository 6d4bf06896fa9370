"""Where packages of a Debian suite come from on this machine, and which keys vouch for them.

The machine's own apt configuration decides: the mirrors it uses for the suite, the keys it trusts for them. A machine
that has none (Ubuntu, or another Debian release) gets Debian's public mirrors and the keys of debian-archive-keyring.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from opendsec.errors import HostCapabilityError
from opendsec.store.programs import ENVIRONMENT, run_program

APT = Path("/etc/apt")
DEBIAN_KEYS = Path("/usr/share/keyrings")
_ROLLING = frozenset({"sid", "unstable", "experimental", "rc-buggy", "testing"})
_SIGNED_BY = re.compile(r"signed-by\s*[:=]\s*[\"']?(/[^\]\s\"']+)", re.IGNORECASE)
_KEY_FILES = (".gpg", ".asc", ".pgp")


def public_sources(suite: str) -> list[str]:
    """Debian's public source lines for a suite."""
    lines = [f"deb http://deb.debian.org/debian {suite} main"]
    if suite not in _ROLLING:
        lines.append(f"deb http://deb.debian.org/debian {suite}-updates main")
        lines.append(f"deb http://deb.debian.org/debian-security {suite}-security main")
    return lines


def own_sources(suite: str) -> list[str]:
    """This machine's source lines for the suite, else the public ones."""
    apt = shutil.which("apt-get", path=ENVIRONMENT["PATH"])
    if apt is None:
        return public_sources(suite)
    question = [apt, "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    lines: list[str] = []
    run_program(question, timeout_s=60, on_line=lines.append)
    return sources_from_index(lines, suite) or public_sources(suite)


def sources_from_index(listing: Sequence[str], suite: str) -> list[str]:
    """Source lines out of `apt-get indextargets`, one `URI RELEASE COMPONENT` a line, that serve this suite."""
    wanted = (suite, f"{suite}-updates", f"{suite}-security")
    found: list[str] = []
    for line in listing:
        fields = line.split()
        if len(fields) == 3 and fields[1] in wanted and fields[2] == "main":
            source = f"deb {fields[0]} {fields[1]} main"
            if source not in found:
                found.append(source)
    return found if any(line.split()[2] == suite for line in found) else []


def collect_keys(sources: Sequence[str], into: Path, *, apt: Path = APT, debian_keys: Path = DEBIAN_KEYS) -> Path:
    """Copy the keys that vouch for these sources into a new directory and return it.

    Those of Debian, those apt trusts for everything, and those its configuration names for the same addresses.
    Raises HostCapabilityError when there are none.
    """
    into.mkdir()
    files = [*debian_keys.glob("debian-archive-keyring.*"), *_files(apt, "trusted.gpg.d/*")]
    for text in (path.read_text(errors="replace") for path in _files(apt, "sources.list", "sources.list.d/*")):
        files += (Path(name) for name in keys_named(text, (line.split()[1] for line in sources)))
    for number, path in enumerate(file for file in files if file.suffix in _KEY_FILES and file.is_file()):
        shutil.copyfile(path, into / f"{number:03}{path.suffix}")
    if not any(into.iterdir()):
        raise HostCapabilityError(
            "no keys of Debian's archive are on this machine",
            detail={"probe": "debian-archive-keyring"},
            remedy="apt-get install debian-archive-keyring",
        )
    return into


def keys_named(text: str, addresses: Iterable[str]) -> list[str]:
    """Key files that a sources file, in either of apt's formats, names for any of these addresses."""
    wanted = {address.rstrip("/") for address in addresses}
    found: list[str] = []
    for entry in re.split(r"\n\s*\n", text) if "URIs:" in text else text.splitlines():
        if wanted & {word.rstrip("/") for word in entry.split()}:
            found += _SIGNED_BY.findall(entry)
    return found


def _files(directory: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in directory.glob(pattern) if path.is_file())
