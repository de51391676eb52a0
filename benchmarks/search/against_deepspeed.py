"""Side by side with DeepSpeed's own autotuner: the same small model, machine, knobs and number of trials, from a cold command.

    python -m benchmarks.search.against_deepspeed [--deepspeed-python PATH] [--rounds 5]
        [--markdown docs/results/against-deepspeed.md]

About 10 minutes on two idle cores, 4 of them for DeepSpeed's autotuner. PATH is a Python that has DeepSpeed 0.19.8 with its
autotuning extra (`pip install "deepspeed[autotuning]==0.19.8"`); without it, the program prints why and measures nothing.

All of it runs in a network namespace whose loopback has the rate of a network: between ranks of one machine, communication is
almost free, which is not what people tune for. The namespace needs root and Linux.

DeepSpeed's autotuner runs on the CPU without ssh when LOCAL_SIZE gives the number of devices. After each experiment it calls
`pdsh` to kill leftover processes by name. Its launcher has already waited for them, so a `pdsh` that does nothing replaces it.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.common.paired_statistics import estimate, paired_gain
from benchmarks.common.shaped_link import ShapedLoopback
from benchmarks.common.shaped_link import why_not as why_not_shaped
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.search.grid_design import Grid
from benchmarks.search.tuner_answers import (
    RANKS,
    SPACE,
    Answer,
    keep,
    rate_by_deepspeed_engine,
    run_deepspeed,
    run_ours,
    tuned_before,
)
from benchmarks.search.tuner_answers import why_not as why_not_deepspeed
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

WHOLE_BOUND, TRIAL_BOUND = 8.0, 20.0
"""Required speedups of ours: from a cold command to the answer, and for each trial."""
INTRODUCTION = (
    "Written by `make bench` (`benchmarks/search/against_deepspeed.py`). DeepSpeed 0.19.8's autotuner (`deepspeed --autotuning",
    "tune`) and `autotune sweep`, each from a cold command on the same two ranks, over ZeRO stage, micro-batch and the knobs",
    "of DeepSpeed's templates, at the same global batch, with the same number of trials and the same work in each: DeepSpeed",
    "times two steps of a trial after 3 warm-up steps, without memory accounting and confirmation; ours times two or more",
    "after 4 or more, with both turned off. *A trial* is the cost of one more: the median time from one trial of the search",
    "to the next. Then one harness measures the answers in turn, with our engine and with DeepSpeed's own engine in separate",
    "processes; ours are the answers of all seeds, whose mean is compared in every round.",
)
Rates = dict[TrialConfig, list[float]]
"""Configuration -> samples/s in every round."""


def by_our_engine(configs: Sequence[TrialConfig], rounds: int) -> Rates:
    """Rates of the configurations, measured in turn by trials of our engine."""
    grid = Grid(RANKS)
    with LocalRunner(RANKS, device="cpu") as runner:
        runner.run(grid.request("first", configs[0]))

        def measured(config: TrialConfig) -> float:
            result = runner.run(grid.request("again", config))
            if result.outcome is not Outcome.OK or result.samples_per_second is None:
                raise SystemExit(f"the answer {name_of(config)} ended {result.outcome}: {result.message}")
            return result.samples_per_second.mean

        return in_turn(configs, rounds, measured, "our engine")


def in_turn(configs: Sequence[TrialConfig], rounds: int, measure: Callable[[TrialConfig], float], engine: str) -> Rates:
    """Measure every configuration once a round; each round begins with a different one."""
    rates: Rates = {config: [] for config in configs}
    for number in range(rounds):
        first = number % len(configs)
        for config in (*configs[first:], *configs[:first]):
            rates[config].append(measure(config))
            print(f"{engine}, round {number}: {rates[config][-1]:.1f} samples/s, {name_of(config)}", flush=True)
    return rates


def page(theirs: Answer, ours: Sequence[Answer], measured: dict[str, Rates], network: str) -> tuple[list[str], bool]:
    """Lines of markdown, and whether every bound holds."""
    whole = theirs.seconds / median(answer.seconds for answer in ours)
    trial = theirs.trial_seconds / median(answer.trial_seconds for answer in ours)
    run = theirs.per_run / median(answer.per_run for answer in ours)
    by_run = "whole commands over all their runs, with starts, profile and confirmations"
    claims = [
        (whole >= WHOLE_BOUND, f"{whole:.1f} times faster from a cold command to the answer (bound {WHOLE_BOUND:g})"),
        (trial >= TRIAL_BOUND, f"{trial:.1f} times faster for a trial (bound {TRIAL_BOUND:g}); {run:.1f} times by {by_run}"),
    ]
    rows = []
    for engine, rates in measured.items():
        our_rates = [_mean_rate(values) for values in zip(*(rates[answer.config] for answer in ours), strict=True)]
        lead = paired_gain(our_rates, rates[theirs.config])
        claims.append((lead.high >= 0.0, f"our answers against theirs on {engine}: {lead.signed_percent()}"))
        means = (estimate(values).mean for values in (our_rates, rates[theirs.config]))
        rows.append([engine, *(f"{mean:.1f}" for mean in means), lead.signed_percent()])
    headings = ["tuner", "seconds", "trials", "runs", "seconds a trial", "seconds a run", "answer"]
    lines = [
        "# Side by side with DeepSpeed's autotuner", "", *INTRODUCTION, network, "",
        *(f"- {'holds' if holds else '**DOES NOT HOLD**'}: {claim}" for holds, claim in claims), "",
        *table(headings, [_cells(answer) for answer in (*ours, theirs)]), "",
        "The answers, measured in turn, in samples/s:", "",
        *table(["engine", f"{ours[0].name}'s", f"{theirs.name}'s", "ours ahead by"], rows),
    ]  # fmt: skip
    return lines, all(holds for holds, _ in claims)


def _cells(answer: Answer) -> list[str]:
    return [
        answer.name, f"{answer.seconds:.1f}", str(answer.trials), str(answer.runs), f"{answer.trial_seconds:.2f}",
        f"{answer.per_run:.2f}", name_of(answer.config),
    ]  # fmt: skip


def _mean_rate(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def name_of(config: TrialConfig) -> str:
    """The values of the compared knobs."""
    return ", ".join(f"{name} {getattr(config, name)}" for name in SPACE)


def _print_answer(answer: Answer) -> None:
    print(f"{answer.name}: {answer.seconds:.1f} s, {answer.trial_seconds:.2f} s a trial, {name_of(answer.config)}", flush=True)


def compare(python: Path, folder: Path, arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Run both tuners and measure their answers; return lines of markdown and whether every bound holds."""
    theirs = tuned_before(arguments.keep) or keep(run_deepspeed(python, folder), arguments.keep)
    _print_answer(theirs)
    ours = []
    for seed in range(arguments.seeds):
        ours.append(answer := run_ours(folder, theirs.trials, seed, arguments.confirm_repeats))
        _print_answer(answer)
    configs = list(dict.fromkeys(answer.config for answer in (*ours, theirs)))
    measured = {"our engine": by_our_engine(configs, arguments.rounds)}
    measured["DeepSpeed's engine"] = in_turn(
        configs, arguments.rounds, lambda config: rate_by_deepspeed_engine(config, python, folder), "DeepSpeed's engine"
    )
    return page(theirs, ours, measured, f"The loopback that joins the ranks has {arguments.rate}, both directions together.")


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--deepspeed-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="number of our sweeps")
    parser.add_argument("--rate", default="1gbit", help="rate of the loopback, as tc writes it")
    parser.add_argument("--confirm-repeats", type=int, default=0, help="confirmation rounds of our sweeps; DeepSpeed has none")
    parser.add_argument("--keep", type=Path, help="folder for DeepSpeed's answer; an existing one is reused")
    arguments = parser.parse_args()
    python = arguments.deepspeed_python.absolute()
    if missing := why_not_shaped() or why_not_deepspeed(python):
        print(f"nothing is measured: {missing}")
        return 0
    print("DeepSpeed's autotuner takes about 4 minutes, ours 20 s each, the answers in turn 5 minutes", flush=True)
    with tempfile.TemporaryDirectory() as temporary, ShapedLoopback(arguments.rate) as loopback, loopback.entered():
        lines, good = compare(python, Path(temporary), arguments)
    give(lines, arguments.markdown)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
