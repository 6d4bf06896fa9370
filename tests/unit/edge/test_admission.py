"""The edge's own last word."""

from __future__ import annotations

import pytest

from opendsec.backends.base import Capability
from opendsec.edge import admission
from opendsec.edge.admission import AdmissionLimits, NodeFacts
from opendsec.errors import UnschedulableError, UnsupportedError
from opendsec.model.spec import BackendKind, Resources, SandboxSpec

ROOMY = NodeFacts(memory_total_mb=8000, memory_available_mb=4000, disk_free_mb=50_000, cpu_count=2)
LIMITS = AdmissionLimits(memory_floor_mb=500, disk_floor_mb=1000, max_live=10, max_creating=3)


def test_roomy_node_admits() -> None:
    admission.check(ROOMY, LIMITS, live=9, creating=2)


@pytest.mark.parametrize(
    ("facts", "live", "creating", "word"),
    [
        (NodeFacts(memory_total_mb=8000, memory_available_mb=499, disk_free_mb=50_000, cpu_count=2), 0, 0, "memory"),
        (NodeFacts(memory_total_mb=8000, memory_available_mb=4000, disk_free_mb=999, cpu_count=2), 0, 0, "disk"),
        (ROOMY, 10, 0, "live"),
        (ROOMY, 3, 3, "being created"),
    ],
)
def test_refusal_names_its_reason(facts: NodeFacts, live: int, creating: int, word: str) -> None:
    with pytest.raises(UnschedulableError, match=word) as raised:
        admission.check(facts, LIMITS, live=live, creating=creating)
    assert len(raised.value.detail["reasons"]) == 1  # type: ignore[arg-type]
    assert raised.value.retryable


def test_every_reason_is_told() -> None:
    poor = NodeFacts(memory_total_mb=1, memory_available_mb=0, disk_free_mb=0, cpu_count=1)
    assert len(admission.refusals(poor, LIMITS, live=10, creating=10)) == 4


def test_user_ranges_bound_the_live_ones_whatever_is_configured() -> None:
    limits = AdmissionLimits(max_live=10**9)
    assert admission.refusals(ROOMY, limits, live=admission.MAX_SLOTS, creating=0)


def test_what_the_backend_cannot_honour_is_refused_by_name() -> None:
    spec = SandboxSpec(image="debian", resources=Resources(cpu_cores_limit=1))
    with pytest.raises(UnsupportedError) as raised:
        admission.check_supported(spec, frozenset({Capability.EXEC}))
    assert raised.value.detail["field"] == "cpu_cores_limit"
    admission.check_supported(spec, frozenset({Capability.CPU_LIMIT}))


def test_defaults_nobody_asked_for_are_not_refused() -> None:
    admission.check_supported(SandboxSpec(image="debian"), frozenset())


def test_a_screen_needs_a_display() -> None:
    with pytest.raises(UnsupportedError, match="screen: the container backend") as raised:
        admission.check_supported(SandboxSpec(image="debian", screen="800x600"), frozenset({Capability.EXEC}))
    assert raised.value.detail["field"] == "screen"


def test_open_network_needs_a_network() -> None:
    with pytest.raises(UnsupportedError, match="network"):
        admission.check_supported(SandboxSpec(image="debian", network_rules={"*": True}), frozenset())


@pytest.mark.parametrize("kind", [BackendKind.MICROVM, BackendKind.FULLVM])
def test_a_machine_with_more_memory_than_the_host_is_refused_by_name(kind: BackendKind) -> None:
    def spec(memory_mb: int | None, backend: BackendKind = kind) -> SandboxSpec:
        return SandboxSpec(image="debian", backend=backend, resources=Resources(memory_limit_mb=memory_mb))

    with pytest.raises(UnschedulableError, match="8001 MiB were asked for, and this host has 8000") as caught:
        admission.check_memory(spec(8001), ROOMY)
    assert (caught.value.detail["field"], caught.value.retryable) == ("memory_limit_mb", False)
    admission.check_memory(spec(8000), ROOMY)
    admission.check_memory(spec(None), ROOMY)
    admission.check_memory(spec(8001, BackendKind.CONTAINER), ROOMY)  # a cap, and no more
