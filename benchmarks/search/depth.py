"""Deep models extrapolated from shallow ones, against the full model: agreement of rates, ranking and peaks, and time saved.

    python -m benchmarks.search.depth [--layers 16] [--most 4] [--rounds 2] [--markdown docs/results/depth.md]

About 4 minutes on two idle cores, on a link shaped like the reference grid's, which needs root and Linux.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from autotune.prediction.planning.depth import correlation, spearman
from autotune.request.engines import capability_of
from benchmarks.common.paired_statistics import Estimate, paired_gain
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.search.grid_design import RATE_MBIT, Grid
from executor.runners.runner import Runner
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
WORKLOAD = Workload(global_batch_size=8, sequence_length=64)
FIDELITY = Fidelity(max_warmup_steps=10, min_steps=6, max_steps=30, max_seconds=2.0)
BLOCK = 110_000
"""Parameters: half a layer."""
CASES: tuple[dict[str, Value], ...] = (
    {"zero_stage": 0, "micro_batch_size": 1},
    {"zero_stage": 0, "micro_batch_size": 4},
    {"zero_stage": 1, "micro_batch_size": 2, "reduce_bucket_size": BLOCK},
    {"zero_stage": 2, "micro_batch_size": 4, "overlap_comm": False},
    {"zero_stage": 3, "micro_batch_size": 4},
    {"zero_stage": 3, "micro_batch_size": 1, "prefetch_bucket_size": 0},
    {"zero_stage": 1, "micro_batch_size": 4, "activation_checkpointing": "full"},
    {"tensor_parallel_size": 2, "micro_batch_size": 4},
    {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "micro_batch_size": 2},
    {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe", "micro_batch_size": 1},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, measured both full and shallow in every round."""

    config: TrialConfig
    whole: list[TrialResult]
    shallow: list[TrialResult]

    @property
    def rates(self) -> tuple[float, float]:
        """Samples/s of the whole model and extrapolated, the mean over rounds."""
        whole, shallow = (fmean(map(rate, results)) for results in (self.whole, self.shallow))
        return whole, shallow

    @property
    def off(self) -> Estimate:
        """Relative difference of the extrapolated rate from the full model's."""
        return paired_gain([*map(rate, self.shallow)], [*map(rate, self.whole)])

    @property
    def peaks(self) -> float:
        """Extrapolated peak over the whole model's."""
        return (self.shallow[0].peak_memory_bytes or 0) / (self.whole[0].peak_memory_bytes or 1)


def rate(result: TrialResult) -> float:
    """Samples/s."""
    return result.samples_per_second.mean if result.samples_per_second else 0.0


def seconds(results: Sequence[TrialResult]) -> float:
    """Seconds of the trials without the start of their ranks."""
    return sum(
        sum(result.phase_seconds.get(phase, 0.0) for phase in ("build", "warmup", "memory", "measure")) for result in results
    )


def space_of(layers: int) -> SearchSpace:
    """The search space for a model with `layers` layers on the reference grid's link."""
    grid = Grid(RANKS)
    model = dataclasses.replace(grid.model, num_layers=layers)
    return SearchSpace(
        model=model, cluster=grid.cluster, workload=WORKLOAD, world_size=RANKS, domains={}, capability=capability_of("native"),
        name="depth",
    )  # fmt: skip


def measure(runner: Runner, space: SearchSpace, most: int, rounds: int) -> list[Case]:
    """Measure every case both ways in each round, in turn, so that drift affects all equally."""
    cases = [Case(space.canonical(TrialConfig().replace(knobs)), [], []) for knobs in CASES]
    run(runner, space, cases[0].config, None)
    for number in range(rounds):
        for case in cases:
            case.whole.append(run(runner, space, case.config, None))
            case.shallow.append(run(runner, space, case.config, most))
            print(
                f"round {number}: {rate(case.whole[-1]):.1f} and {rate(case.shallow[-1]):.1f} samples/s, {name_of(case)}",
                flush=True,
            )
    return cases


def run(runner: Runner, space: SearchSpace, config: TrialConfig, most: int | None) -> TrialResult:
    """Run one trial; exit if it fails."""
    assert isinstance(space.model, ModelSpec)
    fidelity = dataclasses.replace(FIDELITY, most_layers=most)
    request = TrialRequest(
        attempt=f"{config.hash}-{most}",
        model=space.model,
        config=config,
        workload=WORKLOAD,
        world_size=RANKS,
        fidelity=fidelity,
    )
    result = runner.run(request)
    if result.outcome is not Outcome.OK or bool(result.extrapolated) != (most is not None):
        raise SystemExit(f"{config}: {result.outcome} {result.message or 'was run whole'}\n{result.traceback or ''}")
    return result


def name_of(case: Case) -> str:
    """The knobs that differ from the defaults."""
    defaults = TrialConfig().values()
    return " ".join(f"{name}={value}" for name, value in case.config.values().items() if value != defaults[name]) or "defaults"


def page(cases: Sequence[Case], space: SearchSpace, most: int, rounds: int) -> list[str]:
    """Lines of markdown."""
    assert isinstance(space.model, ModelSpec)
    whole, shallow = (np.array(side) for side in zip(*(case.rates for case in cases), strict=True))
    predicted = correlation(space, [case.config for case in cases], most, "native")
    took = [seconds([result for case in cases for result in results(case)]) for results in (_whole, _shallow)]
    picked = cases[int(shallow.argmax())].rates[0] / whole.max()
    rows = [
        [name_of(case), f"{case.rates[0]:.1f}", f"{case.rates[1]:.1f}", case.off.signed_percent(), f"{case.peaks:.3f}",
         f"{seconds(case.whole) / rounds:.1f}", f"{seconds(case.shallow) / rounds:.1f}"]
        for case in cases
    ]  # fmt: skip
    method = (
        f"Written by `make bench` (`benchmarks/search/depth.py`): a Llama of {space.model.num_layers} layers, "
        f"{WORKLOAD.sequence_length} tokens a sample, {RANKS} CPU ranks on a link of {RATE_MBIT} Mbit/s, `most_layers` {most}; "
        f"{rounds} rounds, both ways in turn. Rates in samples/s; *off*: extrapolated against full, the mean of paired "
        "differences of log rates with its 95 % interval; *peak*: extrapolated over full; seconds of a trial from its build "
        "to its end."
    )
    found = (
        f"Rank correlation of the rates {spearman(whole, shallow):.3f} (predicted before the first trial: {predicted:.3f}); "
        f"the fastest one by extrapolation has {picked:.1%} of the best rate. Trials took {took[0]:.0f} s full and "
        f"{took[1]:.0f} s extrapolated: {1 - took[1] / took[0]:.0%} saved."
    )
    headings = ["configuration", "full", "extrapolated", "off", "peak", "full s", "shallow s"]
    return ["# Models of fewer layers against the full one", "", method, "", *table(headings, rows), "", found]


def _whole(case: Case) -> list[TrialResult]:
    return case.whole


def _shallow(case: Case) -> list[TrialResult]:
    return case.shallow


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if missing := why_not():
        print(f"nothing is measured: {missing}")
        return 0
    space = space_of(arguments.layers)
    with ShapedNetwork(RANKS, f"{RATE_MBIT}mbit") as network, NetworkRunner(network) as runner:
        cases = measure(runner, space, arguments.most, arguments.rounds)
    lines = page(cases, space, arguments.most, arguments.rounds)
    give(lines, arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
