"""Goodput: the closed form against the simulation and publications, and a cluster on which the fastest layout is not the best.

python -m benchmarks.goodput [--cases 200] [--runs 1000] [--markdown docs/results/goodput.md]
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.goodput.choice import RunChoice
from autotune.goodput.closed_form import best_interval, end_date, expected
from autotune.goodput.failures import failure_rates, preset_names
from autotune.goodput.run import Bandwidths, CheckpointKind, Run, checkpoint_of
from autotune.goodput.terms import TERMS, parse_terms
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, RankedPlan, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from benchmarks.common.written_page import judge, page_parser
from benchmarks.goodput.cases import MOST_MISSING, SLOWEST, random_case
from benchmarks.goodput.publications import LLAMA_STATE, NODE, Publication, publications
from benchmarks.goodput.simulation import simulate
from search_spaces.knob_values import value_text
from search_spaces.trial_config import TrialConfig

CLOSE, FAST = 0.02, 1.0
"""Largest relative difference of the means; seconds of a simulated run."""
PUBLISHED = 0.1
"""Largest relative difference from a published figure."""
OUTSIDE = ("1,024 GPUs, from jobs on 8 GPUs", "restart, if failures were a Poisson process")
"""Figures that are shown although they are further away; the page explains each."""
MODEL, CLUSTER, BATCH, LENGTH = "llama-3-70b", "dgx-h100:2048", 16384, 8192
PINS = {"hsdp_shard_size": (0, 64, 256, 1024)}
TEMPLATE = Path(__file__).parents[1] / "data" / "goodput-page.md"
TERMS_OF_EXAMPLE = ("failures=rsc1", "checkpoint=synchronous", "write_bandwidth=20e9", "restart_seconds=900")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The closed form beside the simulation, over random cases."""

    errors: np.ndarray
    deviations: np.ndarray
    """Standard deviation of the duration, relative to the simulation's."""
    quantiles: np.ndarray
    """95 % quantile, likewise, minus 1."""


