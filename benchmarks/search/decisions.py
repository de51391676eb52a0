"""Is the answer of a job right, and is its stated probability calibrated? Simulated jobs on the replay runner.

    python -m benchmarks.search.decisions [--jobs 400] [--before FILE] [--json FILE]
        [--markdown docs/results/decision-benchmark.md]

Every job runs the whole loop: search, confirmation, decision. Its measurements are the true rates of a random landscape times
log-normal noise. In a third of the jobs no configuration is faster than the baseline. `--json` writes the figures;
`--before` reads those of another version of the program, for comparison.
"""

import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.resolve import prepare
from autotune.session.session import Session
from benchmarks.common.written_page import give, page_parser
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

NOISES = (0.02, 0.05, 0.10)
TRIALS = (3, 6, 12, 30)
WORSE = 0.01
"""An answer is worse if it is slower than the baseline by more than this share."""
MOST_WORSE = 0.02
"""Share of jobs whose answer may be worse."""
MOST_OFF = 0.05
"""Largest difference between stated probabilities and observed frequencies."""
BINS = ((0.0, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1.01))
LEAST_IN_BIN = 30
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Result of one simulated job."""

    worse: bool
    """Whether the answer is slower than the baseline by more than `WORSE`, in truth."""
    loss: float
    """Share of the best tried configuration's true rate that the answer lacks."""
    measurements: int
    """Trials after the search: confirmations and controls."""
    stated: float | None
    """Stated probability that the answer is the best tried configuration; None: this version states none."""
    stated_loss: float | None
    best: bool
    """Whether the answer is truly the best tried configuration."""
    keeps: bool


@cache
def session_of_size(trials: int) -> Session:
    """The session shared by all jobs with this number of trials."""
    request = JobRequest(
        model="llama-tiny", ranks=2, global_batch_size=16, sequence_length=64, trials=trials, strategy="random"
    )  # fmt: skip
    return prepare(request)


def landscape(session: Session, seed: int) -> dict[str, float]:
    """Configuration -> true log rate. Micro-batch, stage and checkpointing act as on real machines; each seed differs."""
    draw = random.Random(seed)
    slope, bend = draw.gauss(0.15, 0.15), draw.gauss(-0.05, 0.05)
    stages = [0.0]
    for _ in range(3):
        stages.append(stages[-1] + draw.gauss(-0.02, 0.03))
    checkpointed, own = -abs(draw.gauss(0.2, 0.1)), draw.choice([0.0, 0.01, 0.03])
    rates = {}
    for config in session.space.enumerate():
        size = math.log2(config.micro_batch_size)
        rate = slope * size + bend * size**2 + stages[config.zero_stage] + draw.gauss(0.0, own)
        rates[config.hash] = rate + (checkpointed if config.activation_checkpointing == "full" else 0.0)
    baseline = session.baselines[0].hash
    if seed % 3 == 0:
        rates[baseline] = max(rates.values()) + draw.uniform(0.0, 0.03)
    return rates


def simulate(noise: float, trials: int, seed: int) -> Job:
    """Run one job to its end and compare its answer with the truth."""
    session = session_of_size(trials)
    session = dataclasses.replace(session, request=dataclasses.replace(session.request, seed=seed))
    truth = landscape(session, seed)
    draw = random.Random(f"{seed} {noise} {trials}")

    def answer(config: TrialConfig) -> TrialResult:
        rate = 100.0 * math.exp(truth[config.hash] + draw.gauss(0.0, noise))
        return measured(rate)

    with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite:///{folder}/jobs.db") as store:
        job = store.jobs.create(request_to_row(session.request))
        run_job(session, store, job.id, ReplayRunner(answer))
        snapshot = read_snapshot(store, job.id)
        document = build_best_config(session, snapshot)
    tried = [truth[trial.config_hash] for trial in snapshot.searched if trial.outcome is Outcome.OK]
    own, best = truth[session.baselines[0].hash], truth[TrialConfig(**document["best"]["config"]).hash]
    decision = document.get("decision")
    return Job(
        worse=best < own - math.log1p(WORSE),
        loss=-math.expm1(best - max(tried)),
        measurements=sum(trial.purpose is not Purpose.SEARCH for trial in snapshot.trials),
        stated=None if decision is None else decision["probability_best"],
        stated_loss=None if decision is None else decision["expected_loss"],
        best=best >= max(tried) - 1e-9,
        keeps=document["best"]["config"] == document["baseline"]["config"],
    )


def measured(rate: float) -> TrialResult:
    """A trial result with that rate, in samples/s."""
    rank = RankMeasurement(
        rank=0, host="host", peak_memory_bytes=1_000_000, memory_by_tag={"parameters": 1_000_000},
        tag_peak_bytes={"parameters": 1_000_000}, rss_peak_bytes=2_000_000, cpu_seconds_per_step=0.1, collectives=(),
    )  # fmt: skip
    return TrialResult(
        attempt="", outcome=Outcome.OK, losses=(5.0, 4.5), step_seconds=(16.0 / rate,) * 5,
        samples_per_second=Interval(mean=rate, low=rate, high=rate), within_relative_error=0.005, peak_memory_bytes=1_000_000,
        ranks=(rank,), tflops_per_device=0.01,
    )  # fmt: skip


