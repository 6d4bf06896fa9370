"""Logging: one event name and fields, one line each, to stderr.

Any layer logs with the standard library: `log.info("sandbox_ready", extra={"fields": {"sandbox_id": id}})`.
`configure` is called once, by the entry point of a process. Request bodies, keys and output of sandboxes never go
into a log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,-]+\Z")
_INCOMPLETE = "ASGI callable returned without completing response."


class EventFormatter(logging.Formatter):
    """Time, level, logger, event, then the fields as `key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: Mapping[str, object] = getattr(record, "fields", {})
        parts = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), record.name, record.getMessage()]
        parts += [f"{key}={_shown(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    text = str(value)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=True)


def _not_a_cut_stream(record: logging.LogRecord) -> bool:
    # Cutting a stream on purpose is how a failure behind it is told; the front logs the reason itself.
    return record.getMessage() != _INCOMPLETE


def configure(level: str = "info") -> None:
    """Log events of `level` and above to stderr. Raises ValueError for a level that does not exist."""
    names = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if level not in names:
        raise ValueError(f"log level {level!r} is none of {', '.join(names)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=names[level], handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "httpx", "httpcore", "alembic"):
        logging.getLogger(noisy).setLevel(max(names[level], logging.WARNING))
    logging.getLogger("uvicorn.error").addFilter(_not_a_cut_stream)
