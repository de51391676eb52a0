"""Share of device time that a pool of two gangs spends inside trials, and memory growth over 200 trials.

python -m benchmarks.trials.pool_overhead [--trials 200] [--strategy tpe] [--markdown docs/results/pool-overhead.md]
"""

import statistics
import sys
import tempfile

import psutil

from autotune.loop.listener import LoopListener
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.resolve import prepare, session_of
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from benchmarks.common.written_page import give, page_parser
from executor.runners.ray import RayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialResult
from storage.records import TrialRecord
from storage.store import open_store

GANGS = 2
INSIDE_BOUND = 0.85
GROWTH_BOUND = 0.05
EARLY, LATE = (0.1, 0.2), (0.9, 1.0)
"""Shares of the trials: of 200, the 20th to the 40th and the 180th to the 200th."""
ONE_SECOND = Fidelity(min_steps=2, max_seconds=0.5, target_relative_half_width=1e-9)
"""With build, warm-up and the memory step around it, a trial takes about a second."""
DEVICE_PHASES = ("build", "warmup", "memory", "measure")


class Residents(LoopListener):
    """Records the resident memory of this process, and of all rank processes, at the end of each trial."""

    def __init__(self) -> None:
        self.driver: list[int] = []
        self.ranks: list[int] = []

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        """Record memory when a trial has its outcome."""
        del snapshot
        if trial.outcome is not Outcome.OK:
            return
        me = psutil.Process()
        self.driver.append(me.memory_info().rss)
        below = [process for process in me.children(recursive=True) if _is_rank(process)]
        self.ranks.append(sum(process.memory_info().rss for process in below))


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("rank_main.py") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def sweep(trials: int, strategy: str) -> tuple[float, list[TrialRecord], Residents, float]:
    """Seconds from the first trial's start to the last one's end, the trials, memory, and seconds inside trials."""
    request = JobRequest(
        model="llama-tiny", ranks=1, space="zero-buckets", strategy=strategy, trials=trials, global_batch_size=8,
        sequence_length=32, runner="ray", confirm_repeats=0, racing=False, fidelity=ONE_SECOND,
    )  # fmt: skip
    residents = Residents()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"{folder}/sweep.db") as store,
        RayRunner(1, gangs=GANGS, device="cpu") as runner,
    ):
        job = store.jobs.create(request_to_row(prepare(request).request))
        session = session_of(job)
        warm_up(runner, session)
        run_job(session, store, job.id, runner, listener=residents)
        records = [trial for trial in store.trials.of(job.id) if trial.started and trial.finished and trial.result]
    began = min(trial.started for trial in records if trial.started)
    ended = max(trial.finished for trial in records if trial.finished)
    inside = sum(_inside(trial) for trial in records)
    return (ended - began).total_seconds(), records, residents, inside


def warm_up(runner: RayRunner, session: Session) -> None:
    """Run a trial on every gang, so that measured trials find warm ranks."""
    for number in range(GANGS):
        runner.submit(trial_request(session, f"warm_up-{number}", session.baselines[0], ()))
    ended = 0
    while ended < GANGS:
        ended += sum(isinstance(event, TrialResult) for _, event in runner.events(1.0))


def _inside(trial: TrialRecord) -> float:
    assert trial.result is not None
    return sum(trial.result.phase_seconds.get(phase, 0.0) for phase in DEVICE_PHASES)


def growth(values: list[int]) -> tuple[float, float, float]:
    """Medians of the early and of the late trials in MiB, and the relative growth between them."""
    early, late = (
        statistics.median(values[int(first * len(values)) : int(last * len(values))]) / 2**20 for first, last in (EARLY, LATE)
    )
    return early, late, late / early - 1


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--strategy", default="tpe")
    arguments = parser.parse_args()
    span, records, residents, inside = sweep(arguments.trials, arguments.strategy)
    share = inside / (GANGS * span)
    warm = sum(bool(trial.result and trial.result.warm) for trial in records)
    driver, ranks = growth(residents.driver), growth(residents.ranks)
    method = (
        f"Written by `make bench`. A sweep of {len(records)} trials of {inside / len(records):.2f} s by {arguments.strategy} "
        f"on {GANGS} gangs of one rank, each on its own core; {warm} of them found a warm rank. "
        f"{span:.1f} s from the first trial's start to the last one's end."
    )
    lines = [
        "# Overhead of a pool of gangs",
        "",
        method,
        "",
        "| | | bound |",
        "|---|---|---|",
        f"| device time inside trials (start of build to end of measurement) | {share:.1%} | at least {INSIDE_BOUND:.0%} |",
        *(
            f"| resident memory of {name}, MiB, early and late trials | {early:.0f} to {late:.0f} ({grown:+.1%}) | "
            f"less than {GROWTH_BOUND:+.0%} |"
            for name, (early, late, grown) in (("the driver", driver), ("both ranks", ranks))
        ),
        "",
        "Early: the second tenth of the trials, late: the last tenth; medians.",
    ]
    give(lines, arguments.markdown)
    good = share >= INSIDE_BOUND and max(driver[2], ranks[2]) < GROWTH_BOUND
    print("all bounds hold" if good else "A BOUND IS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
