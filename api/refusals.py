"""Describes why a request does not match the OpenAPI document: field, problem, remedy.

The validator (pydantic) reports the place and the kind of each error; the expected values come from the document.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import AutotuneError
from autotune.request.job_fields import FIELDS
from autotune.wire.service import FieldProblem

Schema = Mapping[str, Any]

_FORMS: dict[str, tuple[str, str]] = {
    r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$": ("a job's whole id", "give one such as 20300101-000000-a1b2"),
    r"^[0-9a-f]{12}$": ("an id of 12 characters", "give it as the service returned it"),
    r"^[^\x00-\x1f]*$": ("a text without control characters", "leave them out"),
    r"^[^\x00]*$": ("a text without null characters", "leave them out"),
    r"^[a-z0-9_]+$": ("a name of lower-case letters, digits and underscores", "correct the name"),
    r"^[a-z_]{1,40}$": ("a name of lower-case letters and underscores", "correct the name"),
    r"^[A-Za-z0-9_]+$": ("a name of letters, digits and underscores", "correct the name"),
    r"^[A-Za-z_][A-Za-z0-9_]*$": ("a name of letters, digits and underscores, no digit first", "correct the name"),
    r"^[A-Za-z0-9_-]+$": ("a name of letters, digits, underscores and dashes", "correct the name"),
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": ("a name of letters, digits, dots, underscores and dashes", "correct the name"),
    r"^[\x21-\x7e]{1,128}$": ("a key of 1 to 128 visible ASCII characters", "correct the key"),
    r"^[0-9]{1,9}$": ("a whole number of at most 9 digits", "give the number of an event"),
    r"^https?://": ("an address", "begin it with https:// or http://"),
}
"""Pattern -> the description of matching text, and the remedy for other text."""
_KINDS = {
    "boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "a text", "array": "a list",
    "object": "an object",
}  # fmt: skip
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
_OF_VALUES = (
    *_BOUNDS,
    "string_too_short",
    "string_too_long",
    "string_pattern_mismatch",
    "too_short",
    "too_long",
    "value_error",
)
"""Errors of values that have the right type. For a union they are more specific than type errors of its other members."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = 3
_SHORT.maxlevel = 2


@dataclass(slots=True)
class _InvalidValue:
    """An invalid value of a request, with its schemas in the document."""

    name: str
    options: list[Schema]
    """The allowed schemas; several for a union."""
    parent: list[Schema]
    errors: list[Mapping[str, Any]] = field(default_factory=list)


def refusals(errors: Sequence[Mapping[str, Any]], document: Mapping[str, Any], path: str, method: str) -> list[FieldProblem]:
    """Return one entry for each invalid value, at most 20.

    Args:
        errors: the validator's errors.
        document: the OpenAPI document.
        path: the operation's path in the document.
        method: the operation's method, in lower case.
    """
    operation = document.get("paths", {}).get(path, {}).get(method, {})
    places: dict[str, _InvalidValue] = {}
    most_errors = 20
    for error in errors[: 10 * most_errors]:
        value_errors = _place(error, operation, document)
        places.setdefault(value_errors.name, value_errors).errors.append(error)
    # If a part of a value is invalid, the value itself has a right type, so its own error is dropped.
    whole = [
        name
        for name, value in places.items()
        if not any(error["type"] in _OF_VALUES for error in value.errors)
        and any(part.startswith(f"{name}.") for part in places)
    ]
    return [_refused(value) for name, value in places.items() if name not in whole][:most_errors]


def _place(error: Mapping[str, Any], operation: Schema, document: Schema) -> _InvalidValue:
    """Follow the error's location through the document, skipping words that the validator adds."""
    location, *parts = error["loc"]
    if location == "body":
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        names: list[str] = []
        options = _options(content.get("schema", {}), document)
    else:
        names, options, parts = _parameter(location, parts, operation, document)
    parent: list[Schema] = []
    is_new = error["type"] == "extra_forbidden"
    for at, part in enumerate(parts):
        if is_new and at == len(parts) - 1:
            parent, options = options, []
        else:
            inner = [part_schema for option in options if (part_schema := _part(option, part)) is not None]
            if not inner:
                continue
            parent, options = options, [option for schema in inner for option in _options(schema, document)]
        names.append(str(part))
    return _InvalidValue(name=".".join(names)[:200] or str(location), options=options, parent=parent)


def _parameter(
    location: str, parts: Sequence[Any], operation: Schema, document: Schema
) -> tuple[list[str], list[Schema], Sequence[Any]]:
    name = str(parts[0]) if parts else location
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == location and parameter["name"].lower().replace("_", "-") == name.lower().replace("_", "-"):
            return [parameter["name"]], list(_options(parameter["schema"], document)), parts[1:]
    return [name], [], parts[1:]


