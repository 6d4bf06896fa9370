"""A platform of its own with a store of its own, in which there is busybox, and what other images builds begin with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.images import make_busybox_image

import opendsec
from opendsec.build.dockerfile import parse_dockerfile
from opendsec.model.image import ImageConfig, LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer

OPENDSEC = (sys.executable, "-m", "opendsec.main")
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""cap_net_raw+ep."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One that runs."""

    variables: dict[str, str]
    store: ImageStore


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-build-", dir="/var/tmp"))
    run = Path(tempfile.mkdtemp(prefix="opendsec-build-", dir="/run"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")} | {
        "OPENDSEC_STATE_DIR": str(state),
        "OPENDSEC_RUN_DIR": str(run),
        "OPENDSEC_LISTEN": f"unix:{run}/api.sock",
        "OPENDSEC_EDGE": "buildtest",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }
    parse_dockerfile("FROM x\n")  # Its parser's runtime keeps descriptors from now on.
    store = ImageStore(state / "store")
    make_busybox_image(store)
    _make_capable(store)
    _make_equipped(store)
    try:
        subprocess.run([*OPENDSEC, "up", "-d"], env=variables, check=True, timeout=120, stdout=subprocess.DEVNULL)
        yield Platform(variables=variables, store=store)
    finally:
        subprocess.run([*OPENDSEC, "down"], env=variables, check=True, timeout=120, stdout=subprocess.DEVNULL)
        shutil.rmtree(state)
        shutil.rmtree(run, ignore_errors=True)  # `down` has removed it when it was empty


def _make_capable(store: ImageStore) -> None:
    """An image whose files have owners, set-id bits, capabilities and attributes."""
    with store.staging() as work:
        tree = work / "tree"
        (tree / "d" / "sub").mkdir(parents=True)
        (tree / "d" / "ping").write_bytes(b"ping")
        (tree / "d" / "note").write_bytes(b"note")
        (tree / "d" / "link").symlink_to("ping")
        for path in (tree / "d", tree / "d" / "sub", tree / "d" / "ping"):
            os.chown(path, 1234, 4321)
        (tree / "d").chmod(0o2750)
        (tree / "d" / "ping").chmod(0o4755)
        os.setxattr(tree / "d" / "ping", "security.capability", CAPABILITY)
        os.setxattr(tree / "d" / "note", "user.note", b"\0\xff")
        store.publish("capable", layers=[make_layer(store, work, tree)], config=ImageConfig())


def _make_equipped(store: ImageStore) -> None:
    """An image of references alone: busybox with a toolkit, which puts a file where busybox has nothing."""
    with store.staging() as work:
        (work / "tree" / "opt").mkdir(parents=True)
        (work / "tree" / "opt" / "tool").write_text("tool")
        layer = make_layer(store, work, work / "tree", role=LayerRole.TOOLKIT)
        store.publish("tool", layers=[layer], config=ImageConfig(env={"TOOL": "here"}))
    store.publish("equipped", layers=[], config=ImageConfig(), base="busybox", toolkits=["tool"])


@pytest.fixture
async def client(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[opendsec.DSecClient]:
    for name in ("OPENDSEC_API_URL", "OPENDSEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENDSEC_RUN_DIR", platform.variables["OPENDSEC_RUN_DIR"])
    async with opendsec.DSecClient() as opened:
        yield opened
