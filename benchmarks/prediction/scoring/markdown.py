"""The report of a validation as a Markdown page."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.common.written_page import table

Document = Mapping[str, Any]

FIGURES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "oom": (("recall", "recall"), ("precision", "precision"), ("false_alarm_share", "false alarms"), ("rows", "rows")),
    "memory": (("median_abs_error", "median"), ("p95_abs_error", "p95"), ("rows", "rows")),
    "time": (("median_abs_error", "median"), ("mean_abs_error", "mean"), ("max_abs_error", "max"), ("rows", "rows")),
    "rank": (("spearman_median", "Spearman"), ("predicted_best_share_mean", "best's share"), ("groups", "groups")),
}
"""The figures shown for each score, with their headings."""
SHARES = frozenset({"median_abs_error", "mean_abs_error", "max_abs_error", "p95_abs_error", "false_alarm_share"})
"""Figures shown in percent."""


def figure(name: str, value: float | None) -> str:
    """Format a figure: errors in percent, counts as integers, the rest with three digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{100 * value:.1f} %" if name in SHARES else f"{value:.3f}"


def score_cells(score: str, figures: Document) -> list[str]:
    """The table cells of a score; ranks are followed by their ceilings."""
    cells = [figure(name, figures[name]) for name, _ in FIGURES[score]]
    if score == "rank":
        ceiling = figures["ceiling"]
        mark = " assumed" if figures["ceiling_assumes_noise"] and figures["groups"] else ""
        cells[0] = _beside(cells[0], ceiling["spearman_median"], "")
        cells[1] = _beside(cells[1], ceiling["predicted_best_share_mean"], mark)
    return cells


def method_lines(document: Document) -> list[str]:
    """Sentences on the calibration and its caveats."""
    lines = [
        f"Calibration: {document['calibrate']}"
        + (f", {document['calibration_rows']} rows" if document["calibration_rows"] else "")
    ]
    if document["draws"] > 1:
        lines[0] += f" of each source at random; medians of {document['draws']} draws, seed {document['seed']}"
    rows = document["rows"]
    lines.append(f"{rows['in_table']:,} rows, {rows['scored']:,} scored; groups need {document['min_timed']} timed candidates")
    if document["in_sample_note"]:
        lines.append(f"These figures are {document['in_sample_note']}")
    if count := document["predicted_by_priors_alone"]:
        lines.append(f"{count:,} rows are predicted only by priors: no rows were left to fit on")
    return lines


def reasons(document: Document) -> list[tuple[int, str, str]]:
    """Number of skipped rows for each reason, and the first of them."""
    counts = Counter(skip["reason"] for skip in document["skipped"])
    first: dict[str, str] = {}
    for skip in document["skipped"]:
        first.setdefault(skip["reason"], f"{skip['row_id']}, line {skip['line']}")
    return [(count, reason, first[reason]) for reason, count in counts.most_common()]


def markdown_page(document: Document) -> str:
    """The whole report."""
    parts = ["# Validation", "", f"Table: `{document['table'].rsplit('/', 1)[-1]}`.", ""]
    parts += [f"- {sentence}." for sentence in method_lines(document)]
    parts += ["", *source_tables(document), "## Groups", "", *_groups(document), "", "## Noise", "", *_noise(document), ""]
    parts += ["## Rows that are not scored", "", *skipped_tables(document), "", "## Problems", "", *_problems(document), ""]
    parts += ["## How it is scored", "", *(f"- {rule}." for rule in document["rules"]), ""]
    return "\n".join(parts)


def source_tables(document: Document) -> list[str]:
    """A table for each score: a line for each source, and one for all."""
    lines = []
    for score, columns in FIGURES.items():
        rows = [[_cell(source), *score_cells(score, found[score])] for source, found in named_figures(document)]
        lines += [f"## {TITLES[score]}", "", *table(["source", *(heading for _, heading in columns)], rows), ""]
    return lines


TITLES = {"oom": "Out of memory", "memory": "Memory error", "time": "Time error", "rank": "Ranks"}


def named_figures(document: Document) -> Iterable[tuple[str, Document]]:
    """All rows first, then each source."""
    yield "all", document["summary"]
    if len(document["by_source"]) > 1:
        for source, figures in document["by_source"].items():
            yield source or "(no source)", figures


def _groups(document: Document) -> list[str]:
    if not document["groups"]:
        return ["No group has enough timed candidates."]
    headings = ["group", "rows", "timed", "Spearman", "ceiling", "best's share", "ceiling"]
    rows = [
        [
            _cell(group["rank_group"]), figure("", group["rows"]), figure("", group["timed"]), figure("", group["spearman"]),
            figure("", group["spearman_ceiling"]), figure("", group["predicted_best_share"]), figure("", group["ceiling"]),
        ]
        for group in document["groups"]
    ]  # fmt: skip
    return table(headings, rows)


def _noise(document: Document) -> list[str]:
    rows = [
        [
            _cell(source or "(no source)"),
            f"{100 * noise['deviation']:.1f} %",
            figure("", noise["repeated"]),
            "yes" if noise["assumed"] else "no",
        ]
        for source, noise in document["noise"].items()
    ]
    return table(["source", "noise of one measurement", "repeated configurations", "assumed"], rows)


def skipped_tables(document: Document) -> list[str]:
    """Number of scored rows per source, and the reasons for the others."""
    counts = [
        [_cell(source or "(no source)"), f"{rows['read']:,}", f"{rows['scored']:,}"]
        for source, rows in document["rows_by_source"].items()
    ]
    lines = table(["source", "rows read", "scored"], counts)
    if found := reasons(document):
        cells = [[_cell(reason), f"{count:,}", _cell(first)] for count, reason, first in found]
        lines += ["", *table(["reason", "rows", "first"], cells)]
    return lines


def _problems(document: Document) -> list[str]:
    if not document["problems"]:
        return ["None."]
    return [f"- line {each['line']}{_named(each)}: {_cell(each['problem'])}" for each in document["problems"]]


def _named(problem: Document) -> str:
    return f" ({_cell(problem['row_id'])})" if problem["row_id"] else ""


def _beside(cell: str, ceiling: float | None, mark: str) -> str:
    return cell if ceiling is None else f"{cell} (of {ceiling:.3f}{mark})"


def _cell(text: str) -> str:
    """Text that cannot break out of a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
