"""`opendsec snapshot`, `fork`, `run --snapshot` and `forward` against a real edge."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

from tests.cluster.cli.conftest import Cli


def test_a_snapshot_from_the_command_line(cli: Cli, sandbox: str) -> None:
    assert cli("exec", sandbox, "--session", "s", "--", "echo", "kept").returncode == 0
    made = cli("snapshot", "create", sandbox, "warm")
    assert (made.returncode, made.stdout) == (0, b"warm\n"), made.stderr
    again = cli("snapshot", "create", sandbox, "warm", "--json")
    assert json.loads(again.stdout)["error"]["code"] == "conflict"
    (line,) = json.loads(cli("snapshot", "ls", "--json").stdout)
    assert (line["name"], line["backend"], line["source"]) == ("warm", "dummy", sandbox)
    assert cli("snapshot", "ls", "-q").stdout == b"warm\n"
    ran = cli("run", "--snapshot", "warm", "--", "echo", "-n", "from it")
    assert (ran.returncode, ran.stdout) == (0, b"from it"), ran.stderr
    ran = cli("run", "--snapshot", "warm", "echo", "hi")
    assert ran.stdout == b"hi\n", ran.stderr
    ran = cli("run", "--snapshot", "warm", "--", "echo", "--", "hi")
    assert ran.stdout == b"-- hi\n", ran.stderr
    refused = cli("run", "--snapshot", "warm", "--memory", "64", "--", "true")
    assert b"memory_limit_mb: is what it was" in refused.stderr
    assert b"made without a network" in cli("run", "--snapshot", "warm", "--network", "--", "true").stderr
    other = cli("run", "--backend", "microvm", "--snapshot", "warm", "--", "true")
    assert (b"was made by the dummy backend" in other.stderr, other.returncode) == (True, 2), other.stderr
    cold = cli("run", "--snapshot", "cold", "--", "true")
    assert (b"no snapshot 'cold'" in cold.stderr, cold.returncode) == (True, 125)
    for words in (["debian", "--", "true"], ["--keep", "debian", "--", "true"]):
        both = cli("run", "--snapshot", "warm", *words)
        assert (b"a snapshot brings its image" in both.stderr, both.returncode) == (True, 2), both.stderr
    gone = cli("snapshot", "rm", "warm", "cold")
    assert (gone.stdout, gone.returncode) == (b"warm\n", 125)
    assert b"no snapshot 'cold'" in gone.stderr


def test_a_fork_from_the_command_line(cli: Cli, sandbox: str) -> None:
    forked = cli("fork", sandbox, "--count", "2", "--label", "of=it")
    names = forked.stdout.decode().split()
    assert (forked.returncode, len(names)) == (0, 2), forked.stderr
    assert sorted(cli("ls", "-q", "--label", "of=it").stdout.decode().split()) == sorted(names)
    assert cli("stop", *names).returncode == 0


def test_a_port_is_forwarded(environment: dict[str, str], sandbox: str) -> None:
    argv = [sys.executable, "-m", "opendsec.main", "forward", sandbox, "0:7", "0:8"]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as forwarding:
        assert forwarding.stderr is not None
        ports = [int(forwarding.stderr.readline().split()[0].rpartition(":")[2]) for _ in range(2)]
        data = bytes(range(256)) * 2000
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=30) as one:
            one.sendall(data[:100])
            found = one.recv(100)
            one.sendall(data[100:])
            one.shutdown(socket.SHUT_WR)
            while part := one.recv(65536):
                found += part
        assert found == data
        with socket.create_connection(("127.0.0.1", ports[1]), timeout=30) as other:
            assert other.recv(1) == b""
        assert "port 8: Connection refused inside the sandbox" in forwarding.stderr.readline()
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(60) == 130
