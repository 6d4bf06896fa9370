"""The frames between `zygote` (on the host) and `inside` (the image's Python), as both have them; a test compares."""

from __future__ import annotations

import struct
from typing import Final

REQUEST: Final = struct.Struct("<III")
"""Number of the call, seconds of processor time, bytes of the task; with it three descriptors: task, stdout, stderr."""
REPLY: Final = struct.Struct("<IIII")
"""Number, wait status, killed leftovers, kills on request."""
ASK_KILLS: Final = 0xFFFFFFFF
"""As the number of a call: only answer how many kills there were."""
ASK_SWEEP: Final = 0xFFFFFFFE
"""As the number of a call: end whatever is left of the last one."""
UNPREPARED: Final = 122
"""Exit status of a call's process that failed before the call began: the task is then still in its file."""
