"""`--knowledge` of the commands that learn from measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
import table
from called import Answer, Command
from known import measured, run_job
from measurements import sweep, write_table

from autotune.errors import KnowledgeError, RequestError
from autotune.knowledge.content import content_of
from autotune.loop.loop import run_job as run_to_its_end
from autotune.request.rows import request_to_row
from storage.store import open_store

PREDICT = ("predict", "qwen2-0.5b", "--cluster", "dgx-a100:1", "--global-batch-size", 32, "--sequence-length", 1024, "--json")


def refused(answer: Answer, *says: str) -> None:
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    for text in says:
        assert text in answer.err


@pytest.mark.prove
def test_a_table_and_a_job_correct_a_prediction(command: Command, folder: Path) -> None:
    write_table(folder / "theirs.csv", sweep(6))
    blind, informed = (json.loads(command(*PREDICT, *words).out) for words in ((), ("--knowledge", "theirs.csv")))
    assert informed["predicted"]["step_seconds"] != blind["predicted"]["step_seconds"]
    assert "measurements of 1 source by others (" in informed["calibration_source"]
    with open_store(str(folder / "jobs.db")) as store:
        job = run_job(store, measured("x", 8))
    # The database has these trials itself: nothing of them counts twice.
    both, alone = (json.loads(command(*PREDICT, *words).out) for words in (("--knowledge", job), ()))
    assert both["predicted"] == alone["predicted"] != blind["predicted"]


def test_missing_knowledge_is_refused(command: Command, folder: Path) -> None:
    refused(command(*PREDICT, "--knowledge", "none.csv"), "knowledge: none.csv does not exist", "give a table")
    refused(command(*PREDICT, "--knowledge", "ftp://host/t.csv"), "is not an address of HTTP")
    (folder / "content.json").write_text('{"settings": [], "measurements": []}')
    refused(command(*PREDICT, "--knowledge", "content.json"), "content.json: ", "no such column")


@pytest.mark.prove
def test_a_sweep_learns_from_measurements_and_keeps_them(folder: Path) -> None:
    """The job has the measurements, so that a worker needs no file; its best-config.json does not pass them on."""
    from autotune.session.knowledge import with_knowledge
    from autotune.session.resolve import prepare

    content = content_of(measured("x", 6))
    with open_store(str(folder / "jobs.db")) as store:
        session = prepare(table.request(folder, strategy="guided", trials=3, confirm_repeats=0, knowledge=content))
        job = store.jobs.create(request_to_row(session.request)).id
        result = run_to_its_end(session, store, job, table.runner())
        assert result is not None
        assert "measurements of 1 source by others (6 on others)" in store.jobs.prior(job)["source"]  # type: ignore[index]
    told: list[str] = []
    own = with_knowledge(table.request(folder, strategy="guided", knowledge=job), told.append, str(folder / "jobs.db"))
    assert isinstance(own.knowledge, dict)
    assert len(own.knowledge["measurements"]) == 3
    assert told[-1] == "knowledge: 3 of 3 measurements go with the job"
    with pytest.raises(RequestError, match="knowledge: random does not use earlier trials; use --strategy guided"):
        prepare(table.request(folder, strategy="random", knowledge=content))
    broken: dict[str, Any] = json.loads(json.dumps(content))
    broken["measurements"][0]["samples_per_second"] = -1.0
    with pytest.raises(KnowledgeError, match=r"knowledge.measurements\[0\].samples_per_second: -1.0 is not a positive number"):
        prepare(table.request(folder, strategy="guided", knowledge=broken))
