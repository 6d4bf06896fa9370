"""`python -m opendsec.apiserver`: reads the environment and serves; `… new-key PROJECT` makes an admin key.

What stops it is said on stderr in one sentence.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from opendsec.apiserver.app import run_apiserver
from opendsec.apiserver.database import open_database
from opendsec.apiserver.iam import check_project_name, insert_key, insert_project
from opendsec.apiserver.settings import Settings, from_environment
from opendsec.errors import OpenDSecError
from opendsec.model.access import Role
from opendsec.server.logs import configure
from opendsec.server.runner import run

log = logging.getLogger("opendsec.apiserver")


def new_key(settings: Settings, project: str) -> str:
    """An admin key of that project, which is made when it is missing. Whoever can write to the database may do this."""
    check_project_name(project)
    engine = open_database(settings.database_url)
    try:
        with engine.begin() as connection:
            insert_project(connection, project)
            return insert_key(connection, project=project, role=Role.ADMIN, title="new-key").key
    finally:
        engine.dispose()


def serve_until_stopped(settings: Settings) -> None:
    """Until SIGTERM."""
    configure(settings.log_level)

    def listening() -> None:
        log.info("listening", extra={"fields": {"address": settings.listen, "edges": ",".join(settings.edges)}})

    run(run_apiserver(settings, on_listening=listening))


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 after SIGTERM, 1 when it could not start or had to stop."""
    parser = argparse.ArgumentParser(prog="python -m opendsec.apiserver")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("new-key", help="print a new admin key").add_argument("project", nargs="?", default="default")
    chosen = parser.parse_args(arguments)
    try:
        settings = from_environment(os.environ)
        if chosen.command == "new-key":
            sys.stdout.write(new_key(settings, chosen.project) + "\n")
        else:
            serve_until_stopped(settings)
    except (OpenDSecError, OSError, ValueError) as exc:
        sys.stderr.write(f"apiserver: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
