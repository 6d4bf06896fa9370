"""What an edge is told, read from its environment once (`opendsec.edge.__main__` lists the names)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec import errors
from opendsec.edge.admission import MAX_SLOTS, AdmissionLimits
from opendsec.edge.backends import AUTO, FACTORIES
from opendsec.edge.calls import CallSettings, read_calls
from opendsec.edge.node import NodeSettings
from opendsec.model.ids import check_edge_name
from opendsec.model.spec import BackendKind
from opendsec.server.runner import Address, parse_address
from opendsec.store.loading.settings import LoadingSettings, read_loading
from opendsec.vm.base import Rates, WantedVmm

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What the environment says."""

    state_dir: Path
    store: str
    """As `opendsec.store.location` understands it."""
    loading: LoadingSettings
    run_dir: Path
    listen: Address
    token: str
    backends: tuple[BackendKind, ...]
    vmm: WantedVmm
    vm_rates: Rates
    cgroup: str | None
    node: NodeSettings
    calls: CallSettings
    log_level: str


def read_settings(environment: Mapping[str, str]) -> EdgeSettings:
    """Raises InvalidSpecError naming the variable."""
    edge = check_edge_name(environment.get("OPENDSEC_EDGE", "local"))
    state = Path(environment.get("OPENDSEC_STATE_DIR", "/var/lib/opendsec"))
    run_dir = Path(environment.get("OPENDSEC_RUN_DIR", "/run/opendsec"))
    address = parse_address(
        environment.get("OPENDSEC_EDGE_LISTEN", f"unix:{run_dir}/edge-{edge}.sock"), field="OPENDSEC_EDGE_LISTEN"
    )
    token = environment.get("OPENDSEC_EDGE_TOKEN", "")
    if address.path is None and len(token) < 16:
        raise bad_setting("OPENDSEC_EDGE_TOKEN", "an edge on host:port needs a token of 16 characters or more")
    return EdgeSettings(
        state_dir=state,
        store=environment.get("OPENDSEC_STORE", ""),
        loading=read_loading(environment, state_dir=state),
        run_dir=run_dir,
        listen=address,
        token=token,
        backends=_kinds(environment.get("OPENDSEC_EDGE_BACKENDS", "auto")),
        vmm=_vmm(environment.get("OPENDSEC_EDGE_VMM", "auto")),
        vm_rates=Rates(
            disk_bytes=_number(environment, "OPENDSEC_EDGE_VM_DISK_MB", 0) * MIB or None,
            disk_operations=_number(environment, "OPENDSEC_EDGE_VM_DISK_OPERATIONS", 0) or None,
            network_bytes=_number(environment, "OPENDSEC_EDGE_VM_NETWORK_MB", 0) * MIB or None,
        ),
        cgroup=environment.get("OPENDSEC_EDGE_CGROUP") or None,
        node=NodeSettings(
            edge=edge,
            state_dir=state / "edge" / edge,
            run_dir=run_dir,
            start_concurrency=_number(environment, "OPENDSEC_EDGE_STARTS", 16, least=1),
            keep_ended_s=float(_number(environment, "OPENDSEC_EDGE_KEEP_ENDED", 3600)),
            limits=AdmissionLimits(
                max_live=_number(environment, "OPENDSEC_EDGE_MAX_LIVE", MAX_SLOTS, least=1),
                memory_floor_mb=_number(environment, "OPENDSEC_EDGE_MEMORY_FLOOR_MB", 512),
                disk_floor_mb=_number(environment, "OPENDSEC_EDGE_DISK_FLOOR_MB", 1024),
            ),
        ),
        calls=read_calls(environment),
        log_level=environment.get("OPENDSEC_LOG_LEVEL", "info"),
    )


def bad_setting(name: str, why: str) -> errors.InvalidSpecError:
    return errors.InvalidSpecError(f"{name}: {why}", detail={"field": name})


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise bad_setting(name, f"{text!r} is not a number from {least} on")
    return int(text)


def _vmm(text: str) -> WantedVmm:
    try:
        return WantedVmm(text)
    except ValueError:
        raise bad_setting("OPENDSEC_EDGE_VMM", f"{text!r} is not of {', '.join(WantedVmm)}") from None


def _kinds(text: str) -> tuple[BackendKind, ...]:
    offered = {*FACTORIES, BackendKind.FNCALL}
    if text.strip() == "auto":
        return (*AUTO, BackendKind.FNCALL)
    try:
        kinds = tuple(BackendKind(word.strip()) for word in text.split(","))
    except ValueError:
        kinds = ()
    if not kinds or not offered.issuperset(kinds):
        raise bad_setting("OPENDSEC_EDGE_BACKENDS", f"{text!r} is not `auto`, and not of {', '.join(sorted(offered))}")
    if BackendKind.FNCALL in kinds and not {BackendKind.CONTAINER, BackendKind.DUMMY} & set(kinds):
        raise bad_setting("OPENDSEC_EDGE_BACKENDS", "`fncall` runs in containers: add `container`")
    return kinds
