"""Reads earlier trials from a table or an Optuna study."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from search_spaces.knob_values import KNOBS

REMEDY = "give a CSV file, or an Optuna storage such as sqlite:///studies.db#NAME"
RATES = ("samples_per_second", "value", "values_0")
"""Columns of a table that may hold samples/s; the first existing one is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRow:
    """An earlier trial as it was read."""

    number: int
    """Counted from 0."""
    parameters: Mapping[str, Any]
    """Name -> value, as text if it comes from a table; not validated."""
    rate: float | None
    """Samples/s; None: the trial was not measured completely."""
    state: str
    interval: tuple[float, float] | None = None
    """95 % interval of the rate; None: not stated."""
    peak_memory_bytes: int | None = None


def read_history(source: str) -> list[EarlierRow]:
    """Read the trials of a CSV file or of a study.

    Raises:
        RequestError: the source cannot be read, has no rates, or has several studies.
    """
    address, _, study = source.partition("#")
    if "://" not in address and not address.endswith((".db", ".sqlite", ".sqlite3")):
        return _table_rows(Path(source))
    storage = address if "://" in address else f"sqlite:///{Path(address).absolute()}"
    sqlite = "sqlite:///"
    file = storage.removeprefix(sqlite)
    if storage.startswith(sqlite) and not Path(file).is_file():  # Optuna would create it
        raise RequestError("knowledge", f"{file} does not exist", REMEDY)
    return _study_rows(storage, study)


def _table_rows(path: Path) -> list[EarlierRow]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), list(reader)
    except OSError as error:
        raise RequestError("knowledge", f"{path} cannot be read ({error.strerror})", REMEDY) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise RequestError("knowledge", f"{path} is not a CSV file ({error})", REMEDY) from error
    rate = next((name for name in RATES if name in columns), None)
    if rate is None:
        raise RequestError("knowledge", f"{path} has no column of rates", f"name one of its columns {RATES[0]}")
    return [_table_row(number, row, rate) for number, row in enumerate(rows)]


def _table_row(number: int, row: Mapping[str, Any], rate: str) -> EarlierRow:
    cells = {
        name: (value or "").strip() for name, value in row.items() if isinstance(name, str) and isinstance(value, str | None)
    }
    attributes = {name.removeprefix("user_attrs_"): value for name, value in cells.items()}
    state = next((cells[name] for name in ("state", "outcome") if name in cells), "")
    # Prefix of the parameters' columns in Optuna's `trials_dataframe`.
    parameter = "params_"
    return EarlierRow(
        number=number,
        # A table may have other columns: parameters are those with the prefix, or with the name of a knob.
        parameters={
            name.removeprefix(parameter): value
            for name, value in cells.items()
            if value and (name in KNOBS or name.startswith(parameter))
        },
        rate=_number(cells[rate]) if state.lower() in ("", "complete", "ok") else None,
        state=state,
        interval=_interval(attributes),
        peak_memory_bytes=_whole(attributes.get("peak_memory_bytes")),
    )


def _study_rows(storage: str, name: str) -> list[EarlierRow]:
    # Optuna and SQLAlchemy are imported only if a study is read.
    import optuna

    from autotune.frameworks.optuna import optuna_storage
    from storage.address import without_password

    with optuna_storage(storage, "knowledge") as opened:
        names = optuna.get_all_study_names(opened)
        if not name and len(names) == 1:
            name = names[0]
        if name not in names:
            study_names = ", ".join(names[:10]) or "none"
            problem = f"{without_password(storage)} has no study {name!r} (it has {study_names})"
            raise RequestError("knowledge", problem, "write STORAGE#NAME")
        study = optuna.load_study(study_name=name, storage=opened)
        if study.direction is not optuna.study.StudyDirection.MAXIMIZE:
            raise RequestError("knowledge", f"the study {name!r} minimizes", "give one whose value is samples/s, maximized")
        return [_study_row(trial) for trial in study.get_trials(deepcopy=False)]


def _study_row(trial: Any) -> EarlierRow:
    complete = trial.state.name == "COMPLETE"
    return EarlierRow(
        number=trial.number,
        parameters=dict(trial.params),
        rate=_number(trial.values[0]) if complete and trial.values else None,
        state=trial.state.name,
        interval=_interval(trial.user_attrs),
        peak_memory_bytes=_whole(trial.user_attrs.get("peak_memory_bytes")),
    )


def _interval(attributes: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = _number(attributes.get("low")), _number(attributes.get("high"))
    return (low, high) if low is not None and high is not None and 0 < low <= high else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or number <= 0 else int(number)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
