"""The project the demonstration works on: simpleeval as published on PyPI, pinned by version and digest.

It is pure Python, has no dependencies, and its 160 tests need nothing but unittest. pip fetches the source archive
once; later runs take it from the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tarfile
from pathlib import Path, PurePosixPath

from opendsec.errors import ConnectError, DigestMismatchError, OpenDSecError

NAME = "simpleeval"
VERSION = "1.0.8"
SHA256 = "b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba"
ARCHIVE = f"{NAME}-{VERSION}.tar.gz"

TEST_COMMAND = "python3 -m unittest -q"
PATCH_COMMAND = "git apply --verbose -"
BREAKING_PATCH = """\
--- a/simpleeval.py
+++ b/simpleeval.py
@@ -454,6 +454,6 @@
     if abs(a) > MAX_POWER or abs(b) > MAX_POWER:
         raise NumberTooHigh(f"Sorry! I don't want to evaluate {a} ** {b}")
-    return a**b
+    return a * b


 def safe_mult(a, b):  # pylint: disable=invalid-name
"""
"""Makes its power operator multiply."""

FETCH_TIMEOUT_S = 120.0


async def fetch(cache: Path) -> Path:
    """The archive, from the cache or from PyPI. Raises ConnectError with pip's last words, or DigestMismatchError."""
    archive = cache / ARCHIVE
    if not archive.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        await _download(cache)
    check_digest(archive)
    return archive


def check_digest(archive: Path) -> None:
    """Raises DigestMismatchError unless this is the pinned archive."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise DigestMismatchError(
            f"{archive} is not {NAME} {VERSION} as published: its SHA-256 is {found}", remedy=f"delete {archive}"
        )


async def _download(cache: Path) -> None:
    arguments = ["download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    # Not `:all:`, which would hold for what pip needs to read the archive's metadata too: minutes of compiling.
    arguments += ["--no-binary", NAME, "--dest", str(cache), f"{NAME}=={VERSION}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pip",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError as exc:
        process.kill()
        await process.wait()
        raise ConnectError(f"pip did not fetch {NAME} within {FETCH_TIMEOUT_S:.0f} s") from exc
    if process.returncode != 0:
        raise ConnectError(
            f"pip could not fetch {NAME} {VERSION}: {reason_of(errors.decode('utf-8', 'replace'))}",
            remedy=f"get {ARCHIVE} from PyPI by hand and give it with --sdist",
        )


def reason_of(said: str) -> str:
    """The line of what pip wrote that says why it failed: its last error, without notes and hints."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.lower().startswith("error:")]
    return (told or lines or ["it said nothing"])[-1]


def unpack(archive: Path, target: Path) -> int:
    """The archive's regular files below `target`, without the archive's top directory; returns how many.

    Raises OpenDSecError for an entry that would land outside.
    """
    count = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise OpenDSecError(f"{archive}: entry {member.name!r} leads outside")
            source = tar.extractfile(member) if member.isfile() and len(path.parts) > 1 else None
            if source is None:
                continue
            file = target.joinpath(*path.parts[1:])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(source.read())
            count += 1
    return count
