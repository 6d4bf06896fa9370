"""What a user fills in to start a sandbox: one class for each kind of isolation. Field names are the published ones;
`to_spec` makes the wire value.

The classes share everything that means the same on every backend. What a backend cannot honour is either no field of
its class, or refused by name by the platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from opendsec.client.kinds import check_fields, is_named, must
from opendsec.errors import InvalidSpecError
from opendsec.model.spec import BackendKind, Lifetime, Resources, SandboxSpec, check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecRunArgs:
    """What all kinds of sandboxes have in common; use one of its subclasses."""

    memory_limit_mb: int | None = None
    """MiB; None: the node's default."""
    cpu_cores_limit: float | None = None
    """Cores, fractions allowed; None: no cap of its own."""
    disk_limit_mb: int | None = None
    """MiB of what the sandbox may write; None: the node's default. Of a full VM the size of its disk; None: the
    image's."""
    ttl_running_stop: float | None = 300.0
    """Seconds without an operation and without a running command after which the sandbox is stopped; None: never."""
    ttl_max_stop: float | None = None
    """Seconds after creation at which the sandbox is stopped whatever happens; None: never."""
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    """Empty: loopback only. `{"*": True}`: outgoing IPv4."""
    init_user: str | None = None
    """User of commands that name none: name, uid or uid:gid; None: the image's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the image's environment."""
    workdir: str | None = None
    """Absolute directory commands start in; None: the image's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Yours, to find the sandbox again with `DSecClient.list(labels=…)`."""

    def to_spec(self) -> SandboxSpec:
        """The checked specification. Raises InvalidSpecError or UnsupportedError naming the field."""
        raise NotImplementedError("use DSecContainerRunArgs, DSecMicroVMRunArgs or DSecFullVMRunArgs")

    def _spec(
        self,
        image: str | None,
        *,
        backend: BackendKind,
        workspace: str | None = None,
        toolkits: Sequence[str] | None = None,
        pids_limit: int | None = Resources().pids_limit,
        snapshot: str | None = None,
        screen: str | None = None,
    ) -> SandboxSpec:
        self._check_kinds()
        if image is None and snapshot is None:
            raise InvalidSpecError("image: is needed, or a snapshot", detail={"field": "image"})
        return check_spec(
            SandboxSpec(
                image=image or "",
                workspace=workspace,
                toolkits=None if toolkits is None else tuple(toolkits),
                backend=BackendKind(backend),
                resources=Resources(
                    memory_limit_mb=self.memory_limit_mb,
                    cpu_cores_limit=self.cpu_cores_limit,
                    pids_limit=pids_limit,
                    disk_limit_mb=self.disk_limit_mb,
                ),
                lifetime=Lifetime(ttl_running_stop=self.ttl_running_stop, ttl_max_stop=self.ttl_max_stop),
                network_rules=dict(self.network_rules),
                init_user=self.init_user,
                env=dict(self.env),
                workdir=self.workdir,
                labels=dict(self.labels),
                screen=screen,
                snapshot=snapshot,
            )
        )

    def _check_kinds(self) -> None:
        """A value of another kind would be taken apart (`labels=["ab"]`), or fail without the name of its field."""
        own = {one.name for one in fields(self)}
        check_fields(
            self,
            texts=[name for name in _TEXTS if name in own],
            whole=[name for name in _WHOLE if name in own],
            numbers=_NUMBERS,
            lists_of_text=own & {"toolkits"},
            dicts_of_text=("env", "labels"),
            may_be_none=own - {"container_image", "env", "labels"},
        )
        must(is_named(self.network_rules, bool), "network_rules", "a dict from a target to True or False")
        backend = getattr(self, "backend", None)
        must(backend in tuple(BackendKind), "backend", f"of {', '.join(BackendKind)}")


_TEXTS = ("container_image", "image", "snapshot", "workspace", "init_user", "workdir", "screen")
_WHOLE = ("memory_limit_mb", "disk_limit_mb", "pids_limit")
_NUMBERS = ("cpu_cores_limit", "ttl_running_stop", "ttl_max_stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecContainerRunArgs(DSecRunArgs):
    """Arguments of `DSecClient.run_container`. Only `container_image` is needed."""

    container_image: str
    """Name of an image in the platform's store."""
    workspace: str | None = None
    """Image with the role workspace, laid over it."""
    toolkits: Sequence[str] | None = None
    """Images with the role toolkit, laid over all that, lowest first; None: those the image asks for."""
    pids_limit: int | None = 1024
    """Processes and threads."""
    backend: BackendKind = BackendKind.CONTAINER
    """`BackendKind.DUMMY` answers from memory, for tests of your own code."""

    def to_spec(self) -> SandboxSpec:
        """The checked specification. Raises InvalidSpecError or UnsupportedError naming the field."""
        return self._spec(
            self.container_image,
            backend=self.backend,
            workspace=self.workspace,
            toolkits=self.toolkits,
            pids_limit=self.pids_limit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecMicroVMRunArgs(DSecRunArgs):
    """Arguments of `DSecClient.run_microvm`: the same images as a container's, below a kernel of their own. `image` or
    `snapshot` is needed."""

    image: str | None = None
    """Name of an image in the platform's store."""
    snapshot: str | None = None
    """Name of a snapshot to go on from, instead of an image: memory, disk, limits and programs that run are as they
    were; `network_rules` must be what its source had."""
    workspace: str | None = None
    """Image with the role workspace, laid over it."""
    toolkits: Sequence[str] | None = None
    """Images with the role toolkit, laid over all that, lowest first; None: those the image asks for."""
    pids_limit: int | None = 1024
    """Processes and threads."""
    backend: BackendKind = BackendKind.MICROVM
    """`BackendKind.DUMMY` answers from memory, for tests of your own code."""

    def to_spec(self) -> SandboxSpec:
        """The checked specification. Raises InvalidSpecError or UnsupportedError naming the field."""
        return self._spec(
            self.image,
            backend=self.backend,
            workspace=self.workspace,
            toolkits=self.toolkits,
            pids_limit=self.pids_limit,
            snapshot=self.snapshot,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecFullVMRunArgs(DSecRunArgs):
    """Arguments of `DSecClient.run_fullvm`: any operating system from the image of a disk. `image` or `snapshot` is
    needed.

    `init_user`, `env` and `workdir` are for commands, and need our agent inside the guest.
    """

    image: str | None = None
    """Name of a disk image in the platform's store; firmware, TPM and display adapter are the image's."""
    snapshot: str | None = None
    """Name of a snapshot to go on from, instead of an image; `network_rules` must be what its source had."""
    screen: str | None = None
    """Size in pixels the display asks the guest for, as `1920x1080`; None: 1280x800. The guest may choose another."""
    backend: BackendKind = BackendKind.FULLVM
    """`BackendKind.DUMMY` answers from memory, for tests of your own code."""

    def to_spec(self) -> SandboxSpec:
        """The checked specification. Raises InvalidSpecError or UnsupportedError naming the field."""
        return self._spec(self.image, backend=self.backend, snapshot=self.snapshot, screen=self.screen)
