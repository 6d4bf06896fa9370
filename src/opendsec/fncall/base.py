"""What an edge asks for calls: one method. How calls are pooled, limited and judged is the engine's behind it.

Refuses nothing by itself; `model.fncall.check_call` has passed for every spec that comes here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from opendsec.model.fncall import FnCallResult, FnCallSpec
from opendsec.model.node import BackendReport


class FnCalls(ABC):
    """The engine of one edge."""

    @abstractmethod
    async def open(self) -> None:
        """Probe and prepare; remove what an earlier process of this edge left. Called once before anything else.

        Raises HostCapabilityError with the remedy.
        """

    @abstractmethod
    async def close(self) -> None:
        """End every container of every pool and leave nothing behind."""

    @abstractmethod
    def report(self) -> BackendReport:
        """Whether calls work here, and if not, why. `live`: calls that run or wait now.

        Capabilities: a word for each task type, `gpu` where there is one, `gpu_simulated` where its inventory is made
        up.
        """

    @abstractmethod
    async def call(self, spec: FnCallSpec, *, project: str) -> FnCallResult:
        """Carry out one call. Many may be under way at once; the engine queues what its pools cannot take.

        What the program did is in the result, whatever it was. Raised is what is not about the program:
        InvalidSpecError and UnsupportedError naming the field (a language the image has not, a GPU where there is
        none), ImageNotFoundError, NotFoundError (`artifact`: no such one, or another project's), CapacityError (the
        queue is full), NodeError (a container was lost under the call; repeating is harmless).
        Cancelling ends whatever runs for the call.
        """