def run_setting(noise: float, trials: int, jobs: int) -> list[Job]:
    """Run all jobs of one setting, on every core."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(simulate, [noise] * jobs, [trials] * jobs, range(jobs), chunksize=4))


def figures(noise: float, trials: int, jobs: list[Job]) -> Row:
    """The compared figures of one setting."""
    found = {
        "noise": noise, "trials": trials, "jobs": len(jobs), "worse": fmean(job.worse for job in jobs),
        "loss": fmean(job.loss for job in jobs), "measurements": fmean(job.measurements for job in jobs),
        "best": fmean(job.best for job in jobs), "keeps": fmean(job.keeps for job in jobs),
    }  # fmt: skip
    stated = [job.stated for job in jobs if job.stated is not None]
    losses = [job.stated_loss for job in jobs if job.stated_loss is not None]
    return found | {"stated": fmean(stated) if stated else None, "stated_loss": fmean(losses) if losses else None}


def calibration(jobs: list[Job]) -> list[Row]:
    """Stated probabilities against observed frequencies, in bins."""
    rows = []
    for low, high in BINS:
        inside = [job for job in jobs if job.stated is not None and low <= job.stated < high]
        if len(inside) >= LEAST_IN_BIN:
            stated = fmean(job.stated for job in inside if job.stated is not None)
            true = fmean(job.best for job in inside)
            rows.append({"low": low, "high": min(high, 1.0), "jobs": len(inside), "stated": stated, "true": true})
    return rows


def page(settings: list[Row], bins: list[Row], before: dict[tuple[float, int], Row], count: int) -> list[str]:
    """The figures as Markdown."""
    lines = [
        "# Are answers right, and are their probabilities calibrated?",
        "",
        f"Written by `python -m benchmarks.search.decisions`: {count} simulated jobs for each line. Each runs the whole loop",
        "on the replay runner. Measurements are true rates times log-normal noise. In a third of the jobs no configuration is",
        f"faster than the baseline. *Worse*: the answer is slower than the baseline by more than {WORSE:.0%} in truth; at most",
        f"{MOST_WORSE:.0%} of the answers may be. *Loss*: the answer's shortfall from the best tried configuration.",
        "*Repeats*: measurements after the search. [How answers are decided](../strategies.md#how-the-answer-is-decided).",
        "",
        "| noise | trials | worse: old | now | loss: old | now | stated | repeats: old | now | keeps | best: stated | true |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in settings:
        old = before.get((row["noise"], row["trials"]))
        cells = [
            f"{row['noise']:.0%}", str(row["trials"]), _share(old, "worse"), _share(row, "worse"), _share(old, "loss", 2),
            _share(row, "loss", 2), _share(row, "stated_loss", 2), _number(old, "measurements"), _number(row, "measurements"),
            _share(row, "keeps"), _share(row, "stated"), _share(row, "best"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Stated probabilities over all settings:",
        "",
        "| stated | jobs | mean stated | came true |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['low']:.0%} to {row['high']:.0%} | {row['jobs']} | {row['stated']:.1%} | {row['true']:.1%} |" for row in bins
    ]
    return lines


def _share(row: Row | None, name: str, digits: int = 1) -> str:
    return "–" if row is None or row[name] is None else f"{100 * row[name]:.{digits}f} %"


def _number(row: Row | None, name: str) -> str:
    return "–" if row is None else f"{row[name]:.1f}"


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings, every, began = [], [], time.monotonic()
    for noise in NOISES:
        for trials in TRIALS:
            jobs = run_setting(noise, trials, arguments.jobs)
            every += jobs
            settings.append(figures(noise, trials, jobs))
            print(f"{time.monotonic() - began:.0f} s: {settings[-1]}", file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps({"settings": settings, "jobs": [asdict(job) for job in every]}))
    known = json.loads(arguments.before.read_text())["settings"] if arguments.before else []
    bins = calibration(every)
    give(page(settings, bins, {(row["noise"], row["trials"]): row for row in known}, arguments.jobs), arguments.markdown)
    worst = max(row["worse"] for row in settings)
    off = max((abs(row["stated"] - row["true"]) for row in bins), default=0.0)
    print(f"largest share of worse answers in a setting: {worst:.2%} (at most {MOST_WORSE:.0%})")
    print(f"stated probabilities are off by {off:.1%} (at most {MOST_OFF:.0%})")
    return int(worst > MOST_WORSE or off > MOST_OFF)


if __name__ == "__main__":
    raise SystemExit(main())
