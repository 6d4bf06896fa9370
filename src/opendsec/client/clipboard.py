"""The clipboard of a desktop, by commands inside: `xclip`, or `wl-copy` and `wl-paste`, whichever is there. Pure."""

from __future__ import annotations

from opendsec.client.results import ShellResult
from opendsec.errors import SandboxError, UnsupportedError

TIMEOUT_S = 30.0
MAX_BYTES = 16 * 1024 * 1024
_NO_PROGRAM = 69
_SCRIPT = """
export DISPLAY="${DISPLAY:-:0}"
if [ -n "${WAYLAND_DISPLAY:-}" ] && command -v wl-copy >/dev/null; then exec %s
elif command -v xclip >/dev/null; then exec %s
else exit 69
fi
"""
GET_SCRIPT = _SCRIPT % ("wl-paste --no-newline --type text", "xclip -selection clipboard -o -target UTF8_STRING")
SET_SCRIPT = _SCRIPT % (
    "wl-copy --type text/plain >/dev/null 2>&1",
    # xclip lives on in the background until somebody else copies: it must not hold the command's output.
    "xclip -selection clipboard -i >/dev/null 2>&1",
)


def text_of(result: ShellResult) -> str:
    """What GET_SCRIPT has found; "" when nothing was copied yet. Raises as `check_result`."""
    if not result.ok and "not available" in result.stderr:
        return ""
    check_result(result)
    return result.stdout


def check_result(result: ShellResult) -> None:
    """Raises UnsupportedError when no program for it is inside, SandboxError when no desktop answers."""
    if result.exit_code == _NO_PROGRAM:
        raise UnsupportedError(
            "the guest has neither xclip nor wl-clipboard",
            detail={"capability": "clipboard"},
            remedy="install one of them inside",
        )
    if not result.ok:
        words = result.stderr.strip()[-500:] or f"{result.end_reason} with status {result.exit_code}"
        raise SandboxError(
            f"the guest's clipboard does not answer: {words}",
            remedy="is its desktop up, and does DISPLAY in the sandbox's env name it?",
            retryable=True,
        )
