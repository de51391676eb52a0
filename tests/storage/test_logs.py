"""What ranks print and do: in order, bounded, fenced, and gone with their job."""

import io
import itertools
from datetime import timedelta
from pathlib import Path

import pytest

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.shared_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES, LogPart
from search_spaces.trial import LogLines, Progress, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import LeaseLostError, UnknownTrialError
from storage.leases import current_owner
from storage.records import AttemptState, Lease
from storage.store import Store, open_store

LINE = "0123456789abcdef" * 64


@pytest.fixture
def lease(store: Store) -> Lease:
    lease = store.jobs.acquire(store.jobs.create({"model": "m"}).id, current_owner())
    store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
    return lease


@pytest.fixture
def token(store: Store, lease: Lease) -> str:
    return store.attempts.start(lease, 0).token


def printed(token: str, text: str, rank: int = 0, left_out: int = 0) -> LogLines:
    return LogLines(attempt=token, rank=rank, text=text, left_out=left_out)


def texts(parts: list[LogPart]) -> list[tuple[int, int, str]]:
    return [(part.attempt, part.rank, part.text) for part in parts]


def gaps(parts: list[LogPart]) -> list[int]:
    """Bytes that are missing between neighbours."""
    return [later.start - former.start - former.size for former, later in itertools.pairwise(parts)]


def test_parts_come_back_in_order_and_can_be_paged_and_chosen(store: Store, lease: Lease, token: str) -> None:
    store.logs.add(lease, [printed(token, "zero\n"), printed(token, "one Ünïcode\0\n", rank=1)])
    store.logs.add(lease, [printed(token, "more\n")])
    parts = store.logs.of(lease.job_id, 0)
    assert texts(parts) == [(1, 0, "zero\n"), (1, 1, "one Ünïcode\\0\n"), (1, 0, "more\n")]
    assert [part.sequence for part in parts] == [1, 2, 3]
    assert (parts[1].start, gaps(parts)) == (5, [0, 0])
    assert store.logs.of(lease.job_id, 0, after=1, limit=1) == parts[1:2]
    assert store.logs.of(lease.job_id, 0, rank=0) == [parts[0], parts[2]]
    assert store.logs.of(lease.job_id, 1) == store.logs.of("20300101-000000-aaaa", 0) == []


@pytest.mark.prove
def test_the_beginning_and_the_end_are_kept_and_the_rest_is_counted(store: Store, lease: Lease, token: str) -> None:
    total = 0
    for number in range(40):
        text = f"{number:4}\n" + LINE * 30
        store.logs.add(lease, [printed(token, text, rank=number % 2)])
        total += len(text)
    parts = store.logs.of(lease.job_id, 0)
    assert parts[0].text.startswith("   0\n")
    assert parts[-1].start + parts[-1].size == total
    kept = sum(part.size for part in parts)
    assert LOG_HEAD_BYTES <= kept <= LOG_HEAD_BYTES + LOG_TAIL_BYTES + 2**15
    assert sum(gaps(parts)) == total - kept > 0
    assert sum(gap > 0 for gap in gaps(parts)) == 1


def test_what_was_left_out_before_is_counted_too(store: Store, lease: Lease, token: str) -> None:
    store.logs.add(lease, [printed(token, "a"), printed(token, "b" * 40_000, left_out=1000), printed(token, "", left_out=5)])
    store.logs.add(lease, [printed(token, "c")])
    parts = store.logs.of(lease.job_id, 0)
    assert gaps(parts) == [1000, 0, 0, 5, 0]
    assert parts[-1].start == 41_006


def test_every_attempt_has_its_own(store: Store, lease: Lease, token: str) -> None:
    store.logs.add(lease, [printed(token, "first\n")])
    second = store.attempts.start(lease, 0).token
    store.logs.add(lease, [printed(second, "second\n"), printed(token, "late\n")])
    assert texts(store.logs.of(lease.job_id, 0)) == [(1, 0, "first\n"), (2, 0, "second\n"), (1, 0, "late\n")]
    assert [part.start for part in store.logs.of(lease.job_id, 0, attempt=1)] == [0, 6]
    assert [attempt.state for attempt in store.attempts.of(lease.job_id)] == [AttemptState.ABANDONED, AttemptState.RUNNING]


