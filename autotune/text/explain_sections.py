"""An explanation as sections of lines and tables, which the console and Markdown each format in their own way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.explain.findings import (
    Basis,
    Explanation,
    KnobFinding,
    KnobPoint,
    KnobVerdict,
    MemoryUse,
    TimeUse,
    percent,
    speedup_text,
    values_text,
)
from autotune.question.assumption import assumed_lines
from autotune.text.prediction_table import SPENT_ON, bar_text, seconds_text
from autotune.text.rows import bytes_text, rate_text
from search_spaces.knob_values import value_text
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig

_MARKS = {
    Basis.MEASURED: "measured", Basis.BOUND: "ended early", Basis.OUT_OF_MEMORY: "out of memory",
    Basis.OVER_LIMIT: "over the limit", Basis.FAILED: "failed", Basis.PREDICTED: "predicted",
    Basis.DOES_NOT_FIT: "would not fit", Basis.REFUSED: "refused", Basis.UNKNOWN: "not measured",
}  # fmt: skip

BAR = 14
"""Characters of a bar: with what a part is spent on, a row fits into 80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTable:
    """A table."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    """Left-aligned columns; the others, which hold numbers, are right-aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A title and its content, in order."""

    title: str
    content: tuple[str | SectionTable, ...]


def sections_of(explanation: Explanation) -> list[Section]:
    """All sections, in reading order."""
    sections = [_time(explanation.time, explanation.calibration_source)]
    if explanation.memory is not None:
        sections.append(_memory(explanation.memory))
    sections.append(Section(title="What each knob contributes", content=tuple(_knobs(explanation.knobs))))
    if explanation.limits is not None:
        rows = [
            (bound.name, seconds_text(bound.seconds), percent(bound.share))
            for bound in explanation.limits.bounds
            if bound.seconds > 0
        ]
        table = SectionTable(header=("if it cost nothing (predicted)", "saved", "of the step"), rows=tuple(rows))
        sections.append(Section(title="What limits it", content=(explanation.limits.text, table)))
    if explanation.upgrades:
        sections.append(_upgrades(explanation))
    return sections


def head_lines(explanation: Explanation) -> list[str]:
    """The job, the winner, and its gain."""
    tie = "; the measurements do not separate it from the runner-up" if explanation.tie else ""
    answer = "keep the baseline, trial" if explanation.baseline == explanation.config else "trial"
    job_text = f"{explanation.model} on {explanation.cluster} with {explanation.world_size} ranks"
    lines = [
        f"job {explanation.job}: {job_text}, {explanation.strategy} for {explanation.objective}, {explanation.state.lower()}",
        f"best of {explanation.trials} trials ({explanation.measured} with a rate): {answer} {explanation.winner}{tie}",
        "  " + config_text(explanation.config),
    ]
    if explanation.gain is not None:
        measure = "less peak memory" if explanation.objective == "memory" else "samples/s"
        lines.append(f"  {speedup_text(explanation.gain)} over the baseline ({measure}, measured)")
    return [*lines, *assumed_lines(explanation.assumed)]


def config_text(config: TrialConfig) -> str:
    """Values that are not defaults, and always `zero_stage` and `micro_batch_size`."""
    changed = config.differences(TrialConfig())
    shown = [name for name in config.values() if name in changed or name in ("zero_stage", "micro_batch_size")]
    return " ".join(f"{name}={value_text(getattr(config, name))}" for name in shown)


def _time(time: TimeUse, calibration_source: str) -> Section:
    step = time.step_seconds
    rate = f"{rate_text(time.samples_per_second)} samples/s, {time.repeats} repeat{'s' * (time.repeats != 1)}"
    content: list[str | SectionTable] = [
        f"measured: {seconds_text(step.mean)} a step [{seconds_text(step.low)}, {seconds_text(step.high)}], {rate}"
    ]
    if time.parts:
        rows = [
            (part.name, seconds_text(part.seconds), percent(part.share), bar_text(part.share, BAR), SPENT_ON.get(part.name, ""))
            for part in time.parts
            if part.seconds > 0
        ]
        header = ("part (predicted)", "of the step", "share", "", "")
        content.append(SectionTable(header=header, rows=tuple(rows), left=frozenset({0, 3, 4})))
    if time.predicted_seconds is not None and time.measured_over_predicted is not None:
        band = time.predicted_seconds
        content.append(
            f"predicted: {seconds_text(band.mean)} [{seconds_text(band.low)}, {seconds_text(band.high)}]; "
            f"measured is {time.measured_over_predicted:.3g}x that; by {calibration_source}"
        )
    if time.measured_over_predicted is not None and time.measured_over_predicted < 1:
        content.append("the equations predict more than was measured: all parts are scaled down")
    if time.collectives:
        counts = [(f"{c.mesh_dimension}: {c.operation}", str(c.count), bytes_text(c.bytes)) for c in time.collectives]
        content.append(SectionTable(header=("sent in a step (measured)", "count", "bytes"), rows=tuple(counts)))
    if time.cpu_seconds is not None:
        content.append(f"measured: {seconds_text(time.cpu_seconds)} of processor time a step in the busiest rank")
    return Section(title="Where the time goes", content=tuple(content))


def _memory(memory: MemoryUse) -> Section:
    whole = memory.limit_bytes or memory.peak_bytes or 1
    tag_rows = [
        (tag, bytes_text(size), percent(size / whole), bar_text(size / whole, BAR))
        for tag, size in memory.by_tag.items()
        if size
    ]
    content: list[str | SectionTable] = [
        f"measured: {bytes_text(memory.peak_bytes)} at the peak of rank {memory.rank}, the fullest"
    ]
    if memory.limit_bytes is not None and memory.free_bytes is not None:
        headroom_bytes = memory.headroom * memory.limit_bytes
        rows = [("free" if memory.free_bytes >= 0 else "too much", abs(memory.free_bytes)), ("headroom", headroom_bytes)]
        tag_rows += [(name, bytes_text(size), percent(size / whole), "") for name, size in rows]
    of = "of the limit" if memory.limit_bytes else "of the peak"
    content.append(SectionTable(header=("tag", "bytes", of, ""), rows=tuple(tag_rows), left=frozenset({0, 3})))
    if memory.breaks_first is not None and memory.breaks_at is not None:
        content.append(f"{memory.breaks_first} would break the limit first: at {memory.breaks_at:.3g}x their present size")
    if memory.limit_bytes is None:
        content.append("no limit was stated, and none is known of this device")
    for name, size in (("reserved by the allocator", memory.reserved_bytes), ("outside of it", memory.outside_bytes)):
        if size is not None:
            content.append(f"measured: {bytes_text(size)} {name}")
    return Section(title="Where the memory goes", content=tuple(content))


def _knobs(findings: Sequence[KnobFinding]) -> Iterator[str | SectionTable]:
    # The others share one line, without a curve.
    shown = [finding for finding in findings if finding.verdict not in (KnobVerdict.NOISE, KnobVerdict.ALIKE)]
    for finding in shown:
        yield f"{finding.knob}={value_text(finding.value)}: {finding.text}"
        table = _curve(finding)
        if len(table.rows) > 1:
            yield table
        yield from _refused(finding)
    noise = [f"{finding.knob} ({_compared(finding)})" for finding in findings if finding.verdict is KnobVerdict.NOISE]
    alike = [f"{finding.knob}={value_text(finding.value)}" for finding in findings if finding.verdict is KnobVerdict.ALIKE]
    if noise:
        yield f"no difference within the noise: {', '.join(noise)}"
    if alike:
        yield f"not measured by itself, and predicted to make no difference: {', '.join(alike)}"
    if not findings:
        yield "no knob could have another value"


def _compared(finding: KnobFinding) -> str:
    """`4 over 2: 1.01x [0.95, 1.07], over 1: out of memory`."""
    other_points = [point for point in finding.curve if point.value != finding.value and point.source is not Basis.REFUSED]
    texts = [f"over {value_text(point.value)}: {_outcome(point)}" for point in other_points]
    return f"{value_text(finding.value)} {', '.join(texts)}"


def _outcome(point: KnobPoint) -> str:
    if point.speedup is None:
        return _MARKS[point.source]
    if point.source is Basis.BOUND and not point.compared:
        return "ended early, left open"
    least = "at least " if point.source is Basis.BOUND else ""
    marked = "" if point.source in (Basis.MEASURED, Basis.BOUND) else f" ({_MARKS[point.source]})"
    return f"{least}{speedup_text(point.speedup)}{marked}"


def _curve(finding: KnobFinding) -> SectionTable:
    rows = [
        (
            f"{value_text(point.value)}{' ★' if point.value == finding.value else ''}",
            _rate(point),
            f"{'≥ ' * (point.source is Basis.BOUND)}{speedup_text(point.speedup)}" if point.speedup else "",
            bytes_text(point.peak_bytes) if point.peak_bytes else "",
            _mark(point),
        )
        for point in finding.curve
        if point.source is not Basis.REFUSED or point.trial is not None
    ]
    header = ("value", "samples/s", "winner over it", "peak/rank", "")
    return SectionTable(header=header, rows=tuple(rows), left=frozenset({0, 4}))


def _refused(finding: KnobFinding) -> Iterator[str]:
    """`gpipe and 1f1b are refused by virtual-stages`, one line per rule."""
    by_rule: dict[str, list[KnobPoint]] = {}
    for point in finding.curve:
        if point.source is Basis.REFUSED and point.trial is None:
            by_rule.setdefault(point.note, []).append(point)
    for rule, points in by_rule.items():
        yield f"  {values_text(points)} {'is' if len(points) == 1 else 'are'} refused by {rule}"


def _rate(point: KnobPoint) -> str:
    if point.samples_per_second is None:
        return "-"
    if point.source is Basis.BOUND:
        return f"≤ {point.samples_per_second.high:.4g}"
    return ("~" if point.trial is None else "") + rate_text(_rounded(point.samples_per_second))


def _rounded(interval: Interval) -> Interval:
    return Interval(**{name: float(f"{getattr(interval, name):.4g}") for name in ("mean", "low", "high")})


def _mark(point: KnobPoint) -> str:
    trial = "" if point.trial is None else f", trial {point.trial}"
    self_explanatory = point.source in (Basis.OUT_OF_MEMORY, Basis.BOUND, Basis.UNKNOWN)  # their marks already state it
    note = f": {point.note}" if point.note and not self_explanatory else ""
    return f"{_MARKS[point.source]}{trial}{note}"


def _upgrades(explanation: Explanation) -> Section:
    rows = tuple(
        (upgrade.name, speedup_text(upgrade.gain), _changed(upgrade.config, explanation.config))
        for upgrade in explanation.upgrades
    )
    table = SectionTable(header=("if there were", "rate (predicted)", "configuration"), rows=rows, left=frozenset({0, 2}))
    return Section(title="Which hardware would help most", content=(table,))


def _changed(config: TrialConfig | None, winner: TrialConfig) -> str:
    if config is None:
        return "the same"
    return "with " + " ".join(f"{name}={value_text(value)}" for name, value in config.differences(winner).items())


def markdown_of(explanation: Explanation) -> str:
    """The whole report."""
    first, *further_lines = head_lines(explanation)
    parts = [f"# {first}", *(line.strip() for line in further_lines), *map(_section, sections_of(explanation))]
    return "\n\n".join([*parts, *(f"Note: {note}" for note in explanation.notes)]) + "\n"


def _section(section: Section) -> str:
    content = [_table(item) if isinstance(item, SectionTable) else _escaped(item.strip()) for item in section.content]
    return "\n\n".join([f"## {section.title}", *content])


def _table(table: SectionTable) -> str:
    rule = ["---" if column in table.left else "---:" for column in range(len(table.header))]
    lines = [table.header, tuple(rule), *table.rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Escape a cell or a line: a bar would end the cell; underscores inside words need no escape."""
    return text.replace("|", "\\|").replace("\n", " ")
