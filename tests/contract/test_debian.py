"""A real distribution in a real container: packages, set-id programs, a debugger's calls, compilers, Python."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.capabilities import STATE_DIR
from tests.contract.harness import Place, Sandbox, container_place

from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "native", "cgroup", "erofs", "overlay", "netns", "image")),
]
CONTAINER_ONLY = True

SET_ID = r"""
cat > /tmp/who.c <<'END'
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("%d %d\n", getuid(), geteuid()); return 0; }
END
gcc -o /usr/local/bin/who-am-i /tmp/who.c
chmod 4755 /usr/local/bin/who-am-i
useradd --create-home --uid 1001 tester
su tester -c who-am-i
"""
PACKAGE = r"""
set -e
mkdir -p /tmp/p/DEBIAN /tmp/p/usr/share/hello
echo hello > /tmp/p/usr/share/hello/text
printf 'Package: hello-test\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: a test\n' \
    > /tmp/p/DEBIAN/control
printf '#!/bin/sh\nset -e\nuseradd -r hello-test\n' \
    > /tmp/p/DEBIAN/postinst
printf 'chown hello-test /usr/share/hello/text\nchmod 2750 /usr/share/hello\n' >> /tmp/p/DEBIAN/postinst
chmod 755 /tmp/p/DEBIAN/postinst
dpkg-deb --build /tmp/p /tmp/hello.deb >/dev/null
apt-get install -y /tmp/hello.deb >/dev/null 2>/tmp/err || { cat /tmp/err; exit 1; }
stat -c '%U %a' /usr/share/hello/text /usr/share/hello
apt-get remove -y hello-test >/dev/null 2>&1
test ! -e /usr/share/hello/text && echo removed
"""
TRACE = r"""
cat > /tmp/trace.c <<'END'
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(1);
    }
    if (ptrace(PTRACE_ATTACH, child, 0, 0) < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        return perror("ptrace"), 1;
    long word = ptrace(PTRACE_PEEKTEXT, child, (void *)main, 0);
    printf("%s\n", word == *(long *)(void *)main ? "traced" : "wrong");
    return ptrace(PTRACE_KILL, child, 0, 0) < 0;
}
END
gcc -o /tmp/trace /tmp/trace.c && chmod 755 /tmp/trace && su nobody -s /bin/sh -c /tmp/trace && /tmp/trace
"""
PING = r"""
import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
s.settimeout(5)
s.connect(("127.0.0.1", 0))
s.send(struct.pack("!BBHHH", 8, 0, 0, 0, 1) + b"ping")
print(s.recv(100)[0])
t = socket.create_server(("127.0.0.1", 80))
print(t.getsockname()[1])
"""


@pytest.fixture(scope="module")
async def debian(anyio_backend: str) -> AsyncIterator[Place]:
    """A backend with the node's base image."""
    store = ImageStore(STATE_DIR / "store")
    async with container_place(store.get("debian"), store) as made:
        yield made


@pytest.fixture
async def box(debian: Place) -> AsyncIterator[Sandbox]:
    async with debian.sandbox("debian") as made:
        yield made


async def output(box: Sandbox, script: str, **fields: object) -> bytes:
    result = await box.run(script, **fields)
    assert result.exit.exit_code == 0, (result.stdout, result.stderr)
    return result.stdout


async def test_set_id_programs_change_the_user(box: Sandbox) -> None:
    assert await output(box, SET_ID) == b"1001 0\n"


async def test_packages_are_installed_and_removed(box: Sandbox) -> None:
    assert await output(box, PACKAGE) == b"hello-test 644\nroot 2750\nremoved\n"


async def test_own_processes_can_be_debugged(box: Sandbox) -> None:
    assert await output(box, TRACE) == b"traced\ntraced\n"


async def test_ping_sockets_and_low_ports_are_open_to_everyone(box: Sandbox) -> None:
    for user in ("", "nobody"):
        result = await box.run(argv=("python3", "-c", PING), user=user)
        assert result.stdout == b"0\n80\n", result.stderr


async def test_python_and_its_processes(box: Sandbox) -> None:
    script = "import multiprocessing as m\nif __name__ == '__main__':\n  print(m.Pool(4).map(abs, range(-4, 0)))\n"
    await box.run(f"cat > /tmp/pool.py <<'END'\n{script}END")
    assert await output(box, "python3 /tmp/pool.py") == b"[4, 3, 2, 1]\n"


async def test_git_and_make(box: Sandbox) -> None:
    script = """
    set -e
    git init -q /tmp/repo && cd /tmp/repo
    printf 'all:\\n\\t@echo made\\n' > Makefile
    git add . && git -c user.name=a -c user.email=a@example.org commit -q -m first
    make -s && git log --oneline | wc -l
    """
    assert await output(box, script) == b"made\n1\n"


async def test_ownership_of_image_files_is_as_in_the_image(box: Sandbox) -> None:
    assert await output(box, "stat -c '%u:%g %a' /etc/passwd /etc/shadow /tmp /root") == (
        b"0:0 644\n0:42 640\n0:0 1777\n0:0 700\n"
    )


async def test_nothing_else_runs_inside(box: Sandbox) -> None:
    assert (await output(box, "ls -d /proc/[0-9]* | wc -l")).strip() in {b"2", b"3", b"4"}
