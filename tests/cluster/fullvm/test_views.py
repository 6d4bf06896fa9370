"""Displays over WebSockets: with a key, by an address for a browser, by many at once, and by those who never read."""

from __future__ import annotations

import re
import socket
import time

import httpx
import pytest
from tests.boot_disk import picture, same
from tests.cluster.fullvm.conftest import Platform, until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

import opendsec.sync
from opendsec.errors import InvalidSpecError

pytestmark = [pytest.mark.root, pytest.mark.qemu, pytest.mark.cgroup, pytest.mark.timeout(180)]


def _display(platform: Platform, sandbox: opendsec.sync.Sandbox, key: str | None = None) -> ClientConnection:
    headers = {"Authorization": f"Bearer {platform.key if key is None else key}"}
    address = f"{platform.url.replace('http', 'ws')}/v1/sandboxes/{sandbox.id}/screen/vnc"
    return connect(address, additional_headers=headers, compression=None, open_timeout=30, close_timeout=1)


def _greet(viewer: ClientConnection) -> tuple[int, int]:
    """The handshake of RFB 3.8 without a password; the display's size."""
    seen = b""

    def read(count: int) -> bytes:
        nonlocal seen
        while len(seen) < count:
            message = viewer.recv(30)
            assert isinstance(message, bytes)
            seen += message
        taken, seen = seen[:count], seen[count:]
        return taken

    assert read(12) == b"RFB 003.008\n"
    viewer.send(b"RFB 003.008\n")
    assert 1 in read(read(1)[0])  # no authentication: the platform's was enough
    viewer.send(b"\x01")
    assert read(4) == bytes(4)
    viewer.send(b"\x01")
    head = read(24)
    read(int.from_bytes(head[20:24], "big"))
    return int.from_bytes(head[:2], "big"), int.from_bytes(head[2:4], "big")


def test_an_address_shows_the_display_to_whoever_has_it(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    address = machine.screen.view(seconds=60)
    with httpx.Client(timeout=30) as browser:
        page = browser.get(address)
        assert page.status_code == 200
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        script = re.search(r'from "\./([^"]+)"', page.text)
        assert script is not None
        code = browser.get(address + script[1])
        assert (code.status_code, code.headers["content-type"]) == (200, "text/javascript")
        assert "RFB" in code.text
        refused = {
            address[:-4] + "xxx/": 404,
            address.rstrip("/"): 404,
            address + "novnc/..%2f..%2f..%2fetc/passwd": 404,
            address + "novnc/core/nothing.js": 404,
            address + "novnc/%00.js": 404,
            address + f"novnc/{'a' * 300}.js": 404,
            f"{platform.url}/view/{machine.id}/": 404,
            f"{platform.url}/v1/sandboxes/{machine.id}/screen": 401,
        }
        for wrong, status in refused.items():
            assert browser.get(wrong).status_code == status, wrong
    with connect(address.replace("http", "ws") + "vnc", compression=None) as viewer:
        assert _greet(viewer) == (640, 400)
    with pytest.raises(InvalidStatus) as caught:
        connect(address.replace("http", "ws") + "other", compression=None)
    assert caught.value.response.status_code == 404
    with pytest.raises(InvalidSpecError, match="seconds"):
        machine.screen.view(seconds=0)
    short = machine.screen.view(seconds=0.2)
    until(lambda: httpx.get(short, timeout=30).status_code == 404, "an address was good for ever")


def test_many_watch_and_whoever_never_reads_holds_up_nobody(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    with pytest.raises(InvalidStatus) as caught:
        _display(platform, machine, key="odk_wrong")
    assert caught.value.response.status_code == 401
    with _display(platform, machine) as lazy, _display(platform, machine) as one, _display(platform, machine) as two:
        assert _greet(lazy) == _greet(one) == _greet(two) == (640, 400)
        lazy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        update = b"\x03\x00" + bytes(4) + (640).to_bytes(2, "big") + (400).to_bytes(2, "big")
        for _ in range(100):  # 100 MB of pictures that nobody takes
            lazy.send(update)
        for _ in range(5):  # while the guest changes its screen, and is looked at and told things
            machine.keyboard.press("f1")
            machine.keyboard.press("f2")
            assert machine.screen.screenshot().startswith(b"\x89PNG")
            for viewer in (one, two):
                viewer.send(update)
                assert viewer.recv(30)
        until(lambda: same(machine.screen.screenshot(), picture()))
        key = b"\x04\x01\x00\x00" + ord("v").to_bytes(4, "big")
        one.send(key + b"\x04\x00\x00\x00" + ord("v").to_bytes(4, "big"))
        until(lambda: machine.serial.read().endswith(b"v"))
        began = time.monotonic()
        machine.stop()  # ends all of them
        assert time.monotonic() - began < 30
