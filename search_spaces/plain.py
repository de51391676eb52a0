"""Convert frozen dataclasses to plain data (dict, list, str, numbers) and back.

Only plain data crosses process boundaries: in a rank our packages are not importable by name (users may have packages with the
same names), so pickling by reference is impossible. The decoder reads the field types, which are real classes because the
modules that define plain data do not postpone annotations.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return `value` with every dataclass as a dict, every enum as its value and every tuple as a list."""
    if type(value) in _UNCHANGED:
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


_UNCHANGED = frozenset((bool, int, float, str, type(None)))


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def finite(value: Any) -> Any:
    """Plain data with None in place of non-finite numbers, such as a diverged loss."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the dataclass `kind` from the result of `to_plain`. Unknown keys are ignored, missing ones take their default.

    Raises:
        TypeError: a field without a default is missing.
        ValueError: a value is not a member of its enum, or the dataclass refuses it.
    """
    decoders = _decoders(kind)  # type: ignore[arg-type]
    fields = {name: value for name, value in data.items() if name in decoders}
    for name, value in fields.items():
        if (decode := decoders[name]) is not None:
            fields[name] = decode(value)
    return kind(**fields)


_Decoder = Callable[[Any], Any] | None
"""Converts plain data to a value; None: unchanged."""


@cache
def _decoders(kind: type[Any]) -> dict[str, _Decoder]:
    return {field.name: _decoder(field.type) for field in dataclasses.fields(kind)}


def _decoder(kind: Any) -> _Decoder:
    """The decoder of a field type; looked up once per dataclass."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union_decoder(tuple(argument for argument in arguments if argument is not type(None)))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])
        return tuple if item is None else lambda values: tuple(map(item, values))
    if origin is tuple:
        items = [_decoder(part) for part in arguments]
        return lambda values: tuple(v if item is None else item(v) for item, v in zip(items, values, strict=True))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        inner = _decoder(arguments[1])
        return dict if inner is None else lambda values: {key: inner(value) for key, value in values.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return partial(from_plain, kind)
    return _number if kind is float else None


def _union_decoder(kinds: tuple[Any, ...]) -> _Decoder:
    """Decode a union of dataclasses by its fields: use the first class that has all the keys."""
    classes = [(set(_names(kind)), kind) for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    single = _decoder(kinds[0]) if len(kinds) == 1 else None
    if single is not None or not classes:
        return None if single is None else lambda value: None if value is None else single(value)

    def decode(value: Any) -> Any:
        if isinstance(value, Mapping):
            for names, kind in classes:
                if names.issuperset(value):
                    return from_plain(kind, value)
        return value

    return decode


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
