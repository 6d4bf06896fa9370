"""What a sandbox that starts from a snapshot is: what it was asked to be, laid over what its source was. Pure."""

from __future__ import annotations

from dataclasses import replace

from opendsec.errors import InvalidSpecError, SnapshotInvalidError
from opendsec.model.image import Image
from opendsec.model.spec import SandboxSpec
from opendsec.store.snapshots import Snapshot


def from_snapshot(asked: SandboxSpec, snapshot: Snapshot) -> SandboxSpec:
    """The whole specification. Raises InvalidSpecError naming the field that contradicts the snapshot."""
    source = snapshot.spec
    if asked.backend is not snapshot.backend:
        raise InvalidSpecError(
            f"backend: the snapshot {snapshot.name!r} was made by the {snapshot.backend.value} backend",
            detail={"field": "backend", "backend": snapshot.backend.value},
            remedy=f"start from it with the backend {snapshot.backend.value}",
        )
    if dict(asked.network_rules) != dict(source.network_rules):
        had = "outgoing IPv4" if any(source.network_rules.values()) else "loopback only"
        raise InvalidSpecError(
            f"network_rules: the snapshot {snapshot.name!r} was made with {had}, which stays as it is",
            detail={"field": "network_rules"},
            remedy=f"ask for {dict(source.network_rules)}",
        )
    return replace(
        asked,
        image=source.image,
        workspace=source.workspace,
        toolkits=source.toolkits,
        resources=source.resources,
        screen=source.screen,
        init_user=asked.init_user or source.init_user,
        env={**source.env, **asked.env},
        workdir=asked.workdir or source.workdir,
    )


def check_binding(snapshot: Snapshot, binding: str) -> None:
    """Raise SnapshotInvalidError when what reads snapshots here is another than what made it."""
    if snapshot.binding and binding and snapshot.binding != binding:
        raise SnapshotInvalidError(
            f"snapshot {snapshot.name!r} can only be read by {snapshot.binding}; this node has {binding}",
            detail={"snapshot": snapshot.name, "needs": snapshot.binding, "has": binding},
            remedy="start from it on a node like the one it was made on, or make it anew",
        )


def image_of(snapshot: Snapshot) -> Image:
    """What its source was started from."""
    return Image(
        name=snapshot.spec.image,
        digest=snapshot.image_digest,
        layers=snapshot.image_layers,
        config=snapshot.image_config,
        created_at=snapshot.created_at,
        parts=snapshot.image_parts,
    )
