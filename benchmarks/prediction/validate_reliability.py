"""Reliability diagrams of a validation as Markdown: tables, and pictures that the documentation draws (Mermaid)."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.written_page import table

Document = Mapping[str, Any]


def reliability_lines(diagrams: Document) -> list[str]:
    """Fit probability by bin, and the share inside the bands of time and memory by level."""
    bins = [each for each in diagrams["fit"] if each["rows"]]
    cells = [
        [f"{each['low']:g} to {each['high']:g}", str(each["rows"]), f"{each['stated']:.2f}", f"{each['ran']:.2f}"]
        for each in bins
    ]
    lines = [
        *table(["probability that memory suffices", "rows", "stated, mean", "ran"], cells),
        "",
        *_picture(
            "Fit probability: stated (line) and observed (bars)",
            [each["stated"] for each in bins],
            [each["ran"] for each in bins],
        ),
    ]
    for name, levels in diagrams["bands"].items():
        known = [each for each in levels if each["inside"] is not None]
        rows = [
            [_percent(each["stated"]), str(each["rows"]), _percent(each["inside"]), _percent(each["inside_mean_source"])]
            for each in known
        ]
        lines += [
            "",
            *table([f"band of {name}", "rows", "inside", "inside, mean of the sources"], rows),
            "",
            *_picture(
                f"Bands of {name}: stated (line), inside, mean of the sources (bars)",
                [each["stated"] for each in known],
                [each["inside_mean_source"] for each in known],
            ),
        ]
    return lines


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _picture(title: str, stated: Sequence[float], observed: Sequence[float]) -> list[str]:
    return [
        "```mermaid",
        "xychart-beta",
        f'    title "{title}"',
        f"    x-axis [{', '.join(f'{value:.2f}' for value in stated)}]",
        '    y-axis "share" 0 --> 1',
        f"    bar [{', '.join(f'{value:.3f}' for value in observed)}]",
        f"    line [{', '.join(f'{value:.3f}' for value in stated)}]",
        "```",
    ]
