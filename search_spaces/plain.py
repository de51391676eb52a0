"""Frozen dataclasses to plain data (dict, list, str, numbers) and back.

Only plain data crosses a process border: in a rank our packages are no longer importable by name (users may have packages
of the same names), so pickling by reference is not possible there. The decoder reads the field types themselves, which are
real classes because the modules that define plain data do not postpone their annotations.
"""

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return `value` with every dataclass as a dict, every enum as its value and every tuple as a list."""
    if type(value) in _AS_THEY_ARE:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


_AS_THEY_ARE = frozenset((bool, int, float, str, type(None)))


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _types(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the dataclass `kind` from what `to_plain` gave. Unknown keys are ignored, missing ones take their default.

    Raises:
        TypeError: a field without a default is missing.
        ValueError: a value is not one of its enum's, or the dataclass refuses it.
    """
    known = _types(kind)  # type: ignore[arg-type]
    return kind(**{name: _decode(known[name], value) for name, value in data.items() if name in known})


def _decode(kind: Any, value: Any) -> Any:
    if type(value) is kind:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in value)
        return tuple(_decode(part, item) for part, item in zip(arguments, value, strict=True))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {key: _decode(arguments[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_plain(kind, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _decode_union(arguments: tuple[Any, ...], value: Any) -> Any:
    """A union of dataclasses is told apart by its fields: the first kind that has all the keys is taken."""
    if value is None:
        return None
    kinds = [kind for kind in arguments if kind is not type(None)]
    if isinstance(value, Mapping):
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and set(value) <= {field.name for field in dataclasses.fields(kind)}:
                return _decode(kind, value)
    return _decode(kinds[0], value) if len(kinds) == 1 else value
