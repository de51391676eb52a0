"""Commands that read a job: `autotune show`, `explain`, `export` and `report`."""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status, write_document, write_export
from autotune.errors import NoBestError, RequestError
from autotune.explain.findings import Explanation
from autotune.frameworks.best_config import read_best_config
from autotune.frameworks.exporters import exporter
from autotune.objective.ranking import peak_bytes, rate
from autotune.output import require_writable, write_whole
from autotune.question.assumption import assumed_document, assumed_lines
from autotune.request.request import JobRequest
from autotune.request.rows import assumed_of_row
from autotune.text.console import Console
from autotune.text.explain_sections import SectionTable, head_lines, markdown_of, sections_of
from autotune.text.result import print_result
from autotune.text.rows import (
    TextTable,
    TrialRows,
    TrialTable,
    baseline_of,
    bytes_text,
    duration_text,
    labels_text,
    place_text,
    progress_text,
    rate_text,
    state_text,
)
from autotune.text.visible_text import visible
from executor.errors import failure_table
from search_spaces.failure import FailureRow
from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import finite, from_plain, to_plain
from search_spaces.quantities import ratio_text
from search_spaces.trial import Interval
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import JobRecord, TrialRecord

SORTS: Mapping[str, Callable[[TrialRecord], float | None]] = {
    "number": lambda trial: trial.number,
    "samples_per_second": lambda trial: -rate(trial) if trial.outcome is Outcome.OK else None,
    "peak_memory_bytes": lambda trial: peak_bytes(trial) if trial.outcome is Outcome.OK else None,
    "seconds": lambda trial: (trial.finished - trial.started).total_seconds() if trial.started and trial.finished else None,
}
"""Sort keys of trials in addition to knobs, ascending; None comes last. Rates are negated, so that the highest comes first."""


def show_command(
    job_id: str | None,
    top: int | None,
    sort: str | None,
    url: str | None,
    database: str | None,
    as_json: bool,
    every: bool = False,
) -> Status:
    """Print state, configurations or trials, and best configuration of one job.

    `every`: every trial with its single measurement, instead of the configurations. `sort`: one of SORTS or a knob, which means
    trials; None: trials by number.
    """
    if sort is not None and sort not in (*SORTS, *KNOB_NAMES):
        raise RequestError("sort", f"{sort!r} is not a field", f"use {', '.join(SORTS)}, or the name of a knob")
    with open_backend(url, database) as backend:
        job = backend.job(job_id)
        trials = list(backend.trials(job.id))
        (progress_of_job,) = backend.standings([job])
        running = {progress.trial: progress_text(progress) for progress in backend.progress(job.id)}
        try:
            best = backend.best(job.id)
        except NoBestError:
            best = None
    configurations = configurations_of(trials, best)
    if sort is not None or every:
        chosen = _sorted(trials, sort)[:top]
    else:
        chosen = trials if top is None else [configuration.trial for configuration in configurations[:top]]
    if as_json:
        write_document(_document(job, configurations[:top], chosen, best))
        return Status.OK
    console = Console()
    counted = sum(trial.counted for trial in trials)
    console.print(
        f"job {job.id}: {state_text(job)}, {place_text(job)}, {counted} trials in {duration_text(job.active_seconds)}, "
        f"opened {job.created:%Y-%m-%d %H:%M} UTC",
        soft_wrap=True,
    )
    if labels := labels_text(job.request):
        console.print(f"  {labels}", soft_wrap=True)
    if status := job.message or progress_of_job.waiting:
        console.print(f"  {status}", soft_wrap=True)
    for line in assumed_lines(assumed_of_row(job.request)):
        console.print(f"  {line}", soft_wrap=True)
    if sort is not None or every:
        _print_trials(trials, chosen, console, best, running)
    else:
        _print_configurations(trials, configurations, top or MOST_CONFIGURATIONS, console)
        _print_unmeasured(trials, running, console)
    _print_remedies(job, trials, console)
    print_result(best, console)
    return Status.OK


