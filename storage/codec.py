"""Convert rows to records, and plain data to JSON text for both databases."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from sqlalchemy import Row

from search_spaces.plain import from_plain
from search_spaces.shared_records import JobEvent
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.errors import DamagedRowError
from storage.records import DAMAGED, AttemptRecord, JobRecord, Owner, TrialRecord
from storage.tables import AttemptRow, EventRow, JobRow, TrialRow

T = TypeVar("T")

_NUMBER = "$number"
_KNOBS = frozenset(KNOB_NAMES)
_WORDS: dict[str | bytes, Any] = {"null": None, "true": True, "false": False, '""': "", "0.0": 0.0}
"""The most frequent texts that a database extracts from results."""


def dump_json(value: Any) -> str:
    """Return `value` as JSON. NaN and infinities, which losses can have and JSON lacks, become `{"$number": "nan"}`."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_tagged(value), allow_nan=False, separators=(",", ":"))


def load_json(text: str | bytes) -> Any:
    """Return the value that `dump_json` was given.

    Raises:
        ValueError, RecursionError: it is not JSON, or cannot be read here.
    """
    if text in _WORDS:
        return _WORDS[text]
    decoded = text if isinstance(text, str) else text.decode()
    return _decode_tagged(decoded) if _NUMBER in decoded else _decode(decoded)


class Damaged(dict[str, Any]):
    """A JSON value of the database that cannot be read. It replaces an error, which would also fail the other rows of a query.

    Its content is the stored text, so that a backup and its restoration preserve it.
    """

    def __init__(self, text: str) -> None:
        super().__init__({DAMAGED: text})


def load_column(text: Any) -> Any:
    """Return the value of a JSON column, or `Damaged`. Raises nothing: one row must not stop a query of many."""
    if not isinstance(text, str | bytes):
        return Damaged(repr(text))  # SQLite stores a numeric text as a number
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return Damaged(text if isinstance(text, str) else text.decode("utf-8", "backslashreplace"))
    if type(value) is dict and value.keys() == {DAMAGED}:
        return Damaged(str(value[DAMAGED]))
    return value


@contextlib.contextmanager
def reading(row_name: str) -> Iterator[None]:
    """Convert errors while reading a row to an error that names the row.

    Raises:
        DamagedRowError: the row has a value of the wrong kind.
    """
    try:
        yield
    except DamagedRowError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        detail = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise damaged(row_name, detail) from error


def damaged(row_name: str, detail: str) -> DamagedRowError:
    """Make the error for a row that cannot be read."""
    return DamagedRowError(f"{row_name}: is damaged ({detail}); see `autotune db check`, and restore it from a backup")


def clean(text: str) -> str:
    """Return `text` without characters that text columns refuse: NUL, and lone surrogates (file names may contain them)."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def owner_of(row: JobRow) -> Owner | None:
    """Return the process that holds the job."""
    if row.lease_host is None or row.lease_pid is None or row.lease_started is None:
        return None
    return Owner(host=row.lease_host, pid=row.lease_pid, started=row.lease_started)


def record_of(kind: type[T], row: Any, **values: Any) -> T:
    """Return a row as a record: each field of the dataclass `kind` is in `values`, or is the column of its name."""
    columns: Iterable[str] = kind.__dataclass_fields__.keys() - values.keys()  # type: ignore[attr-defined]
    return kind(**{name: getattr(row, name) for name in columns}, **values)


def job_record(row: JobRow) -> JobRecord:
    """Return a job as a value. A damaged one has an empty request, because it must not make a list of jobs fail."""
    return _job(row, row.request, row.reference_losses, damage_of(row))


def job_summary(row: JobRow) -> JobRecord:
    """Return a job for lists, from a row without its request."""
    return _job(row, row.summary, None, _damage(row.summary, row.answer))


def references_of(stored: Any) -> dict[str, tuple[float, ...]]:
    """Name -> losses of each reference of a job. A list, as earlier versions stored, is the only one and has no name."""
    if isinstance(stored, list):
        stored = {"": stored}
    return {name: tuple(losses) for name, losses in (stored or {}).items()}


def _job(row: JobRow, request: Mapping[str, Any], losses: Any, damage: str) -> JobRecord:
    return record_of(
        JobRecord,
        row,
        request={} if damage else request,
        reference_losses={} if damage else references_of(losses),
        answer=None if damage else row.answer,
        owner=owner_of(row),
        version=row.event_count,
        damage=damage,
    )


_LISTED: dict[str, tuple[type[Any], ...]] = {
    "model": (str,), "name": (str,), "note": (str,), "team": (str,), "tags": (list,), "trials": (int, float),
    "max_seconds": (int, float), "control_every": (int, float), "confirm_repeats": (int, float),
}  # fmt: skip
"""The fields of requests that lists of jobs read, and their types if they are given."""


def damage_of(row: JobRow | Row[Any]) -> str:
    """Describe the damaged part of a job's row; empty: none."""
    if damage := _damage(row.request, row.answer):
        return damage
    losses = row.reference_losses
    if not isinstance(losses, dict | list | None) or (
        isinstance(losses, dict) and not all(isinstance(values, list) for values in losses.values())
    ):
        return "its reference losses cannot be read"
    return ""


