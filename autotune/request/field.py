"""The declaration of a request field, for the command line, Python, TOML files, REST, the web form and the docs."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

EVERY = ("sweep", "scale", "submit")
JOB = ("sweep", "submit")
SWEEP = ("sweep",)
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
    shown_default: str = ""
    """Description of the default in the help; empty: the default itself."""
    helps: tuple[tuple[str, str], ...] = ()
    """(Command, help) for commands with a different help."""
    label: str = ""
    """Label in the web form; empty: the form has no input for it, or a special one."""
    section: str = ""
    """Section of the form: workload, machine, goal, search or labels."""
    measure: str = ""
    """Unit after the label of the form's input."""
    service: bool = True
    """Whether a service accepts it. False: it names paths or hosts of the server, or affects the cost of trials."""

    def help_of(self, command: str) -> str:
        """The help for a command."""
        return dict(self.helps).get(command, self.help)


class FieldOption(NamedTuple):
    """The option of a field, for the commands that have it."""

    name: str
    """The field."""
    kind: str
    """text, texts (may be repeated), whole, number, bytes, path or flag."""
    panel: str
    helps: dict[str, str]
    """Command -> its help, with the default."""
    unit: str = ""
    on: bool = False
    """Whether a flag is on by default."""


def request_field(default: Any, help: str, panel: Panel, unit: str = "", **declared: Any) -> Any:
    """A field of `JobRequest`. Arguments as for `RequestField`; a callable default is a factory."""
    metadata = {"request": RequestField(help=help, panel=panel, unit=unit, **declared)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
