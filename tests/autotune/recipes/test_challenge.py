"""A recipe against rivals: when it is beaten, when it is not, and that noise alone does not beat it."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import table
from lint_recipes import RECIPES

from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import read_snapshot
from autotune.recipes.challenge import Challenged, Nomination, Result, Rival, challenge_session, judge, nominate
from autotune.recipes.lint import case_of
from autotune.request.rows import request_to_row
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store

LIVE = Path(__file__).parents[3] / "benchmarks" / "data" / "live-sweeps-2.jsonl"
RIVALS = (2, 4)
"""Micro-batch sizes of the rivals; the recipe's is 1."""


def rivals() -> tuple[Rival, ...]:
    return tuple(Rival(differences={"micro_batch_size": size}, settings={}, predicted=None) for size in RIVALS)


def nomination() -> Nomination:
    """Two rivals of a recipe; what it is about is not read."""
    one = read_written(RECIPES / "deepspeed-zero2.json")[0]
    return Nomination(case=case_of(one, Surroundings()), outlook="not predicted", rivals=rivals())


def challenged(folder: Path, store: Store, answer: Callable[[TrialConfig], TrialResult], rounds: int = 3) -> Challenged:
    asked = table.session(folder, baseline={"zero_stage": 2, "micro_batch_size": 1}, confirm_repeats=rounds)
    session, offered = challenge_session(asked, nomination())
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    return judge(session, read_snapshot(store, job.id), offered)


def with_rates(rates: dict[int, float], noise: float = 0.01, seed: int = 0) -> Callable[[TrialConfig], TrialResult]:
    """Results with these rates by micro-batch size, times log-normal noise."""
    draw = random.Random(seed)
    return lambda config: table.ok(rates[config.micro_batch_size] * draw.lognormvariate(0.0, noise))


def recorded() -> list[float]:
    """Samples/s of one configuration at the start of 100 live sweeps on two local ranks."""
    sweeps = [json.loads(line) for line in LIVE.read_text(encoding="utf-8").splitlines()]
    return [trial["rate"] for sweep in sweeps for trial in sweep["trials"] if not trial["config"] and trial["outcome"] == "OK"]


def test_a_faster_rival_beats_the_recipe(tmp_path: Path, store: Store) -> None:
    found = challenged(tmp_path, store, with_rates({1: 100.0, 2: 130.0, 4: 105.0}))
    assert found.result is Result.BEATEN
    assert found.best is not None and found.best.differences == {"micro_batch_size": 2}
    assert found.gain is not None and found.gain.low < 1.3 < found.gain.high < 1.45 and found.gain.low > 1.1
    assert found.rounds > 1 and [rival.outcome for rival in found.rivals] == ["OK", "OK"]


def test_slower_rivals_do_not_beat_it(tmp_path: Path, store: Store) -> None:
    found = challenged(tmp_path, store, with_rates({1: 100.0, 2: 80.0, 4: 70.0}))
    assert (found.result, found.best) == (Result.NOT_BEATEN, None)
    assert found.gain is not None and found.gain.high < 1.0


def test_where_intervals_overlap_it_is_undecided(tmp_path: Path, store: Store) -> None:
    found = challenged(tmp_path, store, with_rates({1: 100.0, 2: 103.0, 4: 99.0}, noise=0.08))
    assert (found.result, found.best) == (Result.UNDECIDED, None)
    assert found.gain is not None and found.gain.low < 1.0 < found.gain.high


@pytest.mark.prove
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.nightly)])
def test_recorded_noise_alone_beats_nothing(tmp_path: Path, store: Store, count: int) -> None:
    """The recipe against itself: every trial's rate is the next of 100 real measurements of one configuration."""
    rates, results = recorded(), []
    assert len(rates) >= 100
    for number in range(count):
        order = rates[:]
        random.Random(number).shuffle(order)
        noise: Iterator[float] = iter(order)
        results.append(challenged(tmp_path, store, lambda _, noise=noise: table.ok(next(noise))).result)  # type: ignore[misc]
    assert results.count(Result.BEATEN) <= 0.05 * count, results


def test_a_recipe_that_does_not_run_says_so(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        return table.ended(Outcome.INFEASIBLE, "out of memory on rank 1") if config.micro_batch_size == 1 else table.ok(100.0)

    found = challenged(tmp_path, store, answer)
    assert (found.rate, found.message) == (None, "the recipe itself infeasible here: out of memory on rank 1")


def test_predictions_nominate_a_faster_layout() -> None:
    """Megatron-Bridge #949: the shipped recipe is slower than others by prediction."""
    one = read_written(RECIPES / "bridge-949-shipped.args")[0]
    case = case_of(one, Surroundings(cluster=resolve_cluster("dgx-h100:2")))
    assert case.batch is not None
    found = nominate(case, case.batch, 3)
    assert len(found.rivals) == 3
    assert all(rival.differences and rival.settings and rival.predicted is not None for rival in found.rivals)
    best = found.rivals[0].predicted
    assert best is not None and best.mean > 1.0


def test_predictions_do_not_beat_the_predicted_best() -> None:
    one = read_written(RECIPES / "deepspeed-zero2.json")[0]
    around = Surroundings(cluster=resolve_cluster("dgx-h100:1"), model=resolve_model("llama-3.2-1b"), sequence_length=2048)
    case = case_of(one, around)
    rival = nominate(case, 64, 1).rivals[0]
    improved = case.changed(rival.settings)
    again = nominate(improved, 64, 5)
    assert again.result is not Result.BEATEN


@pytest.mark.parametrize("size", RIVALS)
def test_rivals_run_as_nominated(tmp_path: Path, store: Store, size: int) -> None:
    asked = table.session(tmp_path, baseline={"zero_stage": 2, "micro_batch_size": 1})
    session, offered = challenge_session(asked, nomination())
    recipe = session.baselines[0]
    assert session.request.trials == 3 and session.baselines == asked.baselines[:1]
    assert recipe.replace({"micro_batch_size": size}) in [config for config, _ in offered]
