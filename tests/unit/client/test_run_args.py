"""One class of arguments for each kind of isolation: what they share means the same, what one has not is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import typer

from opendsec import DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, DSecRunArgs, sync
from opendsec.cli import options
from opendsec.errors import InvalidSpecError
from opendsec.model.ids import SandboxId
from opendsec.model.spec import BackendKind, Lifetime, Resources

COMMON = {
    "memory_limit_mb": 256,
    "cpu_cores_limit": 1.5,
    "disk_limit_mb": 512,
    "ttl_running_stop": None,
    "ttl_max_stop": 60.0,
    "network_rules": {"*": True},
    "init_user": "agent",
    "env": {"A": "1"},
    "workdir": "/work",
    "labels": {"run": "7"},
}


def each() -> list[tuple[DSecRunArgs, BackendKind]]:
    return [
        (DSecContainerRunArgs(container_image="i", **COMMON), BackendKind.CONTAINER),  # type: ignore[arg-type]
        (DSecMicroVMRunArgs(image="i", **COMMON), BackendKind.MICROVM),  # type: ignore[arg-type]
        (DSecFullVMRunArgs(image="i", **COMMON), BackendKind.FULLVM),  # type: ignore[arg-type]
    ]


def test_the_kind_is_the_only_difference() -> None:
    specs = []
    for args, kind in each():
        spec = args.to_spec()
        assert (spec.backend, spec.image) == (kind, "i")
        assert spec.resources == Resources(memory_limit_mb=256, cpu_cores_limit=1.5, disk_limit_mb=512)
        assert spec.lifetime == Lifetime(ttl_running_stop=None, ttl_max_stop=60.0)
        specs.append(dataclasses.replace(spec, backend=BackendKind.DUMMY))
    assert specs[0] == specs[1] == specs[2]


def test_the_common_ones_have_the_same_names_everywhere() -> None:
    for args, _ in each():
        assert {field.name for field in dataclasses.fields(args)} >= {*COMMON, "backend"}


@pytest.mark.parametrize("kind", [DSecMicroVMRunArgs, DSecFullVMRunArgs])
def test_an_image_or_a_snapshot_is_needed(kind: type[DSecMicroVMRunArgs | DSecFullVMRunArgs]) -> None:
    with pytest.raises(InvalidSpecError, match="image: is needed, or a snapshot"):
        kind().to_spec()
    spec = kind(snapshot="warm-1.0").to_spec()
    assert (spec.image, spec.snapshot) == ("", "warm-1.0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "debian"),
        ("workspace", "w"),
        ("toolkits", ("t",)),
        ("memory_limit_mb", 64),
        ("cpu_cores_limit", 1.0),
        ("disk_limit_mb", 64),
        ("pids_limit", 64),
    ],
)
def test_what_a_snapshot_fixes_cannot_be_chosen(field: str, value: object) -> None:
    with pytest.raises(InvalidSpecError, match=f"{field}: is what it was") as raised:
        DSecMicroVMRunArgs(snapshot="warm", **{field: value}).to_spec()  # type: ignore[arg-type]
    assert raised.value.detail["field"] == field


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-x", ".x", "x" * 129, "a b", "ä", "x\n", "a\x00"])
def test_a_bad_name_of_a_snapshot_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpecError, match="snapshot: "):
        DSecMicroVMRunArgs(snapshot=name).to_spec()


def test_the_command_line_chooses_the_class() -> None:
    common = {"memory": 128, "cpus": None, "network": False, "labels": None, "ttl": 0.0}
    for backend, kind in (
        (BackendKind.CONTAINER, DSecContainerRunArgs),
        (BackendKind.DUMMY, DSecContainerRunArgs),
        (BackendKind.MICROVM, DSecMicroVMRunArgs),
        (BackendKind.FULLVM, DSecFullVMRunArgs),
    ):
        args = options.run_args("debian", backend=backend, **common)  # type: ignore[arg-type]
        assert type(args) is kind
        spec = args.to_spec()
        assert (spec.backend, spec.image, spec.resources.memory_limit_mb) == (backend, "debian", 128)
    with pytest.raises(typer.BadParameter, match="one disk image"):
        options.run_args("disk", backend=BackendKind.FULLVM, toolkits=("t",), **common)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", ["ab"]),
        ("labels", {"a": 1}),
        ("env", None),
        ("env", {"A": 1}),
        ("network_rules", "x"),
        ("network_rules", {"*": "yes"}),
        ("memory_limit_mb", "256"),
        ("memory_limit_mb", True),
        ("disk_limit_mb", 1.5),
        ("pids_limit", "1"),
        ("cpu_cores_limit", "1"),
        ("ttl_running_stop", "60"),
        ("ttl_max_stop", False),
        ("image", 5),
        ("snapshot", 5),
        ("workspace", 5),
        ("toolkits", [5]),
        ("toolkits", "tool"),
        ("toolkits", 5),
        ("init_user", 0),
        ("workdir", b"/"),
        ("backend", "cloud"),
        ("backend", []),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidSpecError, match=f"^{field}: ") as raised:
        DSecMicroVMRunArgs(**{"image": "i", field: value}).to_spec()  # type: ignore[arg-type]
    assert raised.value.detail["field"] == field


def test_a_container_needs_a_name_of_an_image() -> None:
    for wrong in (None, 5):
        with pytest.raises(InvalidSpecError, match=r"^container_image: is not a string"):
            DSecContainerRunArgs(container_image=wrong).to_spec()  # type: ignore[arg-type]


def test_so_are_those_of_a_call() -> None:
    with contextlib.closing(sync.DSecClient("http://127.0.0.1:9", "key")) as client:  # nothing is sent
        sandbox = sync.Sandbox(client._transport, SandboxId("sbx-local-aaaaaaaaaaaaaaaa"))
        calls: tuple[tuple[str, Callable[[], object]], ...] = (
            ("count", lambda: sandbox.fork("2")),  # type: ignore[arg-type]
            ("count", lambda: sandbox.fork(True)),
            ("labels", lambda: sandbox.fork(labels=["ab"])),  # type: ignore[arg-type]
            ("lifetime", lambda: sandbox.fork(lifetime=60)),  # type: ignore[arg-type]
            ("name", lambda: sandbox.snapshot(5)),  # type: ignore[arg-type]
            ("name", lambda: client.snapshots.get(5)),  # type: ignore[arg-type]
            ("name", lambda: client.snapshots.remove(None)),  # type: ignore[arg-type]
            ("count", lambda: next(client.run_many(DSecContainerRunArgs(container_image="i"), "2"))),  # type: ignore[arg-type]
        )
        for field, call in calls:
            with pytest.raises(InvalidSpecError, match=f"^{field}: "):
                call()


def test_arguments_of_another_kind_start_nothing() -> None:
    """A sandbox with less isolation than the call names would be the worst of surprises."""
    client = sync.DSecClient(api_url="http://127.0.0.1:9", api_key="k")
    calls: list[tuple[type[DSecRunArgs], Callable[[DSecRunArgs], object]]] = [
        (DSecContainerRunArgs, client.run_container),  # type: ignore[list-item]
        (DSecMicroVMRunArgs, client.run_microvm),  # type: ignore[list-item]
        (DSecFullVMRunArgs, client.run_fullvm),  # type: ignore[list-item]
        (DSecContainerRunArgs, lambda args: client.container(args).__enter__()),  # type: ignore[arg-type]
        (DSecMicroVMRunArgs, lambda args: client.microvm(args).__enter__()),  # type: ignore[arg-type]
        (DSecFullVMRunArgs, lambda args: client.fullvm(args).__enter__()),  # type: ignore[arg-type]
    ]
    for wanted, call in calls:
        for args, _ in each():
            if not isinstance(args, wanted):
                with pytest.raises(InvalidSpecError, match=f"args: {wanted.__name__} is wanted here"):
                    call(args)
