"""The coding of SETUP, RENEW and USAGE. Pure."""

from __future__ import annotations

from typing import Final

from opendsec.guest import protocol
from opendsec.guest.machine import GuestSetup, GuestUsage, Identity
from opendsec.guest.protocol import Fields, FieldValue, pack_fields, unsigned

ENTROPY_BYTES: Final = 64
"""The kernel's generator hashes whatever it gets; 32 would do for its 256 bits of state."""


def encode_setup(setup: GuestSetup, *, clock_ns: int, entropy: bytes) -> bytes:
    """SETUP's payload; `clock_ns` is the wall clock, nanoseconds since 1970."""
    fields: list[tuple[int, FieldValue]] = [
        (protocol.T_LAYER, f"{layer.meta}\0{layer.data}" if layer.data else layer.meta) for layer in setup.layers
    ]
    fields.append((protocol.T_WRITABLE, setup.writable))
    fields += [(protocol.T_DISK, f"{disk.drive}\0{disk.mount_point}") for disk in setup.disks]
    fields.append((protocol.T_PIDS_LIMIT, setup.pids_limit))
    return pack_fields(fields) + encode_identity(setup.identity, clock_ns=clock_ns, entropy=entropy)


def encode_identity(identity: Identity, *, clock_ns: int, entropy: bytes) -> bytes:
    """RENEW's payload."""
    fields: list[tuple[int, FieldValue]] = [
        (protocol.T_CLOCK_NS, clock_ns),
        (protocol.T_ENTROPY, entropy),
        (protocol.T_HOST_NAME, identity.host_name),
        (protocol.T_MACHINE_ID, identity.machine_id),
        (protocol.T_GENERATION, identity.generation),
        (protocol.T_MAC, identity.mac),
        (protocol.T_ADDRESS, identity.address),
        (protocol.T_GATEWAY, identity.gateway),
    ]
    if identity.is_new:
        fields.append((protocol.T_FLAGS, protocol.RENEW_IS_NEW))
    fields += [(protocol.T_RESOLVER, resolver) for resolver in identity.resolvers]
    return pack_fields(fields)


def decode_usage(payload: bytes | memoryview) -> GuestUsage:
    """USAGE. Raises FieldError."""
    fields: Fields = protocol.unpack_fields(payload)
    return GuestUsage(
        oom_kills=unsigned(fields, protocol.T_OOM_KILLS),
        pids_denied=unsigned(fields, protocol.T_PIDS_DENIED),
        disk_full=bool(unsigned(fields, protocol.T_FLAGS, 0) & protocol.USAGE_DISK_FULL),
        memory_bytes=unsigned(fields, protocol.T_MEMORY),
        cpu_us=unsigned(fields, protocol.T_CPU_US),
    )
