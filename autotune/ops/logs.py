"""Logs: lines for people, or a JSON object a line for machines; each names the job and the trial that it is about."""

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from autotune.text.visible_text import visible, visible_line

CHATTY = ("httpx2", "httpcore2", "alembic", "urllib3")
"""Libraries that tell of each request at INFO, with addresses that hold what is nobody's business."""

ABOUT = ("job", "trial", "method", "path", "status", "seconds", "owner")
"""What a record may carry by `extra={…}`."""


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


def set_up_logs(style: LogFormat, level: int = logging.INFO) -> None:
    """Send every log of the process to standard error in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style is LogFormat.JSON else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """One line a record, behind it the traceback. What others wrote in it neither ends the line nor commands a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name is logging's
        """The line without its traceback."""
        return visible_line(super().formatMessage(record).rstrip())

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback, in as many lines as it has."""
        return visible(super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC, ISO 8601), level, logger, message, what it is about, traceback."""

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
