"""Where the time of a step and the memory of a rank go: best, baseline and runner-up side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.explain.evidence import ExplanationEvidence
from autotune.explain.figures.source import (
    FigureSource,
    FigureUnit,
    MakeFigure,
    bytes_text,
    column,
    config_text,
    limit_marks,
    percent,
    seconds_text,
    table,
    varying,
)
from autotune.explain.findings import StepActivity
from autotune.explain.limits import UNEXPLAINED, parts_of
from autotune.outcome.standings import with_whole_result
from autotune.prediction.planning.estimate import estimates
from autotune.wire.figures import Axis, Figure
from search_spaces.trial import Interval, RankMeasurement
from storage.records import TrialRecord


@dataclass(frozen=True)
class Contender:
    """One of the compared configurations."""

    name: str
    """best, baseline or runner-up; `best, baseline` if the baseline won."""
    trial: TrialRecord
    """The configuration's search trial."""
    evidence: ExplanationEvidence

    @cached_property
    def rate(self) -> Interval:
        """Measured samples/s."""
        return self.evidence.rate_of(self.trial)

    @property
    def step_seconds(self) -> float:
        """Measured seconds per step."""
        return self.evidence.session.request.global_batch_size / self.rate.mean

    @cached_property
    def ranks(self) -> tuple[RankMeasurement, ...]:
        """The measurements of the ranks; empty: they reported none."""
        whole = with_whole_result(self.evidence.snapshot, self.trial)
        return whole.result.ranks if whole.result is not None else ()


def contenders(evidence: ExplanationEvidence) -> list[Contender]:
    """The available contenders, the best first. A trial with several roles appears once."""
    verdict = evidence.verdict
    roles = {"best": verdict.best, "baseline": verdict.baseline, "runner-up": verdict.runner_up}
    names: dict[int, list[str]] = {}
    for name, trial in roles.items():
        if trial is not None:
            names.setdefault(trial.number, []).append(name)
    return [
        Contender(", ".join(trial_roles), evidence.snapshot.trial(number), evidence) for number, trial_roles in names.items()
    ]


TITLES = {
    "compute": "compute", "tensor": "tensor-parallel traffic", "pipeline": "pipeline bubble", "data": "data-parallel traffic",
    "optimizer": "optimizer", "offload": "offload", UNEXPLAINED: "unexplained",
}  # fmt: skip
"""Part -> its title."""


def time_breakdown(source: FigureSource, figure: MakeFigure) -> Figure:
    """Measured steps, divided into parts by the equations; the unexplained rest is a part of its own."""
    evidence = source.evidence
    if evidence is None:
        return figure(summary=source.lacking())
    if evidence.question is None:
        return figure(summary=source.unpredicted)
    compared = contenders(evidence)
    predicted = estimates(evidence.question, [contender.trial.config for contender in compared])
    divided = [parts_of(estimate, contender.step_seconds) for contender, estimate in zip(compared, predicted, strict=True)]
    rows = [(contender, part) for contender, parts in zip(compared, divided, strict=True) for part in parts if part.seconds > 0]
    parts = table(
        "parts",
        "a part of a configuration's step",
        [
            column("configuration", "configuration", [contender.name for contender, _ in rows]),
            column("trial", "trial", [contender.trial.number for contender, _ in rows]),
            column("part", "part", [part.name for _, part in rows]),
            column("seconds", "of the step", [part.seconds for _, part in rows], FigureUnit.SECONDS),
            column("share", "share", [part.share for _, part in rows], FigureUnit.SHARE),
        ],
    )
    batch, knobs = evidence.session.request.global_batch_size, varying(source.snapshot.searched)
    slowest = [batch / contender.rate.low if contender.rate.low else None for contender in compared]
    steps = table(
        "steps",
        "a configuration",
        [
            column("configuration", "configuration", [contender.name for contender in compared]),
            column("trial", "trial", [contender.trial.number for contender in compared]),
            column("measured", "measured step", [contender.step_seconds for contender in compared], FigureUnit.SECONDS),
            column("low", "from", [batch / contender.rate.high for contender in compared], FigureUnit.SECONDS),
            column("high", "to", slowest, FigureUnit.SECONDS),
            column("predicted", "predicted step", [estimate.step_seconds.mean for estimate in predicted], FigureUnit.SECONDS),
            column("config", "knobs", [config_text(contender.trial.config, knobs) for contender in compared]),
        ],
    )
    return figure(
        summary=_summary(compared, divided),
        x=Axis(title="a step", unit=FigureUnit.SECONDS, column="seconds"),
        y=Axis(title="configuration", column="configuration"),
        tables=(parts, steps),
        notes=(
            "Steps are measured; their parts are by the equations, scaled down where these predict more than was measured.",
            f"The coefficients of the equations come from {evidence.question.calibration_source}.",
        ),
    )


