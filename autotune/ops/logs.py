"""Logs: text lines for people, or JSON lines for machines; each names its job and trial."""

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from autotune.text.visible_text import visible, visible_line

CHATTY = ("httpx2", "httpcore2", "alembic", "urllib3")
"""Libraries that log each request at INFO, with addresses that may contain secrets."""

ABOUT = ("job", "trial", "method", "path", "status", "seconds", "owner")
"""Fields that a record may have by `extra={…}`."""


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


def set_up_logs(style: LogFormat, level: int = logging.INFO) -> None:
    """Send all logs of the process to standard error in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style is LogFormat.JSON else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """One line per record, followed by the traceback. Foreign text in it can neither break the line nor control a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name is logging's
        """The line without its traceback."""
        return visible_line(super().formatMessage(record).rstrip())

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback, in several lines."""
        return visible(super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC, ISO 8601), level, logger, message, the fields in `ABOUT`, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in ABOUT if hasattr(record, name)}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