def _options(schema: Schema, document: Schema) -> list[Schema]:
    """The allowed schemas of a value without null, which is equivalent to omitting it."""
    if "$ref" in schema:
        return _options(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        return [option for part in schema["anyOf"] for option in _options(part, document)]
    return [] if schema.get("type") == "null" else [schema]


def _part(schema: Schema, part: Any) -> Schema | None:
    """The schema of a part of a value; None: there is no such part."""
    if isinstance(part, int):
        return schema.get("items")
    if part in schema.get("properties", {}):
        return schema["properties"][part]  # type: ignore[no-any-return]
    if part != "[key]":
        for pattern, inner in schema.get("patternProperties", {}).items():
            if re.search(pattern, part):
                return inner  # type: ignore[no-any-return]
    additional = schema.get("additionalProperties")
    return additional if isinstance(additional, dict) else None


def _refused(refused_value: _InvalidValue) -> FieldProblem:
    errors = [error for error in refused_value.errors if error["type"] in _OF_VALUES] or refused_value.errors
    problem, remedy = _describe(errors[0], refused_value)
    return FieldProblem(field=refused_value.name, message=problem, remedy=remedy)


def _describe(error: Mapping[str, Any], refused_value: _InvalidValue) -> tuple[str, str]:
    """The problem, and the remedy."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    cause = context.get("error")
    match kind:
        case "missing":
            return "is missing", f"give {_expected(refused_value.options)}"
        case "extra_forbidden":
            return _unknown(refused_value)
        case "string_too_short" | "too_short":
            noun = "character" if kind == "string_too_short" else "item"
            least = context["min_length"]
            return (
                ("is empty", f"give at least one {noun}")
                if least == 1
                else ("is too short", f"give at least {least:,} {noun}s")
            )
        case "string_too_long" | "too_long":
            noun = "characters" if kind == "string_too_long" else "items"
            return f"has more than {context['max_length']:,} {noun}", "shorten it"
        case "string_pattern_mismatch":
            noun, remedy = _FORMS.get(context["pattern"], ("of the right form", f"write it like {context['pattern']}"))
            return f"{_shown(value)} is not {noun}", remedy
        case "value_error" if isinstance(cause, AutotuneError):
            refused_value.name = cause.field if refused_value.name == "body" else refused_value.name
            return cause.problem, cause.remedy
        case "json_invalid":
            return "is not JSON", "correct it"
    if "[key]" in error["loc"]:
        return f"{_shown(value)} is not a name", "correct it"
    options = (
        [option for option in refused_value.options if option.get("type") in ("integer", "number")] if kind in _BOUNDS else []
    )
    expected = _expected(options or refused_value.options, with_most=kind.startswith("less"))
    names = [str(name) for option in refused_value.options for name in _names(option)]
    if names and isinstance(value, str):
        return f"{_shown(value)} is not known", f"use one of {', '.join(names)}"
    return f"{_shown(value)} is not {expected}", _remedy(options or refused_value.options, kind, expected)


def _unknown(refused_value: _InvalidValue) -> tuple[str, str]:
    name = refused_value.name.rpartition(".")[2]
    field_names = [field_name for option in refused_value.parent for field_name in option.get("properties", {})]
    if name in FIELDS and "trials" in field_names:
        return "is not a field of a request to a service", "leave it out"
    nearest = difflib.get_close_matches(name, field_names, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"the fields are {', '.join(field_names)}"
    return "is not a field of this request", remedy


def _names(schema: Schema) -> Iterator[Any]:
    yield from schema.get("enum", ())
    if "const" in schema:
        yield schema["const"]


def _expected(options: Sequence[Schema], with_most: bool = False) -> str:
    """A description of the allowed values: `a whole number of 1 or more`, `a text or an object`."""
    texts = list(dict.fromkeys(_expected_of(option, with_most) for option in options)) or ["a value"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _expected_of(schema: Schema, with_most: bool) -> str:
    if names := [str(name) for name in _names(schema)]:
        return f"one of {', '.join(names)}"
    kind = schema.get("type", "")
    text = _KINDS.get(kind, "a value")
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if with_most and most is not None and least is not None:
        return f"{text} from {_number(least)} to {_number(most)}"
    if below is not None and least is not None:
        return f"{text} from {_number(least)} to less than {_number(below)}"
    if above is not None:
        return f"{text} above {_number(above)}" + (f", up to {_number(most)}" if with_most and most is not None else "")
    return text if least is None or least < 0 else f"{text} of {_number(least)} or more"


def _remedy(options: Sequence[Schema], kind: str, expected: str) -> str:
    if len(options) == 1:
        least, most = options[0].get("minimum"), options[0].get("maximum")
        if kind.startswith("less") and most is not None:
            return f"give at most {_number(most)}"
        if not kind.startswith("less") and least is not None and least >= 0 and "exclusiveMaximum" not in options[0]:
            return f"give at least {_number(least)}"
    return f"give {expected}"


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 10**17 else f"{value:g}"


def _shown(value: Any) -> str:
    """The value, shortened: text in quotes, null and booleans as in JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)
