"""Which layers of an image share one layer of the store. Pure.

Long chains of small layers cost every start and every look-up; large ones are worth having alone, because other images
share them. So layers are taken together from the bottom until a group has `limit_bytes` of uncompressed archive. Where
a group ends depends on nothing above it: images that have the same bottom share its layers byte for byte. A group
never holds layers of two roles.

Sizes become known when a layer is unpacked for the first time; they are remembered by the digest of what was unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence

from opendsec.model.image import LayerRole

COLLAPSE_BYTES = 64 << 20
"""So that an image of 2 GiB, whatever it was built of, stays within the 32 layers from which on each look-up of a name
that is not there takes three times as long as in one layer (6 µs in 1, 9 in 8, 18 in 32, 55 in 128; Linux 6.18)."""


def is_complete(size_bytes: int, roles: Sequence[LayerRole], end: int, *, limit_bytes: int) -> bool:
    """Whether a group of `size_bytes` that ends before layer number `end` (counted from 0) takes no more."""
    return end >= len(roles) or roles[end] is not roles[end - 1] or size_bytes >= limit_bytes


def known_groups(sizes: Sequence[int | None], roles: Sequence[LayerRole], *, limit_bytes: int) -> list[range]:
    """The groups from the bottom, as far as sizes are known; each is a range of layer numbers."""
    groups: list[range] = []
    start = total = 0
    for number, size in enumerate(sizes):
        if size is None:
            break
        total += size
        if is_complete(total, roles, number + 1, limit_bytes=limit_bytes):
            groups.append(range(start, number + 1))
            start, total = number + 1, 0
    return groups
