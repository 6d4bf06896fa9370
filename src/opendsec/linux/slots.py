"""Whose a slot is: the number from which user ids, addresses and names of one sandbox on this kernel follow. Pure.

No slot has two uses, also not one after the other: an edge that carries out no calls leaves theirs alone, for the next
edge of the same platform may carry out some while sandboxes of this one live.
"""

from __future__ import annotations

SLOTS = 4096
"""Of one platform; with `node_number.NUMBERS`, all ranges of 65536 ids from 2^28 on."""
MACHINE_SLOT = SLOTS - 1
"""Of virtual machines that are not yet a sandbox's."""
CALL_SLOTS = range(MACHINE_SLOT - 256, MACHINE_SLOT)
"""Of containers for calls."""
SANDBOX_SLOTS = range(CALL_SLOTS.start)
