"""What is told of a winner: the shares of the device's peak only where the peak is stated."""

from pathlib import Path
from typing import Any

import pytest
import table
from rich.console import Console

from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve
from autotune.text.result import print_result
from search_spaces.trial import COMPARABLE
from search_spaces.trial_config import TrialConfig
from storage.store import Store


def told(folder: Path, store: Store, **measured: Any) -> str:
    def answer(config: TrialConfig) -> Any:
        return table.ok(table.measured(config).samples_per_second.mean, **measured)  # type: ignore[union-attr]

    session = table.session(folder)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    console = Console(record=True, width=120, file=(folder / "told.txt").open("w"))
    print_result(build_best_config(session, read_snapshot(store, job.id)), console)
    console.file.close()
    return console.export_text()


def test_mfu_and_hfu_stand_beside_each_other(tmp_path: Path, store: Store) -> None:
    text = told(tmp_path, store, mfu=0.4, hfu=0.5)
    assert ("MFU" in text, "HFU" in text) == (True, True)
    assert "40.0%" in text
    assert "50.0%" in text


@pytest.mark.prove
@pytest.mark.parametrize(("mfu", "hfu"), [(None, None), (0.4, None)])
def test_what_is_not_known_has_no_column(tmp_path: Path, store: Store, mfu: float | None, hfu: float | None) -> None:
    text = told(tmp_path, store, mfu=mfu, hfu=hfu)
    assert ("MFU" in text, "HFU" in text) == (mfu is not None, False)


@pytest.mark.prove
def test_figures_of_ranks_that_took_turns_are_said_to_compare_within_the_job_alone(tmp_path: Path, store: Store) -> None:
    note = "within the job only: 4 ranks took turns on 2 cores"
    assert f"  comparable {note}\n" in told(tmp_path, store, environment={COMPARABLE: note})
    assert "comparable" not in told(tmp_path, store)


def test_a_script_comes_with_the_line_that_launches_it(tmp_path: Path, store: Store) -> None:
    words = ["python", "train.py", "--batch", "{micro_batch_size}", "--deepspeed_config", "{config}"]
    fields = {"command": words, "ranks": 2, "strategy": "random", "trials": 2, "confirm_repeats": 0}
    session = resolve(request_from_fields({**fields, "pins": {"micro_batch_size": 2}, "baseline": {"micro_batch_size": 2}}))
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner())
    console = Console(record=True, width=60, file=(tmp_path / "told.txt").open("w"))
    print_result(build_best_config(session, read_snapshot(store, job.id)), console)
    console.file.close()
    text = console.export_text()
    launch = "torchrun --nnodes=1 --nproc-per-node=2 train.py --batch 2 --deepspeed_config config.json"
    assert f"launch:\n  {launch}\n" in text
    assert f"config.json: `autotune export {job.id} --format deepspeed --out config.json` writes it\n" in text
