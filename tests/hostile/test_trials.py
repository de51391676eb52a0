"""Attacks by what a trial runs: code that reads its environment, and rows that call a node broken."""

import json
import time
from pathlib import Path

import httpx2
import pytest

from storage.store import open_store
from tests.hostile.ground import Finding, NodePool, Row, ground

pytestmark = pytest.mark.hostile

ENVIRONMENT = Finding(
    number=9, title="Secrets in trials", attack="a model whose code reads the environment that it runs in",
    before="the database's address, API keys and tokens of the worker",
)  # fmt: skip
NODES = Finding(
    number=11, title="Nodes in quarantine", attack="a failure row that calls the node broken, and a model that fails by it",
    before="the node took no job of anybody any more",
)  # fmt: skip
SECRETS = ("AUTOTUNE_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD")
MODULE = '''\
import json
import os
from pathlib import Path

import torch

HERE = Path(__file__).parent


def look():
    """What this process finds."""
    (HERE / f"seen.{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))


class Net(torch.nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.inner, self.broken = torch.nn.Linear(8, 8), broken
        look()

    def forward(self, x):
        look()
        if self.broken:
            raise RuntimeError("boom")
        return self.inner(x).square().mean()


def batch(micro_batch_size, generator):
    return {"x": torch.randn(micro_batch_size, 8, generator=generator)}


def build():
    return Net(False), batch


def boom():
    return Net(True), batch
'''
OWN = {
    "ranks": 1, "runner": "local", "space": "zero", "strategy": "random", "trials": 1, "global_batch_size": 2,
    "control_every": 0, "confirm_repeats": 0,
}  # fmt: skip
ROW = {"outcome": "FAILED", "remedy": "none", "message": ["boom"], "quarantine": True}


def ended(here: NodePool, http: httpx2.Client, model: str, **changes: object) -> str:
    """The state in which a job of this model ends."""
    answer = http.post("/v1/jobs", json=OWN | {"model": model} | changes)
    assert answer.status_code == httpx2.codes.ACCEPTED, answer.text
    limit = time.monotonic() + 120
    while (state := http.get(f"/v1/jobs/{answer.json()['id']}").json()["state"]) not in ("SUCCEEDED", "FAILED"):
        assert time.monotonic() < limit, (here.folder / "worker0.log").read_text()
        time.sleep(0.1)
    return str(state)


def test_code_of_a_trial_finds_no_secret_and_condemns_no_node(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    (tmp_path / "spy.py").write_text(MODULE)
    allowed = ("--allow-factory", "spy:build", "--allow-factory", "spy:boom")
    secrets = {name: f"secret of {name}" for name in SECRETS} | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    with (
        ground(tmp_path, sqlite, keys=True, workers=1, serve=allowed, worker=allowed, environment=secrets) as here,
        here.client(here.key("mallory")) as mallory,
        here.client(here.key("anna")) as anna,
    ):
        assert ended(here, mallory, "spy:boom", failures={"mine": ROW}) == "FAILED"
        with open_store(sqlite) as store:
            assert store.nodes.quarantined() == []
        assert ended(here, anna, "spy:build") == "SUCCEEDED"
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("seen.*.json")]
    assert seen
    for values in seen:
        found = [name for name, value in values.items() if value.startswith("secret of") or value == sqlite]
        assert found == []
    rows += [
        Row(finding=ENVIRONMENT, database="SQLite", after="a fixed list of variables, none of them a secret"),
        Row(finding=NODES, database="SQLite", after="no node is in quarantine; the next owner's job runs there"),
    ]