def agreement(cases: int, runs: int) -> Agreement:
    """Compare in random cases."""
    found = []
    for seed in range(cases):
        case = random_case(seed)
        simulated = simulate(case.run, case.work, case.interval, runs=runs, seed=seed)
        date = end_date(case.run, case.work, case.interval)
        late = float(np.quantile(simulated.seconds, 0.95))
        spread = float(simulated.seconds.std()) or 1.0
        found.append((date.mean / simulated.mean - 1, date.deviation / spread, date.quantile(0.95) / late - 1))
    errors, deviations, quantiles = (np.array(column) for column in zip(*found, strict=True))
    return Agreement(errors=errors, deviations=deviations, quantiles=quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Time of the simulation of 16,384 devices for 54 days."""

    one: float
    """CPU seconds of one run."""
    thousand: float
    """CPU seconds of 1,000 runs together."""
    interruptions: float


def llama_run() -> Run:
    """16,384 H100 with the failures of Llama 3, as in the publications."""
    checkpoint = checkpoint_of(LLAMA_STATE, Bandwidths(), CheckpointKind.SYNCHRONOUS, NODE)
    return Run(nodes=2048, step_seconds=10.0, failures=failure_rates("llama3", 2048), checkpoint=checkpoint, spares=32)


def speed(run: Run) -> Speed:
    """Time one run and 1,000."""
    course = expected(run)
    work = 54 * 86400 * course.effective
    started = time.process_time()
    simulate(run, work, course.interval, runs=1)
    one = time.process_time() - started
    started = time.process_time()
    many = simulate(run, work, course.interval, runs=1000)
    return Speed(one=one, thousand=time.process_time() - started, interruptions=float(many.interruptions.mean()))


def picture(run: Run) -> list[str]:
    """Effective training time by interval: the closed form as a line, the simulation as bars."""
    factors = (0.125, 0.25, 0.5, 1, 2, 4, 8)
    best = best_interval(run)
    intervals = [max(round(best * factor / run.step), 1) * run.step for factor in factors]
    work = 10 * 86400.0
    line = [100 * expected(run, interval).effective for interval in intervals]
    bars = [100 * work / simulate(run, work, interval, runs=200).mean for interval in intervals]
    labels = ", ".join(f'"{interval / 60:.0f}"' for interval in intervals)
    low = int(min(line)) - 2
    return [
        "```mermaid",
        "xychart-beta",
        '    title "Effective training time of 16,384 GPUs by minutes between checkpoints"',
        f'    x-axis "minutes between checkpoints; the best is {best / 60:.0f}" [{labels}]',
        f'    y-axis "%" {low} --> {int(max(line)) + 2}',
        f"    bar [{', '.join(f'{value:.2f}' for value in bars)}]",
        f"    line [{', '.join(f'{value:.2f}' for value in line)}]",
        "```",
        "",
        "Bars: mean of 200 simulated runs. Line: the closed form. Failures of Llama 3, synchronous checkpoints at 100 GB/s.",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A cluster on which the fastest layout does not have the best goodput."""

    question: Question
    fastest: TrialConfig
    fastest_seconds: float
    run: RunChoice
    """The best way to run the fastest."""
    best: RankedPlan


def example() -> Example:
    """Plan for throughput and for goodput; the fastest layout is then planned alone, to see what it keeps."""

    def asked(pins: dict[str, object]) -> Question:
        return question_of(
            model_of(MODEL, None, None, None), cluster_of(CLUSTER, None, None), global_batch_size=BATCH,
            sequence_length=LENGTH, pins=pins,
        )  # fmt: skip

    terms = parse_terms(TERMS_OF_EXAMPLE)
    (first,) = plan(asked(dict(PINS)), PlanOptions(top=1)).plans
    ties = [(tie.seconds, tie.config) for tie in first.ties]
    seconds, config = min([(first.estimate.step_seconds.mean, first.estimate.config), *ties], key=lambda pair: pair[0])
    for_goodput = PlanOptions(objective=PlanObjective.GOODPUT, goodput=terms, top=1)
    (best,) = plan(asked(dict(PINS)), for_goodput).plans
    (alone,) = plan(asked(dict(config.every_value())), for_goodput).plans
    return Example(question=asked(dict(PINS)), fastest=config, fastest_seconds=seconds, run=alone.goodput[0], best=best)


def example_lines(found: Example) -> list[str]:
    """The example as a page section."""
    base, best = found.best.base, found.best.goodput[0]

    tokens = found.run.tokens
    rows = [
        ("fastest", found.fastest, found.fastest_seconds, found.run),
        ("best goodput", found.best.estimate.config, found.best.estimate.step_seconds.mean, best),
    ]
    lines = [
        f"| layout | knobs | s/step | recovery | effective | million tokens kept/s | days until {tokens:.2g} tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config, seconds, choice in rows:
        knobs = ", ".join(
            f"`{knob}={value_text(getattr(config, knob))}`" for knob in config.differences(base) if "bucket" not in knob
        )
        lines.append(
            f"| {name} | {knobs} | {seconds:.2f} | {choice.run.recovery}, {choice.run.spares} spares, every "
            f"{choice.interval_steps} steps | {choice.effective:.1%} | {choice.tokens_kept_per_second / 1e6:.2f} | "
            f"{tokens / choice.tokens_kept_per_second / 86400:.1f} |"
        )
    return lines


def publication_lines(found: Publication) -> list[str]:
    """A publication as a page section."""
    lines = [f"### {found.title}", "", "| figure | published | computed | difference | basis |", "|---|---|---|---|---|"]
    for figure in found.figures:
        bound = "more than " if figure.at_least else ""
        error = "holds" if figure.at_least and not figure.error else f"{figure.error:+.1%}"
        published, computed = f"{bound}{figure.published:g} {figure.unit}", f"{figure.computed:.4g} {figure.unit}"
        lines.append(f"| {figure.name} | {published.strip()} | {computed.strip()} | {error} | {figure.basis} |")
    lines += ["", found.remarks, "", "| input | value | source |", "|---|---|---|"]
    lines += [f"| {given.name} | {given.value} | {given.source} |" for given in found.inputs]
    if found.varied:
        lines += ["", "Assumed inputs varied, the others unchanged:", ""]
    for name, values in found.varied:
        lines.append(f"- {name}: " + ", ".join(f"{value} → {figure:.1f}" for value, figure in values))
    return [*lines, ""]


def problems_of(agreed: Agreement, timed: Speed, found: Sequence[Publication], shown: Example) -> list[str]:
    """What does not hold."""
    problems = []
    if np.abs(agreed.errors).max() > CLOSE:
        problems.append(f"a mean differs by {np.abs(agreed.errors).max():.1%}")
    if timed.one > FAST:
        problems.append(f"a simulated run takes {timed.one:.2f} s")
    problems += [
        f"{publication.title}: {figure.name} differs by {figure.error:+.1%}"
        for publication in found
        for figure in publication.figures
        if abs(figure.error) > PUBLISHED and figure.name not in OUTSIDE
    ]
    if shown.best.goodput[0].tokens_kept_per_device_hour <= shown.run.tokens_kept_per_device_hour:
        problems.append("the fastest layout has the best goodput")
    return problems


def page(agreed: Agreement, timed: Speed, found: Sequence[Publication], shown: Example, drawn: list[str], runs: int) -> str:
    """The page."""
    errors = np.abs(agreed.errors)
    slower = shown.best.estimate.step_seconds.mean / shown.fastest_seconds - 1
    more = shown.best.goodput[0].tokens_kept_per_device_hour / shown.run.tokens_kept_per_device_hour - 1
    one_of_inputs = "| `{}` | {} | {} {} |"
    rates = [failure_rates(name, 1) for name in preset_names()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        model=MODEL,
        cluster=CLUSTER,
        batch=BATCH,
        terms=" ".join(f"--goodput {term}" for term in TERMS_OF_EXAMPLE),
        example="\n".join(example_lines(shown)),
        hours=failure_rates("rsc1", 1).mean_hours_between(2048),
        slower=slower,
        more=more,
        inputs="\n".join(
            one_of_inputs.format(name, _default(term.default), term.metadata["help"], _unit(term.metadata["unit"]))
            for name, term in TERMS.items()
        ),
        rates="\n".join(f"| `{rate.name}` | {1000 * rate.per_node_day:.3g} | {rate.source} |" for rate in rates),
        picture="\n".join(drawn),
        timed=timed,
        cases=len(errors),
        runs=runs,
        slowest=SLOWEST,
        missing=MOST_MISSING,
        errors="\n".join(
            (
                _errors_row("mean duration, difference", errors),
                _errors_row("95 % quantile of the duration, difference", np.abs(agreed.quantiles)),
                _errors_row("standard deviation, difference", np.abs(agreed.deviations - 1)),
            )
        ),
        publications="\n".join(line for publication in found for line in publication_lines(publication)).rstrip(),
    )


def _errors_row(name: str, errors: np.ndarray) -> str:
    return f"| {name} | {np.median(errors):.2%} | {np.quantile(errors, 0.95):.2%} | {errors.max():.2%} |"


def _unit(text: str) -> str:
    return f"({text})" if text else ""


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def main() -> int:
    """Run the benchmark. Return the exit code."""
    parser = page_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    run = llama_run()
    timed, drawn, found, shown = speed(run), picture(run), publications(), example()
    agreed = agreement(options.cases, options.runs)
    return judge(
        page(agreed, timed, found, shown, drawn, options.runs), problems_of(agreed, timed, found, shown), options.markdown
    )


if __name__ == "__main__":
    sys.exit(main())
