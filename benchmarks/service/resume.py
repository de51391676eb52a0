"""One process that resumes a job: `python -m benchmarks.service.resume DATABASE JOB`. Prints memory and times as JSON."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.loop.agenda import next_trials
from autotune.loop.heartbeats import LeaseHeartbeat
from autotune.loop.listener import LoopListener, StopSignal
from autotune.loop.loop import TuningLoop
from autotune.session.resolve import session_of
from benchmarks.service.rows import measured
from executor.runners.replay import ReplayRunner
from storage.leases import current_owner
from storage.store import open_store

TURNS = 20


def peak_bytes() -> int:
    """Peak resident set of this program. (`getrusage` would include the parent process's.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    database, job_id = sys.argv[1:]
    with open_store(database) as store:
        lease = store.jobs.acquire(job_id, current_owner())
        session = session_of(store.jobs.get(job_id))
        session.strategy.propose(session.space, (), (), 1, 0)  # loads the strategy's imports
        base = peak_bytes()
        with LeaseHeartbeat(store, lease) as heartbeat:
            loop = TuningLoop(session, store, heartbeat, ReplayRunner({}), StopSignal(), LoopListener())
            began = time.perf_counter()
            snapshot = loop.recall()
            recalled = time.perf_counter() - began
            planned = next_trials(session, snapshot, (), 1)
            first = time.perf_counter() - began
            turns = []
            for _ in range(TURNS if session.request.strategy != "tpe" else 1):
                lease = heartbeat.lease
                for trial in loop.check(planned):
                    attempt = store.attempts.start(lease, trial.number)
                    store.attempts.finish(lease, measured(attempt.token))
                began = time.perf_counter()
                snapshot = loop.recall()
                planned = next_trials(session, snapshot, (), 1)
                turns.append(time.perf_counter() - began)
        figures = {"base": base, "peak": peak_bytes(), "trials": len(snapshot.trials), "recall_seconds": recalled,
                "first_seconds": first, "turn_seconds": sorted(turns)[len(turns) // 2]}  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
