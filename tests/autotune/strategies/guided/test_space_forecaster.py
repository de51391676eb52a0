"""What is predicted of a space: the pool is the space, and describes what a single configuration is described as."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import table

from autotune.objective.ranking import Ranking
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.fitting.residuals import EarlierResidual
from autotune.prediction.planning.scan import NOT_SCANNED, without_buckets
from autotune.request.job_fields import Objective
from autotune.strategies.guided import space_forecaster
from autotune.strategies.guided.described import Described
from autotune.strategies.guided.prior import JobSetting, Prior, setting_of, shipped_prior, transformer_of
from autotune.strategies.guided.space_forecaster import PENALTY, SpaceForecaster, moves
from autotune.strategies.guided.surrogate import prior
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome, Purpose
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


def setting(folder: Path, space: str, ranks: int = 4) -> JobSetting:
    searched = table.session(folder, space=space, ranks=ranks).space
    return setting_of(searched.model, searched, "native", Ranking(), Fidelity())


def forecaster(found: JobSetting, prior: Prior | None = None) -> SpaceForecaster:
    return SpaceForecaster(found, prior or shipped_prior(found.cluster, found.engine))


def trial(config: TrialConfig, number: int, rate: float) -> TrialRecord:
    """One that was measured at that rate."""
    now = datetime.now(UTC)
    return TrialRecord(
        job_id="j", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full", repeat=0,
        counted=True, outcome=Outcome.OK, result=table.ok(rate), attempts=1, created=now, started=now, finished=now,
    )  # fmt: skip


def equal(one: Described, other: Described) -> None:
    for item in dataclasses.fields(Described):
        assert np.allclose(getattr(one, item.name), getattr(other, item.name), rtol=1e-12), item.name


@pytest.mark.parametrize("space", ["zero", "3d"])
def test_the_pool_is_the_space_and_describes_what_is_described_alone(tmp_path: Path, space: str) -> None:
    found = setting(tmp_path, space)
    pool = forecaster(found).pool(found.space)
    configs = [pool.config(place) for place in range(len(pool.described))]
    assert set(configs) == set(found.space.enumerate())
    assert list(pool.places(configs)) == list(range(len(configs)))
    some = [0, 7, len(configs) // 2, len(configs) - 1]
    equal(pool.described.take(np.array(some)), forecaster(found).describe([configs[place] for place in some]))


@pytest.mark.prove
def test_buckets_of_a_small_space_are_candidates_like_all_others(tmp_path: Path) -> None:
    found = setting(tmp_path, "zero-buckets")
    pool = forecaster(found).pool(found.space)
    assert {pool.config(place) for place in range(len(pool.described))} == set(found.space.enumerate())


def test_buckets_of_a_large_space_stand_where_they_are_and_are_moved_around_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_forecaster, "WHOLE", 10)
    found = setting(tmp_path, "zero-buckets")
    pool = forecaster(found).pool(found.space)
    assert {pool.config(place) for place in range(len(pool.described))} == set(without_buckets(found.space).enumerate())
    best = pool.config(0)
    around = forecaster(found).around(best, float(np.log(1.0)))
    assert around
    assert len(set(around)) == len(around)
    assert not set(around) & {best}
    assert all(config in found.space for config in around)
    assert all(pool.places([config])[0] == -1 for config in around)


def test_a_knob_that_acts_on_next_to_nothing_is_not_moved(tmp_path: Path) -> None:
    space = setting(tmp_path, "zero-buckets").space
    best = next(iter(without_buckets(space).enumerate()))
    parts = {"compute": 0.999, "data": 0.001}
    assert moves(space, best, parts, measured=1.0) == []
    assert moves(space, best, parts, measured=2.0)  # half of the step is not explained


def test_every_knob_that_the_pool_leaves_acts_on_something() -> None:
    assert {knob.name for knob in KNOBS.values() if knob.acts_on} == NOT_SCANNED


def test_of_a_large_space_the_fastest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = setting(tmp_path, "3d")
    whole = forecaster(found).pool(found.space)
    monkeypatch.setattr(space_forecaster, "LARGEST_POOL", 50)
    pool = forecaster(found).pool(found.space)
    assert 50 <= len(pool.described) <= 60  # equals of the last are kept, too
    kept = whole.places([pool.config(place) for place in range(len(pool.described))])
    assert np.all(kept >= 0)
    left = np.setdiff1d(np.arange(len(whole.described)), kept)
    assert whole.described.log_rate[kept].min() >= whole.described.log_rate[left].max() - 1e-9


def test_a_space_beyond_reach_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = setting(tmp_path, "3d")
    monkeypatch.setattr(space_forecaster, "MOST_PREDICTED", 100)
    with pytest.raises(SpaceTooLargeError, match=r"more than 100 configurations.*pin some knobs"):
        forecaster(found).pool(found.space)


def test_a_lesson_of_an_earlier_job_moves_what_is_like_it_and_nothing_else(tmp_path: Path) -> None:
    found = setting(tmp_path, "zero")
    plain = forecaster(found).pool(found.space).described
    told = tuple(float(value) for value in plain.features[3])
    residual = EarlierResidual(features=told, error=-1.0, noise=0.01, setting=0)
    other = EarlierResidual(features=tuple(value + 100 for value in told), error=1.0, noise=0.01, setting=0)
    prior = dataclasses.replace(shipped_prior(found.cluster, "native"), residuals=(residual, other))
    learned = forecaster(found, prior).pool(found.space).described.learned
    assert np.all(plain.learned == 0)
    assert learned.argmin() == 3
    assert learned[3] < -0.5


def test_of_what_is_predicted_alike_the_one_with_fewest_settings_of_its_own_is_believed_first(tmp_path: Path) -> None:
    found = setting(tmp_path, "full")
    base = found.space.base
    asked = [base, base.replace({"offload_activations": True}), base.replace({"offload_activations": True, "gc_interval": 50})]
    described = forecaster(found).describe(asked)
    assert described.penalty == pytest.approx([0.0, PENALTY, 2 * PENALTY])
    assert prior(described) == pytest.approx(described.log_rate - described.penalty)


def trials(found: JobSetting, rates: Coefficients, count: int) -> list[TrialRecord]:
    """Of a job on hardware whose coefficients are these."""
    made = forecaster(found, dataclasses.replace(shipped_prior(found.cluster, "native"), rates=rates)).pool(found.space)
    places = [*range(0, len(made.described), max(len(made.described) // count, 1))][:count]
    return [trial(made.config(at), number, float(np.exp(made.described.log_rate[at]))) for number, at in enumerate(places)]


@pytest.mark.prove
def test_trials_of_the_job_mend_coefficients_that_are_far_off(tmp_path: Path) -> None:
    found = setting(tmp_path, "zero-buckets")
    shipped = shipped_prior(found.cluster, "native").rates
    real = dataclasses.replace(shipped, step_seconds=shipped.step_seconds / 8, link_seconds=shipped.link_seconds * 10)
    first, wanted = (
        forecaster(found),
        forecaster(found, dataclasses.replace(shipped_prior(found.cluster, "native"), rates=real)),
    )
    later = first.after(trials(found, real, 8))
    truth = wanted.pool(found.space).described.log_rate

    def error(made: SpaceForecaster) -> float:
        return float(np.std(made.pool(found.space).described.log_rate - truth))

    assert error(later) < 0.3 * error(first)


def test_coefficients_are_fitted_at_milestones_alone(tmp_path: Path) -> None:
    found = setting(tmp_path, "zero")
    first = forecaster(found)
    done = trials(found, shipped_prior(found.cluster, "native").rates, 8)
    assert first.after([]) is first
    assert first.after([dataclasses.replace(done[0], outcome=Outcome.FAILED)]) is first
    at_four = first.after(done[:4])
    assert first.after(done[:5]) is at_four
    assert first.after(done[:6]) is not at_four


def test_where_earlier_jobs_were_learned_from_their_coefficients_stay(tmp_path: Path) -> None:
    found = setting(tmp_path, "zero")
    residual = EarlierResidual(features=(0.0,) * 40, error=0.0, noise=0.1, setting=0)
    learned = forecaster(found, dataclasses.replace(shipped_prior(found.cluster, "native"), residuals=(residual,)))
    assert learned.after(trials(found, shipped_prior(found.cluster, "native").rates, 4)) is learned


def test_with_the_memory_objective_the_least_is_the_most(tmp_path: Path) -> None:
    space = table.session(tmp_path, objective="memory").space
    found = setting_of(
        space.model,
        space,
        "native",
        Ranking(objective=Objective.MEMORY),
        Fidelity(),
    )
    described = forecaster(found).pool(space).described
    held = described.tags.sum(axis=1)
    assert described.log_rate.argmax() == held.argmin()


def test_a_module_of_ones_own_is_a_transformer_of_its_size() -> None:
    for count in (10_000, 125_000_000, 7_000_000_000):
        made = transformer_of(FactoryModel(reference="a:b", parameter_count=count), 512)
        assert 0.3 < made.parameter_count / count < 3.0 or count < 100_000


def test_a_limit_makes_room_smaller(tmp_path: Path) -> None:
    space: SearchSpace = table.session(tmp_path, memory_limit=3_000_000).space
    limited = setting_of(space.model, space, "native", Ranking(memory_limit_bytes=3_000_000, headroom=0.1), Fidelity())
    assert forecaster(limited).pool(space).described.room.max() <= 2_700_001
