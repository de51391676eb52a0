"""Attacks by files, requests and rows: on other people's jobs, on the machine, and on keys."""

import io
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import create_engine, text

from storage.records import ORIGIN, Submission
from storage.store import open_store
from tests.hostile.endurance import receivers
from tests.hostile.ground import COMMAND, HEAVY, JOB, Finding, NodePool, Row, ground

pytestmark = pytest.mark.hostile
IMPORT = Finding(
    number=7, title="Imported keys", attack="`db import` of a job's file that holds an API key with the scope admin",
    before="the key was installed, and worked",
)  # fmt: skip
ALLOW = Finding(
    number=8, title="Allow-lists of yesterday", attack="clone, resume and claim of a job whose factory is allowed no more",
    before="it was cloned, resumed, and built by the worker",
)  # fmt: skip
WEBHOOKS = Finding(
    number=10, title="Slow webhooks", attack="an owner with deliveries to a receiver that accepts and never answers",
    before="deliveries of others waited for batches of 8 slow ones: minutes",
)  # fmt: skip
DAMAGE = Finding(
    number=12, title="Damaged rows", attack="one JSON value of one job is damaged",
    before="claims, lists and predictions answered 500 or stopped",
)  # fmt: skip


def until(holds: Callable[[], bool], seconds: float = 120.0) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


def state_of(http: httpx2.Client, job: str) -> str:
    return str(http.get(f"/v1/jobs/{job}").json()["state"])


def submit(http: httpx2.Client, **changes: object) -> str:
    answer = http.post("/v1/jobs", json=JOB | changes)
    assert answer.status_code == httpx2.codes.ACCEPTED, answer.text
    return str(answer.json()["id"])


def attack_by_import(here: NodePool, job: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Add an admin's key to the file of a job, and have it imported."""
    with open_store(here.database) as store, open_store(str(folder / "mallory.db")) as mine:
        mine.keys.create("mallory", ("admin",))
        sink, own = io.StringIO(), io.StringIO()
        store.transfer.dump(sink, job)
        mine.transfer.dump(own)
        store.jobs.delete(job)
    key = next(line for line in own.getvalue().splitlines() if '"api_keys"' in line)
    lines = sink.getvalue().splitlines()[:-1]
    path = folder / "job.jsonl"
    path.write_text("\n".join([*lines, key, json.dumps({"end": len(lines)})]) + "\n", encoding="utf-8")
    words = [*COMMAND, "db", "import", str(path), "--db", here.database]
    return subprocess.run(words, env=dict(here.variables), capture_output=True, text=True, timeout=120, check=False)


def test_a_file_installs_no_key(tmp_path: Path, database: str, rows: list[Row]) -> None:
    with ground(tmp_path, database, keys=True) as here, here.client(here.key("anna")) as http:
        job = submit(http)
        done = attack_by_import(here, job, tmp_path)
        assert done.returncode == 2, done.stderr
        assert "rows of api_keys do not belong in a job's file" in done.stderr
        with open_store(here.database) as store:
            assert "mallory" not in {key.owner for key in store.keys.all()}
            assert store.jobs.exact([job]) == {}
    rows.append(Row(finding=IMPORT, database=here.kind, after="refused with one line (exit 2); nothing is written"))


def test_what_is_allowed_no_more_runs_no_more(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    with ground(tmp_path, sqlite, keys=True, workers=1) as here, here.client(here.key("anna")) as http:
        allowed = submit(http)
        until(lambda: state_of(http, allowed) == "SUCCEEDED")
        with open_store(here.database) as store:
            request = {**store.jobs.get(allowed).request, "model": "mallory:build", ORIGIN: "service"}
            # As a service wrote it that allowed the factory.
            former = store.queue.submit(request, Submission(submitter="anna"))[0].id
        until(lambda: state_of(http, former) == "FAILED")
        ended = http.get(f"/v1/jobs/{former}").json()
        assert "--allow-factory" in ended["message"]
        for asked in ("clone", "resume"):
            refused = http.post(f"/v1/jobs/{former}/{asked}")
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "model")
    rows.append(
        Row(finding=ALLOW, database=here.kind, after="clone and resume: 422; claimed: FAILED with one line, nothing built")
    )


def test_slow_receivers_hold_up_their_owner_alone(tmp_path: Path, database: str, rows: list[Row]) -> None:
    with (
        receivers() as there,
        ground(tmp_path, database, keys=True, serve=("--webhook-network", "127.0.0.0/8")) as here,
        here.client(here.key("mallory")) as mallory,
        here.client(here.key("anna")) as anna,
    ):
        for _ in range(4):
            assert mallory.post("/v1/webhooks", json={"url": there["silent"]}).status_code == httpx2.codes.CREATED
        hook = anna.post("/v1/webhooks", json={"url": there["well"]}).json()["id"]
        for _ in range(20 if HEAVY else 8):
            mallory.post(f"/v1/jobs/{submit(mallory)}/cancel")
        with here.normal_client() as client:
            anna.post(f"/v1/jobs/{submit(anna)}/cancel")
            told = f"/v1/webhooks/{hook}/deliveries"
            waited = until(lambda: [item["state"] for item in anna.get(told).json()["items"]] == ["delivered"])
        usage = here.usage()
    client.require_served()
    after = f"a delivery of another owner is made after {waited:.1f} s"
    rows.append(Row(finding=WEBHOOKS, database=here.kind, after=after, client=client, usage=usage))


def test_a_damaged_row_stops_nobody(tmp_path: Path, database: str, rows: list[Row]) -> None:
    with ground(tmp_path, database, keys=True) as here, here.client(here.key("anna")) as http:
        bad = submit(http, tags=["nightly"])
        engine = create_engine(here.database.replace("postgresql:", "postgresql+psycopg:"))
        value = "{" if here.kind == "SQLite" else "5"
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE jobs SET request = '{value}' WHERE id = :id"), {"id": bad})
        engine.dispose()
        good = submit(http, tags=["nightly"])
        with here.normal_client() as client:
            # Two that look for jobs of some runners, which the damaged request has none of, and one that takes it.
            for options in (["--jobs", "2", "--runner", "local", "--runner", "ray"], ["--jobs", "1"]):
                words = [*COMMAND, "worker", "--replay", "table.json", *options]
                done = subprocess.run(
                    words, env=dict(here.variables), cwd=here.folder, capture_output=True, text=True, timeout=300, check=False
                )
                assert done.returncode == 0, done.stderr
                assert "Traceback" not in done.stderr
            for path in ("/v1/jobs", "/v1/jobs?tag=nightly", f"/v1/overviews?job={bad}&job={good}", f"/v1/jobs/{bad}"):
                assert http.get(path).status_code == httpx2.codes.OK, path
            assert (state_of(http, good), state_of(http, bad)) == ("SUCCEEDED", "FAILED")
            usage = here.usage()
        told = subprocess.run(
            [*COMMAND, "db", "check", "--db", here.database], env=dict(here.variables), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert (told.returncode, told.stdout.split(":")[0]) == (1, f"jobs {bad}")
    client.require_served()
    after = "others are listed, claimed and run; `db check` names the row"
    rows.append(Row(finding=DAMAGE, database=here.kind, after=after, client=client, usage=usage))
