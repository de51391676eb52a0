"""The report of a contest as a Markdown page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.markdown import reasons

Document = Mapping[str, Any]
TITLES = {
    "share": "Share of the best, after trials",
    "within_5_percent": "Chance of being within 5 % of the best, after trials",
}
WASTED = (("failed_in_first_10", "failed"), ("oom_in_first_10", "out of memory"))
"""Trials without a time among the first ten, with their headings."""
DECISIONS = (("propose_ms_p95", "decision, p95"), ("first_propose_ms", "first decision"))


def method_lines(document: Document) -> list[str]:
    """Sentences on the method and its caveats."""
    rows = document["rows"]
    games = f"{document['trials']} trials, {document['seeds']} seeds, seed {document['seed']}"
    groups = f"{document['group_count']} groups with {document['min_timed']} or more timed candidates"
    lines = [
        f"Calibration: {document['calibrate']}; {games}",
        f"{rows['in_table']:,} rows, {rows['in_groups']:,} of them in {groups}",
    ]
    if document.get("in_sample_rows"):
        lines.append(
            f"In-sample: the shipped coefficients were fitted on the sources of {document['in_sample_rows']:,} of these rows"
        )
    if not document["groups"]:
        lines.append("No group has enough timed candidates: nothing was played")
    lines += [
        f"{each['strategy']} was cut short in {each['games']} game{'s' * (each['games'] > 1)}, "
        f"first on {each['rank_group']}: {each['error']}"
        for each in document["cut_short"]
    ]
    return lines


def families(document: Document) -> list[tuple[str, Document]]:
    """All groups first, then those of each source."""
    found = [("all", document)]
    if len(document["by_source"]) > 1:
        found += [(source or "(no source)", figures) for source, figures in document["by_source"].items()]
    return found


def stops(document: Document) -> list[str]:
    """A table of when strategies that can estimate it were sure to be finished, and whether they were right."""
    cells = [
        [
            source, name, f"{100 * each['sure_share']:.0f} %",
            "–" if each["sure_after"] is None else f"{each['sure_after']:.1f}",
            "–" if each["sure_and_right_share"] is None else f"{100 * each['sure_and_right_share']:.0f} %",
        ]
        for source, figures in families(document)
        for name, each in figures["strategies"].items()
        if each["sure_share"]
    ]  # fmt: skip
    return table(["groups", "strategy", "games that ended", "after trials", "right"], cells) if cells else []


def budgets(document: Document) -> list[str]:
    """Numbers of trials after which shares are reported."""
    return list(next(iter(document["strategies"].values()))["share"])


def score_rows(figures: Document, score: str) -> list[list[str]]:
    """A line for each strategy, then one for each oracle."""
    strategies = [[name, *(f"{value:.3f}" for value in each[score].values())] for name, each in figures["strategies"].items()]
    oracles = [
        [f"oracle, {100 * float(noise):g} % noise", *(f"{value:.3f}" for value in each[score].values())]
        for noise, each in figures["oracles"].items()
        if each
    ]
    return strategies + oracles


def interval_rows(figures: Document, score: str) -> list[list[str]]:
    """A line for each strategy: 95 % intervals over groups."""
    return [[name, *map(_interval, each[f"{score}_interval"].values())] for name, each in figures["strategies"].items()]


def waste_rows(figures: Document) -> list[list[str]]:
    """A line for each strategy: trials without a time, and decision times."""
    return [
        [name, *(_figure(each[key]) for key, _ in WASTED), *(_milliseconds(each[key]) for key, _ in DECISIONS)]
        for name, each in figures["strategies"].items()
    ]


def ahead_rows(figures: Document) -> list[list[str]]:
    """The lead of the first strategy over each other one."""
    return [
        [_cell(name), *(f"{one['mean']:+.3f} ({_interval(one['interval'])})" for one in each.values())]
        for name, each in figures["ahead"].items()
    ]


def markdown_page(document: Document) -> str:
    """The whole report."""
    parts = ["# Strategies against each other", "", f"Table: `{document['table'].rsplit('/', 1)[-1]}`.", ""]
    parts += [f"- {_cell(sentence)}." for sentence in method_lines(document)]
    parts += ["", *source_tables(document)]
    for name in document["strategies"] if document["groups"] else ():
        parts += [f"## Groups: {name}", "", *group_tables(document, name), ""]
    parts += ["## What is left out", "", *_left_out(document), ""]
    parts += ["## How it is played", "", *(f"- {rule}." for rule in document["rules"]), ""]
    return "\n".join(parts)


def source_tables(document: Document, level: str = "##") -> list[str]:
    """For all groups and for each source: shares, chances, waste."""
    if not document["groups"]:
        return []
    lines: list[str] = []
    for source, figures in families(document):
        lines += [f"{level} {_cell(source)}: {figures['group_count']} group{'s' * (figures['group_count'] != 1)}", ""]
        for score, title in TITLES.items():
            lines += [f"{title}:", "", *table(["strategy", *budgets(figures)], score_rows(figures, score)), ""]
            lines += ["95 % intervals:", "", *table(["strategy", *budgets(figures)], interval_rows(figures, score)), ""]
        if figures["ahead"]:
            lines += ["Ahead in share:", "", *table(["strategies", *budgets(figures)], ahead_rows(figures)), ""]
        headings = [*(f"{name} of 10" for _, name in WASTED), *(name for _, name in DECISIONS)]
        lines += ["Waste and time:", "", *table(["strategy", *headings], waste_rows(figures)), ""]
    return lines


def group_tables(document: Document, strategy: str) -> list[str]:
    """A line for each group: results of one strategy."""
    rows = [
        [
            _cell(group["rank_group"]), f"{group['candidates']:,}", f"{group['timed']:,}",
            *(f"{value:.3f}" for value in group["strategies"][strategy]["share"].values()),
            _figure(group["strategies"][strategy]["oom_in_first_10"]),
        ]
        for group in document["groups"]
    ]  # fmt: skip
    return table(["group", "candidates", "timed", *budgets(document), "out of memory of 10"], rows)


def left_out(document: Document) -> Iterable[str]:
    """Groups that are too small, rows that cannot be predicted, and problems of the table."""
    if small := document["small_groups"]:
        yield f"{len(small):,} group{'s' * (len(small) > 1)} with fewer than {document['min_timed']} timed candidates"
    for count, reason, first in reasons(document):
        yield f"{count:,} row{'s' * (count > 1)}: {reason} (first: {first})"
    for each in document["problems"]:
        yield f"line {each['line']} {each['row_id']}: {each['problem']}"


def _left_out(document: Document) -> Sequence[str]:
    return [f"- {_cell(line)}." for line in left_out(document)] or ["Nothing."]


def _interval(bounds: Sequence[float] | None) -> str:
    return f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "–"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"


def _cell(text: str) -> str:
    """Text that cannot break out of a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
