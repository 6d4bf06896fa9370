"""How a command's end is named."""

from __future__ import annotations

import pytest

from opendsec.backends.base import Usage
from opendsec.edge import outcome
from opendsec.edge.command import DEFAULT_PATH, check_session, continue_session, start_plan
from opendsec.edge.file_routes import file_error
from opendsec.edge.outcome import Counters, Recorded
from opendsec.errors import ExecError, FileError, InvalidSpecError, NoShellError, ProtocolError, UnsupportedError
from opendsec.guest import protocol
from opendsec.guest.base import Exit, GuestError
from opendsec.model.command import EndReason, ExecRequest, PtySize
from opendsec.model.file import FileEventKind, FileKind
from opendsec.model.ids import CommandId
from opendsec.model.image import ImageConfig
from opendsec.model.spec import SandboxSpec

ONE = CommandId("cmd-1")
NOTHING = Recorded(0, 0, 0, 0)
KILLED = Exit(exit_code=None, signal=9)


@pytest.mark.parametrize(
    ("exit_", "usage", "reason"),
    [
        (Exit(exit_code=0), None, EndReason.EXITED),
        (Exit(exit_code=0), Usage(oom_kills=1, pids_denied=1, disk_full=True), EndReason.EXITED),
        (KILLED, Usage(oom_kills=0), EndReason.SIGNALED),
        (KILLED, Usage(oom_kills=1), EndReason.OOM),
        (Exit(exit_code=137), Usage(oom_kills=1), EndReason.OOM),
        (Exit(exit_code=1), Usage(pids_denied=5), EndReason.PIDS_LIMIT),
        (Exit(exit_code=1), Usage(disk_full=True), EndReason.DISK_FULL),
        (Exit(exit_code=1), Usage(), EndReason.EXITED),
        (Exit(exit_code=None, signal=9, reason=1), Usage(oom_kills=1), EndReason.TIMEOUT),
        (Exit(exit_code=None, signal=15, reason=2), None, EndReason.CANCELLED),
        (Exit(exit_code=None, signal=9, reason=3), None, EndReason.SESSION_ENDED),
        (Exit(exit_code=None, signal=9, reason=3), Usage(oom_kills=1), EndReason.OOM),
        (Exit(exit_code=3, reason=3), Usage(oom_kills=1), EndReason.SESSION_ENDED),
    ],
)
def test_end_reason(exit_: Exit, usage: Usage | None, reason: EndReason) -> None:
    assert outcome.end_reason(exit_, Counters(), usage) is reason


def test_what_happened_before_is_not_blamed_on_this_command() -> None:
    before = Counters().advanced(Usage(oom_kills=3, pids_denied=2))
    assert outcome.end_reason(KILLED, before, Usage(oom_kills=3, pids_denied=2)) is EndReason.SIGNALED
    assert before.advanced(Usage()) == before


def test_signal_is_told_as_a_shell_tells_it() -> None:
    result = outcome.conclude(ONE, KILLED, NOTHING, EndReason.SIGNALED)
    assert (result.exit_code, result.signal) == (137, 9)


@pytest.mark.parametrize(
    ("kept", "total", "truncated"), [((5, 0), (5, 0), False), ((4, 0), (5, 0), True), ((5, 0), (5, 1), True)]
)
def test_truncated_is_honest(kept: tuple[int, int], total: tuple[int, int], truncated: bool) -> None:
    exit_ = Exit(exit_code=0, stdout_total=total[0], stderr_total=total[1])
    result = outcome.conclude(ONE, exit_, Recorded(*total, *kept), EndReason.EXITED)
    assert result.truncated is truncated


def test_an_unseen_end_has_no_code() -> None:
    assert outcome.conclude_unseen(ONE, NOTHING, EndReason.LOST, 1.0).exit_code is None


def test_refusals_are_typed() -> None:
    assert isinstance(outcome.refusal(GuestError("no_shell", "none")), NoShellError)
    assert isinstance(outcome.refusal(GuestError("bad_cwd", "none")), ExecError)
    assert isinstance(outcome.refusal(GuestError("unsupported", "none")), UnsupportedError)
    assert outcome.end_at_start(GuestError("pids_limit", "")) is EndReason.PIDS_LIMIT
    assert outcome.end_at_start(GuestError("exec", "")) is None


def test_image_then_sandbox_then_request() -> None:
    image = ImageConfig(env={"A": "image", "B": "image", "C": "image"}, workdir="/image", user="image")
    spec = SandboxSpec(image="debian", env={"B": "sandbox", "C": "sandbox"}, init_user="sandbox")
    plan = start_plan(ExecRequest(script="true", env={"C": "request"}, cwd="/request"), spec, image)
    assert plan.env == {"PATH": DEFAULT_PATH, "A": "image", "B": "sandbox", "C": "request"}
    assert (plan.cwd, plan.user) == ("/request", "sandbox")
    plan = start_plan(ExecRequest(script="true"), SandboxSpec(image="debian"), image)
    assert (plan.cwd, plan.user) == ("/image", "image")


def test_an_image_with_a_path_keeps_it() -> None:
    image = ImageConfig(env={"PATH": "/opt/bin"})
    assert start_plan(ExecRequest(script="true"), SandboxSpec(image="x"), image).env == {"PATH": "/opt/bin"}


def test_times_are_milliseconds_and_never_become_unlimited() -> None:
    request = ExecRequest(argv=("true",), timeout_s=0.0001, grace_s=1.5, pty=PtySize(rows=3, cols=4))
    plan = start_plan(request, SandboxSpec(image="x"), ImageConfig())
    assert (plan.timeout_ms, plan.grace_ms, plan.pty) == (1, 1500, (3, 4))
    assert start_plan(ExecRequest(argv=("true",)), SandboxSpec(image="x"), ImageConfig()).timeout_ms == 0


def test_a_living_session_takes_what_the_command_names_for_itself() -> None:
    request = ExecRequest(script="echo 'x'", session="s", cwd="/a b", env={"N": "it's"})
    plan = start_plan(request, SandboxSpec(image="x"), ImageConfig())
    words = continue_session(plan, request).script
    assert words == "export N='it'\"'\"'s' && cd -- '/a b' && eval 'echo '\"'\"'x'\"'\"''"
    plain = ExecRequest(script="pwd", session="s")
    assert continue_session(start_plan(plain, SandboxSpec(image="x"), ImageConfig()), plain).script == "pwd"


def test_a_session_needs_names_a_shell_can_hold() -> None:
    with pytest.raises(InvalidSpecError, match=r"A\.B"):
        check_session(ExecRequest(script="true", session="s", env={"A.B": "1"}))
    check_session(ExecRequest(script="true", env={"A.B": "1"}))


def test_a_guest_that_breaks_the_protocol_is_no_file_error() -> None:
    told = file_error(GuestError("protocol", "field 40: 'door' is not of file"), "/a")
    assert (type(told), told.http_status) == (ProtocolError, 502)
    assert isinstance(file_error(GuestError("file", "gone", 2), "/a"), FileError)


def test_the_kinds_of_the_guest_protocol_are_those_of_the_api() -> None:
    assert frozenset(FileKind) == protocol.FILE_KINDS
    assert frozenset(FileEventKind) == protocol.EVENT_KINDS
