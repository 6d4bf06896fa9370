"""What a tar entry says beyond its plain header: attributes, holes, and times to the nanosecond. Pure."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import tarfile
from collections.abc import Mapping
from typing import cast
from urllib.parse import unquote_to_bytes

_PAX_XATTR = "SCHILY.xattr."
_LIBARCHIVE_XATTR = "LIBARCHIVE.xattr."
_TEXT_ACLS = ("SCHILY.acl.access", "SCHILY.acl.default", "SCHILY.acl.ace")
_PLAIN_ACL = re.compile(r"(?:user::|group::|other::)[-rwx]{3}\Z")


def extents_of(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Offset and size of what is no hole. (`TarInfo.sparse` is typed wrongly in typeshed.)"""
    sparse = cast("list[tuple[int, int]] | None", member.sparse)
    return [(0, member.size)] if sparse is None else list(sparse)


def text_acl(pax_headers: Mapping[str, str]) -> str | None:
    """The header that has an access list as text, with names of this machine perhaps, and more in it than the mode."""
    for header in _TEXT_ACLS:
        lines = pax_headers.get(header, "").replace("\n", ",").split(",")
        if not all(_PLAIN_ACL.match(line) for line in lines if line):
            return header
    return None


def xattrs_of(pax_headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """Extended attributes out of pax headers, as star, GNU tar and Go (SCHILY) or as libarchive write them."""
    found: dict[bytes, bytes] = {}
    for key, value in pax_headers.items():
        encoded = value.encode("utf-8", "surrogateescape")
        if key.startswith(_PAX_XATTR):
            found[os.fsencode(key.removeprefix(_PAX_XATTR))] = encoded
        elif key.startswith(_LIBARCHIVE_XATTR):
            name = unquote_to_bytes(key.removeprefix(_LIBARCHIVE_XATTR))
            with contextlib.suppress(binascii.Error):
                found.setdefault(name, base64.b64decode(encoded + b"=" * (-len(encoded) % 4)))
    return found


def mtime_ns(member: tarfile.TarInfo) -> int:
    """Whole nanoseconds: pax writes times as decimal text, which a float would round."""
    text = member.pax_headers.get("mtime", "")
    whole, point, fraction = text.partition(".")
    if point and whole.removeprefix("-").isdigit() and fraction.isdigit():
        nanoseconds = int(fraction[:9].ljust(9, "0"))
        return int(whole) * 10**9 + (-nanoseconds if whole.startswith("-") else nanoseconds)
    return int(member.mtime * 10**9)
