"""What a filling process does before the kernel is asked anything: it takes over what the one before it owed."""

from __future__ import annotations

import os
from pathlib import Path

from opendsec.store.loading.fanotify_filling import Front
from opendsec.store.loading.fanotify_group import place_of
from opendsec.store.loading.fanotify_journal import Journal


def test_numbers_that_are_owed_are_held_also_the_one_the_next_descriptor_would_get(tmp_path: Path) -> None:
    """Else the process that takes over dies of it, each time, and reads wait for ever."""
    place = place_of(tmp_path / "run", tmp_path / "state")
    place.make()
    journal = Journal(place.run / "journal")
    front = Front(-1, place, journal)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    owed = {lowest, 800, 801}
    try:
        front._hold(owed)
        assert front._held == owed
        assert all(os.fstat(number) for number in owed)
    finally:
        for number in front._held:
            os.close(number)
        journal.close()
    after = os.open(os.devnull, os.O_RDONLY)
    os.close(after)
    assert after == lowest, "nothing else stays open"
