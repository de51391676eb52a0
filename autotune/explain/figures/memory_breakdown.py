"""Where the memory of a rank goes: best, baseline and runner-up side by side, with the device's limit."""

from autotune.explain.figures.contenders import Contender, contenders
from autotune.explain.figures.figure import FigureUnit, bytes_text, column, percent, table
from autotune.explain.figures.source import FigureSource
from autotune.wire.figures import Axis, Figure, Mark
from search_spaces.trial import RankMeasurement

NAME, TITLE = "memory_breakdown", "Where the memory goes"
ORDER = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
"""Tags in drawing order, from the left; other tags follow."""


def memory_breakdown(source: FigureSource) -> Figure:
    """The measured peak of each configuration's fullest rank by tag, and a table with every rank's peak."""
    evidence = source.evidence
    if evidence is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    compared = [contender for contender in contenders(evidence) if contender.ranks]
    if not compared:
        return Figure(name=NAME, title=TITLE, summary="No rank reported what its memory holds.")
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
    limit, capacity = evidence.session.ranking.memory_limit_bytes, evidence.session.ranking.capacity_bytes
    marks = [Mark(axis="x", name="limit", title=f"limit {bytes_text(limit)}", value=float(limit))] if limit else []
    if limit and capacity < limit:
        capacity_mark = Mark(axis="x", name="capacity", title=f"less headroom {bytes_text(capacity)}", value=capacity)
        marks.append(capacity_mark)
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(compared, fullest, limit),
        x=Axis(title="peak of the fullest rank", unit=FigureUnit.BYTES, column="bytes"),
        y=Axis(title="configuration", column="configuration"),
        tables=(tags, ranks),
        marks=tuple(marks),
        notes=() if limit else ("No limit was stated, and none is known of this device.",),
    )


def _place(tag: str) -> tuple[int, str]:
    return (ORDER.index(tag) if tag in ORDER else len(ORDER), tag)


def _summary(compared: list[Contender], fullest: list[RankMeasurement], limit: int | None) -> str:
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
