"""What is printed of a winner: the shares of the device's peak only where the peak is stated, and what was not compared."""

import re
from collections.abc import Callable
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
from search_spaces.outcome import Outcome
from search_spaces.trial import COMPARABLE, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store

PINS = {"micro_batch_size": (1, 2, 4), "zero_stage": 0, "activation_checkpointing": "none"}


def result_text(folder: Path, store: Store, answer: Callable[[TrialConfig], TrialResult], **changes: Any) -> str:
    """What a sweep of the table says at its end."""
    session = table.session(folder, **changes)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    console = Console(record=True, width=120, file=(folder / "result.txt").open("w"))
    print_result(build_best_config(session, read_snapshot(store, job.id)), console)
    console.file.close()
    return console.export_text()


def measured_with(**fields: Any) -> Callable[[TrialConfig], TrialResult]:
    """The table's rates, with other fields of the results."""
    return lambda config: table.ok(table.measured(config).samples_per_second.mean, **fields)  # type: ignore[union-attr]


def test_mfu_and_hfu_stand_beside_each_other(tmp_path: Path, store: Store) -> None:
    text = result_text(tmp_path, store, measured_with(mfu=0.4, hfu=0.5))
    assert ("MFU" in text, "HFU" in text) == (True, True)
    assert "40.0%" in text
    assert "50.0%" in text


@pytest.mark.prove
@pytest.mark.parametrize(("mfu", "hfu"), [(None, None), (0.4, None)])
def test_what_is_not_known_has_no_column(tmp_path: Path, store: Store, mfu: float | None, hfu: float | None) -> None:
    text = result_text(tmp_path, store, measured_with(mfu=mfu, hfu=hfu))
    assert ("MFU" in text, "HFU" in text) == (mfu is not None, False)


@pytest.mark.prove
def test_figures_of_ranks_that_took_turns_are_said_to_compare_within_the_job_alone(tmp_path: Path, store: Store) -> None:
    note = "within the job only: 4 ranks took turns on 2 cores"
    assert f"  comparable {note}\n" in result_text(tmp_path, store, measured_with(environment={COMPARABLE: note}))
    assert "comparable" not in result_text(tmp_path, store, measured_with())


def test_a_script_comes_with_the_line_that_launches_it(tmp_path: Path, store: Store) -> None:
    words = ["python", "train.py", "--batch", "{micro_batch_size}", "--deepspeed_config", "{config}"]
    fields = {"command": words, "ranks": 2, "strategy": "random", "trials": 2, "confirm_repeats": 0}
    session = resolve(request_from_fields({**fields, "pins": {"micro_batch_size": 2}, "baseline": {"micro_batch_size": 2}}))
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner())
    console = Console(record=True, width=60, file=(tmp_path / "result.txt").open("w"))
    print_result(build_best_config(session, read_snapshot(store, job.id)), console)
    console.file.close()
    text = console.export_text()
    launch = "torchrun --nnodes=1 --nproc-per-node=2 train.py --batch 2 --deepspeed_config config.json"
    assert f"launch:\n  {launch}\n" in text
    assert f"config.json: `autotune export {job.id} --format deepspeed --out config.json` writes it\n" in text


@pytest.mark.parametrize(("others", "headline", "line"), [
    (Outcome.FAILED, "Keep the baseline, which are the defaults, to which nothing could be compared: of 3 trials, 2 FAILED",
     "  not compared: trials 1, 2 (FAILED); see `autotune show`\n"),
    (Outcome.WRONG, "Keep the baseline, which are the defaults, to which nothing could be compared: of 3 trials, 2 WRONG",
     "  not compared: trials 1, 2 (WRONG); see `autotune show`\n"),
])  # fmt: skip
def test_an_answer_without_a_rival_to_compare_says_so_instead_of_a_probability(
    tmp_path: Path, store: Store, others: Outcome, headline: str, line: str
) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        return table.ok(100.0) if config.micro_batch_size == 1 else TrialResult(attempt="", outcome=others, message="no")

    text = result_text(tmp_path, store, answer, pins=PINS, trials=3)
    assert headline in text.replace("\n", " ")
    assert line in text
    assert "probability" not in text


def test_a_rival_that_failed_is_named_beside_the_probability(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        failed = TrialResult(attempt="", outcome=Outcome.FAILED, message="no")
        return failed if config.micro_batch_size == 4 else table.ok(100.0 * config.micro_batch_size)

    text = result_text(tmp_path, store, answer, pins=PINS, trials=3)
    assert "probability that nothing measured is better: > 99.9 %" in text
    assert re.search(r"\n  not compared: trial \d \(FAILED\)", text)
