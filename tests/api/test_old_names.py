"""Bodies with fields by their old names: accepted, and noted in a header."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api.conftest import REQUEST, problem_of

NOTE = '@1795392000;note="memory_limit_bytes is now memory_limit; the old name still works"'


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/drafts/check"])
def test_an_old_name_is_accepted_and_noted(client: TestClient, path: str) -> None:
    former = client.post(path, json=REQUEST | {"memory_limit_bytes": "2GB"})
    assert (former.is_success, former.headers["deprecation"]) == (True, NOTE)
    assert former.json()["request"]["memory_limit"] == 2 * 10**9
    assert "deprecation" not in client.post(path, json=REQUEST | {"memory_limit": 2 * 10**9}).headers


def test_both_names_are_refused(client: TestClient) -> None:
    body: dict[str, Any] = REQUEST | {"memory_limit_bytes": 1, "memory_limit": 1}
    answer = client.post("/v1/jobs", json=body)
    assert problem_of(answer, 422)["detail"] == "memory_limit: is given as memory_limit_bytes too; leave one of them out"
    assert "deprecation" not in answer.headers


def test_an_old_value_is_noted(client: TestClient) -> None:
    body = {"model": "gpt2", "cluster": "dgx-a100:1", "max": "micro_batch", "global_batch_size": 8, "space": "zero", "top": 1}
    answer = client.post("/v1/plans", json=body)
    assert answer.json()["max"]["dimension"] == "micro_batch_size"
    assert answer.headers["deprecation"] == '@1795392000;note="micro_batch is now micro_batch_size; the old name still works"'
