"""Do predictions meet their targets? Every calibration mode on published measurements.

    python -m benchmarks.prediction.validation [--data ../shared/data] [--markdown docs/results/validation.md]

The measurements are not part of the repository: without them the program prints the reason and measures nothing. What
needs more than a table is measured by `validate_selene` (times fitted on one curve) and `validate_plan` (the rank of experts'
choices in a plan).
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.knowledge.table import read_table
from benchmarks.common.written_page import table
from benchmarks.prediction import validate_plan, validate_selene
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.markdown import method_lines, skipped_tables, source_tables
from benchmarks.prediction.scoring.outcomes import read_labels
from benchmarks.prediction.scoring.report import validate
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.prediction.validate_reliability import reliability_lines
from benchmarks.prediction.validate_targets import TARGETS, Document, Line

HELD = {True: "held", False: "**missed**", None: "not measured"}
SECTIONS = {
    Calibration.NONE: "As shipped",
    Calibration.LEAVE_SOURCE_OUT: "Fitted on the other sources",
    Calibration.LEAVE_GROUP_OUT: "Fitted on everything but the group",
    Calibration.FEW_ROWS: "Fitted on three rows of the source",
}


def measure(data: Path) -> dict[Calibration, Document]:
    """Validate in each mode; return the documents."""
    measurements, labels = read_table(data / "measured.csv"), read_labels(data / "failure_labels.csv")
    documents = {}
    for mode in SECTIONS:
        began = time.monotonic()
        documents[mode] = validate(measurements, TablePredictor(), Protocol(calibrate=mode), labels)
        print(f"{mode}: {time.monotonic() - began:.0f} s", flush=True)
    return documents


def page(documents: Mapping[Calibration, Document], lines: list[Line], sections: list[str], seconds: float) -> str:
    """The Markdown page."""
    cells = [[line.target, line.mode, line.bound, line.figure, HELD[line.held], line.ceiling] for line in lines]
    held = sum(line.held is True for line in lines)
    parts = [
        "# Predictions against measurements",
        "",
        f"Written by `make validate` in {seconds:.0f} s: `python -m benchmarks.prediction.validate` on published",
        "measurements, in each mode. [Scores and ceilings](../prediction-model.md#how-predictions-are-scored).",
        "",
        f"{held} of {len(lines)} targets are held, {sum(line.held is False for line in lines)} missed.",
        "[Why](../prediction-model.md#what-is-missed-and-why).",
        "",
        *table(["target", "fitted on", "bound", "figure", "", "perfect predictor"], cells),
        "",
        *sections,
    ]
    for mode, title in SECTIONS.items():
        parts += [f"## {title}", "", *(f"- {sentence}." for sentence in method_lines(documents[mode])), ""]
        parts += [line.replace("## ", "### ") for line in source_tables(documents[mode])]
    parts += [
        "## Reliability", "",
        "On sources left out of the fit: stated probabilities against what happened. Bands are those of the mean source: a few",
        "sources with many rows are off by a common factor.", "",
        *reliability_lines(documents[Calibration.LEAVE_SOURCE_OUT]["reliability"]), "",
    ]  # fmt: skip
    parts += ["## Rows that are not scored", "", *skipped_tables(documents[Calibration.LEAVE_SOURCE_OUT]), ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    for name in ("measured.csv", "failure_labels.csv"):
        if not (arguments.data / name).is_file():
            print(f"{arguments.data / name} not found: nothing is measured; give its folder: make validate DATA=FOLDER")
            return 2
    began = time.monotonic()
    documents = measure(arguments.data)
    data = arguments.data
    lines = [target.line(documents) for target in TARGETS] + validate_selene.lines(data) + validate_plan.lines(data)
    text = page(documents, lines, validate_plan.section(data), time.monotonic() - began)
    print("\n".join(f"{HELD[line.held]:12} {line.target}: {line.figure} ({line.bound}) {line.ceiling}" for line in lines))
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    return 0 if all(line.held for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
