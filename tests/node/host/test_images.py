"""`opendsec image …` as a user meets it: what it prints, its statuses, and its errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oci_layout import file, make_layout, tar_of

from opendsec.linux.libc import umount2
from opendsec.linux.mount import mountinfo
from opendsec.main import main
from opendsec.store.images import ImageStore
from opendsec.store.location import open_location
from opendsec.store.mounts import mount_erofs

pytestmark = [pytest.mark.root, pytest.mark.erofs]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    monkeypatch.setenv("OPENDSEC_STATE_DIR", str(path / "state"))
    (path / "tree").mkdir()
    (path / "tree/f").write_text("content")
    yield path
    shutil.rmtree(path)


class Command:
    """Runs `opendsec image …` in this process, at descriptor level."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["image", *words])
        out, err = self._capture.readouterr()
        assert ended.value.code == status, err
        return out, err

    def json(self, *words: str, status: int = 0) -> Any:
        """With --json standard output is one JSON value and nothing else."""
        out, _ = self(*words, "--json", status=status)
        return json.loads(out)


@pytest.fixture
def image(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


def test_the_life_of_an_image(image: Command, disk: Path) -> None:
    given = ["--env", "A=b c", "--env", "E=", "--workdir", "/w", "--user", "u"]
    made = image.json("import", "mine", str(disk / "tree"), *given)
    assert made["config"]["env"] == {"A": "b c", "E": ""}
    assert (made["config"]["workdir"], made["config"]["user"]) == ("/w", "u")
    [listed] = image.json("ls")
    told = image.json("inspect", "mine")
    for key in ("name", "digest", "created_at", "source", "size_bytes"):
        assert listed[key] == told[key] == made[key]
    assert (told["config"], told["layers"]) == (made["config"], made["layers"])
    assert "A=b c" in image("inspect", "mine")[0]
    table, _ = image("ls")
    assert table.split()[:7] == ["NAME", "ROLE", "DIGEST", "SIZE", "SHARED", "CREATED", "FROM"]
    assert made["digest"][7:19] in table
    assert image("rm", "mine")[0] == "removed mine\n"
    assert image.json("ls") == []


def test_phases_are_told_when_nobody_looks_at_a_terminal(image: Command, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("f", b"f")]])
    out, err = image("import", "mine", f"oci:{layout}:latest")
    assert out.startswith("image mine: sha256:")
    assert "image mine: unpacking layer 1 of 1" in err
    assert "image mine: writing the layers\nimage mine: publishing\n" in err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["inspect", "nope"], "image_not_found", "no image 'nope'"),
        (["rm", "nope"], "image_not_found", "no image 'nope'"),
        (["inspect", "../x"], "invalid_spec", "is not an image name"),
        (["import", "a b", "/etc"], "invalid_spec", "name 'a b' is not an image name"),
        (["import", "x", "/nowhere"], "invalid_spec", "source: '/nowhere' is neither"),
        (["import", "x", "tree", "--env", "novalue"], "invalid_spec", "env: 'novalue' is not NAME=value"),
        (["import", "x", "tree", "--workdir", "rel"], "invalid_spec", "workdir"),
        (["import", "x", "layout", "--user", "root"], "unsupported", "brings its own"),
        (["import", "x", "evil.tar"], "image_invalid", "entry '../evil'"),
        (["build-debian", "x", "--include", "git;rm"], "invalid_spec", "include: 'git;rm'"),
        (["build-debian", "x", "--suite", "no such"], "invalid_spec", "suite 'no such'"),
    ],
)
def test_errors(
    image: Command, disk: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, sentence: str
) -> None:
    monkeypatch.chdir(disk)
    make_layout(disk / "layout", [[file("f")]])
    (disk / "evil.tar").write_bytes(tar_of([file("../evil", b"x")]))
    error = image.json(*words, status=1)["error"]
    assert error["code"] == code
    assert sentence in error["message"]
    out, err = image(*words, status=1)
    assert out == ""
    assert sentence in err
    assert image.json("ls") == []


def test_a_taken_name_says_what_to_do(image: Command, disk: Path) -> None:
    image("import", "mine", str(disk / "tree"))
    (disk / "tree/f").write_text("other")
    error = image.json("import", "mine", str(disk / "tree"), status=1)["error"]
    assert error["code"] == "conflict"
    assert "--replace" in error["remedy"]
    assert image.json("import", "mine", str(disk / "tree"), "--replace")["digest"] != error["detail"]["digest"]


