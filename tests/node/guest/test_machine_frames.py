"""Frames for virtual machines, sent to an agent that is none: refused by name, and bytes that are none are no harm."""

from __future__ import annotations

import random
import socket

import pytest
from tests.node.guest.agents import Agent, Connect, Shell

from opendsec.guest import protocol as p
from opendsec.guest.base import GuestError
from opendsec.guest.machine import ExtraDisk, GuestSetup, Identity, RootLayer
from opendsec.guest.machine_fields import encode_setup
from opendsec.wire.frames import pack_frame

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

SETUP = GuestSetup(
    layers=(RootLayer(meta="base", data="data"), RootLayer(meta="one")),
    writable="rw",
    disks=(ExtraDisk(drive="d", mount_point="/d"),),
    identity=Identity(machine_id="0" * 32, generation="g", address="10.0.0.2/30", resolvers=("10.0.0.1",)),
)
GOOD = encode_setup(SETUP, clock_ns=1, entropy=bytes(64))
CALL = p.FIRST_CALL_ID


async def test_an_agent_that_is_no_machine_refuses_by_name(agent: Agent, connect: Connect) -> None:
    channel = await connect(agent)
    assert not {"machine", "ready"} & channel.capabilities
    for refused in (channel.setup(SETUP), channel.renew(SETUP.identity), channel.frozen().__aenter__()):
        with pytest.raises(GuestError) as caught:
            await refused
        assert caught.value.code == "unsupported"
    with pytest.raises(GuestError, match="pack_upper"):
        await anext(channel.pack_upper())
    assert channel.usage is None
    assert (await Shell(channel).run("echo on")).stdout == b"on\n"


@pytest.mark.parametrize(
    "fields",
    [
        [(p.T_LAYER, b"x")] * 201,
        [(p.T_DISK, b"a\0b")] * 17,
        [(p.T_DISK, b"no mount point")],
        [(p.T_CLOCK_NS, b"short")],
        [(p.T_PIDS_LIMIT, b"")],
    ],
    ids=["layers", "disks", "disk", "clock", "pids"],
)
async def test_more_than_there_is_room_for_ends_the_connection(
    agent: Agent, connect: Connect, fields: list[tuple[int, bytes]]
) -> None:
    assert b"protocol" in _answer(agent, [pack_frame(p.SETUP, CALL, p.pack_fields(fields))])
    assert (await Shell(await connect(agent)).run("echo on")).stdout == b"on\n"


async def test_any_bytes_are_survived(agent: Agent, connect: Connect) -> None:
    rng = random.Random(7)
    for _ in range(60):
        payload = bytearray(GOOD)
        for _ in range(rng.randrange(1, 6)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        _answer(agent, [pack_frame(p.RENEW, CALL, bytes(payload[: rng.randrange(len(payload))]))])
    assert (await Shell(await connect(agent)).run("echo on")).stdout == b"on\n"


def _answer(agent: Agent, frames: list[bytes]) -> bytes:
    """All that comes until the agent closes, or says that this is not supported."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(agent.socket_path)
        sock.sendall(pack_frame(p.HELLO, 0, p.pack_fields([(p.T_VERSION, 1)])) + b"".join(frames))
        said = b""
        while b"unsupported" not in said and (piece := sock.recv(65536)):
            said += piece
    return said
