"""Do the engines train exactly like one process? Prints a table; exit code 1 if a case differs or is missing.

    python -m benchmarks.correctness.parity [--ranks 2 4 8] [--every N] [--only TEXT] [--lines FILE] [--seconds 120]
        [--markdown docs/results/parity.md]

Each case trains three AdamW steps on real text, on `--ranks` gloo processes, and compares every loss, gradient norm and
weight with plain PyTorch in one process on the whole batch; for types less exact than float64, only losses are compared, within
a bound stated in `parity_cases.py`. A failing case is printed with its label: `--only LABEL` runs just that case. With
`--lines`, each case that passed becomes a line of the file, and a run that ended early goes on after them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.gang import Gang, TaskError
from benchmarks.correctness.parity_cases import FLOAT64_BOUND, Case
from benchmarks.correctness.parity_matrix import matrix, some, untested
from benchmarks.correctness.parity_rank import Report, compare, reference_weights

RANKS = (2, 4, 8)
MOST_STARTS = 12
"""Starts of a gang (each failing case costs one) after which its remaining cases are skipped."""
STAGES = (0, 1, 2, 3)
HEADER = f"""# Parity of the engines with one process

Written by `make parity`. Three AdamW steps on text, on 2, 4 and 8 gloo ranks, against plain PyTorch in one process on the whole
batch. The cases are the product of the engines' capability tables, without those that the rules of `search_spaces` refuse; a
knob or value of a table that no case exercises fails the run. Cells: the largest difference of any loss, gradient norm or
weight in float64 (bound {FLOAT64_BOUND:g}) / number of cases, over checkpointing (none, selective, full, every second block),
three models (llama with grouped queries; GPT-2 with biases and tied embeddings; experts with a sliding window; without model
parallelism also a user's module with a branch that only some ranks take), micro-batches, clipping, bucket sizes, uneven
pipelines and explicit stage layouts, which alternate. A dash: refused by a rule, or not supported by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of a case."""

    case: Case
    off: float = math.inf
    error: str | None = None
    """Why it failed to run; None: it ran."""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.error is None and self.case.least < self.off <= self.case.bound


def run(gang: Gang, cases: Sequence[Case]) -> Iterator[Row]:
    """Run every case in turn on a gang that runs `compare`; the gang restarts after a failing case."""
    for case in cases:
        if gang.starts >= MOST_STARTS:
            yield Row(case=case, error="not run: too many cases before it failed")
            continue
        began = time.monotonic()
        try:
            off, error = _judged(case, gang.run(case)), None
        except TaskError as problem:
            off, error = math.inf, f"{str(problem).partition(': ')[0]}: {str(problem).splitlines()[-1]}"
        yield Row(case=case, off=off, error=error, seconds=time.monotonic() - began)


def _judged(case: Case, reports: Sequence[Report]) -> float:
    """The worst rank's difference; infinite where a weight was compared on no rank."""
    compared = frozenset().union(*(report.weights for report in reports))
    return max(report.off for report in reports) if compared == reference_weights(case) else math.inf


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Markdown: the worst difference of every group of cases."""
    exact = [row for row in rows if row.case.exact]
    right, worst = sum(row.right for row in rows), max((row.off for row in exact), default=0.0)
    counts = f"{len(rows)} cases ({len(exact)} in float64)"
    lines = [
        HEADER,
        "",
        f"{counts}, {right} within their bound, worst float64 difference {worst:.1e}, {seconds:.0f} s.",
    ]
    for engine in dict.fromkeys(row.case.engine for row in rows):
        mine = [row for row in exact if row.case.engine == engine]
        lines += ["", f"## {engine}: layouts", "", *_table(("ranks", "layout"), mine, lambda case: (case.ranks, case.layout))]
        pipelined = [row for row in mine if row.case.schedule]
        if pipelined:
            lines += ["", f"## {engine}: schedules (x stages a rank)", ""]
            lines += _table(("ranks", "schedule"), pipelined, lambda case: (case.ranks, case.schedule))
        lines += ["", f"## {engine}: checkpointing", ""]
        lines += _table(("ranks", "checkpointing"), mine, lambda case: (case.ranks, case.checkpointing))
        offloaded = [row for row in mine if row.case.offload]
        if offloaded:
            lines += [
                "",
                f"## {engine}: offload",
                "",
                *_table(("ranks", "offload"), offloaded, lambda case: (case.ranks, case.offload)),
            ]
        others = [row for row in mine if row.case.config.optimizer != "adamw"]
        if others:
            lines += ["", f"## {engine}: optimizers", ""]
            lines += _table(("ranks", "optimizer"), others, lambda case: (case.ranks, case.config.optimizer))
        predicting = [row for row in mine if row.case.config.mtp_layers]
        if predicting:
            lines += ["", f"## {engine}: multi-token prediction", ""]
            lines += _table(("ranks", "layout"), predicting, lambda case: (case.ranks, case.layout))
    lines += ["", "## Other types", "", *_types([row for row in rows if not row.case.exact])]
    return "\n".join(lines) + "\n"


def _table(names: tuple[str, ...], rows: Sequence[Row], key: Callable[[Case], tuple[object, ...]]) -> Iterator[str]:
    """One line for each value of `key`."""
    yield f"| {' | '.join(names)} | " + " | ".join(f"stage {stage}" for stage in STAGES) + " |"
    yield "|---" * (len(names) + len(STAGES)) + "|"
    for group in dict.fromkeys(key(row.case) for row in rows):
        mine = [row for row in rows if key(row.case) == group]
        cells = [_cell([row for row in mine if row.case.config.zero_stage == stage]) for stage in STAGES]
        yield f"| {' | '.join(map(str, group))} | {' | '.join(cells)} |"


def _cell(rows: Sequence[Row]) -> str:
    return f"{max(row.off for row in rows):.0e} / {len(rows)}" if rows else "–"


def _types(rows: Sequence[Row]) -> Iterator[str]:
    yield "Largest relative difference of a loss from float64, and its bound."
    yield ""
    yield "| engine | precision | summed in | reduced in | worst | bound | cases |"
    yield "|---|---|---|---|---|---|---|"
    for group in dict.fromkeys(_types_of(row.case) for row in rows):
        mine = [row for row in rows if _types_of(row.case) == group]
        yield f"| {' | '.join(group)} | {max(row.off for row in mine):.1e} | {mine[0].case.bound:.1e} | {len(mine)} |"


def _types_of(case: Case) -> tuple[str, str, str, str]:
    config = case.config
    return case.engine, config.precision, config.accumulation_dtype, config.reduce_dtype


def passed_cases(lines: Path | None) -> dict[tuple[int, str], float]:
    """Ranks and label of each case that passed in earlier runs -> its difference."""
    if lines is None or not lines.exists():
        return {}
    return {(ranks, label): off for ranks, label, off in map(json.loads, lines.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--every", type=int, default=1, help="of the chosen cases run only every Nth, and each schedule once")
    parser.add_argument("--only", default="", help="run only cases whose label contains this text")
    parser.add_argument("--lines", type=Path, help="file of the cases that passed, which are not run again")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="longest time of a case, more where other work runs beside it"
    )
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    passed = passed_cases(arguments.lines)
    cases = {ranks: matrix(ranks) for ranks in arguments.ranks}
    whole = arguments.every == 1 and not arguments.only
    missing = untested(case for ranks in RANKS for case in cases.get(ranks) or matrix(ranks)) if whole else []
    rows = []
    for ranks, mine in cases.items():
        chosen = some([case for case in mine if arguments.only in case.label()], arguments.every)
        rows += [Row(case=case, off=passed[ranks, case.label()]) for case in chosen if (ranks, case.label()) in passed]
        chosen = [case for case in chosen if (ranks, case.label()) not in passed]
        with Gang(ranks, compare, arguments.seconds) as gang:
            for done, row in enumerate(run(gang, chosen), 1):
                rows.append(row)
                if arguments.lines and row.right:
                    with arguments.lines.open("a") as file:
                        file.write(json.dumps([ranks, row.case.label(), row.off]) + "\n")
                if done % 100 == 0:
                    print(f"{ranks} ranks: {done} of {len(chosen)} cases, {time.monotonic() - began:.0f} s", flush=True)
                if not row.right:
                    print(f"WRONG {row.case.label()}: {row.error or f'{row.off:.2e} > {row.case.bound:.1e}'}", flush=True)
    text = summary(rows, time.monotonic() - began)
    print(text)
    for claim in missing:
        print(f"UNTESTED {claim}")
    wrong = sum(not row.right for row in rows)
    if arguments.markdown and not wrong and not missing:
        arguments.markdown.write_text(text)
    print(f"{len(rows) - wrong} passed, {wrong} failed, {len(missing)} untested")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
