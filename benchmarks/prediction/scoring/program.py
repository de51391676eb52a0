"""Common parts of programs that score predictions, or strategies, on one table of measurements."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.status import write_document
from autotune.errors import AutotuneError
from benchmarks.common.written_page import page_parser
from benchmarks.prediction.scoring.folds import Calibration


def table_parser(description: str | None, modes: Sequence[Calibration], default: Calibration) -> argparse.ArgumentParser:
    """A parser with the table and the options that all these programs have."""
    parser = page_parser(description)
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="a table of measurements, one configuration per row")
    parser.add_argument(
        "--calibrate", choices=[str(mode) for mode in modes], default=str(default), help="what predictions are fitted on"
    )
    parser.add_argument("--labels", type=Path, help="a CSV file with the causes of failed runs whose cause is not in the table")
    parser.add_argument("--knowledge", metavar="FILE|JOB|URL", help="measurements to learn from, without the table's own rows")
    parser.add_argument("--min-timed", type=int, default=8, help="least timed configurations of a group")
    parser.add_argument("--seed", type=int, default=0, help="seed of random draws")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of Markdown")
    return parser


def report(
    arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], Any], page: Callable[[Mapping[str, Any]], str]
) -> int:
    """Measure, print the document, write the page if `--markdown` names one; return the exit code: 2 for bad input."""
    try:
        document = measure(arguments)
    except AutotuneError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        write_document(document)
    else:
        print(page(document))
    if arguments.markdown:
        arguments.markdown.write_text(page(document), encoding="utf-8")
    return 0
