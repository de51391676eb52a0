"""The service in process, on a database of its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.settings import Settings
from autotune.outcome.job_snapshot import read_snapshot
from autotune.outcome.verdict import answer_summary, decide
from autotune.session.resolve import session_of
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.store import Store, open_store
from tests.api.stalls import noticed_stalls

BASE = "http://127.0.0.1:8000"
REQUEST = {"model": "llama-tiny", "ranks": 2, "space": "zero", "trials": 3, "global_batch_size": 8, "sequence_length": 64}


@pytest.fixture
def database(tmp_path: Path, migrated: Path) -> str:
    return str(shutil.copy(migrated, tmp_path / "jobs.db"))


@pytest.fixture(scope="module", autouse=True)
def _no_collection_at_the_start() -> Iterator[None]:
    """A service sets aside, once and for good, what its process has imported: hundreds of them in one process do it in vain."""
    with patch("api.app.gc"):
        yield


@pytest.fixture(autouse=True)
def _no_stalls() -> Iterator[None]:
    """No callback of a service's event loop computes for long (`stalls.LIMIT_SECONDS`), whatever a test asks of it."""
    with noticed_stalls() as stalls:
        yield
    assert stalls == []


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with open_store(database) as store:
        yield store


@pytest.fixture
def serve(database: str, store: Store) -> Iterator[Callable[..., TestClient]]:
    """Starts a service with these settings, and returns a client that speaks to it over loopback."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(service(database, **settings))


@pytest.fixture
def client(serve: Callable[..., TestClient]) -> TestClient:
    """A client that needs no key."""
    return serve()


@contextmanager
def service(database: str, **settings: Any) -> Iterator[TestClient]:
    """A client of a service on the database; without keys, unless the settings say otherwise."""
    app = create_app(Settings(database_url=database, **{"require_keys": False, **settings}))
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def untouched_database(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> str:
    """For all tests that write nothing: to start a service for each would take longer than what they ask."""
    return str(shutil.copy(migrated, tmp_path_factory.mktemp("untouched") / "jobs.db"))


@pytest.fixture(scope="session")
def untouched(untouched_database: str) -> Iterator[Store]:
    """What must be empty after each of these tests."""
    with open_store(untouched_database) as store:
        yield store


@pytest.fixture(scope="session")
def refusing(untouched_database: str) -> Iterator[TestClient]:
    """A client of the one service that these tests ask; needs no key."""
    with service(untouched_database) as client:
        yield client


def submit(client: TestClient, headers: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """Submit a job and return its view."""
    answer = client.post("/v1/jobs", json=REQUEST | changes, headers=headers or {})
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def measure(store: Store, job_id: str, trials: int = 2) -> None:
    """Run some trials of a job by hand, and leave it paused."""
    lease = store.jobs.acquire(job_id, current_owner())
    for number in range(trials):
        config = TrialConfig(zero_stage=number % 4, micro_batch_size=1 + number // 4)
        store.trials.add(lease, config, Purpose.SEARCH)
        token = store.attempts.start(lease, number).token
        rate = 100.0 + number
        result = TrialResult(
            attempt=token, outcome=Outcome.OK, losses=(5.0, float("nan")), step_seconds=(8 / rate,) * 5,
            samples_per_second=Interval(mean=rate, low=rate, high=rate), peak_memory_bytes=1_000_000,
        )  # fmt: skip
        store.attempts.finish(lease, result)
    # As the loop does after every trial.
    session = session_of(store.jobs.get(job_id))
    verdict = decide(read_snapshot(store, job_id), session.ranking, session.prior, session.baselines)
    store.jobs.set_answer(lease, None if verdict is None else answer_summary(verdict))
    store.jobs.release(lease, JobState.PAUSED, "paused", "")


def problem_of(answer: Any, status: int) -> dict[str, Any]:
    """The problem document of a refusal: RFC 9457, and no path or name of the server in it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail"} <= document.keys()
    assert document["status"] == status
    assert "Traceback" not in answer.text
    return document