MOST_CONFIGURATIONS = 10
"""Rows of `autotune show` without `--top`: with the failures and the answer they fill a screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A measured configuration."""

    trial: TrialRecord
    """Its search trial."""
    rate: Interval
    """Samples/s: the pooled estimate; of a configuration that is not compared, its single measurement."""
    repeats: int
    """Number of measurements behind the rate."""
    over_baseline: Interval | None
    """The rate over the baseline's; None: not compared, or the baseline was not measured."""
    is_compared: bool
    """Whether the rate is estimated together with the other configurations', and so shrunk towards them."""
    mark: str
    """`best`, `baseline`, or empty."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "trial": self.trial.number, "config": self.trial.config.values(), "rate": to_plain(self.rate),
            "repeats": self.repeats, "over_baseline": to_plain(self.over_baseline), "is_compared": self.is_compared,
            "peak_memory_bytes": peak_bytes(self.trial) or None,
        }  # fmt: skip


def configurations_of(trials: Sequence[TrialRecord], best: Mapping[str, Any] | None) -> list[Configuration]:
    """The measured configurations: those that are compared, best first, then the others by their single measurement.

    `best`: the best-config document, which has the estimates; None: nothing is compared.
    """
    decision = best["decision"] if best is not None else {"standings": ()}
    standings = {standing["trial"]: standing for standing in decision["standings"]}
    marks = {decision.get("baseline"): "baseline", decision.get("trial"): "best"}
    configurations = []
    for trial in trials:
        standing = standings.get(trial.number)
        single = trial.result.samples_per_second if trial.result is not None and trial.outcome is Outcome.OK else None
        rate = Interval(**standing["rate"]) if standing is not None else single
        if trial.purpose is not Purpose.SEARCH or rate is None:
            continue
        over = standing and standing["over_baseline"]
        configurations.append(
            Configuration(
                trial=trial,
                rate=rate,
                repeats=standing["repeats"] if standing is not None else 1,
                over_baseline=Interval(**over) if over else None,
                is_compared=standing is not None,
                mark=marks.get(trial.number, ""),
            )
        )
    order = {number: place for place, number in enumerate(standings)}
    return sorted(configurations, key=lambda item: (order.get(item.trial.number, len(order)), -item.rate.mean))


def _sorted(trials: list[TrialRecord], field: str | None) -> list[TrialRecord]:
    """The trials in order. Sorting is stable: equal ones keep the order of their numbers."""
    value = SORTS.get(field or "number")
    if value is None:
        return sorted(trials, key=lambda trial: getattr(trial.config, str(field)))
    valued = sorted((trial for trial in trials if value(trial) is not None), key=lambda trial: value(trial) or 0.0)
    return [*valued, *(trial for trial in trials if value(trial) is None)]


def _print_configurations(
    trials: Sequence[TrialRecord], configurations: Sequence[Configuration], most: int, console: Console
) -> None:
    rows = TrialRows(baseline_of(trials))
    table = TextTable("configuration", "trial", "samples/s [95 %]", "n", "gain", "peak/rank")
    for item in configurations[:most]:
        table.add_row(
            f"{'★ ' if item.mark == 'best' else ''}{item.trial.number}",
            rate_text(item.rate),
            str(item.repeats) if item.is_compared else "single",
            ratio_text(item.over_baseline.mean) if item.over_baseline is not None else "",
            bytes_text(peak_bytes(item.trial) or None),
            text=rows.describe(item.trial.config) + (" (baseline)" if item.mark == "baseline" else ""),
            style="bold green" if item.mark == "best" else "green" if item.is_compared else "dim",
        )
    if configurations:
        console.print(table)
    if len(configurations) > most:
        console.print(f"  {most} of {len(configurations)} measured configurations; --top N for more", style="dim")
    if any(item.is_compared for item in configurations):
        console.print(
            "  samples/s: estimated from all n measurements of a configuration, and shrunk towards the other configurations; "
            "--all: every trial with its single measurement", style="dim", soft_wrap=True,
        )  # fmt: skip


def _print_trials(
    trials: Sequence[TrialRecord],
    chosen: Sequence[TrialRecord],
    console: Console,
    best: dict[str, Any] | None,
    running: Mapping[int, str],
) -> None:
    number = best["best"]["trial"] if best else None
    rows = TrialTable(baseline_of(trials))
    for trial in chosen:
        rows.add(trial, best=trial.number == number, state=running.get(trial.number, "wanted"))
    console.print(rows.table)
    console.print("  samples/s: single measurements; the estimate of a configuration is in `autotune show`", style="dim")
    if len(chosen) < len(trials):
        console.print(f"  {len(chosen)} of {len(trials)} trials", style="dim")
    for trial in chosen:
        if trial.result is not None and trial.result.message:
            line = f"  trial {trial.number}: {trial.result.message}"
            console.print(line, soft_wrap=True)


def _print_unmeasured(trials: Sequence[TrialRecord], running: Mapping[int, str], console: Console) -> None:
    """Print the trials without a rate by outcome and cause, with the first message of each, and those that are open."""
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in trials:
        if trial.outcome is None:
            console.print(f"  trial {trial.number}: {running.get(trial.number, 'waits')}", soft_wrap=True)
        elif trial.outcome is not Outcome.OK:
            cause = (trial.result.cause or trial.result.rule) if trial.result is not None else ""
            groups.setdefault((trial.outcome, cause or ""), []).append(trial)
    for (outcome, cause), alike in groups.items():
        label = f"{outcome.value.lower()}{f' ({cause})' if cause else ''}"
        message = next((trial.result.message for trial in alike if trial.result is not None and trial.result.message), "")
        numbers = trials_text([trial.number for trial in alike])
        console.print(f"  {len(alike)} {label}: {numbers}{f': {message}' if message else ''}", soft_wrap=True)


def _print_remedies(job: JobRecord, trials: Sequence[TrialRecord], console: Console) -> None:
    """Print the remedy of each cause of failure once."""
    table = failure_table(tuple(from_plain(FailureRow, row) for row in job.request.get("failures", ())))
    causes = dict.fromkeys(trial.result.cause for trial in trials if trial.result is not None)
    for row in filter(None, map(table.row, causes)):
        numbers = [trial.number for trial in trials if trial.result is not None and trial.result.cause == row.name]
        line = f"  {row.name} ({trials_text(numbers)}): {row.remedy}"
        console.print(line, soft_wrap=True)


def trials_text(numbers: Sequence[int]) -> str:
    """`trial 3`, `trials 3, 5`, or the first few of many."""
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"trial{'s' if len(numbers) > 1 else ''} {shown}"


def _document(
    job: JobRecord, configurations: Sequence[Configuration], trials: Sequence[TrialRecord], best: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "job": {
            "id": job.id, "state": job.state.value, "reason": job.reason, "message": job.message,
            "created": job.created.isoformat(), "active_seconds": job.active_seconds, "request": dict(job.request),
            "assumed": assumed_document(assumed_of_row(job.request)),
        },
        "configurations": [configuration.document() for configuration in configurations],
        "trials": [
            {
                "number": trial.number, "purpose": trial.purpose.value, "repeat": trial.repeat, "counted": trial.counted,
                "outcome": trial.outcome.value if trial.outcome else None, "config": trial.config.values(),
                "result": to_plain(trial.result),
            }
            for trial in trials
        ],
        "best_config": best,
    }  # fmt: skip


def explain_command(job: str | None, markdown: Path | None, url: str | None, database: str | None, as_json: bool) -> Status:
    """Read the job, explain it and print the explanation."""
    if markdown is not None:
        require_writable(markdown)
    with open_backend(url, database) as backend:
        explanation = backend.explain(job)
    if markdown is not None:
        write_whole(markdown, markdown_of(explanation))
    if as_json:
        write_document(finite(to_plain(explanation)))
    elif markdown is None:
        print_explanation(explanation, Console())
    return Status.OK


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the explanation as text."""

    def print_line(text: str, style: str = "") -> None:
        console.print(text, style=style)

    for line in head_lines(explanation):
        print_line(line)
    for section in sections_of(explanation):
        print_line(f"\n{section.title}", "bold")
        for item in section.content:
            if isinstance(item, SectionTable):
                console.print_table(_table(item), "", "peak/rank", "winner over it", "configuration")
            else:
                print_line(item)
    for note in explanation.notes:
        print_line(f"\nnote: {note}", "yellow")


