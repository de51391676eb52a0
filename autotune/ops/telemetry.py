"""OpenTelemetry traces: spans are created through its API, which discards them until `traces` sets up an exporter.

The endpoint comes from OpenTelemetry's own environment variables: OTEL_EXPORTER_OTLP_ENDPOINT and related ones.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.errors import RequestError

WANTED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


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
    named = next((name for name in WANTED if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield False
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        remedy = "pip install 'autotune[opentelemetry]', or unset it"
        raise RequestError(named, f"asks for traces, and {error.name} is not installed", remedy) from error
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield True
    finally:
        provider.shutdown()
