"""Are the stated 95 % intervals honest? 5 configurations x 30 interleaved repeats.

    python -m benchmarks.trials.intervals [--repeats 30] [--markdown docs/results/interval-coverage.md]

Each repeat's interval is computed as in a sweep: from the repeat's own steps and the spread between repeats of the trials
before it. It is right if it contains the configuration's grand mean over all repeats.
"""

import statistics
import sys
import time

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from benchmarks.common.written_page import give, page_parser
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Fidelity, Interval, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
BOUND = 0.90
CONFIGS = {
    "stage 0, micro-batch 4": TrialConfig(micro_batch_size=4),
    "stage 1, micro-batch 2": TrialConfig(zero_stage=1, micro_batch_size=2),
    "stage 2, micro-batch 4, checkpointing": TrialConfig(zero_stage=2, micro_batch_size=4, activation_checkpointing="full"),
    "stage 3, sharded, no prefetch": TrialConfig(
        zero_stage=3, micro_batch_size=4, param_persistence_threshold=0, prefetch_bucket_size=0
    ),
    "stage 3, micro-batch 2": TrialConfig(zero_stage=3, micro_batch_size=2),
}


def request(name: str, config: TrialConfig) -> TrialRequest:
    return TrialRequest(
        attempt=name,
        model=resolve_model("llama-tiny"),
        config=config,
        workload=Workload(global_batch_size=8, sequence_length=128),
        world_size=RANKS,
        fidelity=Fidelity(max_seconds=1.0, measure_memory=False),
    )


def measure(repeats: int) -> tuple[dict[str, list[Repeat]], dict[str, list[Interval]]]:
    """Interleaved trials, and the interval stated for each."""
    groups: dict[str, list[Repeat]] = {name: [] for name in CONFIGS}
    stated: dict[str, list[Interval]] = {name: [] for name in CONFIGS}
    with LocalRunner(RANKS) as runner:
        for number in range(repeats):
            for name, config in CONFIGS.items():
                result = runner.run(request(f"{name}-{number}", config))
                if result.samples_per_second is None:
                    raise SystemExit(f"a trial ended {result.outcome}: {result.message}\n{result.traceback}")
                repeat = Repeat(rate=result.samples_per_second.mean, within=result.within_relative_error)
                spread = pooled_spread(groups.values(), Spread())
                stated[name].append(spread.interval(repeat.rate, repeat.within))
                groups[name].append(repeat)
    return groups, stated


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    began = time.monotonic()
    groups, stated = measure(arguments.repeats)
    method = (
        f"Written by `make bench`: {len(CONFIGS)} configurations of `llama-tiny` on {RANKS} CPU ranks, {arguments.repeats} "
        "interleaved repeats each, on a warm gang. Each interval uses only trials up to its own."
    )
    lines = [
        "# Are the stated 95 % intervals right?",
        "",
        method,
        "",
        "| configuration | grand mean, samples/s | repeats' deviation | median half-width | intervals that contain it |",
        "|---|---|---|---|---|",
    ]
    held = total = 0
    for name, repeats in groups.items():
        rates = [repeat.rate for repeat in repeats]
        grand = statistics.fmean(rates)
        good = sum(interval.low <= grand <= interval.high for interval in stated[name])
        half = statistics.median((interval.high - interval.low) / 2 / interval.mean for interval in stated[name])
        held, total = held + good, total + len(repeats)
        deviation = statistics.stdev(rates) / grand
        lines.append(f"| {name} | {grand:.1f} | {deviation:.1%} | {half:.1%} | {good} of {len(repeats)} |")
    spread = pooled_spread(groups.values(), Spread())
    seconds = time.monotonic() - began
    verdict = (
        f"{held} of {total} intervals contain the grand mean: {held / total:.1%} (bound {BOUND:.0%}). "
        f"Spread between repeats after all trials: {spread.relative:.1%}. {seconds:.0f} s."
    )
    lines += ["", verdict]
    give(lines, arguments.markdown)
    print("the bound holds" if held / total >= BOUND else "THE BOUND IS MISSED")
    return 0 if held / total >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
