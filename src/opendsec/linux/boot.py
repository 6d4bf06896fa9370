"""Which boot of this host it is: what was remembered of processes, devices and memory is of one boot only."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """A UUID that is another after every boot. Raises OSError."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
