"""What a user fills in to start a container sandbox. Field names are the published ones; `to_spec` makes the wire
value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opendsec.errors import InvalidSpecError
from opendsec.model.spec import BackendKind, Lifetime, Resources, SandboxSpec, check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecContainerRunArgs:
    """Arguments of `DSecClient.run_container`. Only `container_image` is needed."""

    container_image: str
    """Name of an image in the platform's store."""
    workspace: str | None = None
    """Image with the role workspace, laid over it."""
    toolkits: Sequence[str] | None = None
    """Images with the role toolkit, laid over all that, lowest first; None: those the image asks for."""
    memory_limit_mb: int | None = None
    """MiB; None: the node's default."""
    cpu_cores_limit: float | None = None
    """Cores, fractions allowed; None: no cap of its own."""
    ttl_running_stop: float | None = 300.0
    """Seconds without an operation and without a running command after which the sandbox is stopped; None: never."""
    ttl_max_stop: float | None = None
    """Seconds after creation at which the sandbox is stopped whatever happens; None: never."""
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    """Empty: loopback only. `{"*": True}`: outgoing IPv4."""
    init_user: str | None = None
    """User of commands that name none: name, uid or uid:gid; None: the image's."""
    pids_limit: int | None = 1024
    """Processes and threads."""
    disk_limit_mb: int | None = None
    """MiB of the writable layer; None: the node's default."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the image's environment."""
    workdir: str | None = None
    """Absolute directory commands start in; None: the image's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Yours, to find the sandbox again with `DSecClient.list(labels=…)`."""
    backend: BackendKind = BackendKind.CONTAINER
    """`BackendKind.DUMMY` answers from memory, for tests of your own code."""

    def to_spec(self) -> SandboxSpec:
        """The checked specification. Raises InvalidSpecError or UnsupportedError naming the field."""
        if isinstance(self.toolkits, str):
            raise InvalidSpecError("toolkits: is a string, not a list of references", detail={"field": "toolkits"})
        return check_spec(
            SandboxSpec(
                image=self.container_image,
                workspace=self.workspace,
                toolkits=None if self.toolkits is None else tuple(self.toolkits),
                backend=self.backend,
                resources=Resources(
                    memory_limit_mb=self.memory_limit_mb,
                    cpu_cores_limit=self.cpu_cores_limit,
                    pids_limit=self.pids_limit,
                    disk_limit_mb=self.disk_limit_mb,
                ),
                lifetime=Lifetime(ttl_running_stop=self.ttl_running_stop, ttl_max_stop=self.ttl_max_stop),
                network_rules=dict(self.network_rules),
                init_user=self.init_user,
                env=dict(self.env),
                workdir=self.workdir,
                labels=dict(self.labels),
            )
        )
