"""What a field of a request is: one declaration for the command line, Python, TOML files, REST, the web form and the docs."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

EVERY = ("sweep", "scale", "submit")
JOB = ("sweep", "submit")
SWEEP = ("sweep",)
SERVICE = "service"
"""In place of a command in `RequestField.helps`: REST and the client."""
FORM = "form"
"""Likewise: the hint below an entry of the web form."""


class Panel(StrEnum):
    """Groups of options in the help and of inputs in forms, in their order."""

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
    """One field. Its name, type and default are those of the dataclass field."""

    help: str
    """One line, without the default."""
    panel: Panel
    unit: str = ""
    """As the help shows the value: N, SECONDS, NAME."""
    least: float | None = None
    """The smallest value; None: no bound."""
    most: float | None = None
    """The largest value that a service takes; None: no bound. There is none elsewhere."""
    above: float | None = None
    """A bound that is itself too small."""
    below: float | None = None
    """A bound that is itself too large."""
    choices: Callable[[], tuple[str, ...]] | None = None
    """The values that text may have; None: any."""
    commands: tuple[str, ...] = EVERY
    """Commands that have an option for it; empty: none."""
    shown_default: str = ""
    """What the help says of the default; empty: the default itself."""
    helps: tuple[tuple[str, str], ...] = ()
    """(Command, help) where it is another there."""
    label: str = ""
    """What the web form calls it; empty: the form has no entry for it, or one of its own kind."""
    section: str = ""
    """The part of the form that it stands in: workload, machine, goal, search or labels."""
    measure: str = ""
    """Unit behind the label of the form's entry."""
    service: bool = True
    """Whether a service takes it. False: it names paths and hosts of the server, or what its trials cost."""

    def help_of(self, command: str) -> str:
        """The line for a command."""
        return dict(self.helps).get(command, self.help)


def request_field(default: Any, help: str, panel: Panel, unit: str = "", **declared: Any) -> Any:
    """A field of `JobRequest`. Arguments: those of `RequestField`; a callable default makes each request's own."""
    metadata = {"request": RequestField(help=help, panel=panel, unit=unit, **declared)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
