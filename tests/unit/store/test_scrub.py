"""Which paths are left out of a packed layer: patterns, defaults, files that hold secrets, and what `keep` saves."""

from __future__ import annotations

import time

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.store.scrub import DEFAULTS, MAX_PATTERNS, PLATFORM, Scrub, Verdict, check_patterns, homes_of

OUT, PACK, LOOK = Verdict.LEAVE_OUT, Verdict.PACK, Verdict.LOOK


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("/root/.bash_history", OUT),
        ("/srv/somewhere/.python_history", OUT),
        ("/home/agent/.cache", OUT),
        ("/srv/.cache", PACK),
        ("/root/.cache-not", PACK),
        ("/usr/lib/python3/dist-packages/x/__pycache__", OUT),
        ("/usr/lib/python3/dist-packages/x/legacy.pyc", PACK),
        ("/var/lib/apt/lists/deb.debian.org_dists", OUT),
        ("/var/lib/apt/lists", PACK),
        ("/var/lib/apt/extended_states", PACK),
        ("/var/cache/apt/archives/x_1_amd64.deb", OUT),
        ("/var/cache/apt/pkgcache.bin", OUT),
        ("/tmp", PACK),
        ("/tmp/x", OUT),
        ("/tmpx/x", PACK),
        ("/run/lock", OUT),
        ("/srv/tmp/x", PACK),
        ("/root/.netrc", OUT),
        ("/root/.aws", OUT),
        ("/root/.docker/config.json", OUT),
        ("/root/.docker/daemon.json", PACK),
        ("/root/.config/gh", OUT),
        ("/root/.config/git/config", PACK),
        ("/root/.ssh/id_ed25519", LOOK),
        ("/root/.ssh/known_hosts", OUT),
        ("/root/.ssh", PACK),
        ("/root/.npmrc", LOOK),
        ("/srv/project/.npmrc", LOOK),
        ("/root/.pypirc", LOOK),
        ("/etc/hosts", OUT),
        ("/srv/etc/hosts", PACK),
        ("/srv/.main.c.swp", OUT),
        ("/srv/upload.opendsec-0123456789abcdef", OUT),
        ("/srv/file", PACK),
    ],
)
def test_defaults(path: str, verdict: Verdict) -> None:
    assert Scrub().verdict(path) is verdict


def test_without_defaults_only_the_platforms_own_files_are_left_out() -> None:
    scrub = Scrub(defaults=False, scrub=["/srv/*.o"])
    assert scrub.verdict("/root/.bash_history") is PACK
    assert scrub.verdict("/root/.npmrc") is PACK
    assert scrub.verdict("/etc/resolv.conf") is OUT
    assert scrub.verdict("/srv/x.o") is OUT
    assert scrub.verdict("/srv/below/x.o") is PACK


