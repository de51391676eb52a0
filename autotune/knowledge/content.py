"""Measurements as plain data: what a request, a job in the database and a body of the service hold.

    {"settings": [{"model": …, "cluster": …, "engine": …, …}], "measurements": [
        {"source": …, "repeats": 1, "noise": 0.05, "columns": {"num_layers": 32, …}},
        {"source": …, "repeats": 2, "noise": 0.01, "setting": 0, "config": {"zero_stage": 1}, "outcome": "ok", …}]}

A measurement has the columns of a row of a table, or the place of its setting and a configuration.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.errors import KnowledgeError
from autotune.knowledge.measurement import LONGEST_TEXT, Measurement, TrialMeasurement, TrialSetting
from autotune.knowledge.row import LEARNED_COLUMNS, TableRow
from autotune.knowledge.table import CsvRecord, read_records
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import check_value
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial_config import TrialConfig

_REMEDY = "send what `autotune submit --knowledge` sends"


def content_of(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """The measurements as plain data in a fixed order, each once."""
    settings: dict[str, Any] = {}
    drafts = []
    for measurement in measurements:
        plain = _plain(measurement)
        if isinstance(measurement.measured, TrialMeasurement):
            setting = to_plain(measurement.measured.setting)
            plain["setting"] = _text(setting)
            settings[plain["setting"]] = setting
        drafts.append(plain)
    places = {text: index for index, text in enumerate(sorted(settings))}
    numbered = [{**plain, "setting": places[plain["setting"]]} if "setting" in plain else plain for plain in drafts]
    once = {_text(plain): plain for plain in numbered}
    return {"settings": [settings[text] for text in sorted(settings)], "measurements": [once[text] for text in sorted(once)]}


def read_content(content: Any) -> tuple[Measurement, ...]:
    """Measurements from plain data: the field `knowledge` of a request.

    Raises:
        KnowledgeError: a field is damaged.
    """
    if not isinstance(content, Mapping) or set(content) != {"settings", "measurements"}:
        raise KnowledgeError("knowledge", "does not have exactly settings and measurements", _REMEDY)
    plain_settings, plain = content["settings"], content["measurements"]
    if not isinstance(plain_settings, list | tuple) or not isinstance(plain, list | tuple):
        raise KnowledgeError("knowledge", "has no lists of settings and measurements", _REMEDY)
    if len(plain) > 200_000:
        raise KnowledgeError("knowledge", "has more than 200,000 measurements", "send fewer")
    settings = [_setting(item, f"knowledge.settings[{index}]") for index, item in enumerate(plain_settings)]
    return tuple(_measurement(item, settings, f"knowledge.measurements[{at}]") for at, item in enumerate(plain))


def _setting(plain: Any, field_path: str) -> TrialSetting:
    names = {field.name for field in dataclasses.fields(TrialSetting)}
    if not isinstance(plain, Mapping) or set(plain) != names:
        raise KnowledgeError(field_path, "is not a model, a cluster, an engine and a workload", _REMEDY)
    for name in ("global_batch_size", "sequence_length"):
        _positive(plain, name, field_path, whole=True)
    try:
        setting = from_plain(TrialSetting, plain)
    except (TypeError, ValueError, AttributeError, LookupError, SearchSpaceError) as error:
        raise KnowledgeError(field_path, f"cannot be read ({' '.join(str(error).split())[:200]})", _REMEDY) from error
    if (wrong := _of_wrong_type(setting)) is not None:
        raise KnowledgeError(f"{field_path}.{wrong}", "has a value of another type, or no finite number", _REMEDY)
    return setting


_PLAIN: Mapping[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""Type of a field -> types of its values."""


