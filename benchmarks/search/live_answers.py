"""Does a real sweep keep the baseline whenever its answer is not faster? Sweeps on this machine's own ranks.

    python -m benchmarks.search.live_answers [--sweeps 40] [--markdown docs/results/live-answers.md]

Half of the sweeps have 3 trials, half 6. Half begin with the defaults, half with a configuration that is hard to beat.
"""

import sys
import tempfile
import time
from typing import Any

from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.resolve import prepare
from benchmarks.common.written_page import judge, page_parser
from executor.runners.local import LocalRunner
from search_spaces.outcome import Purpose
from search_spaces.trial import Fidelity
from storage.store import open_store

RANKS = 2
SIZES = (3, 6)
STRONG = {"zero_stage": 1, "micro_batch_size": 8}
"""A baseline that few configurations of the space beat on two CPU cores."""


def sweep(runner: LocalRunner, number: int) -> dict[str, Any]:
    """Run one sweep; return its best-config document with the number of confirmations."""
    request = JobRequest(
        model="llama-tiny", ranks=RANKS, global_batch_size=16, sequence_length=64, trials=SIZES[number % 2], seed=number,
        strategy="random" if number % 8 >= 4 else "guided", runner="local", baseline=STRONG if number % 4 >= 2 else None,
        fidelity=Fidelity(max_seconds=1.0),
    )  # fmt: skip
    session = prepare(request)
    with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite:///{folder}/jobs.db") as store:
        job = store.jobs.create(request_to_row(session.request))
        run_job(session, store, job.id, runner)
        snapshot = read_snapshot(store, job.id)
        confirmations = sum(trial.purpose is Purpose.CONFIRM for trial in snapshot.trials)
        return build_best_config(session, snapshot) | {"confirmations": confirmations, "given": request.baseline is not None}


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--sweeps", type=int, default=40)
    arguments = parser.parse_args()
    began, rows, problems = time.monotonic(), [], []
    kept = proven = 0
    with LocalRunner(RANKS) as runner:
        for number in range(arguments.sweeps):
            document = sweep(runner, number)
            decision = document["decision"]
            gain, keeps = decision["gain"], decision["keeps_baseline"]
            kept, proven = kept + keeps, proven + (gain["low"] > 1.0)
            if gain["mean"] < 1.0 and not keeps:
                problems.append(f"sweep {number}: a gain of {gain['mean']:.3f}, and the baseline is not kept")
            answer = "keep" if keeps else f"{gain['mean']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}]"
            rows.append(
                f"| {number} | {document['job']['trials']} | {'given' if document['given'] else 'defaults'} "
                f"| {document['confirmations']} | {answer} | {100 * decision['probability_best']:.0f} % "
                f"| {100 * decision['expected_loss']:.1f} % |"
            )
            print(f"{time.monotonic() - began:.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
    lines = [
        "# Answers of real sweeps",
        "",
        f"Written by `python -m benchmarks.search.live_answers`: {arguments.sweeps} sweeps of `llama-tiny` on {RANKS} CPU",
        f"ranks. {kept} keep the baseline. Of the others none has a gain below 1; {proven} intervals are above 1.",
        "",
        "| sweep | trials | baseline | confirmations | gain, 95 % interval | probability to be the best | expected loss |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]  # fmt: skip
    return judge("\n".join(lines), problems, arguments.markdown)


if __name__ == "__main__":
    raise SystemExit(main())