def _table(rows: SectionTable) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, name in enumerate(rows.header):
        first, is_left_aligned = column == 0, column in rows.left
        last = is_left_aligned and not first and column == len(rows.header) - 1
        table.add_column(
            f"  {name}" if first else name, justify="left" if is_left_aligned else "right", no_wrap=not last, overflow="fold"
        )
    for first_cell, *cells in rows.rows:
        table.add_row(f"  {first_cell}", *cells)
    return table


def export_command(job: str | None, format_name: str, out: Path | None, url: str | None, database: str | None) -> Status:
    """Write the file to standard output or `out`, and notes on what the format cannot express to standard error. `job` may be a
    best-config file, or one that `autotune plan --json` wrote, of which the first plan is meant."""
    if out is not None:
        require_writable(out)
    if job is not None and job.endswith(".json"):  # no id has a dot
        exported = exporter(format_name)(_document_in(Path(job)))
    else:
        with open_backend(url, database) as backend:
            exported = backend.export(job, format_name)
    write_export(exported.text, exported.notes, out)
    return Status.OK


def _document_in(path: Path) -> dict[str, Any]:
    """The best-config document in a file, or that of the first plan in one of `autotune plan --json`."""
    document = None
    with contextlib.suppress(OSError, ValueError):  # the reader of best-config files says what is wrong
        document = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(document, dict) and "plans" in document:
        return document_of_plan(document, str(path))
    return read_best_config(path)


