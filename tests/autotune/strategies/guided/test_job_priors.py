"""What earlier jobs taught: learned when a job begins, frozen then, and enough to begin with the best."""

from pathlib import Path

import pytest
import table

from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from search_spaces.outcome import Purpose
from storage.store import Store, open_store


def run(store: Store, folder: Path, trials: int) -> tuple[str, list[str]]:
    """The job and the configurations that it tried, in their order."""
    session = table.session(folder, strategy="guided", trials=trials, confirm_repeats=0, racing=False)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner())
    snapshot = read_snapshot(store, job.id)
    return job.id, [trial.config_hash for trial in snapshot.trials if trial.purpose is Purpose.SEARCH]


@pytest.mark.prove
def test_the_next_job_begins_with_what_the_first_one_found(tmp_path: Path) -> None:
    space = table.session(tmp_path).space
    rates = {config.hash: table.measured(config).samples_per_second.mean for config in space.enumerate()}  # type: ignore[union-attr]
    best = max(rates.values())
    with open_store(str(tmp_path / "jobs.db")) as store:
        _, first = run(store, tmp_path, trials=12)
        job, second = run(store, tmp_path, trials=3)
        # The baseline comes first in every job; what it chooses then is all that is looked at.
        assert rates[second[1]] >= 0.97 * best
        assert max(rates[name] for name in first[:2]) < best or second[1] == first[1]
        prior = store.jobs.prior(job)
    assert prior is not None
    assert len(prior["residuals"]) >= 10
    assert "trials on the same hardware" in prior["source"]


@pytest.mark.prove
def test_a_resumed_job_decides_by_what_was_frozen(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "jobs.db")) as store:
        job, _ = run(store, tmp_path, trials=3)
        kept = store.jobs.prior(job)
        run(store, tmp_path, trials=8)  # teaches others, not this one
        session = session_of(store.jobs.get(job))
        assert session.strategy is not None
        assert store.jobs.prior(job) == kept
