"""Decodes answers of the service. Unknown fields of a newer service are ignored."""

import dataclasses
import types
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decode(kind: type[T], data: Any) -> T:
    """Return the dataclass `kind` from decoded JSON. A field that an older service does not send has its default.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or has another type.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"is not an object; {kind.__name__} was expected")
    hints = _hints(kind)  # type: ignore[arg-type]
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    given = (item for item in fields if item.name in data or item.default is dataclasses.MISSING)
    return kind(**{item.name: _value(hints[item.name], data[item.name]) for item in given})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if origin is Mapping:
        return {name: _value(arguments[1], item) for name, item in value.items()}
    if kind is datetime:
        return datetime.fromisoformat(value)
    if dataclasses.is_dataclass(kind):
        return decode(kind, value)  # type: ignore[arg-type]
    if kind is not Any and isinstance(kind, type) and not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} is not {kind.__name__}")
    return value