def test_who_no_longer_holds_the_job_writes_nothing(store: Store, lease: Lease, token: str) -> None:
    store.jobs.release(lease, JobState.PAUSED, "", "")
    again = store.jobs.acquire(lease.job_id, current_owner())
    with pytest.raises(LeaseLostError):
        store.logs.add(lease, [printed(token, "x")], [Progress(attempt=token, phase="build", step=0)])
    assert store.logs.of(lease.job_id, 0) == []
    with pytest.raises(UnknownTrialError, match="has no attempt 'nobody'"):
        store.logs.add(again, [printed(token, "x"), printed("nobody", "y")])
    assert store.logs.of(lease.job_id, 0) == []


def test_progress_is_that_of_attempts_that_run(store: Store, lease: Lease, token: str, clock) -> None:
    assert store.logs.progress([lease.job_id, "none"]) == {lease.job_id: [], "none": []}
    store.logs.add(lease, [], [Progress(attempt=token, phase="build", step=0)])
    clock.advance(1)
    version = store.jobs.get(lease.job_id).version
    store.logs.add(lease, [], [Progress(attempt=token, phase="measure", step=7, samples_per_second=12.5)])
    (sign,) = store.logs.progress([lease.job_id])[lease.job_id]
    assert (sign.trial, sign.attempt, sign.phase, sign.step, sign.samples_per_second) == (0, 1, "measure", 7, 12.5)
    assert sign.time == clock()
    assert store.jobs.get(lease.job_id).version == version, "a sign of life is no event"
    store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.OK))
    assert store.logs.progress([lease.job_id]) == {lease.job_id: []}


def test_news_of_trials_that_are_followed(store: Store, lease: Lease, token: str) -> None:
    store.trials.add(lease, TrialConfig(zero_stage=1), Purpose.SEARCH)
    store.logs.add(lease, [printed(token, "a\n"), printed(token, "b\n")])
    first, second, missing = (lease.job_id, 0), (lease.job_id, 1), (lease.job_id, 9)
    news = store.logs.news({first: 1, second: 0, missing: 0})
    assert news.keys() == {first, second}
    assert ([part.text for part in news[first].parts], news[first].last, news[first].over) == (["b\n"], 2, False)
    assert (news[second].parts, news[second].last) == ((), 0)
    store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.OK))
    assert not store.logs.news({first: 0}, limit=1)[first].over
    assert store.logs.news({first: 1}, limit=1)[first].over
    assert not store.logs.news({second: 0})[second].over
    store.jobs.release(lease, JobState.CANCELLED, "", "")
    assert store.logs.news({second: 0})[second].over


def test_they_go_with_their_job_and_with_age(store: Store, lease: Lease, token: str, clock, tmp_path: Path) -> None:
    store.logs.add(lease, [printed(token, "a\n")], [Progress(attempt=token, phase="build", step=0)])
    store.jobs.release(lease, JobState.SUCCEEDED, "", "")
    sink = io.StringIO()
    store.transfer.dump(sink, lease.job_id)
    with open_store(str(tmp_path / "elsewhere.db")) as elsewhere:
        elsewhere.transfer.load_job(sink)
        assert elsewhere.logs.of(lease.job_id, 0) == store.logs.of(lease.job_id, 0) != []
        elsewhere.jobs.delete(lease.job_id)
        assert elsewhere.logs.of(lease.job_id, 0) == []
    assert store.maintenance.prune(clock() - timedelta(days=1)).logs == 0
    clock.advance(86400)
    assert store.maintenance.prune(clock() - timedelta(hours=1)).logs == 1
    assert store.logs.of(lease.job_id, 0) == []
