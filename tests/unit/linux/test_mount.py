"""mountinfo as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.linux.mount import MountEntry, mountinfo, parse_mountinfo

LINES = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
57 22 0:39 /a\040b /mnt/with\040blank\134and\011tab ro,nosuid master:3 propagate_from:2 - tmpfs none rw,size=64k
"""


def test_lines_become_values() -> None:
    root, other = parse_mountinfo(LINES.splitlines())
    assert root == MountEntry(
        mount_id=22,
        root="/",
        target="/",
        options=("rw", "relatime"),
        fstype="ext4",
        source="/dev/vda",
        super_options=("rw", "discard"),
    )
    assert other.root == "/a b"
    assert other.target == "/mnt/with blank\\and\ttab"
    assert other.options == ("ro", "nosuid")
    assert other.fstype == "tmpfs"


@pytest.mark.parametrize("line", [b"", b"22 1 254:0 / / rw", b"22 1 254:0 / / rw - ext4"])
def test_a_line_of_something_else_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a line of mountinfo"):
        parse_mountinfo([line])


def test_names_that_are_not_text_survive(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_bytes(b"22 1 254:0 / /\xff rw - ext4 /dev/vda rw\n")
    assert mountinfo(file)[0].target == "/\udcff"


def test_the_root_of_this_machine_is_found() -> None:
    assert any(entry.target == "/" for entry in mountinfo())
