"""The deepspeed engine in warm ranks: overhead of a trial beyond its steps, memory growth, and the native engine beside it.

    python -m benchmarks.engines.deepspeed_engine [--trials 30] [--rounds 3] [--markdown docs/results/deepspeed-engine.md]

6 minutes on two idle cores. DeepSpeed 0.19.8 must be installed (`pip install 'autotune-parallel[deepspeed]'`); without it,
the program prints the reason and measures nothing.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.prediction.planning.depth import spearman
from benchmarks.common.written_page import give, page_parser, table
from executor.engines.deepspeed.capability import installed_version, unusable
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
MODEL = resolve_model("llama-tiny")
WORK = Workload(global_batch_size=8, sequence_length=128)
SHORT = Fidelity(max_warmup_steps=6, min_steps=5, max_steps=10)
TIMED = Fidelity(max_warmup_steps=10, min_steps=8, max_steps=60, max_seconds=2.0)
OVERHEAD_BOUND = 3.0
"""Seconds that a warm trial may take beyond its steps."""
GROWTH_BOUND = 0.10
"""Largest growth of a rank's resident set from the end of the first round of configurations to the end of the last."""
LOSS_BOUND = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the first three losses from the native engine's."""
SMALL = 13_000
IN_A_ROW: dict[str, TrialConfig] = {
    "stage 0": TrialConfig(zero_stage=0, micro_batch_size=2),
    "stage 1": TrialConfig(zero_stage=1, micro_batch_size=2),
    "stage 2": TrialConfig(zero_stage=2, micro_batch_size=2),
    "stage 3": TrialConfig(zero_stage=3, micro_batch_size=2),
    "stage 2, small buckets": TrialConfig(zero_stage=2, micro_batch_size=2, reduce_bucket_size=SMALL, overlap_comm=False),
    "stage 3, small sizes": TrialConfig(
        zero_stage=3, micro_batch_size=2, reduce_bucket_size=SMALL, prefetch_bucket_size=SMALL, param_persistence_threshold=0,
    ),
    "stage 2, optimizer offloaded": TrialConfig(zero_stage=2, micro_batch_size=2, offload_optimizer="cpu"),
    "stage 3, all offloaded": TrialConfig(zero_stage=3, micro_batch_size=2, offload_optimizer="cpu", offload_param="cpu"),
    "AutoTP 2": TrialConfig(zero_stage=0, micro_batch_size=2, tensor_parallel_size=2),
    "stage 2 in bf16": TrialConfig(zero_stage=2, micro_batch_size=2, precision="bf16"),
}  # fmt: skip
RANKED: tuple[TrialConfig, ...] = tuple(
    TrialConfig(zero_stage=stage, micro_batch_size=micro, reduce_bucket_size=bucket)
    for stage in range(4)
    for micro in (1, 2, 4)
    for bucket in ((500_000_000,) if stage == 0 else (SMALL, 500_000_000))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of the trials in a row."""

    name: str
    result: TrialResult
    off: float
    """Largest relative difference of a loss from the native engine's."""
    beyond: float
    """Seconds from request to result, minus the trial's optimizer steps."""
    resident: int
    """Resident bytes of the larger rank, after the trial."""

    @property
    def right(self) -> bool:
        bound = LOSS_BOUND[IN_A_ROW[self.name].precision]
        return self.result.outcome is Outcome.OK and self.off <= bound


def request(engine: str, config: TrialConfig, name: str, fidelity: Fidelity = SHORT) -> TrialRequest:
    return TrialRequest(
        attempt=name, model=MODEL, config=config, workload=WORK, world_size=RANKS, engine=engine, fidelity=fidelity,
        timeout_seconds=120.0,
    )  # fmt: skip


def in_a_row(runner: LocalRunner, trials: int) -> list[Row]:
    """Run `trials` trials of the deepspeed engine, cycling through its configurations."""
    reference = runner.run(request("native", TrialConfig(micro_batch_size=2), "reference"))
    runner.run(request("deepspeed", TrialConfig(micro_batch_size=2), "imports"))
    rows = []
    for number in range(trials):
        name = list(IN_A_ROW)[number % len(IN_A_ROW)]
        began = time.perf_counter()
        result = runner.run(request("deepspeed", IN_A_ROW[name], f"{number}"))
        seconds = time.perf_counter() - began
        rows.append(Row(
            name=name, result=result, off=_off(result, reference), beyond=seconds - _steps(result), resident=max(residents()),
        ))  # fmt: skip
        note = result.message if result.outcome is not Outcome.OK else f"{rows[-1].beyond:.2f} s beyond its steps"
        print(f"{number + 1:2} {name}: {result.outcome}, {note}, {rows[-1].resident / 1e6:.0f} MB", flush=True)
    return rows


def side_by_side(runner: LocalRunner, rounds: int) -> dict[str, list[float]]:
    """Mean samples/s of every configuration of `RANKED` on each engine, measured in turn."""
    rates = {engine: [list[float]() for _ in RANKED] for engine in ("native", "deepspeed")}
    for number in range(rounds):
        for place, config in enumerate(RANKED):
            for engine in rates if (number + place) % 2 else reversed(rates):
                result = runner.run(request(engine, config, f"{number} {place} {engine}", TIMED))
                if result.samples_per_second is None:
                    raise SystemExit(f"{engine} ended {result.outcome}: {result.message}\n{result.traceback}")
                rates[engine][place].append(result.samples_per_second.mean)
        print(f"round {number + 1} of {rounds}", flush=True)
    return {engine: [statistics.fmean(values) for values in found] for engine, found in rates.items()}


def residents() -> list[int]:
    """Resident bytes of each child process."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children]
    return [count * 4096 for count in pages]


def page(rows: list[Row], rates: dict[str, list[float]] | None) -> tuple[list[str], bool]:
    """Lines of markdown, and whether every bound holds."""
    beyond = [row.beyond for row in rows]
    last_of_first = rows[min(len(IN_A_ROW), len(rows)) - 1].resident
    growth = rows[-1].resident / last_of_first - 1
    right = sum(row.right for row in rows)
    cost = (
        f"at most {max(beyond):.2f} s beyond its steps, median {statistics.median(beyond):.2f} s (bound {OVERHEAD_BOUND:g} s)"
    )
    kept = f"a rank's resident set {growth:+.1%} from the end of trial {min(len(IN_A_ROW), len(rows))} to the end of the last"
    claims = [
        (right == len(rows), f"{right} of {len(rows)} trials OK with native's losses"),
        (max(beyond) <= OVERHEAD_BOUND, cost),
        (growth <= GROWTH_BOUND, f"{kept} (bound {GROWTH_BOUND:+.0%}), {rows[-1].resident / 1e6:.0f} MB then"),
    ]
    cells = [
        [
            f"{number + 1}", row.name, str(row.result.outcome), f"{row.off:.1e}", f"{row.beyond:.2f}",
            f"{row.resident / 1e6:.0f}", f"{(row.result.peak_memory_bytes or 0) / 1e6:.2f}",
        ]
        for number, row in enumerate(rows)
    ]  # fmt: skip
    method = (
        f"DeepSpeed {installed_version()} on {RANKS} CPU ranks over loopback, `llama-tiny`, after one trial that imports it"
    )
    lines = [
        "# The deepspeed engine in warm ranks", "",
        f"Written by `python -m benchmarks.engines.deepspeed_engine`: {method}.", "",
        *(f"- {'holds' if holds else '**DOES NOT HOLD**'}: {claim}" for holds, claim in claims), "",
        *table(["trial", "configuration", "outcome", "losses off by", "s beyond steps", "RSS MB", "peak MB"], cells), "",
        *(_ranking(rates) if rates else []),
    ]  # fmt: skip
    return lines, all(holds for holds, _ in claims)


def _ranking(rates: dict[str, list[float]]) -> list[str]:
    native, theirs = (np.array(rates[engine]) for engine in ("native", "deepspeed"))
    correlation = spearman(native, theirs)
    best = int(native.argmax())
    lost = 1 - theirs[best] / theirs.max()
    cells = [
        [_text(config), f"{one:.1f}", f"{other:.1f}", f"{one / other:.2f}"]
        for config, one, other in zip(RANKED, native, theirs, strict=True)
    ]
    ranks = f"Spearman of {len(RANKED)} configurations' samples/s: {'none' if correlation is None else f'{correlation:.2f}'}"
    answer = f"Native's best ({_text(RANKED[best])}) loses {lost:.1%} on DeepSpeed against its own best"
    return [
        "## The same knobs on native and DeepSpeed", "", f"{ranks}. {answer}.", "",
        *table(["configuration", "native", "deepspeed", "ratio"], cells),
    ]  # fmt: skip


def _text(config: TrialConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.differences(TrialConfig()).items()) or "defaults"


def _off(result: TrialResult, reference: TrialResult) -> float:
    pairs = zip(result.losses, reference.losses, strict=False)
    return max((abs(one - other) / abs(other) for one, other in pairs), default=float("inf"))


def _steps(result: TrialResult) -> float:
    if not result.step_seconds:
        return 0.0
    return result.phase_seconds["warmup"] + statistics.fmean(result.step_seconds) + sum(result.step_seconds)


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the comparison with native; 0: no comparison")
    arguments = parser.parse_args()
    refusal = unusable(installed_version())
    if refusal is not None:
        print(f"nothing is measured: {refusal.message}; {refusal.remedy}")
        return 0
    with LocalRunner(RANKS, device="cpu") as runner:
        rows = in_a_row(runner, arguments.trials)
        rates = side_by_side(runner, arguments.rounds) if arguments.rounds else None
    lines, good = page(rows, rates)
    give(lines, arguments.markdown)
    print("all bounds hold" if good else "A BOUND IS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
