"""Submissions that compute: in the event loop, in the threads that others need, in regular expressions."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from search_spaces.patterns import compiled
from tests.hostile.ground import HEAVY, JOB, Finding, NodePool, Row, ground

pytestmark = pytest.mark.hostile

FREEZE = Finding(
    number=1,
    title="One submission freezes the API",
    attack="bodies of up to 1 MB: 2,400 regular expressions, 100,000 wrong values, 300,000 lists, one long text",
    before="30 to 50 s without any answer, `/livez` included; 5 to 15 MB kept for each body",
)
STARVE = Finding(
    number=6,
    title="Shared threads starve",
    attack="20 clients submit large spaces; 45 webhooks whose names no server resolves",
    before="the median read rises from 1 ms to 3.4 s; lists wait 7.4 s for names",
)
ENDLESS = r"(?:(?:.|.)*)*\x01"
"""Python's engine searches one line of output for it for longer than anybody waits."""
EXPRESSION = Finding(
    number=2,
    title="A regular expression freezes a worker",
    attack=r"a failure row with `(?:(?:.\|.)*)*\x01`, searched in one line of output",
    before="the worker never comes back, nor do its heartbeats: the engine holds the interpreter's lock",
)
MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
LARGE = {
    "model": "llama-3-70b", "cluster": "dgx-h100:4096", "space": "full", "trials": 3, "global_batch_size": 2**32 - 1,
    "sequence_length": 2**32 - 1,
}  # fmt: skip


def row(patterns: list[str]) -> dict[str, Any]:
    """A row of the failure table."""
    return {"outcome": "LOST", "remedy": "look", "said": patterns}


def heavy_bodies(number: int) -> list[dict[str, Any]]:
    """Bodies that took longest to read, compile, hash and write down; `number` makes those of each call new."""
    patterns = [f"x{number}{at}" + "(?:ab|cd|[e-z]{2,9})" * 17 for at in range(2400)]
    return [
        JOB | {"failures": {f"r{at}": row(patterns[100 * at : 100 * at + 100]) for at in range(24)}},
        JOB | {"failures": {"r": row([f"(?:a{at}{number}?){{80}}" for at in range(50)])}},
        JOB | {"failures": {f"r{at}": {f"f{one}": number for one in range(1000)} for at in range(80)}},
        JOB | {"pins": {f"k{at}": [{}] * 100 for at in range(100)}},
        JOB | {"model": {"config": MODEL | {"x": [[] for _ in range(300_000)]}}},
        JOB | {"model": {"config": MODEL | {"model_type": f"{number}" + "x" * 900_000}}},
        JOB | {"model": {"config": MODEL | {"x": "\n" * 450_000, "y": number}}},
        {f"u{at}": number for at in range(4900)},
    ]


def attack_with_heavy_bodies(here: NodePool, key: str, rounds: int) -> set[int]:
    """Send them one after another; return the statuses of the answers."""
    with here.client(key) as http:
        return {http.post("/v1/jobs", json=body).status_code for at in range(rounds) for body in heavy_bodies(at)}


def attack_with_large_spaces(here: NodePool, key: str, clients: int, seconds: float) -> list[httpx2.Response]:
    """Clients that submit, check and count spaces which take long, each at once after the other, for so long."""
    until = time.monotonic() + seconds
    numbers = iter(range(10**9))
    answers: list[httpx2.Response] = []

    def submit() -> None:
        with here.client(key) as http:
            while True:
                body = LARGE | {"global_batch_size": 2**32 - 1 - 2 * next(numbers)}
                for path in ("/v1/jobs", "/v1/spaces/count", "/v1/drafts/check"):
                    answers.append(http.post(path, json=body))
                if time.monotonic() > until:
                    return

    threads = [threading.Thread(target=submit) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_no_submission_holds_up_anybody(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    with ground(tmp_path, sqlite, keys=True) as here:
        key = here.key("mallory")
        with here.normal_client() as client:
            began = time.monotonic()
            statuses = attack_with_heavy_bodies(here, key, rounds=20 if HEAVY else 1)
            seconds = time.monotonic() - began
        usage = here.usage()
    assert statuses <= {202, 400, 422}
    after = f"{20 if HEAVY else 1} rounds of 8 bodies are answered in {seconds:.0f} s; longest wait of the normal client "
    worst = max(reading["worst"] for reading in client.readings.values())
    rows.append(
        Row(finding=FREEZE, database="SQLite", after=after + f"{worst * 1e3:.0f} ms", client=client, usage=usage)
    )  # fmt: skip
    client.require_served()
    if HEAVY:
        assert worst < 0.5


def test_large_spaces_do_not_take_the_threads_of_reads(tmp_path: Path, database: str, rows: list[Row]) -> None:
    with ground(tmp_path, database, keys=True) as here:
        key = here.key("mallory")
        with here.normal_client() as client:
            answers = attack_with_large_spaces(here, key, clients=20 if HEAVY else 2, seconds=20.0 if HEAVY else 0.0)
        usage = here.usage()
    assert {answer.status_code for answer in answers} <= {202, 422, 503}
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 503)
    median = max(client.readings[name]["median"] for name in ("list", "job"))
    refused = sum(answer.status_code == 503 for answer in answers)
    after = f"median read {median * 1e3:.1f} ms; {refused} of {len(answers)} requests answered 503 with Retry-After"
    rows.append(Row(finding=STARVE, database=here.kind, after=after, client=client, usage=usage))
    client.require_served()


def test_an_endless_expression_is_refused_or_matched_at_once(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    """RE2 reads it as it reads any other: the job is taken, and its worker goes on to the end."""
    with ground(tmp_path, sqlite, workers=1) as here, here.client() as http:
        refused = http.post("/v1/jobs", json=JOB | {"failures": {"r": row(["(?=x)y"])}})
        assert refused.status_code == 422
        assert "lookaround" in refused.json()["errors"][0]["remedy"]
        job = http.post("/v1/jobs", json=JOB | {"failures": {"r": row([ENDLESS])}}).json()["id"]
        limit = time.monotonic() + 60
        while http.get(f"/v1/jobs/{job}").json()["state"] != "SUCCEEDED":
            assert time.monotonic() < limit
            time.sleep(0.05)
    began = time.process_time()
    assert not compiled(ENDLESS).found_in("x" * 100_000)
    milliseconds = (time.process_time() - began) * 1e3
    after = f"{milliseconds:.1f} ms for 100,000 characters; what RE2 cannot read, such as lookaround, is refused with 422"
    rows.append(Row(finding=EXPRESSION, database="SQLite", after=after))