def test_a_missing_program_names_its_package(image: Command, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.store.programs.ENVIRONMENT", {"PATH": str(disk)})
    error = image.json("import", "mine", str(disk / "tree"), status=1)["error"]
    assert error["code"] == "host_capability"
    assert error["detail"]["probe"] == "mkfs.erofs"
    assert error["remedy"] == "apt-get install erofs-utils"
    error = image.json("build-debian", "deb", status=1)["error"]
    assert error["remedy"] == "apt-get install mmdebstrap"


def test_users_without_root_are_told(image: Command, disk: Path) -> None:
    image("import", "mine", str(disk / "tree"))
    os.seteuid(65534)
    try:
        for words in (["ls"], ["rm", "mine"], ["import", "x", str(disk / "tree")]):
            error = image.json(*words, status=1)["error"]
            assert (error["code"], error["detail"]) == ("host_capability", {"probe": "root"})
            assert "sudo" in error["remedy"]
    finally:
        os.seteuid(0)


def test_a_source_that_cannot_be_read_is_named(image: Command, disk: Path) -> None:
    (disk / "loop").symlink_to("loop")
    error = image.json("import", "x", f"dir:{disk / 'tree'}", "--workdir", "/" + "w" * 5000, status=1)["error"]
    assert error["code"] == "invalid_spec"
    error = image.json("import", "x", f"tar:{disk / 'loop'}", status=1)["error"]
    assert error["code"] == "invalid_spec"


@pytest.mark.mmdebstrap
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_debian_image_keeps_nothing_of_this_machine(image: Command, disk: Path, tmp_path: Path) -> None:
    made = image.json("build-debian", "deb", "--include", "hello,procps")
    assert image.json("build-debian", "deb", "--include", "procps,hello") == made
    meta, data = (made["layers"][0][part]["digest"] for part in ("meta", "data"))
    store = ImageStore(disk / "state/store")
    mount_erofs(store.blob_path(meta), tmp_path, data=store.data_path(data))
    try:
        assert (tmp_path / "usr/bin/hello").is_file()
        sources = (tmp_path / "etc/apt/sources.list").read_text().splitlines()
        assert all("deb.debian.org" in line for line in sources)
        assert not list((tmp_path / "etc/apt/sources.list.d").iterdir())
        for name in ("hostname", "hosts", "resolv.conf"):
            assert (tmp_path / "etc" / name).read_bytes() == b""
        for name in ("dev", "run", "tmp", "var/lib/apt/lists", "var/log", "var/cache/apt"):
            assert list((tmp_path / name).iterdir()) == []
        assert not (tmp_path / "usr/share/man").exists()
    finally:
        umount2(tmp_path)
    assert image.json("build-debian", "deb", "--include", "hello,procps", "--rebuild")["layers"] == made["layers"]


@pytest.mark.mmdebstrap
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_unknown_package_says_so_and_leaves_nothing(image: Command, disk: Path) -> None:
    error = image.json("build-debian", "deb", "--include", "no-such-package-anywhere", status=1)["error"]
    assert error["code"] == "node"
    assert "no-such-package-anywhere" in error["message"]
    assert image.json("ls") == []
    assert list((disk / "state/store/staging").iterdir()) == []


def _lives(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words in line:
            found.append(line)
    return found


def _wait_for(condition: Callable[[], object], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.mmdebstrap
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_build_leaves_no_process_and_no_files(disk: Path) -> None:
    staging = disk / "state/scratch"
    command = [sys.executable, "-m", "opendsec.main", "image", "build-debian", "deb", "--include", "hello"]
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OPENDSEC_STATE_DIR": str(disk / "state")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: list(staging.glob("*/tree/var/lib/dpkg")), within_s=60)
    finally:
        process.kill()
        process.wait(60)
    _wait_for(lambda: not _lives(str(staging)), within_s=20)
    store = open_location("", disk / "state")
    assert {path.name for path in staging.iterdir()} == {".lock"}
    assert list((store.root / "staging").iterdir()) == []
    assert store.list() == []


def test_images_are_looked_into_and_named_without_a_platform(image: Command, disk: Path) -> None:
    (disk / "tree/gone").write_text("g")
    image("import", "base", str(disk / "tree"))
    (disk / "tree/gone").unlink()
    (disk / "tree/f").write_text("CONTENT")
    (disk / "tree/f").chmod(0o600)
    (disk / "kit/opt").mkdir(parents=True)
    (disk / "kit/opt/kit").symlink_to("nowhere")
    image("import", "next", str(disk / "tree"))
    image("import", "kit", str(disk / "kit"), "--role", "toolkit")
    before = len(os.listdir("/proc/self/fd"))
    out, _ = image("tree", "base", "--depth", "1")
    assert [line.split()[-1] for line in out.splitlines()] == ["/", "/f", "/gone"]
    out, err = image("diff", "base", "next", "--no-times")
    assert out.splitlines() == ["M /f  (mode, content)", "D /gone"]
    assert err == "0 added, 1 changed, 1 removed\n"
    image("compose", "task", "base", "--toolkit", "kit")
    image("tag", "stable", "task")
    assert image.json("inspect", "stable")["toolkits"] == ["kit"]
    assert image("tree", "stable", "/opt/kit")[0].rstrip().endswith("/opt/kit -> nowhere")
    assert "toolkit" in image("ls", "kit")[0]
    assert image.json("tree", "base", "/nope", status=1)["error"]["code"] == "not_found"
    assert image.json("tag", "kit", "base", status=1)["error"]["code"] == "conflict"
    assert image.json("compose", "x", "kit", status=1)["error"]["detail"]["field"] == "image"
    assert len(os.listdir("/proc/self/fd")) == before
    assert [entry.source for entry in mountinfo() if entry.source.startswith(str(disk))] == []


def test_removed_collected_and_checked(image: Command, disk: Path) -> None:
    for name in ("a", "b"):
        (disk / "tree/f").write_text(f"content of {name}")
        image("import", name, str(disk / "tree"))
    image("rm", "a")
    out, _ = image("gc")
    assert "deleted 0 files" in out
    assert "waiting 4 files" in out
    out, _ = image("gc", "--grace", "0", "--dry-run")
    assert out.count("would delete ") == 5
    done = image.json("gc", "--grace", "0s")
    assert (len(done["files"]), done["waiting"], done["kept"]) == (4, 0, 4)
    out, _ = image("fsck")
    assert out.startswith("sound: 1 images, read 4 files")
    [data] = (disk / "state/store/data/sha256").iterdir()
    data.chmod(0o644)
    data.write_bytes(b"X" + data.read_bytes()[1:])
    assert image("fsck", "--quick")[0].startswith("sound")
    out, _ = image("fsck", status=1)
    assert "1 of its 1 chunks are damaged" in out
    told = image.json("fsck", "--repair", status=1)
    assert [(one["fault"], one["repair"], one["images"]) for one in told["findings"]] == [
        ("damaged", "set aside", ["b"])
    ]
    assert {one["name"] for one in told["file_system"]} == {"rename", "fsync", "locks", "clock", "links"}
    image("import", "b", str(disk / "tree"))
    image("fsck")
    _, err = image("gc", "--grace", "soon", status=1)
    assert "grace: 'soon' is no span of time" in err


def test_many_layers_become_few(image: Command, disk: Path) -> None:
    layers = [[file(f"f{n}", f"{n}".encode()), file("same", f"{n}".encode())] for n in range(3)]
    image("import", "many", str(make_layout(disk / "layout", layers)), "--collapse-mb", "0")
    assert len(image.json("inspect", "many")["layers"]) == 3
    assert "2 layers (it had 3)" in image("merge", "many", "--most", "2")[0]
    assert image.json("merge", "many", "--most", "1")["layers_before"] == 2
    shown, _ = image("tree", "many")
    assert all(name in shown for name in ("f0", "f1", "f2", "same"))
    image("fsck")


def test_the_store_may_lie_elsewhere(image: Command, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENDSEC_STORE", str(disk / "shared"))
    image("import", "a", str(disk / "tree"))
    assert (disk / "shared/tags/a").exists()
    assert not (disk / "state/store").exists()
    monkeypatch.setenv("OPENDSEC_STORE", "shared")
    _, err = image("ls", status=1)
    assert "OPENDSEC_STORE" in err


def test_a_remote_store_is_asked_for_at_the_platform(
    image: Command, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENDSEC_STORE", "s3://bucket/prefix")
    monkeypatch.setenv("OPENDSEC_RUN_DIR", str(disk / "run"))
    monkeypatch.delenv("OPENDSEC_API_URL", raising=False)
    error = image.json("ls", status=1)["error"]
    assert (error["code"], "opendsec up" in error["remedy"]) == ("connect", True)
