"""Steps of fewer micro-batches, extrapolated, against full steps: how well they agree, and the time they save.

python -m benchmarks.trials.fidelity [--cycles 12] [--most 4] [--markdown docs/results/fidelity.md]
"""

import dataclasses
import json
import math
import statistics
import sys
from dataclasses import dataclass

from benchmarks.common.written_page import give, page_parser
from executor.measurement.meter import Line, line_of
from executor.measurement.timing import student_t_975
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Interval, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
SEQUENCE_LENGTH = 16
MODEL = "llama-tiny"
CASES: tuple[tuple[int, dict[str, object]], ...] = (
    (8, {"zero_stage": 0}),
    (8, {"zero_stage": 2, "overlap_comm": True}),
    (8, {"zero_stage": 3, "micro_batch_size": 2}),
    (8, {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    (16, {"zero_stage": 1}),
    (16, {"zero_stage": 2, "overlap_comm": False}),
    (16, {"zero_stage": 3, "activation_checkpointing": "full"}),
    (16, {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"}),
    (16, {"tensor_parallel_size": 2}),
    (32, {"zero_stage": 0, "micro_batch_size": 2}),
    (32, {"zero_stage": 2}),
    (32, {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}),
)
"""Micro-batches of a full step, and the knobs."""


@dataclass(slots=True)
class Case:
    """One configuration: steps with three counts of micro-batches in turn, and one trial each, full and extrapolated."""

    micro_batches: int
    config: TrialConfig
    line: Line
    wall: dict[str, list[float]]
    """Seconds of steps with `first`, `second` and `full` micro-batches, by cycle, on the slowest rank."""
    cpu: dict[str, list[float]]
    """CPU seconds of the same steps, summed over the ranks."""
    full: TrialResult
    fewer: TrialResult

    def ratio(self, of: str = "wall") -> Interval:
        """Extrapolated over full step time in the same build; each cycle gives a pair, which cancels drift."""
        steps: dict[str, list[float]] = getattr(self, of)
        extrapolated = [self.line.at_full(*pair) for pair in zip(steps["first"], steps["second"], strict=True)]
        whole = statistics.fmean(steps["full"])
        off = [a - b for a, b in zip(extrapolated, steps["full"], strict=True)]
        error = student_t_975(len(off) - 1) * statistics.stdev(off) / math.sqrt(len(off)) / whole
        mean = statistics.fmean(extrapolated) / whole
        return Interval(mean=mean, low=mean - error, high=mean + error)

    def multiplied(self) -> float:
        """The larger timed step's CPU seconds, scaled in proportion to micro-batches, over the full step's."""
        scale = self.micro_batches / self.line.second
        return scale * statistics.fmean(self.cpu["second"]) / statistics.fmean(self.cpu["full"])


def seconds(result: TrialResult) -> float:
    """Seconds of the trial without the start of its ranks."""
    return sum(
        result.phase_seconds[phase] for phase in ("build", "warmup", "memory", "measure") if phase in result.phase_seconds
    )


def request(micro_batches: int, config: TrialConfig, fidelity: Fidelity) -> TrialRequest:
    model = resolve_model(MODEL)
    assert isinstance(model, ModelSpec)
    samples = micro_batches * config.micro_batch_size * config.data_parallel_size(RANKS)
    return TrialRequest(
        attempt=f"{config.hash}-{fidelity.most_micro_batches}-{fidelity.max_steps}",
        model=model,
        config=config,
        workload=Workload(global_batch_size=samples, sequence_length=SEQUENCE_LENGTH),
        world_size=RANKS,
        fidelity=fidelity,
    )


def run(runner: LocalRunner, request_: TrialRequest) -> TrialResult:
    result = runner.run(request_)
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{request_.config}: {result.outcome} {result.message}\n{result.traceback}")
    return result


def measure(steps: LocalRunner, trials: LocalRunner, count: int, config: TrialConfig, cycles: int, most: int) -> Case:
    fewer, whole = (request(count, config, Fidelity(max_seconds=2.0, most_micro_batches=bound)) for bound in (most, None))
    line = line_of(fewer)
    if line is None:
        raise SystemExit(f"{config} is not extrapolated from {most} micro-batches")
    cycled = dataclasses.replace(fewer, fidelity=Fidelity(max_steps=cycles, most_micro_batches=most))
    cycles_of = run(steps, cycled).environment
    return Case(
        micro_batches=count,
        config=config,
        line=line,
        wall=json.loads(cycles_of["wall"]),
        cpu=json.loads(cycles_of["cpu"]),
        full=run(trials, whole),
        fewer=run(trials, fewer),
    )


def measure_all(cycles: int, most: int) -> list[Case]:
    cases = []
    with (
        LocalRunner(RANKS, device="cpu", trial_function="benchmarks.trials.fidelity_rank:run_trial") as steps,
        LocalRunner(RANKS, device="cpu") as trials,
    ):
        run(trials, request(4, TrialConfig(), Fidelity(max_steps=5)))  # starting the ranks is not part of any trial's seconds
        for count, knobs in CASES:
            cases.append(measure(steps, trials, count, TrialConfig(**knobs), cycles, most))  # type: ignore[arg-type]
            print(f"{_name(cases[-1])}: {_ratio_text(cases[-1])}, CPU {_ratio_text(cases[-1], 'cpu')}", flush=True)
    return cases


def _name(case: Case) -> str:
    defaults = TrialConfig().values()
    return " ".join(f"{name}={value}" for name, value in case.config.values().items() if value != defaults[name]) or "defaults"


def _ratio_text(case: Case, of: str = "wall") -> str:
    ratio = case.ratio(of)
    return f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _row(case: Case) -> str:
    exact = all(a.collectives == b.collectives for a, b in zip(case.full.ranks, case.fewer.ranks, strict=True))
    took = seconds(case.full), seconds(case.fewer)
    return (
        f"| {_name(case)} | {case.micro_batches} | {case.line.first}, {case.line.second} | {_ratio_text(case)} | "
        f"{_ratio_text(case, 'cpu')} | "
        f"{case.multiplied():.3f} | {took[0]:.1f} | {took[1]:.1f} | {1 - took[1] / took[0]:.0%} | "
        f"{'same' if exact else 'DIFFER'} |"
    )


def _holds_one(ratio: Interval) -> bool:
    return ratio.low <= 1.0 <= ratio.high


def _agreement(cases: list[Case], of: str) -> str:
    ratios = [case.ratio(of) for case in cases]
    off = statistics.fmean(abs(ratio.mean - 1.0) for ratio in ratios)
    median = statistics.median(ratio.mean for ratio in ratios)
    return (
        f"{of}: {sum(map(_holds_one, ratios))} of {len(cases)} intervals cover 1, median {median:.3f}, mean distance {off:.1%}"
    )


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--most", type=int, default=4)
    arguments = parser.parse_args()
    cases = measure_all(arguments.cycles, arguments.most)
    agreed = "; ".join(_agreement(cases, of) for of in ("wall", "cpu"))
    took = [sum(seconds(getattr(case, which)) for case in cases) for which in ("full", "fewer")]
    method = (
        f"Written by `python -m benchmarks.trials.fidelity`: `{MODEL}`, {SEQUENCE_LENGTH} tokens a sample, {RANKS} CPU ranks "
        f"joined by gloo, at most {arguments.most} micro-batches. In one build, {arguments.cycles} cycles of a step with each "
        "count and a full one. *wall*: extrapolated over full step time, with the 95 % interval of their differences; *CPU*: "
        "the same for CPU seconds summed over the ranks, which other work on the machine changes less; *multiplied*: the "
        "larger timed step's CPU seconds scaled by the number of micro-batches instead. Seconds are those of one trial of each "
        "kind, from build to end. Collectives: whether counts and bytes of a step equal the full step's on every rank."
    )
    found = (
        f"{agreed}. Multiplied, the median is {statistics.median(case.multiplied() for case in cases):.3f}. All trials in full "
        f"took {took[0]:.0f} s, extrapolated {took[1]:.0f} s: {1 - took[1] / took[0]:.0%} saved."
    )
    lines = [
        "# Steps of fewer micro-batches against full ones",
        "",
        method,
        "",
        "| configuration | micro-batches | timed | wall | CPU | multiplied | full s | fewer s | saved | collectives |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, cases),
        "",
        found,
    ]
    give(lines, arguments.markdown)
    return 0 if sum(map(_holds_one, (case.ratio() for case in cases))) >= len(cases) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
