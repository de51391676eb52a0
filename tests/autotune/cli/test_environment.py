"""A real sweep with environments as its last stage, read back in the ranks; and what the command line refuses."""

import json
from pathlib import Path

import jsonschema
import pytest
from called import Command

from autotune.frameworks.best_config import SCHEMA_PATH
from autotune.outcome.job_snapshot import read_snapshot
from search_spaces.outcome import Outcome, Purpose
from storage.store import open_store

pytestmark = pytest.mark.usefixtures("forked_ranks")

ARENA, PASSIVE = "MALLOC_ARENA_MAX=1", "MALLOC_TOP_PAD_=65536 OMP_WAIT_POLICY=passive"
SWEEP = (
    "sweep", "llama-tiny", "--runner", "local", "--trials", 4, "--trial-seconds", 0.1, "--confirm-repeats", 1, "--no-racing",
    "--global-batch-size", 4, "--sequence-length", 16, "--pin", "micro_batch_size=1",
    "--environment-setting", ARENA, "--environment-setting", PASSIVE,
)  # fmt: skip


@pytest.mark.nightly
def test_ranks_have_the_variables_of_their_trial_and_no_others(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT")  # of the tests
    answer = command(*SWEEP)
    assert answer.status == 0
    with open_store(str(folder / "jobs.db")) as store:
        snapshot = read_snapshot(store, store.jobs.get().id)
        trials = [snapshot.whole(trial) for trial in snapshot.trials]
        active = snapshot.job.active_seconds
    assert [t.config.environment for t in trials if t.purpose is Purpose.SEARCH] == ["", "", ARENA, PASSIVE]
    results = [trial.result for trial in trials if trial.result is not None]
    assert [result.outcome for result in results] == [Outcome.OK] * len(trials)
    assert [result.environment.get("variables", "") for result in results] == [t.config.environment for t in trials]
    # Every trial of the stage is of cold processes, whose start is in its time and in the job's. So is every one after it where
    # a setting led: which one leads here is for the machine to say.
    warm = [result.warm for result in results]
    assert warm[:4] == [False, True, False, False]
    assert not any(warm[4:]) or not any(trial.config.environment for trial in trials[4:])
    assert active > sum(result.phase_seconds["setup"] for result in results)
    document = json.loads((folder / "best-config.json").read_text())
    jsonschema.validate(document, json.loads(SCHEMA_PATH.read_text()))
    assert [one["environment"] for one in document["environments"]["tried"]] == [ARENA, PASSIVE]
    assert "  environment: " in answer.out

    _reproduces_with_its_variables(command, folder)


def _reproduces_with_its_variables(command: Command, folder: Path) -> None:
    document = json.loads((folder / "best-config.json").read_text())
    document["best"]["config"]["environment"] = PASSIVE
    (folder / "set.json").write_text(json.dumps(document))
    again = command("reproduce", "set.json", "--repeats", 1, "--json")
    assert "inside" in json.loads(again.out)
    document["best"]["config"]["environment"] = "LD_PRELOAD=/tmp/x.so"
    (folder / "hostile.json").write_text(json.dumps(document))
    refused = command("reproduce", "hostile.json", "--repeats", 1)
    assert refused.status != 0
    assert "environment: LD_PRELOAD may not be set; use some of " in refused.err and "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--environment-setting", "LD_PRELOAD=/tmp/x.so"], "environment_settings: LD_PRELOAD may not be set; use some of "),
        (["--environment-setting", "NCCL_ALGO=Tree"], "environment_settings: NCCL_ALGO acts on cuda devices, and ranks have "),
        (["--environment-setting", "MALLOC_ARENA_MAX=lots"], "environment_settings: 'lots' is not a value of MALLOC_ARENA_MAX"),
        (["--environment-setting", "standard", "--trials", 4], "environment_settings: 4 settings leave none of 4 trials "),
        (["--pin", "environment=PATH=/tmp"], "environment: PATH may not be set; use some of "),
        (["--pin", "environment=NCCL_NVLS_ENABLE=0"], "environment-variables: with environment=NCCL_NVLS_ENABLE=0, NCCL_NVLS_"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(command: Command, words: list[object], line: str) -> None:
    answer = command("sweep", "llama-tiny", "--runner", "local", *words)
    assert answer.status == 2
    assert line in answer.err and "Traceback" not in answer.err
