"""Why a request was refused: field, problem and remedy in our words, whatever the validator says of it."""

import itertools
import json
import re
from typing import Any, get_args

import pytest
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType
from starlette.testclient import TestClient

from api.reference import document
from api.refusals import refusals
from api.submission import JobSubmission
from tests.api.conftest import REQUEST, problem_of
from tests.sampling import sampled

DOCUMENT = json.loads(document())
WRONG: tuple[Any, ...] = (
    "x", "", "x" * 5000, "a\nb", 0, -1, 2.5, 2**70, 1e300, True, [], [[]], [1] * 2000, {}, {"": {}}, {"BAD KEY": [{}]},
)  # fmt: skip
"""Of every field some have the wrong kind, and some the wrong size."""
LEAKS = re.compile(
    r"Input should|Value error|Field required|Extra inputs|should (have|match|be)|valid (string|integer|number|list|dict)|"
    r"valid boolean|constrained|function-|union\[|\[key\]|UploadedModel|SubmittedCommand|pydantic|errors\.pydantic",
)


def lines_of(answer: Any) -> list[str]:
    """The lines of a refusal, each checked to be one of ours."""
    body = problem_of(answer, 422)
    for error in body["errors"]:
        assert error["field"] and error["message"] and error["remedy"], error
        assert not error["field"].startswith(("body.", "query.", "path.", "header.")), error
    assert not LEAKS.search(json.dumps(body)), body
    assert "\n" not in body["detail"]
    return [f"{error['field']}: {error['message']}; {error['remedy']}" for error in body["errors"]]


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", sampled([*JobSubmission.model_fields, "nonsense"], every=8))
def test_no_field_is_refused_in_the_words_of_the_validator(refusing: TestClient, name: str) -> None:
    refused = 0
    for value in WRONG:
        answer = refusing.post("/v1/drafts/check", json=REQUEST | {name: value})
        if answer.status_code != 200:
            refused += 1
            assert all(line.count("; ") for line in lines_of(answer))
    assert refused >= 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"trials": "abc"}, "trials: 'abc' is not a whole number of 1 or more; give at least 1"),
        ({"trials": 2_000_000}, "trials: 2000000 is not a whole number from 1 to 1,000,000; give at most 1,000,000"),
        ({"trails": 3}, "trails: is not a field of this request; did you mean trials?"),
        ({"seq_len": 3}, "seq_len: is not a field of this request; did you mean sequence_length?"),
        ({"data_path": "/x"}, "data_path: is not a field of a request to a service; leave it out"),
        ({"model": 3}, "model: 3 is not a text or an object; give a text or an object"),
        ({"model": {"name": "x"}}, "model.config: is missing; give an object"),
        ({"headroom": 1}, "headroom: 1 is not a number from 0 to less than 1; give a number from 0 to less than 1"),
        ({"max_seconds": 0}, "max_seconds: 0 is not a number above 0; give a number above 0"),
        ({"racing": "yes"}, "racing: 'yes' is not true or false; give true or false"),
        ({"pins": {"zero_stage": []}}, "pins.zero_stage: is empty; give at least one item"),
        ({"document_lengths": [16, 0]}, "document_lengths.1: 0 is not a whole number of 1 or more; give at least 1"),
        ({"cluster": "x" * 300}, "cluster: has more than 200 characters; shorten it"),
        ({"cluster": "a\nb"}, r"cluster: 'a\nb' is not a text without control characters; leave them out"),
        (
            {"memory_limit": "40 bananas"},
            "memory_limit: '40 bananas' is not a size; write bytes, or a number with kB, MB, GB, ",
        ),
        (
            {"objective": "goodput", "goodput": ["failures=/etc/x.csv"]},
            "failures: '/etc/x.csv' is not known; use one of llama3, ",
        ),
        ({"goodput": ["tokens=1e12"]}, "goodput: belongs to the objective goodput; leave it out, or choose that objective"),
        ({"failures": {"a": {"outcome": "FUN"}}}, "failures.a.outcome: 'FUN' is not known; use one of INFEASIBLE, FAILED, "),
        ({"command": {"folder": "/x"}}, "command.arguments: is missing; give a list"),
        ({"priority": 1000}, "priority: 1000 is not a whole number from -100 to 100; give at most 100"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_in_one_line(refusing: TestClient, change: dict[str, Any], line: str) -> None:
    assert lines_of(refusing.post("/v1/jobs", json=REQUEST | change))[0].startswith(line)


@pytest.mark.parametrize(
    ("method", "path", "more", "line"),
    [
        ("GET", "/v1/jobs?limit=x", {}, "limit: 'x' is not a whole number of 1 or more; give at least 1"),
        ("GET", "/v1/jobs?limit=9999", {}, "limit: '9999' is not a whole number from 1 to 1,000; give at most 1,000"),
        ("GET", "/v1/jobs?state=FUN", {}, "state.0: 'FUN' is not known; use one of QUEUED, RUNNING, "),
        ("GET", "/v1/jobs/abc", {}, "job_id: 'abc' is not a job's whole id; give one such as 20300101-000000-a1b2"),
        ("GET", "/v1/overviews", {}, "job: is missing; give a list"),
        ("POST", "/v1/jobs", {"json": [1]}, "body: [1] is not an object; give an object"),
        ("POST", "/v1/jobs", {}, "body: is missing; give an object"),
        ("POST", "/v1/plans", {"json": {"model": "gpt2", "max": "fun"}}, "max: 'fun' is not known; use one of sequence_"),
        ("POST", "/v1/predictions", {"json": {}}, "model: is missing; give a text or an object"),
        ("POST", "/v1/webhooks", {"json": {"url": "ftp://x"}}, "url: 'ftp://x' is not an address; begin it with "),
        ("POST", "/v1/jobs", {"json": REQUEST, "headers": {"Idempotency-Key": "a b"}}, "Idempotency-Key: 'a b' is not a key "),
    ],
)  # fmt: skip
def test_wrong_parameters_and_bodies(refusing: TestClient, method: str, path: str, more: dict[str, Any], line: str) -> None:
    assert lines_of(refusing.request(method, path, **more))[0].startswith(line)


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "line"),
    [
        ("POST", "/v1/jobs", b"{", "application/json", "body: is not JSON ("),
        ("POST", "/v1/jobs", b"{}", "text/plain", "Content-Type: is not application/json; send JSON, and say so"),
        ("POST", "/v1/jobs", b'{"a": 1, "a": 2}', "application/json", "body: is not JSON (a field is given twice); correct it"),
        ("GET", "/nowhere", b"", "", "path: '/nowhere' is not an address of this service; see /openapi.json"),
        ("DELETE", "/v1/jobs", b"", "", "method: DELETE is not possible here; use GET, "),
    ],
)
def test_what_no_operation_sees(refusing: TestClient, method: str, path: str, content: bytes, kind: str, line: str) -> None:
    detail = refusing.request(method, path, content=content, headers={"Content-Type": kind}).json()["detail"]
    assert detail.startswith(line)
    assert "; " in detail


def every_error() -> list[ErrorDetails]:
    """An error of each kind that the validator knows, of each place of a request."""
    context = {"min_length": 1, "max_length": 2, "pattern": "x", "error": "x"}
    places = (("body",), ("body", "trials"), ("body", "pins", "zero_stage", "int"), ("query", "limit"), ("body", "none"))
    return [
        {"type": kind, "loc": loc, "input": "abc", "ctx": context, "msg": "the validator's own words"}
        for kind, loc in itertools.product(get_args(ErrorType), places)
    ]


def test_every_kind_of_error_has_words_of_ours() -> None:
    assert len({error["type"] for error in every_error()}) > 90
    for error in every_error():
        (found,) = refusals([error], DOCUMENT, "/v1/jobs", "post")
        assert found.field and found.message and found.remedy
        assert "own words" not in str(found), error
