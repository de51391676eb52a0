"""Rows to records, and plain data to JSON text that both databases take."""

import json
import math
from typing import Any

from sqlalchemy import Row

from search_spaces.plain import from_plain
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, TrialConfig, is_whole
from storage.records import AttemptRecord, EventRecord, JobRecord, Owner, TrialRecord
from storage.tables import AttemptRow, EventRow, JobRow, TrialRow

_NUMBER = "$number"
_KNOBS = frozenset(KNOB_NAMES)
_WORDS: dict[str | bytes, Any] = {"null": None, "true": True, "false": False, '""': "", "0.0": 0.0}
"""What most of the texts are that a database takes out of results."""


def dump_json(value: Any) -> str:
    """Return `value` as JSON. NaN and infinities, which JSON lacks and losses may be, become `{"$number": "nan"}`."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_tagged(value), allow_nan=False, separators=(",", ":"))


def load_json(text: str | bytes) -> Any:
    """Return what `dump_json` was given."""
    if text in _WORDS:
        return _WORDS[text]
    told = text if isinstance(text, str) else text.decode()
    return _decode_tagged(told) if _NUMBER in told else _decode(told)


def clean(text: str) -> str:
    """Return `text` as a text column takes it: no NUL, and no half of a surrogate pair (file names may hold one)."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def owner_of(row: JobRow) -> Owner | None:
    """Return the process that holds the job."""
    if row.lease_host is None or row.lease_pid is None or row.lease_started is None:
        return None
    return Owner(host=row.lease_host, pid=row.lease_pid, started=row.lease_started)


def job_record(row: JobRow) -> JobRecord:
    """Return a job as a value."""
    return JobRecord(
        id=row.id,
        created=row.created,
        updated=row.updated,
        state=row.state,
        reason=row.reason,
        message=row.message,
        request=row.request,
        reference_losses=tuple(row.reference_losses or ()),
        active_seconds=row.active_seconds,
        owner=owner_of(row),
        submitter=row.submitter,
        priority=row.priority,
        queued=row.queued,
        version=row.event_count,
        devices=row.devices,
        events_removed=row.events_removed,
        answer=row.answer,
    )


def job_summary(row: JobRow) -> JobRecord:
    """Return a job as lists show it, from a row without its request."""
    return JobRecord(
        id=row.id,
        created=row.created,
        updated=row.updated,
        state=row.state,
        reason=row.reason,
        message=row.message,
        request=row.summary,
        reference_losses=(),
        active_seconds=row.active_seconds,
        owner=owner_of(row),
        submitter=row.submitter,
        priority=row.priority,
        queued=row.queued,
        version=row.event_count,
        devices=row.devices,
        events_removed=row.events_removed,
        answer=row.answer,
    )


def trial_record(row: TrialRow, accepted: dict[str, Any] | None) -> TrialRecord:
    """Return a trial as a value; `accepted` is the result of its accepted attempt."""
    result = accepted if accepted is not None else row.refusal
    return TrialRecord(
        job_id=row.job_id,
        number=row.number,
        config=config_of(row.config),
        config_hash=_hash_of(row),
        purpose=row.purpose,
        fidelity=row.fidelity,
        repeat=row.repeat,
        counted=row.counted,
        outcome=row.outcome,
        result=_result(result),
        attempts=row.attempt_count,
        created=row.created,
        started=row.started,
        finished=row.finished,
    )


def plain_trial(row: Any) -> dict[str, Any]:
    """Return a trial as plain data, which is a record's but for its token: what is only passed on is not taken apart."""
    result = row.result if row.result is not None else row.refusal
    known = is_whole(row.config)
    return {
        "number": row.number,
        "purpose": row.purpose.value,
        "fidelity": row.fidelity,
        "repeat": row.repeat,
        "counted": row.counted,
        "outcome": None if row.outcome is None else row.outcome.value,
        "config": row.config if known else config_of(row.config).values(),
        "attempts": row.attempt_count,
        "created": row.created,
        "started": row.started,
        "finished": row.finished,
        "result": None if result is None else {name: value for name, value in result.items() if name != "attempt"},
    }


def slim_record(row: Row[Any], shared: dict[Any, Any]) -> TrialRecord:
    """Return a trial of which the row has the figures of its accepted result alone; `shared` is the same for all rows."""
    return TrialRecord(
        job_id=shared.setdefault(row.job_id, row.job_id),
        number=row.number,
        config=config_of({name: shared.setdefault((type(value), value), value) for name, value in row.config.items()}),
        config_hash=_hash_of(row),
        purpose=row.purpose,
        fidelity=shared.setdefault(row.fidelity, row.fidelity),
        repeat=row.repeat,
        counted=row.counted,
        outcome=row.outcome,
        result=_slim_result(row),
        attempts=row.attempt_count,
        created=row.created,
        started=row.started,
        finished=row.finished,
    )


def config_of(values: dict[str, Any]) -> TrialConfig:
    """Return a configuration as a value."""
    return TrialConfig(**values) if values.keys() <= _KNOBS else from_plain(TrialConfig, values)


def _hash_of(row: TrialRow | Row[Any]) -> str:
    # A row from before a knob was there has a hash without it.
    return row.config_hash if is_whole(row.config) else config_of(row.config).hash


def _slim_result(row: Row[Any]) -> TrialResult | None:
    if row.refusal is not None:
        return _result(row.refusal)
    if row.outcome is None:
        return None
    mean = row.samples_per_second_mean
    return TrialResult(
        attempt="",
        outcome=row.outcome,
        message=row.result_message or "",
        rule=row.result_rule,
        cause=row.result_cause,
        samples_per_second=None if mean is None else _interval(mean, row.samples_per_second_low, row.samples_per_second_high),
        within_relative_error=float(row.result_within_relative_error or 0.0),
        peak_memory_bytes=row.peak_memory_bytes,
        unstable=bool(row.result_unstable),
        extrapolated=tuple(row.result_extrapolated or ()),
        slow_nodes=tuple(row.result_slow_nodes or ()),
        phase_seconds=_EMPTY,
        environment=_EMPTY,
    )


def _interval(mean: float, low: float, high: float) -> Interval:
    return Interval(mean=mean, low=low, high=high)


_EMPTY: dict[str, Any] = {}
"""Shared: two dictionaries for each of many trials are more than all else of their results."""


def attempt_record(row: AttemptRow) -> AttemptRecord:
    """Return an attempt as a value."""
    return AttemptRecord(
        token=row.token,
        job_id=row.job_id,
        trial_number=row.trial_number,
        number=row.number,
        state=row.state,
        outcome=row.outcome,
        started=row.started,
        finished=row.finished,
        host=row.host,
        result=_result(row.result),
    )


def event_record(row: EventRow | Row[Any]) -> EventRecord:
    """Return an event as a value."""
    return EventRecord(job_id=row.job_id, sequence=row.sequence, time=row.time, kind=row.kind, payload=row.payload)


def _result(data: dict[str, Any] | None) -> TrialResult | None:
    return None if data is None else from_plain(TrialResult, data)


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(value)}
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    return [_tagged(item) for item in value] if isinstance(value, list | tuple) else value


def _untagged(data: dict[str, Any]) -> Any:
    return float(data[_NUMBER]) if data.keys() == {_NUMBER} and data[_NUMBER] in ("nan", "inf", "-inf") else data


_decode = json.JSONDecoder().decode
_decode_tagged = json.JSONDecoder(object_hook=_untagged).decode
"""Made once: with a hook, `json.loads` would make one for every text; and the hook is called for every object."""
