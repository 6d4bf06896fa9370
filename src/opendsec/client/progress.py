"""How far a transfer is, for progress bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProgress:
    """Given to the `progress` callback of uploads and downloads, about once for every MiB and file."""

    bytes_done: int
    files_done: int
    current: str
    """Path of the file under way, relative to the root of the tree."""
    bytes_total: int | None = None
    """Known for single files."""


ProgressCallback = Callable[[TransferProgress], None]


class Meter:
    """Counts, and tells the callback when there is one."""

    def __init__(self, callback: ProgressCallback | None = None, *, bytes_total: int | None = None) -> None:
        self._callback = callback
        self._total = bytes_total
        self.bytes_done = 0
        self.files_done = 0

    def add(self, size: int, current: str) -> None:
        self.bytes_done += size
        self._tell(current)

    def file_done(self, current: str) -> None:
        self.files_done += 1
        self._tell(current)

    def _tell(self, current: str) -> None:
        if self._callback is not None:
            self._callback(
                TransferProgress(
                    bytes_done=self.bytes_done, files_done=self.files_done, current=current, bytes_total=self._total
                )
            )
