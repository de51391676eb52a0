"""The best way to run a layout on nodes that fail, and the terms of the choice."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.goodput.closed_form import EndDate, best_interval, end_date, expected
from autotune.goodput.failures import DAY, FailureRates, failure_rates, preset_names
from autotune.goodput.run import Bandwidths, CheckpointKind, Recovery, Run, SavedState, checkpoint_of


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
                if isinstance(item, float | int) and not _within(item, term.metadata):
                    raise RequestError(term.name, f"{item:g} is out of range", _range_text(term.metadata))

    @property
    def bandwidths(self) -> Bandwidths:
        """Bytes per second of the paths of checkpoints."""
        return Bandwidths(
            write=self.write_bandwidth, read=self.read_bandwidth, node=self.node_bandwidth, host=self.host_bandwidth
        )


TERMS = {term.name: term for term in dataclasses.fields(GoodputTerms)}


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


def _range_text(limits: Any) -> str:
    if "above" in limits:
        return f"give more than {limits['above']:g}"
    return f"give {limits['least']:g} {'to ' + format(limits['most'], 'g') if 'most' in limits else 'or more'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """What failures cost depends on these."""

    nodes: int
    devices_per_node: int
    step_seconds: float
    """Without failures."""
    tokens_per_step: float
    state: SavedState
    copies: int
    """Nodes or groups of nodes that hold every state: 2 or more, and a failed node's states exist elsewhere."""
    replicas: int
    """Model replicas on different nodes: one can be missing without changing the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """How a layout is run, and what is expected of it."""

    run: Run
    interval_steps: int | None
    """Steps between checkpoints; None: no failures, no checkpoints."""
    tokens_kept_per_second: float
    tokens_kept_per_device_hour: float
    """Spares count as devices."""
    end: EndDate
    """Until all tokens are kept, in seconds."""
    tokens: float
    devices: int
    """With spares."""
    price: float | None
    """Of a device-hour; None: unknown."""

    @property
    def effective(self) -> float:
        """Effective training time ratio."""
        return self.end.course.effective

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        course, hours = self.end.course, self.end.mean / 3600
        return {
            "recovery": self.run.recovery.value,
            "checkpoint": self.run.checkpoint.kind.value,
            "interval_steps": self.interval_steps,
            "interval_seconds": None if self.interval_steps is None else course.interval,
            "spares": self.run.spares,
            "devices": self.devices,
            "effective": course.effective,
            "tokens_kept_per_second": self.tokens_kept_per_second,
            "tokens_kept_per_device_hour": self.tokens_kept_per_device_hour,
            "checkpoint_blocking_seconds": self.run.checkpoint.blocking_seconds,
            "checkpoint_durable_seconds": self.run.checkpoint.durable_seconds,
            "checkpoint_load_seconds": self.run.checkpoint.load_seconds,
            "tokens": self.tokens,
            "hours": hours,
            "hours_quantiles": {str(share): self.end.quantile(share) / 3600 for share in (0.05, 0.5, 0.95)},
            "interruptions": course.interruptions_per_second * self.end.mean,
            "planned_interruptions": course.planned_per_second * self.end.mean,
            "cost": None if self.price is None else self.price * hours * self.devices,
            "failures": self.run.failures.name,
            "failures_source": self.run.failures.source,
        }


def rates_of(terms: GoodputTerms, nodes: int) -> FailureRates:
    """The failure rates that the terms name, for a cluster of `nodes` nodes.

    Raises:
        RequestError: they cannot be read.
    """
    return failure_rates(terms.failures, terms.failure_nodes or nodes)


def choices(layout: RunLayout, terms: GoodputTerms, rates: FailureRates, price: float | None = None) -> list[RunChoice]:
    """The best way to run the layout with each kind of recovery that it allows, most tokens kept per device-hour first.

    For each recovery and checkpoint kind: the best interval in closed form; spares are added as long as they gain more than
    they cost.
    """
    candidates = []
    for recovery in terms.recovery:
        runs = [run for kind in terms.checkpoint if (run := _run(layout, terms, rates, recovery, kind)) is not None]
        best = max((_with_spares(run, terms) for run in runs), key=_per_device, default=None)
        if best is not None:
            candidates.append(_choice(layout, terms, best, price))
    return sorted(candidates, key=lambda item: -item.tokens_kept_per_device_hour)


def _run(layout: RunLayout, terms: GoodputTerms, rates: FailureRates, recovery: Recovery, kind: CheckpointKind) -> Run | None:
    """The run; None: the layout does not allow this recovery or checkpoint.

    Migrating and dropping need a copy of every state on another node; dropping and re-planning need replicas on several nodes.
    Copies in peers' memory need another node.
    """
    if kind is CheckpointKind.PEERS and layout.nodes == 1:
        return None
    if recovery in (Recovery.MIGRATE, Recovery.DROP) and layout.copies < 2:
        return None
    if recovery is Recovery.REPLAN and layout.replicas < 2:
        return None
    checkpoint = checkpoint_of(layout.state, terms.bandwidths, kind, layout.devices_per_node, terms.checkpoint_slowdown)
    drops = recovery is Recovery.DROP
    return Run(
        nodes=layout.nodes,
        step_seconds=layout.step_seconds,
        failures=rates,
        checkpoint=checkpoint,
        recovery=recovery,
        detection_seconds=terms.detection_seconds,
        restart_seconds=terms.restart_seconds,
        replacement_seconds=terms.replacement_hours * 3600,
        in_place_share=terms.in_place_share,
        in_place_seconds=terms.drop_seconds if drops else terms.migrate_seconds,
        join_seconds=terms.join_seconds,
        replicas=layout.copies if drops else 1,
        step_overhead=terms.drop_overhead if drops else 1.0,
        lost_rate=1 / layout.replicas if recovery is Recovery.REPLAN else 0.0,
        planned_seconds=terms.planned_seconds,
    )


def _with_spares(run: Run, terms: GoodputTerms) -> Run:
    """The run with as many spares as pay. More spares always help, ever less, so that the first that does not pay ends the
    search."""
    best: Run | None = None
    for spares in sorted(terms.spares):
        tried = dataclasses.replace(run, spares=spares)
        if best is not None and _per_device(tried) <= _per_device(best):
            break
        best = tried
    return best or run


def _per_device(run: Run) -> float:
    return expected(run).effective * run.nodes / (run.nodes + run.spares)


def _choice(layout: RunLayout, terms: GoodputTerms, run: Run, price: float | None) -> RunChoice:
    rate = layout.tokens_per_step / layout.step_seconds
    tokens = terms.tokens or rate * 30.0 * DAY  # thirty days, if no tokens are given
    interval = best_interval(run)
    end = end_date(run, tokens / rate, interval)
    devices = (run.nodes + run.spares) * layout.devices_per_node
    kept_token_rate = tokens / end.mean
    return RunChoice(
        run=run,
        interval_steps=None if math.isinf(interval) else round(interval / run.step),
        tokens_kept_per_second=kept_token_rate,
        tokens_kept_per_device_hour=kept_token_rate * 3600 / devices,
        end=end,
        tokens=tokens,
        devices=devices,
        price=price,
    )
