"""The `opendsec` program, also as `python -m opendsec`: an interrupt while its modules load is no traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line (`opendsec.main`) and leave with its exit status."""
    try:
        from opendsec.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
