"""Fixtures: agents of both builds (the shipped one and the one with address and undefined-behaviour sanitizers)."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.node.guest.agents import PLAIN, ROOT, SANITIZED, Agent, Shell

from opendsec.guest.channel import Channel


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The sanitized build, made when it is missing or old."""
    subprocess.run(
        ["make", "-C", str(ROOT / "native"), "build/asan/opendsec-guest"], check=True, timeout=300, capture_output=True
    )
    return SANITIZED


@pytest.fixture(params=["plain", "sanitized"])
def binary(request: pytest.FixtureRequest) -> Path:
    """Every test runs against both builds."""
    if request.param == "plain":
        return PLAIN
    found: Path = request.getfixturevalue("sanitized")
    return found


@pytest.fixture
def make_agent(binary: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents and ends them."""
    agents: list[Agent] = []

    def make(**options: object) -> Agent:
        folder = tmp_path / f"agent{len(agents)}"
        folder.mkdir()
        agent = Agent(options.pop("binary", binary), folder, **options)  # type: ignore[arg-type]
        agent.launch()
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    return make_agent()


@pytest.fixture
async def connect(agent: Agent) -> AsyncIterator[Callable[[], Awaitable[Channel]]]:
    """Makes channels to the agent, closed at the end."""
    channels: list[Channel] = []

    async def make(to: Agent = agent) -> Channel:
        channels.append(await to.channel())
        return channels[-1]

    yield make
    for channel in channels:
        await channel.aclose()


@pytest.fixture
async def shell(connect: Callable[[], Awaitable[Channel]]) -> Shell:
    """A shell on a fresh channel to a fresh agent."""
    return Shell(await connect())
