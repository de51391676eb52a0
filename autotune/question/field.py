"""The declaration of a field of the question, for the command line, Python, TOML files, REST, the web form and the docs."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin

from autotune.errors import RequestError
from search_spaces.quantities import Quantity, read_quantity

EVERY = ("sweep", "scale", "submit", "check")
"""Commands that take the fields of jobs."""
JOB = ("sweep", "submit", "check")
SWEEP = ("sweep",)
ASKED = ("predict", "plan")
PLANNED = (*ASKED, "fit")
RECIPE = ("lint", "carry", "challenge")
"""Commands about a recipe, which may state a field itself."""
SERVICE = "service"
"""Key in `RequestField.helps` for REST and the client, instead of a command."""
FORM = "form"
"""Likewise for the hint below an input of the web form."""

ONE_AT_A_TIME: Mapping[str, str] = {
    "pins": "pin",
    "environment_settings": "environment_setting",
    "script_knobs": "script_knob",
    "environment_knobs": "environment_knob",
    "tags": "tag",
    "goodput": "goodput",
    "libraries": "library",
    "trackers": "tracker",
}
"""Fields with several values whose option takes one value and may be repeated; the option's name is the singular."""


def option_name(field: str) -> str:
    """The option of a field, which has the same name everywhere else: `sequence_length` -> `--sequence-length`."""
    return f"--{ONE_AT_A_TIME.get(field, field).replace('_', '-')}"


class Panel(StrEnum):
    """Groups of options in the help and of inputs in forms, in order."""

    BASIC = "Basic options"
    SEARCH = "Search"
    BUDGET = "Budget"
    TRAINING = "Training"
    TRIALS = "Trials"
    HARDWARE = "Hardware"
    SCRIPT = "Your own script"
    SERIES = "Series of jobs"
    JOB = "Job"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One field. Name, type and default are those of the dataclass field."""

    help: str
    """One line, without the default."""
    panel: Panel
    unit: str = ""
    """The value's placeholder in the help: N, SECONDS, NAME."""
    least: float | None = None
    """Minimum; None: no bound."""
    most: float | None = None
    """Maximum that a service accepts; None: no bound. Other entry points have no maximum."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    choices: Callable[[], tuple[str, ...]] | None = None
    """Allowed values of text; None: any."""
    commands: tuple[str, ...] = EVERY
    """Commands that have an option for it; empty: none."""
    option: Any = None
    """Type of the option's value, if it differs from the field's: `read_fields` parses it."""
    shown_default: str = ""
    """Description of the default in the help; empty: the default itself."""
    helps: tuple[tuple[str, str], ...] = ()
    """(Commands, help) for commands with a different help; several have spaces between them."""
    label: str = ""
    """Label in the web form; empty: the form has no input for it, or a special one."""
    section: str = ""
    """Section of the form: workload, machine, goal, search or labels."""
    measure: str = ""
    """Unit after the label of the form's input."""
    required_on: str = ""
    """The kind of devices on which a job must state it; empty: it has a default on each."""
    service: bool = True
    """Whether a service accepts it. False: it names paths or hosts of the server, or affects the cost of trials."""

    def help_of(self, command: str) -> str:
        """The help for a command."""
        return next((text for names, text in self.helps if command in names.split()), self.help)


def request_field(default: Any, help: str, panel: Panel, unit: str = "", **declared: Any) -> Any:
    """A field of a question. Arguments as for `RequestField`; a callable default is a factory."""
    metadata = {"request": RequestField(help=help, panel=panel, unit=unit, **declared)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def redeclared(record: type, name: str, default: Any, **changes: Any) -> Any:
    """The field of a record with another default, for a subclass; `changes`: of its declaration."""
    declared: RequestField = record.__dataclass_fields__[name].metadata["request"]  # type: ignore[attr-defined]
    return dataclasses.field(default=default, metadata={"request": dataclasses.replace(declared, **changes)})


def declared_fields(record: type) -> Iterator[tuple[str, RequestField, Any, Any]]:
    """Name, declaration, type and default of every field that users can set, in order; None for a default factory."""
    for item in dataclasses.fields(record):
        if "request" in item.metadata:
            default = None if item.default is dataclasses.MISSING else item.default
            yield item.name, item.metadata["request"], item.type, default


def service_fields(record: type, command: str = "") -> tuple[str, ...]:
    """The fields that a service accepts, in order; with a command: of those that it takes."""
    fields = ((name, declared) for name, declared, _, _ in declared_fields(record) if declared.service)
    return tuple(name for name, declared in fields if not command or command in declared.commands)


def plain_type(kind: Any) -> type[Any]:
    """The type without None; str for an enumeration."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(member for member in get_args(kind) if member is not type(None))
    return str if isinstance(kind, type) and issubclass(kind, StrEnum) else kind


def parse_size(field: str, text: str) -> int:
    """`2000000000`, `2e9`, `2GB`, `1.5GiB` as bytes.

    Raises:
        RequestError: the text is not a size, or not positive; the message names `field`.
    """
    size = read_quantity(Quantity.BYTES, text)
    if size is None:
        raise RequestError(field, f"{text!r} is not a size", f"write {Quantity.BYTES}")
    if not 1 <= size < 2**63:
        raise RequestError(field, f"{text!r} is out of range", "give at least one byte, and less than 8 EiB")
    return int(size)


def parse_length(field: str, text: str) -> int:
    """`8192`, `8k`, `1M` as tokens.

    Raises:
        RequestError: the text is not a whole, positive number of tokens; the message names `field`.
    """
    length = read_quantity(Quantity.LENGTH, text)
    if length is None or length != int(length) or length < 1:
        raise RequestError(field, f"{text!r} is not a length", f"write {Quantity.LENGTH}")
    return int(length)
