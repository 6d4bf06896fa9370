"""Which calls of a batch are still to be given to which edge: pure bookkeeping, no clock and no I/O.

Every index ends exactly once: with an edge's answer, or with an error that is handed to `failed`. A call an edge did
not answer before it went away goes to the next edge that asks; one that was so on its way MAX_LOST times is given up,
for it may be what ends the edges.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from opendsec import errors
from opendsec.apiserver.placement import refusal

MAX_LOST = 3
MAX_CHUNK = 32
MAX_CHUNK_BYTES = 4 * 1024 * 1024


class CallQueue:
    """The calls of one batch. `pinned`: index → the only edge that can carry it out."""

    def __init__(self, sizes: Sequence[int], edges: Iterable[str], *, lanes: int, pinned: Mapping[int, str]) -> None:
        self._sizes = sizes
        self._lanes = lanes
        self._edges = set(edges)
        self._pinned_to = pinned
        self._free = deque(index for index in range(len(sizes)) if index not in pinned)
        self._pinned: dict[str, deque[int]] = {}
        for index, edge in pinned.items():
            self._pinned.setdefault(edge, deque()).append(index)
        self._refused: dict[int, dict[str, errors.OpenDSecError]] = {}
        self._lost: Counter[int] = Counter()
        self.open = set(range(len(sizes)))
        """Not ended yet."""

    def take(self, edge: str) -> list[int]:
        """The next calls for this edge, fewer towards the end so that all edges end together; [] when none is there for
        it now."""
        pinned = self._pinned.get(edge)
        if pinned:
            return self._some(pinned, edge)
        return self._some(self._free, edge)

    def _some(self, queue: deque[int], edge: str) -> list[int]:
        most = min(MAX_CHUNK, -(-len(queue) // self._lanes))
        taken: list[int] = []
        passed: list[int] = []
        size = 0
        while queue and len(taken) < most and (not taken or size + self._sizes[queue[0]] <= MAX_CHUNK_BYTES):
            index = queue.popleft()
            if edge in self._refused.get(index, ()):
                passed.append(index)
                continue
            taken.append(index)
            size += self._sizes[index]
        queue.extendleft(reversed(passed))
        return taken

    def answered(self, index: int) -> bool:
        """Whether this is its first answer; it has then ended."""
        if index not in self.open:
            return False
        self.open.discard(index)
        return True

    def give_back(self, indexes: Iterable[int], *, sent: bool) -> list[int]:
        """An edge went away before it answered these. Returns those that are given up; `sent`: it may have begun."""
        given_up: list[int] = []
        for index in sorted((index for index in indexes if index in self.open), reverse=True):
            self._lost[index] += sent
            if self._lost[index] >= MAX_LOST:
                given_up.append(index)
            elif index in self._pinned_to:
                self._pinned.setdefault(self._pinned_to[index], deque()).appendleft(index)
            else:
                self._free.appendleft(index)
        return given_up

    def refused(self, index: int, edge: str, error: errors.OpenDSecError) -> errors.OpenDSecError | None:
        """The edge does not take it. The error to tell when no edge is left that could, else None: it is queued."""
        reasons = self._refused.setdefault(index, {})
        reasons[edge] = error
        if index in self._pinned_to or self._edges <= set(reasons):
            return error if len(reasons) == 1 else refusal(reasons)
        self._free.append(index)
        return None

    def edge_gone(self, edge: str, error: errors.OpenDSecError) -> list[tuple[int, errors.OpenDSecError]]:
        """The edge stays away: what cannot be carried out any more, and why."""
        self._edges.discard(edge)
        ended = [(index, error) for index in self._pinned.pop(edge, ())]
        stay: deque[int] = deque()
        for index in self._free:
            reasons = self._refused.get(index, {})
            if self._edges <= set(reasons):
                ended.append((index, refusal({**reasons, edge: error}) if reasons else error))
            else:
                stay.append(index)
        self._free = stay
        return ended
