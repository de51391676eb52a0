"""Lists show a job with a damaged row as one, and the others as they are."""

import sqlalchemy as sa
from starlette.testclient import TestClient

from storage.store import Store
from tests.api.conftest import submit


def test_one_damaged_row_stops_no_list(client: TestClient, store: Store, database: str) -> None:
    jobs = [submit(client)["id"] for _ in range(3)]
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        for job, change in zip(jobs, ('answer = \'{"colour":"red"}\'', 'summary = \'{"$damaged":""}\''), strict=False):
            connection.execute(sa.text(f"UPDATE jobs SET {change} WHERE id = :id"), {"id": job})
    engine.dispose()
    listed = {item["id"]: item for item in client.get("/v1/jobs").json()["items"]}
    assert listed.keys() == set(jobs)
    assert listed[jobs[0]]["answer"] is None
    assert listed[jobs[1]]["message"] == "damaged: its request cannot be read"
    assert (listed[jobs[2]]["message"], listed[jobs[2]]["model"]) == ("", "llama-tiny")
    assert client.get("/v1/overviews", params={"job": jobs}).status_code == 200
