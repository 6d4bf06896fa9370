"""`python -m opendsec.apiserver`: reads the environment, serves, says on stderr what stops it."""

from __future__ import annotations

import logging
import os
import sys

from opendsec.apiserver.app import run_apiserver
from opendsec.apiserver.settings import from_environment
from opendsec.errors import OpenDSecError
from opendsec.server.logs import configure
from opendsec.server.runner import run

log = logging.getLogger("opendsec.apiserver")


def main() -> int:
    """Exit status 0 after SIGTERM, 1 when it could not start or had to stop."""
    try:
        settings = from_environment(os.environ)
        configure(settings.log_level)

        def listening() -> None:
            log.info("listening", extra={"fields": {"address": settings.listen, "edges": ",".join(settings.edges)}})

        run(run_apiserver(settings, on_listening=listening))
    except (OpenDSecError, OSError, ValueError) as exc:
        sys.stderr.write(f"apiserver: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