def document_of_plan(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The best-config document of the first plan, of which nothing was measured.

    Raises:
        RequestError: there is no plan, or it cannot be read; the message names `source`.
    """
    # Imported on demand: a client without the engines has no sessions.
    from autotune.session.resolve import resolve
    from autotune.session.trial_requests import unmeasured_document

    try:
        plan = document["plans"][0]
        same = {name: document[name] for name in ("engine", "global_batch_size", "sequence_length")}
        named = {name: document[name]["name"] for name in ("model", "cluster")}
        resolved = {"resolved_model": document["model"]["spec"], "resolved_cluster": document["cluster"]}
        request = from_plain(JobRequest, {**same, **named, **resolved})
        config = TrialConfig().replace(plan["config"])
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = "nothing fits, so there is no plan" if not document["plans"] else f"its plan cannot be read ({error})"
        raise RequestError(source, problem, "write it again with `autotune plan --json`") from error
    session = resolve(request)
    return unmeasured_document(session, config, session.request)


def report_command(job: str | None, format_name: str | None, out: Path | None, url: str | None, database: str | None) -> Status:
    """Write the report to `out`, or Markdown to standard output without a path."""
    chosen = format_of(format_name, out)
    if out is not None:
        require_writable(out)
    with open_backend(url, database) as backend:
        text = backend.report(job, chosen)
    if out is None:
        sys.stdout.write(visible(text))
    else:
        write_whole(out, text)
    return Status.OK


def format_of(name: str | None, out: Path | None) -> str:
    """The given format, else by the path's suffix, else HTML.

    Raises:
        UnknownFormatError: there is no such format.
        RequestError: HTML (more than a megabyte) would go to standard output.
    """
    # Imported on demand: the other commands here draw no figures.
    from autotune.reports.report import require_format

    by_path = "md" if out is not None and out.suffix.lower() in (".md", ".markdown") else "html"
    chosen = name or by_path
    require_format(chosen)
    if chosen == "html" and out is None:
        raise RequestError("out", "is missing", "give --out FILE.html, or --format md for standard output")
    return chosen
