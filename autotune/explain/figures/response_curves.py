"""The effect of each knob around the winner: every value with all other knobs as in the winner, measured or predicted."""

from autotune.explain.explanation.findings import KnobFinding
from autotune.explain.explanation.knob_findings import knob_findings
from autotune.explain.figures.figure import FigureUnit, column, counted, table
from autotune.explain.figures.source import FigureSource
from autotune.wire.figures import Axis, Figure
from search_spaces.knob_values import value_text

NAME, TITLE = "response_curves", "Around the best"


def response_curves(source: FigureSource) -> Figure:
    """The curves of `autotune explain`, the most informative knob first."""
    if source.evidence is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    findings = [
        finding
        for finding in knob_findings(source.evidence)
        if any(point.samples_per_second is not None for point in finding.curve)
    ]
    rows = [(finding, position, point) for finding in findings for position, point in enumerate(finding.curve)]
    if not rows:
        return Figure(name=NAME, title=TITLE, summary="No knob could have another value.")
    rates = [point.samples_per_second for _, _, point in rows]
    points = table(
        "points",
        "a value of a knob, all other knobs as in the best",
        [
            column("knob", "knob", [finding.knob for finding, _, _ in rows]),
            column("value", "value", [value_text(point.value) for _, _, point in rows]),
            column("place", "place", [position for _, position, _ in rows]),
            column("source", "rests on", [point.source for _, _, point in rows]),
            column("samples_per_second", "samples/s", [rate.mean if rate else None for rate in rates], FigureUnit.RATE),
            column("low", "from", [rate.low if rate else None for rate in rates], FigureUnit.RATE),
            column("high", "to", [rate.high if rate else None for rate in rates], FigureUnit.RATE),
            column(
                "speedup",
                "the best over it",
                [point.speedup.mean if point.speedup else None for _, _, point in rows],
                FigureUnit.RATIO,
            ),
            column("peak_bytes", "peak a rank", [point.peak_bytes for _, _, point in rows], FigureUnit.BYTES),
            column("trial", "trial", [point.trial for _, _, point in rows]),
            column("note", "note", [point.note for _, _, point in rows]),
        ],
    )
    knobs = table(
        "knobs",
        "a knob",
        [
            column("knob", "knob", [finding.knob for finding in findings]),
            column("best", "of the best", [value_text(finding.value) for finding in findings]),
            column("verdict", "verdict", [finding.verdict for finding in findings]),
            column("text", "in words", [finding.text for finding in findings]),
        ],
    )
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(findings),
        x=Axis(title="value of the knob", column="value"),
        y=Axis(title="throughput", unit=FigureUnit.RATE, column="samples_per_second"),
        tables=(points, knobs),
        notes=("Values that were not measured with all other knobs equal are predicted, corrected by the job's trials.",),
    )


def _summary(findings: list[KnobFinding]) -> str:
    first = findings[0]
    return f"{counted(len(findings), 'knob')} around the best; {first.knob}={value_text(first.value)}: {first.text}."