def _of_wrong_type(value: Any) -> str | None:
    """The name of a field, here or further in, whose value has not its type: decoders do not check numbers and texts."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            if (inner_name := _of_wrong_type(inner)) is not None:
                return f"{field.name}.{inner_name}"
        elif isinstance(field.type, type) and field.type in _PLAIN and not _is_of(inner, _PLAIN[field.type]):
            return field.name
    return None


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and not (isinstance(value, float) and not math.isfinite(value))


def _measurement(plain: Any, settings: Sequence[TrialSetting], field_path: str) -> Measurement:
    if not isinstance(plain, Mapping):
        raise KnowledgeError(field_path, "is not an object", _REMEDY)
    common = {"source", "noise", "repeats"}
    of_trial = {"setting", "config", "samples_per_second", "peak_memory_bytes", "outcome"}
    allowed = common | (of_trial if "setting" in plain else {"columns"})
    if unknown := sorted(set(plain) - allowed) or sorted(common - set(plain)):
        raise KnowledgeError(f"{field_path}.{unknown[0]}", "is unknown or missing", _REMEDY)
    source = plain["source"]
    if not isinstance(source, str) or not 0 < len(source) <= 100:
        raise KnowledgeError(f"{field_path}.source", f"{_short(source)} is not the name of a source", _REMEDY)
    repeats, noise = _positive(plain, "repeats", field_path, whole=True), _positive(plain, "noise", field_path, zero=True)
    of_row = "setting" not in plain
    measured = _row(plain.get("columns"), source, field_path) if of_row else _trial(plain, settings, field_path)
    return Measurement(source=source, repeats=int(repeats or 1), noise=noise or 0.0, measured=measured)


def _trial(plain: Mapping[str, Any], settings: Sequence[TrialSetting], field_path: str) -> TrialMeasurement:
    setting_index, outcome = plain["setting"], plain.get("outcome")
    if type(setting_index) is not int or not 0 <= setting_index < len(settings):
        raise KnowledgeError(f"{field_path}.setting", f"{_short(setting_index)} is not the place of a setting", _REMEDY)
    rate, peak = (_positive(plain, name, field_path) for name in ("samples_per_second", "peak_memory_bytes"))
    if outcome not in ("ok", "oom") or (outcome == "ok") != (rate is not None):
        problem = f"{_short(outcome)} is neither ok with a rate nor oom without"
        raise KnowledgeError(f"{field_path}.outcome", problem, _REMEDY)
    try:
        knob_values = plain.get("config", {})
        config = TrialConfig().replace({name: check_value(name, value) for name, value in knob_values.items()})
    except (TypeError, ValueError, AttributeError, LookupError, SearchSpaceError) as error:
        raise KnowledgeError(
            f"{field_path}.config", f"cannot be read ({' '.join(str(error).split())[:200]})", _REMEDY
        ) from error
    setting = settings[setting_index]
    if not _runs(config, setting):
        problem = f"{config} does not divide {setting.cluster.world_size} devices and a batch of {setting.global_batch_size}"
        raise KnowledgeError(f"{field_path}.config", problem, _REMEDY)
    return TrialMeasurement(setting=setting, config=config, samples_per_second=rate, peak_memory_bytes=peak)


def _runs(config: TrialConfig, setting: TrialSetting) -> bool:
    """Whether the sizes of a configuration fit together: only then it has a time."""
    world, shards = setting.cluster.world_size, config.model_parallel_size
    if shards < 1 or world % shards or config.pipeline_parallel_size > setting.model.num_layers or config.micro_batch_size < 1:
        return False
    return config.gradient_accumulation_steps(setting.global_batch_size, world) >= 1


def _row(columns: Any, source: str, field_path: str) -> TableRow:
    if not isinstance(columns, Mapping):
        raise KnowledgeError(f"{field_path}.columns", "is not an object", _REMEDY)
    cells = {}
    for name, value in columns.items():
        good = name in LEARNED_COLUMNS and isinstance(value, str | bool | int | float) and len(str(value)) <= LONGEST_TEXT
        if not good:
            raise KnowledgeError(
                f"{field_path}.columns.{name[:40]}", "is not a column that predictions read, or not its value", _REMEDY
            )
        cells[name] = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else repr(value)
    rows, problems = read_records([CsvRecord(line=1, cells={**cells, "source": source})])
    if problems or len(rows) != 1:
        raise KnowledgeError(f"{field_path}.columns", (problems or ("says nothing",))[0], _REMEDY)
    return rows[0]


def _plain(measurement: Measurement) -> dict[str, Any]:
    measured = measurement.measured
    common = {"source": measurement.source, "repeats": measurement.repeats, "noise": measurement.noise}
    if isinstance(measured, TableRow):
        columns = {name: getattr(measured, name) for name in LEARNED_COLUMNS}
        present_columns = {name: to_plain(value) for name, value in columns.items() if value is not None and value != ""}
        return {**common, "columns": present_columns}
    figures = {"samples_per_second": measured.samples_per_second, "peak_memory_bytes": measured.peak_memory_bytes}
    return {
        **common,
        **{name: float(f"{value:.6g}") for name, value in figures.items() if value is not None},
        "config": measured.config.differences(TrialConfig()),
        "outcome": "oom" if measured.samples_per_second is None else "ok",
        "setting": "",
    }


def _positive(plain: Mapping[str, Any], name: str, field_path: str, whole: bool = False, zero: bool = False) -> float | None:
    value = plain.get(name)
    if value is None:
        return None
    number = type(value) in ((int,) if whole else (int, float)) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        kind = "whole number" if whole else "number"
        raise KnowledgeError(f"{field_path}.{name}", f"{_short(value)} is not a positive {kind}", _REMEDY)
    return float(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _short(value: Any) -> str:
    return repr(value)[:60]
