"""Where the time of a step goes: best, baseline and runner-up side by side."""

from collections.abc import Sequence

from autotune.explain.explanation.findings import StepActivity
from autotune.explain.explanation.resource_use import UNEXPLAINED, parts_of
from autotune.explain.figures.contenders import Contender, contenders
from autotune.explain.figures.figure import FigureUnit, column, config_text, percent, seconds_text, table, varying
from autotune.explain.figures.source import FigureSource
from autotune.prediction.equations.step import PARTS
from autotune.prediction.planning.estimate import estimates
from autotune.wire.figures import Axis, Figure

NAME, TITLE = "time_breakdown", "Where a step goes"
TITLES = {
    "compute": "compute", "tensor": "tensor-parallel traffic", "pipeline": "pipeline bubble", "data": "data-parallel traffic",
    "optimizer": "optimizer", "offload": "offload", UNEXPLAINED: "unexplained",
}  # fmt: skip
"""Part -> its title."""


def time_breakdown(source: FigureSource) -> Figure:
    """Measured steps, divided into parts by the equations; the unexplained rest is a part of its own."""
    evidence = source.evidence
    if evidence is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    if evidence.question is None:
        return Figure(name=NAME, title=TITLE, summary=source.unpredicted)
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
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(compared, divided),
        x=Axis(title="a step", unit=FigureUnit.SECONDS, column="seconds"),
        y=Axis(title="configuration", column="configuration"),
        tables=(parts, steps),
        notes=(
            "Steps are measured; their parts are by the equations, scaled down where these predict more than was measured.",
            f"The coefficients of the equations come from {evidence.question.rests_on}.",
        ),
    )


def _summary(compared: Sequence[Contender], divided: Sequence[Sequence[StepActivity]]) -> str:
    best = compared[0]
    largest = max(divided[0], key=lambda part: part.seconds)
    text = f"The best takes {seconds_text(best.step_seconds)} a step, {percent(largest.share)} of it {TITLES[largest.name]}"
    other_times = [f"the {other.name} {seconds_text(other.step_seconds)}" for other in compared[1:]]
    return f"{'; '.join([text, *other_times])}."


ORDER = (*PARTS, UNEXPLAINED)
"""Parts in drawing order, from the left."""
