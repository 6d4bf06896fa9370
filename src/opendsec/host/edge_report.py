"""How the edge of the platform that runs here is, for `opendsec status` and for commands that have put something right.

Backends that did not work are looked at again first, so what is said is true now, as `opendsec doctor`'s answers are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from opendsec.apiserver.link import EdgeLink
from opendsec.errors import OpenDSecError
from opendsec.host.local import Local, started
from opendsec.model.node import BackendReport, NodeReport
from opendsec.model.spec import BackendKind
from opendsec.server.runner import Address
from opendsec.wire import codec

LOOK_S = 5.0
"""How long `status` waits for a backend that is looked at; the edge goes on with it."""
INSTALL_LOOK_S = 60.0
ANSWER_S = 5.0


async def ask_edge(local: Local, *, look_s: float = LOOK_S) -> tuple[NodeReport | None, str]:
    """Its report, or why there is none."""
    link = EdgeLink(local.edge, Address(path=local.edge_socket), patience_s=0)
    try:
        with contextlib.suppress(TimeoutError, OpenDSecError):  # the next question finds what is wrong, or is enough
            async with asyncio.timeout(look_s):
                _, body = await link.call("POST", "/v1/node/backends")
                return codec.decode_answer(body, NodeReport), ""
        async with asyncio.timeout(ANSWER_S):
            _, body = await link.call("GET", "/v1/node")
    except OpenDSecError as exc:
        return None, exc.message
    except TimeoutError:
        return None, f"edge {local.edge} did not answer within {ANSWER_S:g} s"
    finally:
        link.close()
    return codec.decode_answer(body, NodeReport), ""


def looked_again(kind: BackendKind) -> BackendReport | None:
    """What the platform that runs here says of a backend for which something was installed; None: no edge runs, or it
    was not given that backend.
    """
    report, _ = asyncio.run(ask_edge(started(os.environ), look_s=INSTALL_LOOK_S))
    return None if report is None else report.backends.get(kind.value)
