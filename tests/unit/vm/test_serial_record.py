"""What a serial console said: the end of it is kept, offsets stay true, and another process goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.vm import serial_record
from opendsec.vm.serial_record import SerialRecord


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SerialRecord:
    monkeypatch.setattr(serial_record, "PIECE_BYTES", 8)
    monkeypatch.setattr(serial_record, "PIECES", 2)
    return SerialRecord(tmp_path)


def test_offsets_stay_true_while_the_beginning_is_forgotten(record: SerialRecord, tmp_path: Path) -> None:
    assert record.read(0) == (0, b"")
    said = b""
    for number in range(40):
        piece = bytes([number]) * (number % 5)
        said += piece
        record.append(piece)
        assert record.total == len(said)
        for offset in range(len(said) + 1):
            at, data = record.read(offset)
            assert at == max(offset, record.base)
            assert data == said[at:]
    assert record.base > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * (8 + 4)
    again = SerialRecord(tmp_path)
    assert (again.total, again.base, again.read(0)) == (record.total, record.base, record.read(0))
    again.append(b"more")
    assert again.read(again.total - 4)[1] == b"more"


def test_a_piece_that_cannot_be_made_costs_nothing_that_was_recorded(record: SerialRecord, tmp_path: Path) -> None:
    record.append(b"12345678")
    (tmp_path / "serial.8").mkdir()  # stands for a full disk
    with pytest.raises(OSError, match=r"serial\.8"):
        record.append(b"lost")
    assert (record.total, record.read(0)) == (8, (0, b"12345678"))
    (tmp_path / "serial.8").rmdir()
    assert record.read(0) == (0, b"12345678")
    record.append(b"more")
    assert record.read(0) == (0, b"12345678more")


def test_no_more_is_read_than_asked(record: SerialRecord) -> None:
    for _ in range(3):
        record.append(b"12345678")
    assert record.read(2, most=9) == (2, b"345678123")