@pytest.mark.parametrize(
    ("path", "content", "out"),
    [
        ("/root/.npmrc", b"//registry.npmjs.org/:_authToken=npm_x\n", True),
        ("/root/.npmrc", b"save-exact=true\n", False),
        ("/root/.pypirc", b"[pypi]\nusername = __token__\npassword = pypi-x\n", True),
        ("/etc/pip.conf", b"[global]\nindex-url = https://u:p@host/simple\n", True),
        ("/etc/pip.conf", b"[global]\nindex-url = https://host/simple\n", False),
        ("/home/a/.ssh/deploy", b"-----BEGIN OPENSSH PRIVATE KEY-----\n", True),
        ("/home/a/.ssh/deploy.pub", b"ssh-ed25519 AAAA me\n", False),
        ("/home/a/.ssh/config", b"Host *\n", False),
    ],
)
def test_files_that_are_looked_into(path: str, content: bytes, out: bool) -> None:
    scrub = Scrub()
    assert scrub.verdict(path) is LOOK
    assert scrub.holds_secret(path, content) is out


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("/a/*", ["/a/b", "/a/.b", "/a/b\nc"], ["/a", "/a/b/c", "/b/a/b"]),
        ("/a/**", ["/a/b", "/a/b/c"], ["/a", "/ab"]),
        ("/a/**/b", ["/a/b", "/a/x/b", "/a/x/y/b"], ["/a/xb", "/ab"]),
        ("/*/b", ["/a/b", "/x/b"], ["/b", "/a/x/b"]),
        ("*.log", ["/x.log", "/a/b/.log"], ["/x.log.1", "/x.log/y"]),
        ("x?", ["/xy", "/a/xz"], ["/x", "/xyz"]),
        ("[ab].o", ["/a.o"], ["/c.o", "/ab.o"]),
        ("[!ab].o", ["/c.o"], ["/a.o"]),
        ("[", ["/["], ["/x"]),
        ("a+(b).$", ["/a+(b).$"], ["/aab"]),
        ("~/x", ["/root/x", "/home/me/x", "/srv/people/y/x"], ["/home/x", "/srv/x"]),
        ("bad\udcff", ["/bad\udcff"], ["/bad"]),
    ],
)
def test_patterns(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    scrub = Scrub(scrub=[pattern], defaults=False, homes=("/root", "/srv/people/y"))
    assert [path for path in matched if scrub.verdict(path) is not OUT] == []
    assert [path for path in not_matched if scrub.verdict(path) is OUT] == []


@pytest.mark.parametrize(
    "pattern", ["", "a/b", "./a", "/a//b", "/a/../b", "/", "*", "**", "~", "~x/y", "a\0b", "x" * 5000, "[z-a]", "[!]"]
)
def test_a_bad_pattern_is_named(pattern: str) -> None:
    for field in ("scrub", "keep"):
        with pytest.raises(InvalidSpecError) as failed:
            check_patterns([pattern], field)
        assert failed.value.detail["field"] == field


def test_too_many_patterns() -> None:
    with pytest.raises(InvalidSpecError, match="at most"):
        check_patterns(["x"] * (MAX_PATTERNS + 1), "scrub")
    with pytest.raises(InvalidSpecError, match="characters in all"):
        check_patterns(["x" * 4000] * 20, "keep")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 100 + "b", "/" + "a" * 250),
        ("/**/a*a*a" * 60 + "/b", "/a" * 1000),
        ("~/**/a" * 1 + "/**/a*a*a" * 30 + "/b", "/root" + "/a" * 1000),
        ("[!b]*" * 100 + "b", "/" + "a" * 250),
    ],
)
def test_no_pattern_takes_longer_than_the_path_is_long(pattern: str, path: str) -> None:
    """Trying all ways to share a text out among stars took minutes, in which the node did nothing else."""
    scrub = Scrub(scrub=[pattern], defaults=False)
    began = time.process_time()
    assert scrub.verdict(path) is PACK
    assert time.process_time() - began < 1


def test_homes_without_number() -> None:
    """A sandbox writes its own passwd; 70,000 homes times each pattern were minutes, and gigabytes of expressions."""
    began = time.process_time()
    homes = homes_of("".join(f"a:x:0:0::/h{number}:\n" for number in range(70_000)))
    scrub = Scrub(homes=homes)
    assert scrub.verdict("/h69999/.aws") is OUT
    assert scrub.verdict("/h70000/.aws") is PACK
    assert time.process_time() - began < 5


def test_our_own_patterns_are_good_ones() -> None:
    check_patterns([*DEFAULTS, *PLATFORM], "scrub")


def test_keep_names_paths() -> None:
    scrub = Scrub(keep=["~/.cache/huggingface", "__pycache__"])
    assert scrub.keeps("/root/.cache/huggingface")
    assert not scrub.keeps("/root/.cache")
    assert scrub.keeps("/x/__pycache__")


def test_homes() -> None:
    passwd = (
        "root:x:0:0::/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\nme:x:1000:1000::/work/me/:/bin/sh\n"
        "nobody:x:65534:65534::/nonexistent:/bin/false\nodd:x:1001:1001::/a/../b:/bin/sh\nbroken\ntop:x:1002:2:::\n"
        "star:x:1003:1::/h*:/bin/sh\nslash:x:1004:1::/:/bin/sh\n"
    )
    assert homes_of(passwd) == ("/root", "/work/me", "/h*")
    scrub = Scrub(scrub=["~/.x"], homes=homes_of(passwd))
    assert scrub.verdict("/h*/.x") is OUT
    assert scrub.verdict("/hi/.x") is PACK
