"""Whose a range of user ids is: nobody's and somebody else's at once would let one sandbox act on another's files."""

from __future__ import annotations

from opendsec.edge.admission import MAX_SLOTS, AdmissionLimits
from opendsec.linux.slots import CALL_SLOTS, MACHINE_SLOT, SANDBOX_SLOTS, SLOTS


def test_every_range_has_one_use() -> None:
    assert [*SANDBOX_SLOTS, *CALL_SLOTS, MACHINE_SLOT] == list(range(SLOTS))


def test_no_edge_admits_a_sandbox_that_would_take_anothers() -> None:
    assert AdmissionLimits().max_live == MAX_SLOTS == len(SANDBOX_SLOTS)
