"""What a step is expected to take: predicted, corrected by what the job's trials took."""

from pathlib import Path
from statistics import median

import pytest
import table
from played import run

from autotune.loop.trials import StepForecast, forecast_of
from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import read_snapshot
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import question_of
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store


def shipped(session: Session) -> StepForecast:
    assert isinstance(session.model, ModelSpec)
    return forecast_of(session, None)


def predicted(session: Session, config: TrialConfig) -> float:
    """As `autotune predict` has it."""
    assert isinstance(session.model, ModelSpec)
    question = question_of(session.model, session.cluster, global_batch_size=8, sequence_length=64)
    return estimates(question, [config])[0].step_seconds.mean


def test_before_any_trial_it_is_the_prediction(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    snapshot = read_snapshot(store, store.jobs.create(request_to_row(session.request)).id)
    config = session.baselines[0]
    assert shipped(session).seconds(config, snapshot) == pytest.approx(predicted(session, config))


def test_what_trials_took_corrects_it_once_each(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    snapshot = run(session, store, table.runner())
    ratios = [8 / rate(trial) / predicted(session, trial.config) for trial in snapshot.searched]
    config = session.baselines[0]
    forecast = shipped(session)
    expected = pytest.approx(median(ratios) * predicted(session, config))
    assert (forecast.seconds(config, snapshot), forecast.seconds(config, snapshot)) == (expected, expected)


def test_one_trial_that_met_a_neighbour_moves_little(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, confirm_repeats=0)

    def disturbed(config: TrialConfig) -> TrialResult:
        met = config == session.baselines[0]
        return table.ok(0.01) if met else table.ok(8 / predicted(session, config) / 3)

    snapshot = run(session, store, table.runner(disturbed))
    assert [rate(trial) for trial in snapshot.searched].count(0.01) == 1
    config = session.baselines[0]
    assert shipped(session).seconds(config, snapshot) == pytest.approx(3 * predicted(session, config))


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["random", "guided"])
def test_every_trial_is_asked_for_with_it(tmp_path: Path, store: Store, strategy: str) -> None:
    session, runner = table.session(tmp_path, strategy=strategy), table.Recorded()
    snapshot = run(session, store, runner)
    first, last = runner.requests[0], runner.requests[-1]
    assert first.expected_step_seconds == pytest.approx(predicted(session, first.config))
    assert snapshot.trials[-1].purpose is Purpose.CONFIRM
    assert last.expected_step_seconds == pytest.approx(shipped(session).seconds(last.config, snapshot))
    assert last.expected_step_seconds != pytest.approx(predicted(session, last.config))
