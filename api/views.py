"""Makes the answers of the service (`autotune.wire`) from records, and splits lists into pages of bounded size in bytes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from fastapi import Response
from pydantic import TypeAdapter
from pydantic_core import to_json

from api.submission import shown_fields
from autotune.question.assumption import assumed_document
from autotune.request.rows import assumed_of_row
from autotune.wire.jobs import Answer, Job, JobSummary
from autotune.wire.predictions import AssumedValue
from autotune.wire.trials import Attempt
from search_spaces.plain import to_plain
from storage.records import AttemptRecord, JobRecord

T = TypeVar("T")


def checked_view(kind: type[T], plain: Mapping[str, Any]) -> T:
    """Return the dataclass `kind` from plain data with its fields. Nested mappings become dataclasses, and
    integers become floats where a float is declared.

    Raises:
        ValueError: a field is missing or has another type.
    """
    view: T = _adapter(kind).validate_python(plain)  # type: ignore[arg-type]
    return view


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def job_view(job: JobRecord) -> Job:
    """The job, without the resolved request, which is large and internal to the server."""
    assumed = assumed_views(assumed_document(assumed_of_row(job.request)))
    return Job(**_job_fields(job), message=_message(job), request=shown_fields(dict(job.request)), assumed=assumed)


def assumed_views(documents: Sequence[Mapping[str, Any]]) -> tuple[AssumedValue, ...]:
    """What `assumed_document` returns, as the service shows it."""
    return tuple(checked_view(AssumedValue, item) for item in documents)


def job_summary(job: JobRecord) -> JobSummary:
    """The job in lists."""
    message = _message(job)
    # Most characters of a job's message in a list.
    most_message = 1000
    shown = message if len(message) <= most_message else message[: most_message - 1] + "…"
    return JobSummary(**_job_fields(job), message=shown, request=job.request)


def _job_fields(job: JobRecord) -> dict[str, Any]:
    """The fields that a job has everywhere."""
    return {
        "id": job.id,
        "state": str(job.state),
        "reason": job.reason,
        "model": str(job.request.get("model", "")),
        "submitter": job.submitter,
        "priority": job.priority,
        "created": job.created,
        "updated": job.updated,
        "active_seconds": int(job.active_seconds),
        "version": job.version,
        "answer": answer_view(job),
    }


def _message(job: JobRecord) -> str:
    return f"damaged: {job.damage}" if job.damage else job.message


def answer_view(job: JobRecord) -> Answer | None:
    """The job's answer. None: there is none, or it is damaged (a list must not fail because of one job)."""
    try:
        return None if job.answer is None else checked_view(Answer, job.answer)
    except ValueError:
        return None


def attempt_view(attempt: AttemptRecord) -> Attempt:
    """The attempt, with its result without the attempt's token."""
    return Attempt(
        trial=attempt.trial_number,
        number=attempt.number,
        state=str(attempt.state),
        outcome=None if attempt.outcome is None else str(attempt.outcome),
        started=attempt.started,
        finished=attempt.finished,
        result=_result(attempt.result),
    )


def _result(result: Any) -> dict[str, Any] | None:
    if result is None:
        return None
    plain: dict[str, Any] = to_plain(result)
    return {name: value for name, value in plain.items() if name != "attempt"}


MOST_BYTES = 4_000_000
"""Most bytes of the items of one response. A longer item gets its own page."""
READ_AT_ONCE = 100
"""Most items that are read at once, before their bytes are counted."""


def page(
    read: Callable[[int, int], Sequence[T]], start: int, limit: int, encode: Callable[[T], bytes], following: Callable[[T], int]
) -> tuple[list[bytes], int, bool]:
    """Return up to `limit` encoded items, the start of the next page, and whether that page has items.

    Args:
        read: returns items from a start (first argument), at most as many as the second argument.
        start: the start of this page.
        limit: most items.
        encode: encodes an item as JSON.
        following: returns the start that follows an item.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        batch_size = min(READ_AT_ONCE, limit + 1 - len(parts))
        items = read(start, batch_size)
        for item in items:
            part = encode(item)
            if len(parts) == limit or (parts and size + len(part) > MOST_BYTES):
                return parts, start, True
            parts.append(part)
            size += len(part)
            start = following(item)
        if len(items) < batch_size:
            return parts, start, False


def page_response(parts: Sequence[bytes], following: str | int | None) -> Response:
    """The response of a list: its items, and `next`."""
    body = b'{"items":[' + b",".join(parts) + b'],"next":' + to_json(following) + b"}"
    return Response(body, media_type="application/json")
