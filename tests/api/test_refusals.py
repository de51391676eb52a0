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
            for line in lines_of(answer):
                assert line.count("; ") and re.match(rf"{name}[.:]", line), line
    assert refused >= 5


CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 256,
}  # fmt: skip
ON_GPUS = {"cluster": "dgx-h100", "ranks": 8}
FAULTS: dict[str, tuple[dict[str, Any], ...]] = {
    "model": ({"model": "nope"}, {"model": "./a.json"}, {"model": "os:system"}),
    "model.name": ({"model": {"name": "gpt2", "config": CONFIG}},),
    "model.config.model_type": ({"model": {"config": {}}}, {"model": {"config": CONFIG | {"model_type": "nope"}}}),
    "model.config.hidden_size": ({"model": {"config": CONFIG | {"hidden_size": "x"}}},),
    "model.config.num_attention_heads": ({"model": {"config": CONFIG | {"hidden_size": 63}}},),
    "command": ({"model": None, "command": {"arguments": ["python", "x.py"], "folder": "/x"}}, {"engine": "command"}),
    "cluster": ({"cluster": "nope"}, {"cluster": "dgx-h100:x"}, {"cluster": "8xnope"}, {"cluster": "local:2"}),
    "ranks": ({"cluster": "dgx-h100"},),
    "space": ({"space": "nope"}, {"space": "/etc/passwd"}),
    "global_batch_size": ({"global_batch_size": 3}, {"ranks": 3}),
    "sequence_length": ({"sequence_length": "8 bananas"}, {"model": "gpt2", "sequence_length": 10**6}),
    "memory_limit": ({"memory_limit": "x"},),
    "engine": ({"engine": "nope"},),
    "runner": ({"runner": "nope"},),
    "objective": ({"objective": "nope"}, {"objective": "scale"}),
    "strategy": ({"strategy": "nope"},),
    "optimizer": ({"optimizer": "nope"}, {"optimizer": "onebit_adam", "pins": {"zero_stage": 3}}),
    "run_device_hours": ({"run_device_hours": 1.0, "strategy": "grid"}, {"run_device_hours": 1.0, "objective": "pareto"}),
    "stop_margin": ({"stop_margin": 0.1, "strategy": "random"},),
    "simple": ({"simple": "nope"}, {"simple": "fsdp2", "space": "3d", "pins": {"tensor_parallel_size": 2}}),
    "failures.a.said": ({"failures": {"a": {"outcome": "FAILED", "remedy": "x", "said": ["(?=x)"]}}},),
    "tags": ({"tags": ["a"] * 33},),
    "tags.0": ({"tags": ["a b"]},),
    "name": ({"name": "\x85"},),
    "note": ({"note": "\x85"},),
    "team": ({"team": "\x85"},),
    "document_lengths": ({"document_lengths": [10**6]}, {"document_lengths": [8], "engine": "deepspeed"}),
    "expert_loads": ({"expert_loads": [[1.0, 2.0]]},),
    "environment_settings": ({"environment_settings": ["x"]}, {"environment_settings": ["LD_PRELOAD=x"]}),
    "trackers": ({"trackers": ["nope"]},),
    "knowledge.settings[0]": ({"knowledge": {"settings": [{"a": 1}], "measurements": [{"b": 1}]}},),
    "goodput": ({"goodput": ["tokens=1e12"]}, {"objective": "goodput", "goodput": ["nope=1"]}),
    "goodput.tokens": ({"objective": "goodput", "goodput": ["tokens=x"]}, {"objective": "goodput", "goodput": ["tokens="]}),
    "goodput.failures": ({"objective": "goodput", "goodput": ["failures=/etc/x.csv"]},),
    "baseline": ({"baseline": {"tensor_parallel_size": 3}}, {"baseline": {"micro_batch_size": 64}}),
    "baseline.zero_stag": ({"baseline": {"zero_stag": 1}},),
    "baseline.zero_stage": ({"baseline": {"zero_stage": 7}}, {"baseline": {"zero_stage": "x"}}),
    "baseline.environment": ({"baseline": {"environment": "LD_PRELOAD=x"}},),
    "pins.zero_stag": ({"pins": {"zero_stag": 1}},),
    "pins.zero_stage": (
        {"pins": {"zero_stage": 7}}, {"pins": {"zero_stage": [0, 9]}}, {"pins": {"zero_stage": "0,9"}},
        {"pins": {"zero_stage": 3, "micro_batch_size": 1}, "engine": "ddp"},
    ),
    "pins.micro_batch_size": ({"pins": {"zero_stage": 0, "micro_batch_size": 64}},),
    "pins.tensor_parallel_size": ({"pins": {"tensor_parallel_size": 3}}, {"pins": {"tensor_parallel_size": [3, 5]}}),
    "pins.offload_optimizer": ({"pins": {"offload_optimizer": "nvme"}},),
    "pins.precision": ({"pins": {"precision": "fp8"}}, {"pins": {"precision": "fp8"}} | ON_GPUS),
    "pins.pipeline_layout": ({"pins": {"pipeline_layout": "nope"}},),
    "pins.environment": ({"pins": {"environment": "LD_PRELOAD=x"}}, {"pins": {"environment": ["A=1", "A=2"]}}),
    "pins.optimizer": ({"pins": {"optimizer": "onebit_adam", "zero_stage": 3}},),
}  # fmt: skip
"""Field -> submissions in which it is at fault, although every field has the right type."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_field_that_is_at_fault_is_named(refusing: TestClient, name: str) -> None:
    for change in FAULTS[name]:
        body = {field: value for field, value in (REQUEST | change).items() if value is not None}
        named = {line.split(": ")[0] for line in lines_of(refusing.post("/v1/drafts/check", json=body))}
        assert name in named, (change, named)
        assert named <= {name, *(f"pins.{knob}" for knob in change.get("pins", {}))}, (change, named)


@pytest.mark.parametrize(
    ("path", "change", "fields"),
    [
        ("/v1/plans", {"pins": {"zero_stag": 1}}, ["pins.zero_stag"]),
        ("/v1/plans", {"pins": {"tensor_parallel_size": 3}, "space": "3d"}, ["pins.tensor_parallel_size"]),
        ("/v1/plans", {"goodput": {"failures": "/etc/x.csv"}, "objective": "goodput"}, ["goodput.failures"]),
        ("/v1/fits", {"cluster": "1x24GB", "pins": {"zero_stage": 7}}, ["pins.zero_stage"]),
        ("/v1/predictions", {"config": {"zero_stage": 7}}, ["config.zero_stage"]),
        ("/v1/predictions", {"config": {"tensor_parallel_size": 3}}, ["config.tensor_parallel_size"]),
        ("/v1/spaces/validate", {"config": {"zero_stage": 7}}, ["config.zero_stage"]),
    ],
    ids=str,
)
def test_so_do_questions(refusing: TestClient, path: str, change: dict[str, Any], fields: list[str]) -> None:
    body = {"model": "llama-tiny", "cluster": "dgx-h100", "global_batch_size": 8, "sequence_length": 64} | change
    assert [line.split(": ")[0] for line in lines_of(refusing.post(path, json=body))] == fields


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
            "goodput.failures: '/etc/x.csv' is not known; use one of llama3, ",
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
