"""Who a command runs as: the sandbox's own user database, in every form of USER, and images without shells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.guest.agents import Agent, Connect, Shell

from opendsec.guest.base import GuestError

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

PASSWD = """root:x:0:0:root:/root:/bin/sh
broken line
app:x:1000:1001:An App:/srv/app home:/bin/false
:x:5:5::/:
short:x:7
"""
GROUP = """root:x:0:
app:x:1001:
wheel:x:10:root,app,other
docker:x:20:application,app
none:x:30:application
"""


@pytest.fixture
async def users(make_agent: Callable[..., Agent], connect: Connect, tmp_path: Path) -> Shell:
    (tmp_path / "passwd").write_text(PASSWD)
    (tmp_path / "group").write_text(GROUP)
    setup = f"mount --bind {tmp_path}/passwd /etc/passwd && mount --bind {tmp_path}/group /etc/group"
    return Shell(await connect(make_agent(setup=setup)))


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", "0 0 0 10 /root"),
        ("root", "0 0 0 10 /root"),
        ("0", "0 0 0 10 /root"),
        ("app", "1000 1001 1001 10 20 /srv/app home"),
        ("1000", "1000 1001 1001 10 20 /srv/app home"),
        ("app:wheel", "1000 10 10 /srv/app home"),
        ("app:77", "1000 77 77 /srv/app home"),
        ("4242", "4242 0 0 /"),
        ("4242:4343", "4242 4343 4343 /"),
    ],
)
async def test_every_form_of_user(users: Shell, user: str, expected: str) -> None:
    result = await users.run('echo $(id -u) $(id -g) $(id -G) "$HOME"', user=user)
    assert result.stdout.decode().strip() == expected, result.stderr


@pytest.mark.parametrize("user", ["", "app", "4242:4343"])
async def test_streams_can_be_opened_by_name(users: Shell, user: str) -> None:
    """Pipes belong to whoever a command runs as: `echo > /dev/stderr` is common in scripts."""
    result = await users.run("echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin", user=user)
    assert (result.stdout, result.stderr, result.exit.exit_code) == (b"out\n", b"err\n", 0)


@pytest.mark.parametrize(
    "user", ["nobody", "app:none-such", "short", "4294967295", "99999999999", "-1", "x" * 1000, "app:"]
)
async def test_users_that_are_not_there(users: Shell, user: str) -> None:
    with pytest.raises(GuestError) as caught:
        await users.run("true", user=user)
    assert caught.value.code == "no_user"


async def test_other_users_have_no_capabilities(users: Shell) -> None:
    result = await users.argv("grep", "-E", "Cap(Eff|Prm|Amb)", "/proc/self/status", user="app")
    assert result.stdout.split()[1::2] == [b"0" * 16] * 3


async def test_hostile_user_databases_do_not_stall(
    make_agent: Callable[..., Agent], connect: Connect, tmp_path: Path
) -> None:
    setup = f"mkfifo {tmp_path}/fifo && mount --bind {tmp_path}/fifo /etc/passwd && mount --bind /dev/zero /etc/group"
    shell = Shell(await connect(make_agent(setup=setup)))
    result = await shell.argv("/bin/grep", "Uid", "/proc/self/status", user="12:34")
    assert result.stdout.split()[1] == b"12"
    with pytest.raises(GuestError) as caught:
        await shell.argv("/bin/true", user="app")
    assert caught.value.code == "no_user"


async def test_an_image_without_any_shell_says_so(make_agent: Callable[..., Agent], connect: Connect) -> None:
    setup = (
        "mount -t tmpfs none /mnt && mkdir /mnt/dev /mnt/proc /mnt/usr /mnt/lib /mnt/lib64 && "
        "mount --rbind /dev /mnt/dev && "
        "mount --bind /usr /mnt/usr && mount --bind /usr/lib /mnt/lib && mount --bind /usr/lib64 /mnt/lib64"
    )
    shell = Shell(await connect(make_agent(setup=setup, root="/mnt")))
    for more in ({}, {"session": "s"}):
        with pytest.raises(GuestError, match="neither /bin/bash nor /bin/sh") as caught:
            await shell.run("true", **more)  # type: ignore[arg-type]
        assert caught.value.code == "no_shell"
    assert (await shell.argv("/usr/bin/echo", "fine")).stdout == b"fine\n"
