"""From the text of a Dockerfile to a plan, without a platform."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opendsec.build.dockerfile import parse_dockerfile
from opendsec.build.plan import BuildOptions, images_named, make_plan
from opendsec.build.steps import Copy, MakeDirectory, Plan, Run, step_key
from opendsec.build.template import Template
from opendsec.errors import ImageNotFoundError, InvalidSpecError, UnsupportedError
from opendsec.model.image import ImageConfig

BASE = ImageConfig(
    env={"PATH": "/bin", "HOME_OF": "base"},
    workdir="/base",
    user="someone",
    entrypoint=("/init",),
    cmd=("run",),
    labels={"from": "base"},
)


def lookup(name: str) -> ImageConfig:
    if name not in {"base", "other:1"}:
        raise ImageNotFoundError(name)
    return BASE


def planned(text: str, **options: Any) -> Plan:
    return make_plan(parse_dockerfile(text), BuildOptions(**options), lookup)


def config(text: str, **options: Any) -> ImageConfig:
    return planned(text, **options).stages[-1].config


def only_run(text: str, **options: Any) -> Run:
    (step,) = [step for step in planned(text, **options).stages[-1].steps if isinstance(step, Run)]
    return step


def only_copy(text: str, **options: Any) -> Copy:
    (step,) = [step for step in planned(text, **options).stages[-1].steps if isinstance(step, Copy)]
    return step


def test_configuration_is_the_bases_until_something_is_said() -> None:
    assert config("FROM base") == BASE
    found = config(
        'FROM base\nENV A=1 B="two words" C=$A\nENV C=$A\nLABEL x=y "z w"=q\nUSER u:g\nWORKDIR sub\nCMD echo "$A"\n'
    )
    assert found.env == {"PATH": "/bin", "HOME_OF": "base", "A": "1", "B": "two words", "C": "1"}
    assert found.labels == {"from": "base", "x": "y", "z w": "q"}
    assert (found.user, found.workdir) == ("u:g", "/base/sub")
    assert (found.entrypoint, found.cmd) == (("/init",), ("/bin/sh", "-c", 'echo "$A"'))


def test_values_of_one_instruction_see_what_was_before_it() -> None:
    assert config("FROM base\nENV A=old\nENV A=new B=$A").env["B"] == "old"


def test_the_old_form_of_env() -> None:
    assert config("FROM base\nENV NAME some value").env["NAME"] == "some value"


def test_an_entry_point_drops_the_bases_arguments() -> None:
    assert config('FROM base\nENTRYPOINT ["/x"]').cmd == ()
    assert config('FROM base\nCMD ["a"]\nENTRYPOINT ["/x"]').cmd == ("a",)
    assert config('FROM base\nENTRYPOINT ["/x"]\nCMD ["a"]').cmd == ("a",)


def test_shells() -> None:
    assert only_run("FROM base\nRUN echo $X 'a b'").argv == ("/bin/sh", "-c", "echo $X 'a b'")
    assert only_run('FROM base\nRUN ["/x", "$Y"]').argv == ("/x", "$Y")
    assert only_run('FROM base\nSHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN x').argv[:2] == ("/bin/bash", "-o")
    assert planned('FROM base\nSHELL ["/b"]\nFROM base\nRUN x').stages[-1].steps[0].argv[0] == "/bin/sh"  # type: ignore[union-attr]


def test_heredocs() -> None:
    assert only_run("FROM base\nRUN <<EOF\necho a\n  echo b\nEOF\n").argv[-1] == "echo a\n  echo b\n"
    assert only_run("FROM base\nRUN <<-EOF\n\techo a\nEOF\n").argv[-1] == "echo a\n"
    text = only_run("FROM base\nRUN --network=none cat > /x <<EOF\n$A\nEOF\n").argv[-1]
    assert text == "cat > /x <<EOF\n$A\nEOF\n"
    copied = only_copy("FROM base\nENV A=1\nCOPY <<one <<'two' /d/\n$A \"q\"\none\n$A\ntwo\n")
    assert [(one.name, one.content) for one in copied.inline] == [("one", '1 "q"\n'), ("two", "$A\n")]


def test_arguments_and_their_scopes() -> None:
    text = "ARG V=1\nARG TAG=base\nFROM $TAG\nRUN echo\n"
    assert only_run(text).env == BASE.env
    assert "V" not in only_run(text, arguments={"V": "2"}).env
    text = "ARG V=1\nFROM base\nARG V\nARG W=${V}w\nARG NONE\nRUN echo\n"
    assert only_run(text).env == {**BASE.env, "V": "1", "W": "1w"}
    assert only_run(text, arguments={"V": "2", "NONE": "n"}).env == {**BASE.env, "V": "2", "W": "2w", "NONE": "n"}
    assert only_run("FROM base\nARG A=1\nENV A=2\nARG A=3\nRUN echo").env["A"] == "2"
    assert only_run("FROM base\nARG TARGETARCH\nRUN echo", machine="aarch64").env["TARGETARCH"] == "arm64"
    with pytest.raises(InvalidSpecError, match="line 2: FROM"):
        planned("ARG T\nFROM $T")


def test_proxies_are_given_but_do_not_count() -> None:
    step = only_run("FROM base\nRUN x", arguments={"http_proxy": "http://p"})
    assert step.unkeyed_env == {"http_proxy": "http://p"}
    assert step_key("p", step, "") == step_key("p", only_run("FROM base\nRUN x"), "")


def test_arguments_nobody_uses_are_told() -> None:
    assert "NOBODY" in planned("FROM base", arguments={"NOBODY": "1"}).notes[0]


def test_copies() -> None:
    step = only_copy("FROM base\nENV D=/x\nCOPY --chown=$D:g --chmod=0640 a $D/b c/")
    assert (step.sources, step.target, step.into_directory) == (("a", "/x/b"), "/base/c", True)
    assert (step.owner, step.mode, step.unpack) == ("/x:g", 0o640, False)
    assert only_copy('FROM base\nCOPY ["a b", "/t"]').sources == ("a b",)
    assert only_copy("FROM base\nADD a /t").unpack
    assert only_copy("FROM base\nCOPY a .").into_directory
    assert only_copy("FROM base\nCOPY a .").target == "/base"
    assert only_copy("FROM base\nCOPY --from=other:1 a /").from_image == "other:1"


def test_stages() -> None:
    text = "FROM base AS One\nRUN 1\nFROM base AS two\nRUN 2\nFROM scratch\nCOPY --from=one /a /\nCOPY --from=0 /a /b\n"
    plan = planned(text)
    assert [stage.name for stage in plan.stages] == ["one", ""]
    assert [step.from_stage for step in plan.stages[1].steps if isinstance(step, Copy)] == [0, 0]
    assert [stage.name for stage in planned(text, target="TWO").stages] == ["two"]
    assert planned("FROM base AS a\nENV X=1\nFROM a\nRUN x").stages[1].config.env["X"] == "1"
    assert planned("FROM base AS a\nFROM a AS b\nFROM b").stages[2].base_stage == 1
    with pytest.raises(InvalidSpecError, match="there is no stage 'x'"):
        planned(text, target="x")


def test_images_are_known_before_anything_is_planned() -> None:
    text = "ARG T=other:1\nFROM base AS s\nFROM $T\nCOPY --from=s a /\nCOPY --from=third b /\nFROM scratch\n"
    assert images_named(parse_dockerfile(text), BuildOptions()) == ("base", "other:1", "third")


def test_what_has_no_effect_is_kept_and_told() -> None:
    plan = planned("FROM base\nEXPOSE 80 443/udp\nEXPOSE 80 81\nVOLUME /data\nSTOPSIGNAL SIGINT\nHEALTHCHECK NONE\n")
    labels = plan.stages[0].config.labels
    assert labels["dev.opendsec.dockerfile.expose"] == "80 443/udp 81"
    assert labels["dev.opendsec.dockerfile.volume"] == "/data"
    assert len(plan.notes) == 5


def test_directories() -> None:
    steps = planned("FROM base\nUSER root\nWORKDIR /a/../b\nUSER u\nWORKDIR c").stages[0].steps
    assert [(step.path, step.owner) for step in steps if isinstance(step, MakeDirectory)] == [
        ("/b", "root"),
        ("/b/c", "u"),
    ]


BAD = [
    ("RUN x\nFROM base", InvalidSpecError, "line 1: RUN stands before"),
    ("FROM base\n\nNONSENSE x", InvalidSpecError, "line 3: NONSENSE is no instruction"),
    ("FROM base\nRUN x \\\n  y\nENV =1", InvalidSpecError, "line 4"),
    ("FROM base\nCOPY a", InvalidSpecError, "line 2: COPY takes"),
    ("FROM base\nCOPY a b /c", InvalidSpecError, "line 2: COPY of several"),
    ("FROM base\nCOPY --chmod=u+x a /c", InvalidSpecError, "line 2: --chmod"),
    ("FROM base\nCOPY --from=3 a /c", InvalidSpecError, "line 2: --from"),
    ("FROM base\nCOPY --parents a /c", UnsupportedError, "line 2: COPY --parents"),
    ("FROM base\nADD https://x/y /c", UnsupportedError, "line 2: a source from the network"),
    ("FROM base\nADD --checksum=x y /c", UnsupportedError, "line 2: ADD --checksum"),
    ("FROM base\nRUN --mount=type=cache,target=/x y", UnsupportedError, "line 2: RUN --mount=type=cache"),
    ("FROM base\nRUN --security=insecure y", UnsupportedError, "line 2: RUN --security"),
    ("FROM base\nRUN <<EOF\n#!/usr/bin/python3\nEOF", UnsupportedError, "line 2: a script"),
    ("FROM base\nONBUILD RUN x", UnsupportedError, "line 2: ONBUILD"),
    ("FROM --platform=windows/amd64 base", UnsupportedError, "line 1: the platform"),
    ("FROM base\nSHELL x", InvalidSpecError, "line 2"),
    ("FROM base\nENV A=${B", InvalidSpecError, "line 2"),
    ("FROM base\nENV A='x", InvalidSpecError, "Dockerfile"),
    ("FROM base\nRUN <<EOF\nx", InvalidSpecError, "heredoc"),
    ("", InvalidSpecError, "no instructions"),
    ("ARG X=1", InvalidSpecError, "no FROM"),
    ("FROM a b c d", InvalidSpecError, "line 1: FROM takes"),
    ("FROM nowhere", ImageNotFoundError, "nowhere"),
]


@pytest.mark.parametrize(("text", "kind", "words"), BAD)
def test_what_is_refused_is_named(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        planned(text)


def test_keys_follow_what_counts() -> None:
    step = only_run("FROM base\nRUN x")
    key = step_key("below", step, "")
    assert step_key("below", replace(step, line=9, text="other words"), "") == key
    others = [
        step_key("other", step, ""),
        step_key("below", step, "inputs"),
        step_key("below", replace(step, argv=("y",)), ""),
        step_key("below", replace(step, env={"A": "1"}), ""),
        step_key("below", replace(step, user="u"), ""),
        step_key("below", replace(step, workdir="/w"), ""),
        step_key("below", replace(step, network=False), ""),
        step_key("below", MakeDirectory(line=1, text="", path="/x"), ""),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_a_template_is_the_same_plan() -> None:
    template = (
        Template()
        .from_image("base")
        .env({"A": "$x 'y'"}, B="2")
        .run("echo $A")
        .run(["/bin/x", "$y"], network=False)
        .copy(["a", "b"], "/d/", owner="u:g", mode=0o755)
        .copy("c", "/e", from_image="other:1")
        .workdir("/w")
        .user("u")
        .label({"l": "m"})
        .entrypoint(["/i"])
        .cmd("x")
    )
    written = planned(
        'FROM base\nENV A="\\$x \'y\'" B=2\nRUN echo $A\nRUN --network=none ["/bin/x", "$y"]\n'
        "COPY --chown=u:g --chmod=0755 a b /d/\nCOPY --from=other:1 c /e\nWORKDIR /w\nUSER u\nLABEL l=m\n"
        'ENTRYPOINT ["/i"]\nCMD x\n'
    ).stages[0]
    made = make_plan(template.dockerfile(), BuildOptions(), lookup).stages[0]
    assert made.config == written.config
    assert [step_key("", step, "") for step in made.steps] == [step_key("", step, "") for step in written.steps]


def test_templates_are_values() -> None:
    begin = Template().from_image("base")
    assert begin.run("a") != begin.run("b")
    assert len(begin.instructions) == 1
    with pytest.raises(InvalidSpecError, match="begin with from_image"):
        Template().run("x")
    with pytest.raises(InvalidSpecError, match="template, step 2"):
        make_plan(begin.run("").dockerfile(), BuildOptions(), lookup)
