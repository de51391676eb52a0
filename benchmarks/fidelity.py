"""Steps of fewer micro-batches, extrapolated, against full ones: how well they agree, and what they save.

python -m benchmarks.fidelity [--rounds 3] [--most 4] [--markdown docs/fidelity.md]
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from autotune.intervals import Repeat, Spread
from executor.runners.local import LocalRunner
from search_spaces.fewer import fewer_micro_batches
from search_spaces.huggingface import resolve_model
from search_spaces.model import ModelSpec
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
    """One configuration, measured either way in turn."""

    micro_batches: int
    config: TrialConfig
    full: list[TrialResult] = field(default_factory=list)
    fewer: list[TrialResult] = field(default_factory=list)

    def workload(self) -> Workload:
        samples = self.micro_batches * self.config.micro_batch_size * self.config.data_parallel_size(RANKS)
        return Workload(global_batch_size=samples, sequence_length=SEQUENCE_LENGTH)

    def ratio(self) -> Interval:
        """Extrapolated over full rate, from interleaved pairs; the spread is the pairs' own, with the prior of a CPU."""
        return Spread().ratio(list(map(_repeat, self.fewer)), list(map(_repeat, self.full)))


def _repeat(result: TrialResult) -> Repeat:
    assert result.samples_per_second is not None
    return Repeat(rate=result.samples_per_second.mean, within=result.within_relative_error)


def seconds(result: TrialResult) -> float:
    """Of the trial, less what starting its ranks took."""
    return sum(
        result.phase_seconds[phase] for phase in ("build", "warmup", "memory", "measure") if phase in result.phase_seconds
    )


def measure(runner: LocalRunner, case: Case, fidelity: Fidelity, reference: TrialResult | None) -> TrialResult:
    model = resolve_model(MODEL)
    assert isinstance(model, ModelSpec)
    result = runner.run(
        TrialRequest(
            attempt=f"{case.config.hash}-{fidelity.most_micro_batches}",
            model=model,
            config=case.config,
            workload=case.workload(),
            world_size=RANKS,
            fidelity=fidelity,
            reference_losses=reference.losses if reference else (),
        )
    )
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{case.config}: {result.outcome} {result.message}\n{result.traceback}")
    return result


def measure_all(cases: list[Case], rounds: int, most: int, trial_seconds: float) -> None:
    """Full, fewer, full, fewer …: drift meets both alike. The first trial of all only warms the processes up."""
    whole, fewer = (Fidelity(max_seconds=trial_seconds, most_micro_batches=count) for count in (None, most))
    with LocalRunner(RANKS, device="cpu") as runner:
        measure(runner, cases[0], whole, None)
        for case in cases:
            for _ in range(rounds):
                case.full.append(measure(runner, case, whole, None))
                case.fewer.append(measure(runner, case, fewer, case.full[-1]))
            print(f"{_name(case)}: {_ratio_text(case)}", flush=True)


def _name(case: Case) -> str:
    defaults = TrialConfig().values()
    return " ".join(f"{name}={value}" for name, value in case.config.values().items() if value != defaults[name]) or "defaults"


def _ratio_text(case: Case) -> str:
    ratio = case.ratio()
    return f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _row(case: Case, most: int) -> str:
    counts = fewer_micro_batches(case.config, case.workload(), RANKS, most)
    exact = all(
        a.collectives == b.collectives
        for full, fewer in zip(case.full, case.fewer, strict=True)
        for a, b in zip(full.ranks, fewer.ranks, strict=True)
    )
    took = [statistics.median(map(seconds, results)) for results in (case.full, case.fewer)]
    return (
        f"| {_name(case)} | {case.micro_batches} | {counts[0] if counts else '-'}, {counts[1] if counts else '-'} | "
        f"{_ratio_text(case)} | {took[0]:.1f} | {took[1]:.1f} | {1 - took[1] / took[0]:.0%} | {'same' if exact else 'DIFFER'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--trial-seconds", type=float, default=5.0)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    cases = [Case(count, TrialConfig(**knobs)) for count, knobs in CASES]  # type: ignore[arg-type]
    measure_all(cases, arguments.rounds, arguments.most, arguments.trial_seconds)
    agree = [case.ratio().low <= 1.0 <= case.ratio().high for case in cases]
    off = [abs(case.ratio().mean - 1.0) for case in cases]
    took = [sum(seconds(result) for case in cases for result in getattr(case, which)) for which in ("full", "fewer")]
    method = (
        f"Written by `python -m benchmarks.fidelity`: `{MODEL}`, {SEQUENCE_LENGTH} tokens a sample, {RANKS} CPU ranks joined by "
        f"gloo, `most_micro_batches` {arguments.most}, {arguments.rounds} rounds of a full and an extrapolated trial in turn. "
        "The ratio is of extrapolated over full samples/s, with the 95 % interval of [interleaved pairs](intervals.md). Seconds "
        "are of a trial, from its build to its end, in the median. Collectives: whether counts and bytes of a step are the full "
        "one's on every rank."
    )
    found = (
        f"{sum(agree)} of {len(cases)} intervals hold 1; the median ratio is "
        f"{statistics.median(case.ratio().mean for case in cases):.3f}, and the mean distance from 1 {statistics.fmean(off):.1%}. "
        f"All trials in full took {took[0]:.0f} s, extrapolated {took[1]:.0f} s: {1 - took[1] / took[0]:.0%} saved."
    )
    lines = [
        "# Steps of fewer micro-batches against full ones",
        "",
        method,
        "",
        "| configuration | micro-batches | timed | ratio | full s | fewer s | saved | collectives |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(case, arguments.most) for case in cases),
        "",
        found,
    ]
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    return 0 if sum(agree) >= len(cases) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
