"""The best way to run a layout on nodes that fail."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from autotune.goodput.closed_form import EndDate, best_interval, end_date, expected
from autotune.goodput.failures import DAY, FailureRates, failure_rates
from autotune.goodput.run import CheckpointKind, Recovery, Run, SavedState, checkpoint_of
from autotune.goodput.terms import GoodputTerms


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
