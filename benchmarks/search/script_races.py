"""Are the bounds and the answers true for scripts with slow starts, recompilations, evaluations and checkpoints?

    python -m benchmarks.search.script_races [--scripts 400] [--markdown docs/results/script-races.md]

Each simulated script is a law of its step times, with noise. A sweep of its micro-batch sizes is played by the product itself:
the steps of every trial go through the code that times and races them, and the loop, the confirmation and the verdict are those
of a job. Only processes and clocks are not real. The truth is the mean step of a long run: an evaluation counts with its share.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

import torch

from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.tuning import finish, open_job
from benchmarks.common.written_page import judge, page_parser, table
from executor.engine import RankContext
from executor.engines.command.readings import ReportedStep
from executor.engines.command.steps import FEWEST_TIMED, ReportedSteps
from executor.measurement.timing import step_time
from executor.measurement.trial_report import Trial, rate_of
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

RANKS, BATCH = 2, 64
KINDS = (
    "plain", "slow start", "recompilation", "evaluation", "checkpoint", "slow start and evaluation",
    "recompilation and checkpoint",
)  # fmt: skip
WORSE, ACCEPTED = 0.01, 0.02
"""An answer is worse if it is slower than the baseline by more than this share; the accepted share of such answers."""
PROCESSES = 4
"""Sweeps at a time: they mostly wait for their database and their loop's clock."""
TIMEOUT = 300.0
"""Seconds of simulated steps after which a trial is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedScript:
    """The law of a script's step times [s]."""

    seed: int
    kind: str
    step: float
    micro_batch: float
    sample: float
    power: float
    """An ordinary step takes `step`, and for every micro-batch `micro_batch` plus `sample` times its size to this power."""
    baseline: int
    """Micro-batch size of the baseline."""
    noise: float
    """Standard deviation of the logarithm of a step."""
    between: float
    """The same of a trial's speed."""
    slow_steps: int
    slow_factor: float
    fading: bool
    """Whether the slow steps of the start become faster."""
    lengths: int
    compilation: float
    """Seconds for the first micro-batch of each length."""
    period: int
    pause: float
    """Every `period` steps one is longer by `pause` seconds; 0: none."""

    def ordinary(self, config: TrialConfig) -> float:
        """Seconds of an ordinary step."""
        accumulation = config.gradient_accumulation_steps(BATCH, RANKS)
        return self.step + accumulation * (self.micro_batch + self.sample * config.micro_batch_size**self.power)

    def rate(self, config: TrialConfig) -> float:
        """True samples/s of a long run."""
        return BATCH / (self.ordinary(config) + (self.pause / self.period if self.period else 0.0))

    def seconds(self, config: TrialConfig, draw: Random) -> Iterator[float]:
        """The steps of a trial."""
        ordinary = self.ordinary(config) * math.exp(draw.gauss(0.0, self.between))
        accumulation, compiled = config.gradient_accumulation_steps(BATCH, RANKS), set[int]()
        for number in itertools.count(1):
            seconds = ordinary * math.exp(draw.gauss(0.0, self.noise))
            if number <= self.slow_steps:
                seconds *= 1.0 + (self.slow_factor - 1.0) * (0.7**number if self.fading else 1.0)
            new = {draw.randrange(self.lengths) for _ in range(accumulation)} - compiled if self.lengths else set()
            compiled |= new
            yield seconds + len(new) * self.compilation + (self.pause if self.period and number % self.period == 0 else 0.0)


def script_of(seed: int) -> SimulatedScript:
    """Draw a script."""
    draw = Random(seed)
    kind = KINDS[seed % len(KINDS)]
    micro_batch = 10 ** draw.uniform(-3, -1)
    slow = "slow start" in kind
    pauses = "evaluation" in kind or "checkpoint" in kind
    return SimulatedScript(
        seed=seed, kind=kind, step=micro_batch * draw.uniform(0.1, 3.0), micro_batch=micro_batch,
        sample=micro_batch * draw.choice((0.01, 0.1, 0.5, 2.0)), noise=draw.uniform(0.01, 0.1), between=draw.uniform(0.0, 0.02),
        slow_steps=draw.randint(1, 16) if slow else 0, slow_factor=draw.uniform(4.0, 60.0), fading=draw.random() < 0.3,
        lengths=draw.randint(2, 8) if "recompilation" in kind else 0, compilation=micro_batch * draw.uniform(20.0, 300.0),
        period=draw.choice((5, 10, 20, 50, 100)) if pauses else 0,
        pause=micro_batch * draw.uniform(20.0, 500.0) if pauses else 0.0, power=draw.uniform(0.8, 1.6),
        baseline=2 ** draw.randint(0, 5),
    )  # fmt: skip


