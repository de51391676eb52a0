"""Overhead of a trial beyond its steps: warm against cold processes, and in a sweep of 50 one-second trials.

python -m benchmarks.trials.trial_overhead [--repeats 10] [--trials 50] [--markdown docs/results/trial-overhead.md]
"""

import statistics
import sys
import tempfile
import time

from autotune import tune
from benchmarks.common.written_page import give, page_parser
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

RANKS = 2
WARM_BOUND_SECONDS = 0.5
COLD_OVER_WARM_BOUND = 15.0
OUTSIDE_BOUND = 0.10
SHORT = Fidelity(min_steps=5, max_steps=10, target_relative_half_width=0.0)
ONE_SECOND = {"min_steps": 2, "max_seconds": 0.5, "target_relative_half_width": 1e-9}
"""With build, warm-up and the memory step around it, a trial takes about a second."""


def request(name: str) -> TrialRequest:
    return TrialRequest(
        attempt=name,
        model=resolve_model("llama-tiny"),
        config=TrialConfig(zero_stage=2, micro_batch_size=4),
        workload=Workload(global_batch_size=8, sequence_length=128),
        world_size=RANKS,
        fidelity=SHORT,
    )


def run(runner: LocalRunner, name: str) -> TrialResult:
    result = runner.run(request(name))
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"a trial ended {result.outcome}: {result.message}\n{result.traceback}")
    return result


def beyond_steps(began: float, result: TrialResult) -> float:
    """Seconds from request to result, minus the trial's optimizer steps: warm-up, the memory step, timed steps."""
    memory_step = statistics.fmean(result.step_seconds)
    return time.perf_counter() - began - result.phase_seconds["warmup"] - memory_step - sum(result.step_seconds)


def measure(repeats: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Measure interleaved: a trial on a cold gang, then a trial on the warm one."""
    warm, cold, phases = [], [], {}
    with LocalRunner(RANKS) as kept:
        run(kept, "first")
        for number in range(repeats):
            began = time.perf_counter()
            with LocalRunner(RANKS) as fresh:
                cold.append(beyond_steps(began, run(fresh, f"cold-{number}")))
            began = time.perf_counter()
            result = run(kept, f"warm-{number}")
            warm.append(beyond_steps(began, result))
            phases = result.phase_seconds
    return warm, cold, phases


def sweep(trials: int, runner: str, strategy: str) -> tuple[float, float, int, float]:
    """Seconds from the first trial's start to the last one's end, seconds inside trials, trials, start-up seconds."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/sweep.db"
        began = time.time()
        result = tune(
            "llama-tiny", space="zero-buckets", strategy=strategy, trials=trials, global_batch_size=8,
            sequence_length=32, runner=runner, database=database, confirm_repeats=0, fidelity=ONE_SECOND,
        )  # fmt: skip
        with open_store(database) as store:
            records = [trial for trial in store.trials.of(result.job_id) if trial.started and trial.finished and trial.result]
        first, last = records[0].started, max(trial.finished for trial in records if trial.finished)
        assert first is not None
        inside = sum(
            seconds
            for trial in records
            for phase, seconds in (trial.result.phase_seconds if trial.result else {}).items()
            if phase in ("build", "warmup", "memory", "measure")
        )
        return (last - first).total_seconds(), inside, len(records), first.timestamp() - began


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s (min {min(values):.3f}, max {max(values):.3f})"


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--runner", default="ray")
    parser.add_argument("--strategy", default="tpe")
    arguments = parser.parse_args()
    warm, cold, phases = measure(arguments.repeats)
    ratio = statistics.median(cold) / statistics.median(warm)
    span, inside, count, start = sweep(arguments.trials, arguments.runner, arguments.strategy)
    outside = 1 - inside / span
    method = (
        f"Written by `make bench`. `llama-tiny` on {RANKS} CPU ranks, {arguments.repeats} trials each, interleaved. "
        "Time from request to result, minus the trial's optimizer steps (warm-up, the memory step, timed steps); building, the "
        "memory account and all messages count."
    )
    swept = (
        f"A sweep of {count} trials of {inside / count:.2f} s on the {arguments.runner} runner by {arguments.strategy}: "
        f"{span:.1f} s from the first trial's start to the last one's end, {inside:.1f} s of them inside trials "
        f"(start of build to end of measurement): {outside:.1%} outside (bound {OUTSIDE_BOUND:.0%}). "
        f"Start-up before the first trial: {start:.1f} s."
    )
    last = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
    lines = [
        "# Overhead of a trial beyond its steps",
        "",
        method,
        "",
        "| | median | bound |",
        "|---|---|---|",
        f"| warm process | {spread(warm)} | {WARM_BOUND_SECONDS} s |",
        f"| cold process | {spread(cold)} | |",
        f"| cold over warm | {ratio:.1f} | at least {COLD_OVER_WARM_BOUND:.0f} |",
        "",
        swept,
        "",
        f"Phases of the last warm trial, seconds: {last}.",
    ]
    give(lines, arguments.markdown)
    good = statistics.median(warm) <= WARM_BOUND_SECONDS and ratio >= COLD_OVER_WARM_BOUND and outside <= OUTSIDE_BOUND
    print("all bounds hold" if good else "A BOUND IS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