def _damage(request: Any, answer: Any) -> str:
    """`damage_of` for a request or its summary, and an answer."""
    if not isinstance(request, dict) or isinstance(request, Damaged):
        return "its request cannot be read"
    for name, kinds in _LISTED.items():
        if (value := request.get(name)) is not None and not isinstance(value, kinds):
            return f"{name} of its request is {type(value).__name__}"
    if not all(isinstance(tag, str) for tag in request.get("tags") or ()):
        return "tags of its request are not texts"
    if isinstance(answer, Damaged) or not isinstance(answer, dict | None):
        return "its answer cannot be read"
    return ""


def trial_record(row: TrialRow, accepted: dict[str, Any] | None) -> TrialRecord:
    """Return a trial as a value; `accepted` is the result of its accepted attempt.

    Raises:
        DamagedRowError: its row cannot be read. The next functions raise it too.
    """
    with reading(_trial_place(row)):
        return _trial(row, config_of(row.config), result_of(accepted if accepted is not None else row.refusal))


def slim_record(row: Row[Any], shared: dict[Any, Any]) -> TrialRecord:
    """Return a trial from a row with only the figures of its accepted result; `shared` interns values across rows."""
    with reading(_trial_place(row)):
        config = config_of(
            {name: shared.setdefault((type(value), value), value) for name, value in _readable(row.config).items()}
        )
        return _trial(row, config, _slim_result(row))


def plain_trial(row: Any) -> dict[str, Any]:
    """Return a trial as plain data, without the token: callers that only forward it need no record."""
    with reading(_trial_place(row)):
        result = row.result if row.result is not None else row.refusal
        return {
            "number": row.number,
            "purpose": row.purpose.value,
            "fidelity": row.fidelity,
            "repeat": row.repeat,
            "counted": row.counted,
            "outcome": None if row.outcome is None else row.outcome.value,
            "config": row.config if row.config.keys() <= _KNOBS else config_of(row.config).values(),
            "attempts": row.attempt_count,
            "created": row.created,
            "started": row.started,
            "finished": row.finished,
            "result": None if result is None else {name: value for name, value in result.items() if name != "attempt"},
        }


def _trial_place(row: TrialRow | Row[Any]) -> str:
    return f"trial {row.number} of job {row.job_id}"


def _trial(row: TrialRow | Row[Any], config: TrialConfig, result: TrialResult | None) -> TrialRecord:
    return TrialRecord(
        job_id=sys.intern(row.job_id),
        number=row.number,
        config=config,
        # The hash of a row may contain a knob of a plug-in that is no longer installed.
        config_hash=row.config_hash if row.config.keys() <= _KNOBS else config.hash,
        purpose=row.purpose,
        fidelity=sys.intern(row.fidelity),
        repeat=row.repeat,
        counted=row.counted,
        outcome=row.outcome,
        result=result,
        attempts=row.attempt_count,
        created=row.created,
        started=row.started,
        finished=row.finished,
    )


def config_of(values: dict[str, Any]) -> TrialConfig:
    """Return a configuration as a value, without knobs of plug-ins that are no longer installed."""
    _readable(values)
    return TrialConfig(**values) if values.keys() <= _KNOBS else from_plain(TrialConfig, values)


def _slim_result(row: Row[Any]) -> TrialResult | None:
    if row.refusal is not None:
        return result_of(row.refusal)
    if row.outcome is None:
        return None
    mean, low, high = row.samples_per_second_mean, row.samples_per_second_low, row.samples_per_second_high
    return TrialResult(
        attempt="",
        outcome=row.outcome,
        message=row.result_message or "",
        rule=row.result_rule,
        cause=row.result_cause,
        samples_per_second=None if mean is None else Interval(mean=mean, low=low, high=high),
        within_relative_error=float(row.result_within_relative_error or 0.0),
        peak_memory_bytes=row.peak_memory_bytes,
        unstable=bool(row.result_unstable),
        extrapolated=tuple(row.result_extrapolated or ()),
        slow_nodes=tuple(row.result_slow_nodes or ()),
        phase_seconds=_EMPTY,
        environment=_EMPTY,
    )


_EMPTY: dict[str, Any] = {}
"""Shared, because two dictionaries for each of many trials would need more memory than the rest of their results."""


def attempt_record(row: AttemptRow | Row[Any]) -> AttemptRecord:
    """Return an attempt as a value.

    Raises:
        DamagedRowError: its row cannot be read.
    """
    with reading(f"attempt {row.number} of trial {row.trial_number} of job {row.job_id}"):
        return record_of(AttemptRecord, row, result=result_of(row.result))


def event_record(row: EventRow | Row[Any]) -> JobEvent:
    """Return an event as a value. A damaged payload becomes empty, because streams read the events of many jobs at once."""
    return record_of(JobEvent, row, payload=row.payload if type(row.payload) is dict else {})


def result_of(data: dict[str, Any] | None) -> TrialResult | None:
    """Return a stored result as a value. Call it inside `reading`, which converts its errors."""
    return None if data is None else from_plain(TrialResult, _readable(data))


def _readable(data: Any) -> Any:
    """Return the value, or raise if it is damaged."""
    if isinstance(data, Damaged) or not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


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
"""Created once: with a hook, `json.loads` creates a decoder per text. Two decoders, because the hook runs for every object."""
