"""Logs for people as text lines or for machines as JSON lines, each with its job and trial, and OpenTelemetry traces.

The endpoint comes from OpenTelemetry's own environment variables: OTEL_EXPORTER_OTLP_ENDPOINT and related ones.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from autotune.errors import RequestError
from autotune.text.visible_text import visible, visible_line

CHATTY = ("httpx2", "httpcore2", "alembic", "urllib3")
"""Libraries that log each request at INFO, with addresses that may contain secrets."""


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
    """One JSON object per record: time (UTC, ISO 8601), level, logger, message, fields of `extra={…}`, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # Fields that a record may have by `extra={…}`.
        fields |= {
            name: getattr(record, name)
            for name in ("job", "trial", "method", "path", "status", "seconds", "owner")
            if hasattr(record, name)
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def are_traced() -> bool:
    """Whether spans of this process are exported."""
    from opentelemetry import trace

    return hasattr(trace.get_tracer_provider(), "add_span_processor")  # the API's own provider discards spans


@contextmanager
def traces(service: str) -> Iterator[bool]:
    """Export the spans of the process to a collector, if the environment names one; yield whether it does.

    Raises:
        RequestError: the environment names one, and the packages are not installed.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    variable = next((name for name in names if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield False
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        remedy = "pip install 'autotune-parallel[opentelemetry]', or unset it"
        raise RequestError(variable, f"asks for traces, and {error.name} is not installed", remedy) from error
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield True
    finally:
        provider.shutdown()
