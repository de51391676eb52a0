"""`autotune validate`: compare predictions with a table of measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table as ShownTable
from rich.text import Text

from autotune.cli.report_document import print_document
from autotune.cli.status import Status, print_note
from autotune.errors import RequestError
from autotune.evaluation.table_predictor import TablePredictor
from autotune.evaluation.validation.contract import Predictor
from autotune.evaluation.validation.folds import Calibration
from autotune.evaluation.validation.markdown import (
    FIGURES,
    TITLES,
    Document,
    markdown_page,
    method_lines,
    named_figures,
    reasons,
    score_cells,
)
from autotune.evaluation.validation.outcomes import NO_LABELS, read_labels
from autotune.evaluation.validation.report import validate
from autotune.evaluation.validation.table import Table, read_table
from autotune.evaluation.validation.validate import Progress, Protocol
from autotune.ops.output import require_writable
from autotune.text.console import Console

_SHOWN = 12
"""Maximum problems and reasons on the console; the JSON and the Markdown page have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Parsed options of the command."""

    table: Path
    calibrate: str
    calibration_rows: int
    labels: Path | None
    knowledge: str | None
    min_timed: int
    seed: int
    markdown: Path | None
    json: bool


def validate_command(options: ValidateOptions) -> Status:
    """Score the shipped predictor on the table."""
    protocol = Protocol(
        calibrate=_calibration(options.calibrate),
        calibration_rows=options.calibration_rows,
        min_timed=options.min_timed,
        seed=options.seed,
    )
    if options.markdown:
        require_writable(options.markdown)
    table = read_table(options.table)
    labels = read_labels(options.labels) if options.labels else NO_LABELS
    predictor = shipped_predictor()
    if options.knowledge is not None:
        predictor = informed_predictor(options.knowledge, table, protocol.calibrate)
    with _progress() as progress:
        document = validate(table, predictor, protocol, labels, progress)
    print_document(document, markdown_page, options.markdown, options.json, _print)
    return Status.OK


def shipped_predictor() -> Predictor:
    """The analytic model with the shipped coefficients."""
    return TablePredictor()


def informed_predictor(knowledge: str, table: Table, calibrate: Calibration) -> TablePredictor:
    """The analytic model with the shipped coefficients, and with the measurements that the user names to learn from.

    Raises:
        KnowledgeError, MeasurementsError: these cannot be read, or none of them may be learned from.
    """
    from autotune.evaluation.validation.knowledge import admitted
    from autotune.knowledge.read import read_knowledge

    given = read_knowledge(knowledge)
    found = admitted(given.rows, table.rows, calibrate)
    for note in given.notes:
        print_note(note)
    print_note(f"{len(found.rows):,} rows of {knowledge} are learned from")
    if found.copies:
        print_note(f"{found.copies:,} rows of {knowledge} left out: the table has the same measurements")
    if found.of_the_table:
        print_note(f"{found.of_the_table:,} rows of {knowledge} left out: {calibrate} leaves them out of the table too")
    if not found.rows:
        raise RequestError(
            "knowledge", f"no row of {knowledge} may be learned from", "give other measurements than the table's"
        )
    return TablePredictor().informed(found.rows)


def _calibration(name: str) -> Calibration:
    try:
        return Calibration(name)
    except ValueError:
        raise RequestError("calibrate", f"{name!r} is not a mode", f"use one of {', '.join(Calibration)}") from None


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show progress on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield lambda done, total: status.update(f"{done} of {total} calibrations and predictions")


def _print(document: Document) -> None:
    console = Console()
    for sentence in method_lines(document):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for score, columns in FIGURES.items():
        shown = ShownTable(box=None, pad_edge=False, header_style="bold", title=TITLES[score], title_justify="left")
        shown.add_column("source", overflow="fold", max_width=40)
        for _, heading in columns:
            shown.add_column(heading, justify="right")
        for source, found in named_figures(document):
            shown.add_row(Text(source), *score_cells(score, found[score]))
        console.print()
        console.print(shown, highlight=False)
    _print_rows(console, document)


def _print_rows(console: Console, document: Document) -> None:
    skipped, problems = reasons(document), document["problems"]
    lines = [
        f"not scored, {count:,} row{'s' * (count > 1)}: {reason} (first: {first})" for count, reason, first in skipped[:_SHOWN]
    ]
    lines += [f"line {each['line']} {each['row_id']}: {each['problem']}" for each in problems[:_SHOWN]]
    hidden = max(len(skipped) - _SHOWN, 0) + max(len(problems) - _SHOWN, 0)
    if hidden:
        lines.append(f"… and {hidden} more: see --json or --markdown")
    if lines:
        console.print()
    for line in lines:
        console.print(" ".join(line.split()), highlight=False, markup=False, soft_wrap=True)
