"""What tests of the contract do with a job, and what they measure."""

from search_spaces.outcome import Purpose
from search_spaces.trial import CollectiveCount, RankMeasurement
from search_spaces.trial_config import TrialConfig
from storage.records import Lease, Owner
from storage.store import Store

ELSEWHERE = Owner(host="elsewhere", pid=1, started=1.0)
RANK = RankMeasurement(
    rank=0,
    host="here",
    peak_memory_bytes=2**41,
    memory_by_tag={"parameters": 2**40, "gradients": 2**40},
    tag_peak_bytes={"parameters": 2**40, "gradients": 2**41},
    rss_peak_bytes=2**42,
    cpu_seconds_per_step=0.25,
    collectives=(CollectiveCount(operation="all_gather", mesh_dimension="data", count=3, bytes=12),),
    throttled=False,
)


def attempt(store: Store, lease: Lease, config: TrialConfig | None = None, purpose: Purpose = Purpose.SEARCH) -> str:
    """Add a trial, start an attempt at it, and return its token."""
    return store.attempts.start(lease, store.trials.add(lease, config or TrialConfig(), purpose).number).token


def kinds(store: Store, job_id: str) -> list[str]:
    return [event.kind for event in store.events.of(job_id)]
