"""One name for each request field at every entry point, and the old names of fields.

A field has its name in `JobRequest` everywhere: in Python, in the client, over HTTP, in a TOML file, in a job's row and in a
best-config file. Its option is that name with dashes (`option_name`). Old names are accepted where they were valid; the command
line, Python, the service and TOML files report them, rows and best-config files are read silently.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from autotune.errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")

OLD_NAMES: dict[str, str] = {
    "memory_limit_bytes": "memory_limit",
}
"""Old name of a field -> its name: accepted at every entry point."""
OLD_OPTION_NAMES: dict[str, str] = {
    "seq_len": "sequence_length",
    "set": "pins",
    "data": "data_path",
    "nvme": "nvme_path",
    "for": "answer_for",
    "environment": "environment_settings",
    "run_gpu_hours": "run_device_hours",
    "history": "knowledge",
}
"""Old name of an option -> the field's name: accepted on the command line and in TOML files."""
OLD_COMMAND_OPTIONS: dict[str, str] = {
    "parameters": "parameter_count",
    "accelerate_plugin": "plugin",
    "env_knob": "environment_knobs",
}
"""Old name of an option -> the field of `command`, whose name did not change elsewhere."""
OLD_VALUES: dict[str, dict[str, str]] = {"max": {"seq_len": "sequence_length", "micro_batch": "micro_batch_size"}}
"""Field -> old value -> present value, for values that are names."""
ONE_AT_A_TIME: Mapping[str, str] = {
    "pins": "pin",
    "environment_settings": "environment_setting",
    "script_knobs": "script_knob",
    "environment_knobs": "environment_knob",
    "tags": "tag",
    "goodput": "goodput",
    "trackers": "tracker",
}
"""Fields with several values whose option takes one value and may be repeated; the option's name is the singular."""
SINCE = 1795392000
"""Time when the old names became deprecated, in Unix seconds: the value of the header `Deprecation` (RFC 9745)."""


def option_name(field: str) -> str:
    """The option of a field: `sequence_length` -> `--sequence-length`."""
    return f"--{ONE_AT_A_TIME.get(field, field).replace('_', '-')}"


OLD_OPTIONS = {f"--{old.replace('_', '-')}": option_name(new) for old, new in (OLD_OPTION_NAMES | OLD_COMMAND_OPTIONS).items()}
"""Old option -> the field's option."""


def old_name_note(old: str, new: str) -> str:
    """The message about an old name."""
    return f"{old} is now {new}; the old name still works"


def with_present_names(
    fields: Mapping[str, Any], note: Callable[[str], None] | None = None, names: Mapping[str, str] = OLD_NAMES
) -> dict[str, Any]:
    """Return the fields by their present names.

    Args:
        fields: request fields by present or old names.
        note: receives a line for each old name; None: for stored data, such as database rows.
        names: old name -> present name.

    Raises:
        RequestError: a field is given by both names.
    """
    present: dict[str, Any] = {}
    for name, value in fields.items():
        new = names.get(name, name)
        if new != name and new in fields:
            raise given_twice(new, name)
        if new != name and note is not None:
            note(old_name_note(name, new))
        present[new] = present_value(new, value, note)
    return present


def present_value(field: str, value: Any, note: Callable[[str], None] | None = None) -> Any:
    """Return the value of a field, with an old name replaced by the present one. `note`: see `with_present_names`."""
    new = OLD_VALUES.get(field, {}).get(value) if isinstance(value, str) else None
    if new is None:
        return value
    if note is not None:
        note(old_name_note(value, new))
    return new


def given_twice(new: str, old: str) -> RequestError:
    """The error for a field that is given by both its present and its old name."""
    return RequestError(new, f"is given as {old} too", "leave one of them out")


def accepts_old_names(function: Callable[P, T]) -> Callable[P, T]:
    """Accept old names of keyword arguments too, with a DeprecationWarning. Raises RequestError if both names are given."""

    @wraps(function)
    def renamed(*args: P.args, **fields: P.kwargs) -> T:
        present: Any = with_present_names(fields, _warn)
        return function(*args, **present)

    return renamed


def _warn(note: str) -> None:
    # The warning is for the caller of the function: `with_present_names` and the wrapper are in between.
    warnings.warn(note, DeprecationWarning, stacklevel=4)