class SimulatedRunner(ReplayRunner):
    """Runs the steps of a script through the code of a trial."""

    def __init__(self, script: SimulatedScript) -> None:
        super().__init__({})
        self._script, self._draw = script, Random(script.seed + 1)

    def _answer(self, request: TrialRequest) -> TrialResult:
        context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
        trial = Trial(context=context, request=request, progress=lambda _: None)
        steps, total = ReportedSteps(trial), 0.0
        for seconds in self._script.seconds(request.config, self._draw):
            steps.add(ReportedStep(seconds=seconds, waited=None))
            total += seconds
            if steps.enough or total > TIMEOUT:
                break
        timed = [step.seconds for step in steps.timed()]
        if len(timed) < FEWEST_TIMED:
            return TrialResult(attempt=request.attempt, outcome=Outcome.FAILED, message="too few steps to time")
        timing = step_time(timed)
        lost = trial.race.interval(timed) if steps.lost and trial.race is not None else None
        return TrialResult(
            attempt=request.attempt, outcome=Outcome.PRUNED if lost else Outcome.OK, step_seconds=tuple(timed),
            samples_per_second=lost or rate_of(timing, BATCH), within_relative_error=timing.relative_error,
            warmup_steps=steps.slow.start if steps.settled else None, unstable=lost is None and not steps.settled,
            peak_memory_bytes=1_000_000,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A script's sweep against the truth."""

    kind: str
    bounds: int
    """Trials that were ended early."""
    untrue: int
    """Of them, those that are faster than their bound."""
    over_baseline: float
    """True rate of the answer over that of the baseline; 0: no answer."""
    of_best: float
    """True rate of the answer over that of the fastest configuration."""
    steps: int
    """Steps of its baseline's first trial that were timed."""


def play(seed: int) -> Played:
    """Run the sweep of a script."""
    script = script_of(seed)
    session = resolve(request_from_fields({
        "command": "python train.py --batch {micro_batch_size} --accumulate {gradient_accumulation_steps}", "ranks": RANKS,
        "global_batch_size": BATCH, "trials": 6, "confirm_repeats": 2, "seed": seed, "strategy": "random", "cluster": "local",
        "fidelity": {"max_seconds": 2.0}, "baseline": {"micro_batch_size": script.baseline},
    }))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite:///{folder}/sweep.db") as store:
        job = open_job(store, session)
        answer = finish(session, store, job.id, SimulatedRunner(script))
        trials = [trial for trial in store.trials.of(job.id) if trial.purpose is Purpose.SEARCH and trial.result]
    pruned = [trial for trial in trials if trial.outcome is Outcome.PRUNED]
    rates = [script.rate(trial.config) for trial in trials]
    best = 0.0 if answer.best is None else script.rate(answer.best)
    return Played(
        kind=script.kind, bounds=len(pruned), over_baseline=best / script.rate(session.baselines[0]), of_best=best / max(rates),
        untrue=sum(script.rate(trial.config) > trial.result.samples_per_second.high for trial in pruned),
        steps=len(trials[0].result.step_seconds),
    )  # fmt: skip


def page_of(sweeps: Sequence[Played]) -> str:
    """The page."""
    rows = []
    for kind in (*KINDS, "all"):
        group = [sweep for sweep in sweeps if kind in (sweep.kind, "all")]
        rows.append((
            kind, str(len(group)), str(sum(sweep.bounds for sweep in group)), str(sum(sweep.untrue for sweep in group)),
            str(sum(sweep.over_baseline < 1 - WORSE for sweep in group)),
            f"{sum(sweep.of_best > 1 - WORSE for sweep in group) / len(group):.0%}",
            f"{math.exp(sum(math.log(max(sweep.over_baseline, 0.01)) for sweep in group) / len(group)):.2f}x",
        ))  # fmt: skip
    headings = ("script", "scripts", "ended early", "bound untrue", "answer worse than the baseline", "best found", "gain")
    return "\n".join([
        "# Bounds and answers for scripts whose steps differ", "",
        f"{len(sweeps)} simulated scripts, played through the code that times and races trials and through the loop",
        "(`python -m benchmarks.search.script_races`). `ended early`: rivals that lost their race; a bound is untrue if the",
        "configuration's true rate is above it. An answer is worse, and a best is found, by 1 %. `gain`: geometric mean of the",
        "answer's true rate over the baseline's. A sweep without an answer, because no trial had steps to time, counts as",
        "worse.", "", *table(headings, rows), "",
    ])  # fmt: skip


def problems_of(sweeps: Sequence[Played]) -> list[str]:
    """What must not be."""
    untrue, worse = sum(sweep.untrue for sweep in sweeps), sum(sweep.over_baseline < 1 - WORSE for sweep in sweeps)
    problems = [f"{untrue} bounds are untrue"] if untrue else []
    return problems + ([f"{worse} answers are worse than the baseline"] if worse > ACCEPTED * len(sweeps) else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the scripts, and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("--scripts", type=int, default=400)
    options = parser.parse_args(arguments)
    with ProcessPoolExecutor(PROCESSES) as pool:
        sweeps = list(pool.map(play, range(options.scripts), chunksize=4))
    return judge(page_of(sweeps), problems_of(sweeps), options.markdown)


if __name__ == "__main__":
    sys.exit(main())
