"""A worker that computes a decision for a minute: it obeys at once all the same."""

import signal
import time
from pathlib import Path

import pytest

from tests.hostile.ground import HEAVY, JOB, Finding, NodePool, Row, ground

pytestmark = pytest.mark.hostile

DECIDING = Finding(
    number=16,
    title="A guided decision holds its worker",
    attack="a job with a large space, cancelled, or its worker ended, while it is computed",
    before="CANCELLED after 84 s, the worker's end after 54 s",
)
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip
LARGE = JOB | {
    "model": {"config": CONFIG}, "ranks": 8, "space": "full", "strategy": "guided", "global_batch_size": 1024,
    "sequence_length": 512, "runner": "local",
}  # fmt: skip
OBEYED_SECONDS = 5.0
"""Where one second is meant, on a machine that has nothing else to do."""


def started(here: NodePool, job: str) -> None:
    """Wait until the worker has the job in its hands, and is busy with it."""
    with here.client() as http:
        limit = time.monotonic() + 60
        while http.get(f"/v1/jobs/{job}").json()["state"] != "RUNNING":
            assert time.monotonic() < limit, (here.folder / "worker0.log").read_text()
            time.sleep(0.05)
    time.sleep(3.0 if HEAVY else 1.0)  # into the decision, which takes a minute


def test_cancel_and_sigterm_are_obeyed_while_a_decision_is_computed(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    with ground(tmp_path, sqlite, workers=1) as here, here.client() as http:
        jobs = [http.post("/v1/jobs", json=LARGE | {"seed": seed}).json()["id"] for seed in range(2)]
        started(here, jobs[0])
        began = time.monotonic()
        assert http.post(f"/v1/jobs/{jobs[0]}/cancel").status_code == 202
        while http.get(f"/v1/jobs/{jobs[0]}").json()["state"] != "CANCELLED":
            assert time.monotonic() - began < 50
            time.sleep(0.05)
        cancelled = time.monotonic() - began
        started(here, jobs[1])
        began = time.monotonic()
        here.workers[0].send_signal(signal.SIGTERM)
        here.workers[0].wait(50)
        ended = time.monotonic() - began
        job = http.get(f"/v1/jobs/{jobs[1]}").json()
        assert (job["state"], job["reason"]) == ("QUEUED", "")  # for the next worker
    after = f"CANCELLED after {cancelled:.1f} s, the worker's end after {ended:.1f} s"
    rows.append(Row(finding=DECIDING, database="SQLite", after=after))
    if HEAVY:
        assert max(cancelled, ended) < OBEYED_SECONDS