def _summary(compared: Sequence[Contender], divided: Sequence[Sequence[StepActivity]]) -> str:
    best = compared[0]
    largest = max(divided[0], key=lambda part: part.seconds)
    text = f"The best takes {seconds_text(best.step_seconds)} a step, {percent(largest.share)} of it {TITLES[largest.name]}"
    other_times = [f"the {other.name} {seconds_text(other.step_seconds)}" for other in compared[1:]]
    return f"{'; '.join([text, *other_times])}."


def memory_breakdown(source: FigureSource, figure: MakeFigure) -> Figure:
    """The measured peak of each configuration's fullest rank by tag, and a table with every rank's peak."""
    evidence = source.evidence
    if evidence is None:
        return figure(summary=source.lacking())
    compared = [contender for contender in contenders(evidence) if contender.ranks]
    if not compared:
        return figure(summary="No rank reported what its memory holds.")
    fullest = [max(contender.ranks, key=lambda rank: rank.peak_memory_bytes) for contender in compared]
    rows = [
        (contender, tag, rank.memory_by_tag[tag])
        for contender, rank in zip(compared, fullest, strict=True)
        for tag in sorted(rank.memory_by_tag, key=_place)
        if rank.memory_by_tag[tag]
    ]
    tags = table(
        "tags",
        "what the fullest rank of a configuration holds at its peak",
        [
            column("configuration", "configuration", [contender.name for contender, _, _ in rows]),
            column("trial", "trial", [contender.trial.number for contender, _, _ in rows]),
            column("tag", "tag", [tag for _, tag, _ in rows]),
            column("bytes", "at the peak", [size for _, _, size in rows], FigureUnit.BYTES),
        ],
    )
    every: list[tuple[Contender, RankMeasurement]] = [(contender, rank) for contender in compared for rank in contender.ranks]
    ranks = table(
        "ranks",
        "a rank of a configuration",
        [
            column("configuration", "configuration", [contender.name for contender, _ in every]),
            column("trial", "trial", [contender.trial.number for contender, _ in every]),
            column("rank", "rank", [rank.rank for _, rank in every]),
            column("peak_bytes", "peak", [rank.peak_memory_bytes for _, rank in every], FigureUnit.BYTES),
            column("reserved_bytes", "reserved by the allocator", [rank.reserved_bytes for _, rank in every], FigureUnit.BYTES),
            column("outside_bytes", "outside of it", [rank.non_torch_bytes for _, rank in every], FigureUnit.BYTES),
        ],
    )
    limit = evidence.session.ranking.memory_limit_bytes
    return figure(
        summary=_memory_summary(compared, fullest, limit),
        x=Axis(title="peak of the fullest rank", unit=FigureUnit.BYTES, column="bytes"),
        y=Axis(title="configuration", column="configuration"),
        tables=(tags, ranks),
        marks=limit_marks(evidence.session.ranking),
        notes=() if limit else ("No limit was stated, and none is known of this device.",),
    )


def _place(tag: str) -> tuple[int, str]:
    # Tags in drawing order, from the left; other tags follow.
    tag_order = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
    return (tag_order.index(tag) if tag in tag_order else len(tag_order), tag)


def _memory_summary(compared: list[Contender], fullest: list[RankMeasurement], limit: int | None) -> str:
    best = fullest[0]
    text = f"The {compared[0].name} peaks at {bytes_text(best.peak_memory_bytes)} on rank {best.rank}"
    if limit:
        text += f", {percent(best.peak_memory_bytes / limit)} of the limit"
    if best.memory_by_tag:
        tag = max(best.memory_by_tag, key=lambda name: best.memory_by_tag[name])
        text += f", most of it {tag.replace('_', ' ')} ({bytes_text(best.memory_by_tag[tag])})"
    other_contenders = zip(compared[1:], fullest[1:], strict=True)
    return (
        "; ".join(
            [text, *(f"the {contender.name} at {bytes_text(rank.peak_memory_bytes)}" for contender, rank in other_contenders)]
        )
        + "."
    )
