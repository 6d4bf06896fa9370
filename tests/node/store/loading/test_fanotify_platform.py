"""A whole platform that fills layers as they are read: kills cost nothing, and `down` leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.images import make_busybox_image
from tests.node.store.loading.servers import web_server
from tests.node.store.loading.test_platform import FILES, environment, pid_of, platform, reads_right

from opendsec.linux.mount import mountinfo
from opendsec.store.images import ImageStore
from opendsec.store.loading.fanotify_group import FILLER, GUARDIAN, HOLDERS, is_holding, place_of
from opendsec.sync import DSecContainerRunArgs

__all__ = ["environment"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.erofs,
    pytest.mark.fanotify,
    pytest.mark.cgroup,
    pytest.mark.overlay,
    pytest.mark.native,
]


def test_sandboxes_read_on_whoever_is_killed(
    store: ImageStore,
    environment: Mapping[str, str],
) -> None:
    make_busybox_image(store, files=FILES)
    run_dir = Path(environment["OPENDSEC_RUN_DIR"])
    place = place_of(run_dir, Path(environment["OPENDSEC_STATE_DIR"]))
    with web_server(store.root) as web:
        settings = {**environment, "OPENDSEC_STORE": web.url, "OPENDSEC_LOADER": "fanotify"}
        with (
            platform(settings) as client,
            client.container(DSecContainerRunArgs(container_image="busybox")) as sandbox,
        ):
            assert reads_right(sandbox, "/data/f0")
            for number, name in enumerate((FILLER, GUARDIAN, "edge"), 1):
                pid = pid_of(environment, "edge") if name == "edge" else int((place.run / name).read_text().split()[0])
                os.kill(pid, signal.SIGKILL)
                assert reads_right(sandbox, f"/data/f{number}")
            with client.container(DSecContainerRunArgs(container_image="busybox")) as later:
                assert reads_right(later, "/data/f4")
    assert not any(is_holding(place, name) for name in HOLDERS)
    assert not run_dir.exists()
    assert not [entry for entry in mountinfo() if entry.target.startswith(str(run_dir))]
