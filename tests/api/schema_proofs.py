"""The service holds what its OpenAPI document promises: requests are made from it, and every answer is checked against it.

All checks of schemathesis are on. Where a request that fits the document may be refused all the same, the operation is named
in EXPECTED with the status and the reason. `make nightly` adds each value at the edge of what is allowed, `make fuzz` more
examples.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.errors
import hypothesis.strategies
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis import Case
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.schemas import OpenApiSchema
from starlette.testclient import TestClient

from api.app import create_app, with_routes
from api.settings import Settings
from storage.leases import current_owner
from storage.records import Ask
from storage.store import Store, open_store
from tests.api.conftest import measure, submit

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("AUTOTUNE_FUZZ_EXAMPLES", "5"))
THOROUGH = EXAMPLES > 5
EDGES = "AUTOTUNE_FUZZ_EXAMPLES" in os.environ
"""Whether each value at the edge of what is allowed is sent once to every operation."""
FEW = EXAMPLES if THOROUGH else 2
"""Of those who are let do less, or the same, as an administrator."""
WORD = "Bearer of-the-administrator"
RESOLVED = ("submit_job", "count_space", "validate_config", "predict", "plan", "check_job", "estimate_job")
EXPECTED = [
    # Which names there are, and which values go together, is more than a schema says: 422.
    (RESOLVED, ["422"]),
    # Which hosts are on the public internet: 422. An owner has so many webhooks at most: 409.
    (("create_webhook",), ["409", "422"]),
    # An Idempotency-Key that was used with another body: 422.
    (("clone_job",), ["404", "422"]),
    # There may be no such job, and there are figures of some names alone: 422.
    (("get_figure",), ["404", "422"]),
    # There may be no such trial: 404.
    (("list_logs", "read_log", "stream_logs"), ["404"]),
    # An If-Match of another version (412); a change of nothing (422).
    (("change_job",), ["404", "409", "412", "422"]),
]

# Times as Python knows them: there is no year 0, and no second 60.
schemathesis.openapi.format(
    "date-time", hypothesis.strategies.datetimes(datetime(1900, 1, 1), datetime(2999, 1, 1)).map("{:%Y-%m-%dT%H:%M:%SZ}".format)
)


class Service:
    """A service in process, with jobs of all kinds."""

    def __init__(self, folder: Path, require_keys: bool) -> None:
        url = str(folder / "jobs.db")
        self.store: Store = open_store(url)
        self.key = self.store.keys.create("root", {"admin"})[1]
        # "testserver" is what schemathesis calls it.
        self.app = create_app(Settings(database_url=url, require_keys=require_keys, hosts=("testserver",)))
        self.headers = {"Authorization": f"Bearer {self.key}"}
        self.client = TestClient(self.app, base_url="http://testserver", headers=self.headers)
        self.ended = self._submitted()
        measure(self.store, self.ended)
        self.store.queue.ask(self.ended, Ask.STOP)
        self.cancelled = self._submitted()
        self.store.queue.ask(self.cancelled, Ask.CANCEL)
        self.paused = self._submitted()
        measure(self.store, self.paused)

    def _submitted(self) -> str:
        return str(submit(self.client)["id"])

    def _running(self) -> str:
        job_id = self._submitted()
        self.store.jobs.acquire(job_id, current_owner())
        return job_id

    def choose_job(self, case: Case) -> None:
        """In four of five cases, take a job that is there in place of the one that was made up."""
        if "job_id" not in case.path_parameters or not case.meta.generation.mode.is_positive:
            return
        chance = zlib.crc32(repr((case.query, case.headers, case.body, case.path_parameters)).encode()) % 5
        if case.operation.path.endswith("/stream"):  # of the others it would not end
            jobs: Any = (self.ended, self.cancelled, self.ended, self.ended)
        elif case.method == "GET":
            jobs = (self.ended, self.cancelled, self.paused, self.paused)
        elif chance < 2:
            jobs = (self._submitted(), self._running())[chance:] * 2
        else:
            jobs = (self.ended, self.ended, self.ended, self.cancelled)
        if chance < 4:
            case.path_parameters["job_id"] = jobs[chance % len(jobs)]


class Door:
    """Where requests go: they are made before there is any service, so that they hold a word in place of its key."""

    app: FastAPI
    key = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, self.key.encode() if value == WORD.encode() else value) for name, value in scope.get("headers", ())]
        await self.app(scope | {"headers": headers}, receive, send)


def made_from(asks_for_keys: bool, key: bool, coverage: bool = THOROUGH, examples: int = FEW) -> OpenApiSchema:
    """What requests are made from; `coverage`: see EDGES."""
    accepted = {"2xx", "3xx"} if key or not asks_for_keys else {"401"}
    operations: list[dict[str, Any]] = [
        {
            "include-operation-id": list(names),
            "checks": {"positive_data_acceptance": {"expected-statuses": [*accepted, *statuses]}},
        }
        for names, statuses in EXPECTED
    ]
    config = SchemathesisConfig.from_dict(
        {
            "generation": {"max-examples": examples, "deterministic": True, "database": "none", "mode": "all"},
            "phases": {"coverage": {"enabled": coverage}, "stateful": {"max-steps": 20 if THOROUGH else 6}},
            "operations": operations,
        }
    )
    schema = schemathesis.openapi.from_dict(with_routes(asks_for_keys=asks_for_keys).openapi(), config=config)
    schema.app = Door()
    return schema


WITH_KEY = made_from(asks_for_keys=True, key=True, coverage=EDGES, examples=EXAMPLES)
WITHOUT_KEY = made_from(asks_for_keys=True, key=False)
LOOPBACK = made_from(asks_for_keys=False, key=False)


@WITH_KEY.auth(refresh_interval=None)
class Administrator:
    """Who may do everything."""

    def get(self, case: Case, context: Any) -> str:
        return WORD

    def set(self, case: Case, data: str, context: Any) -> None:
        case.headers["Authorization"] = data


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("keys"), require_keys=True)
    WITH_KEY.app.app = WITHOUT_KEY.app.app = service.app
    WITH_KEY.app.key = service.headers["Authorization"]
    yield service
    service.store.close()


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("loopback"), require_keys=False)
    LOOPBACK.app.app = service.app
    yield service
    service.store.close()


@WITH_KEY.parametrize()
def test_an_administrator_is_answered_as_the_document_says(case: Case, service: Service) -> None:
    service.choose_job(case)
    case.call_and_validate()


@WITHOUT_KEY.parametrize()
def test_who_has_no_key_is_refused_as_the_document_says(case: Case, service: Service) -> None:
    service.choose_job(case)
    answer = case.call_and_validate()
    if case.operation.definition.raw.get("security"):
        # What is no JSON, and no path or method at all, is told before anybody asks who wants to know.
        no_path = answer.status_code == 404 and answer.json()["detail"].startswith("path: ")
        assert answer.status_code in {401, 400, 405, 415} or no_path


@pytest.mark.nightly
@LOOPBACK.parametrize()
def test_on_loopback_all_is_answered_as_the_document_says(case: Case, loopback: Service) -> None:
    loopback.choose_job(case)
    case.call_and_validate()


def test_the_document_of_a_server_is_the_one_that_was_asked(service: Service, loopback: Service) -> None:
    assert service.client.get("/openapi.json").json() == WITH_KEY.raw_schema
    assert loopback.client.get("/openapi.json").json() == LOOPBACK.raw_schema


def test_chains_of_requests_are_answered_as_the_document_says(service: Service) -> None:
    """Operations are linked by what they return: a job that was submitted is read, steered, cloned and listed."""
    asked: list[str] = []
    wrong: list[BaseException] = []

    class Chains(WITH_KEY.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Case) -> None:
            if case.operation.path.endswith("/stream"):
                service.choose_job(case)

        def validate_response(self, response: Any, case: Case, **more: Any) -> None:
            asked.append(case.operation.label)
            try:
                super().validate_response(response, case, **more)
            except BaseException as error:
                wrong.append(error)
                raise

    settings = hypothesis.settings(
        max_examples=EXAMPLES, stateful_step_count=20 if THOROUGH else 6, deadline=None, database=None,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    for seed in range(100):
        # A service remembers what it was asked: the same chain goes on in another way later, which ends a run, not the test.
        with contextlib.suppress(hypothesis.errors.FlakyStrategyDefinition):
            hypothesis.seed(seed)(Chains).run(settings=settings)
        if len(asked) >= 10 * EXAMPLES and len(set(asked)) >= 10:
            break
    assert wrong == []
    assert len(asked) >= 10 * EXAMPLES
    assert len(set(asked)) >= 10, set(asked)


def test_every_check_is_on() -> None:
    checks = WITH_KEY.config.checks
    names = [name for name in dir(checks) if hasattr(getattr(checks, name), "enabled")]
    assert len(names) >= 14
    # The one that has no limit of its own; tests/api/test_hostile.py bounds times.
    assert {name for name in names if not getattr(checks, name).enabled} == {"max_response_time"}
