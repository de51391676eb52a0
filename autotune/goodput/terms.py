"""The terms of a choice on nodes that fail, which a request states: they load no NumPy."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.goodput.failures import preset_names
from autotune.goodput.run import Bandwidths, CheckpointKind, Recovery
from autotune.question.assumption import Assumption


def _term(default: Any, help: str, unit: str = "", **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputTerms:
    """Inputs with their defaults. Defaults of times and bandwidths are assumed: replace them by your cluster's.

    Raises:
        RequestError: a value is out of range.
    """

    failures: str = _term("llama3", "Published rates by name, or a log NAME.csv of failures.")
    failure_nodes: int = _term(0, "Nodes that the log is about; 0: the cluster's.", "nodes", least=0)
    tokens: float = _term(
        0.0, "Length of the run, for hours and cost until its end; 0: 30 days of training.", "tokens", least=0
    )
    spares: tuple[int, ...] = _term((0, 1, 2, 4, 8, 16, 32), "Numbers of spare nodes to choose from.", "nodes", least=0)
    recovery: tuple[Recovery, ...] = _term(tuple(Recovery), "Kinds of recovery to choose from.", kind=Recovery)
    checkpoint: tuple[CheckpointKind, ...] = _term(
        tuple(CheckpointKind), "Kinds of checkpoints to choose from.", kind=CheckpointKind
    )
    write_bandwidth: float = _term(100e9, "Of the file system, all nodes together.", "bytes/s", above=0)
    read_bandwidth: float = _term(100e9, "Of the file system, all nodes together.", "bytes/s", above=0)
    node_bandwidth: float = _term(20e9, "Between a node and the file system or another node.", "bytes/s", above=0)
    host_bandwidth: float = _term(20e9, "From a device to host memory.", "bytes/s", above=0)
    checkpoint_slowdown: float = _term(0.0, "Share by which steps are slower while a checkpoint is written.", least=0, most=1)
    detection_seconds: float = _term(120.0, "From a failure until the job has stopped.", "seconds", least=0)
    restart_seconds: float = _term(300.0, "Until processes run again, without loading the checkpoint.", "seconds", least=0)
    replacement_hours: float = _term(4.0, "Mean time until a failed node is repaired or replaced.", "hours", least=0)
    migrate_seconds: float = _term(60.0, "To rebuild a node's ranks on a spare.", "seconds", least=0)
    drop_seconds: float = _term(10.0, "To continue without a replica.", "seconds", least=0)
    drop_overhead: float = _term(1.05, "Factor on the step time of training that can drop replicas.", least=1)
    join_seconds: float = _term(300.0, "Until a replica with a new node takes part again.", "seconds", least=0)
    in_place_share: float = _term(0.9, "Share of failures that migrating or dropping survives.", least=0, most=1)
    planned_seconds: float = _term(600.0, "Duration of a planned interruption.", "seconds", least=0)

    def __post_init__(self) -> None:
        for term in dataclasses.fields(self):
            value = getattr(self, term.name)
            values = value if isinstance(value, tuple) else (value,)
            if not values:
                raise RequestError(term.name, "has no value", "give at least one")
            for item in values:
                limits = term.metadata
                if isinstance(item, float | int) and not _within(item, limits):
                    most = f"to {limits['most']:g}" if "most" in limits else "or more"
                    remedy = f"more than {limits['above']:g}" if "above" in limits else f"{limits['least']:g} {most}"
                    raise RequestError(term.name, f"{item:g} is out of range", f"give {remedy}")

    @property
    def bandwidths(self) -> Bandwidths:
        """Bytes per second of the paths of checkpoints."""
        return Bandwidths(
            write=self.write_bandwidth, read=self.read_bandwidth, node=self.node_bandwidth, host=self.host_bandwidth
        )


TERMS = {term.name: term for term in dataclasses.fields(GoodputTerms)}


def assumed_terms(terms: GoodputTerms) -> tuple[Assumption, ...]:
    """The terms with their defaults. Sets of possibilities to choose from are no assumptions."""
    return tuple(
        Assumption(name=name, value=getattr(terms, name), stated_by=f"--goodput {name}=VALUE", text=_default_text(name))
        for name, term in TERMS.items()
        if getattr(terms, name) == term.default and not isinstance(term.default, tuple) and name != "failure_nodes"
    )


def _default_text(name: str) -> str:
    default: Any = TERMS[name].default
    if name == "tokens":
        return "tokens of 30 days of training"
    if TERMS[name].metadata["unit"] == "bytes/s":
        return f"{name}={default / 1e9:g} GB/s"
    return f"{name}={default:g}" if isinstance(default, float) else f"{name}={default}"


def parse_terms(settings: Iterable[str]) -> GoodputTerms:
    """Terms from texts NAME=VALUE; several values are separated by commas.

    Raises:
        RequestError: a name is unknown, or a value is not one.
    """
    terms: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if name not in TERMS:
            raise RequestError("goodput", f"{name!r} is not known", f"use one of {', '.join(TERMS)}")
        if not separator or not text:
            raise RequestError(name, "has no value", f"write {name}=VALUE")
        terms[name] = _parsed(name, text)
    return GoodputTerms(**terms)


def terms_of(values: Mapping[str, Any]) -> GoodputTerms:
    """Terms of a request to a service, which reads no logs.

    Raises:
        RequestError: a name is unknown, a value is not one, or the failure rates are not published ones.
    """
    several = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    terms = parse_terms(f"{name}={','.join(str(value) for value in value_list)}" for name, value_list in several.items())
    require_published(terms)
    return terms


def require_published(terms: GoodputTerms) -> None:
    """Refuse a log of failures in a request to a service, which reads none.

    Raises:
        RequestError: the failure rates are not published ones.
    """
    if terms.failures not in preset_names():
        raise RequestError("failures", f"{terms.failures!r} is not known", f"use one of {', '.join(preset_names())}")


def _parsed(name: str, text: str) -> Any:
    term = TERMS[name]
    if isinstance(term.default, str):
        return text
    kind = term.metadata.get("kind") or (int if term.type in (int, tuple[int, ...]) else float)
    words = text.split(",") if isinstance(term.default, tuple) else [text]
    try:
        values = tuple(kind(word.strip()) for word in words)
    except ValueError as error:
        choices = ", ".join(kind) if kind in (Recovery, CheckpointKind) else "a number"
        raise RequestError(name, f"{text!r} is not known", f"use {choices}") from error
    return values if isinstance(term.default, tuple) else values[0]


def _within(value: float, limits: Any) -> bool:
    return (
        math.isfinite(value)
        and value >= limits.get("least", -math.inf)
        and value > limits.get("above", -math.inf)
        and value <= limits.get("most", math.inf)
    )
