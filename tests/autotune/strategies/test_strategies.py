"""One test case for every strategy, the baselines of the benchmarks too, and what is special to each."""

import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import table
from few_candidates import FewCandidates
from flat_forecaster import FlatForecaster

from autotune.errors import RequestError
from autotune.objective.ranking import Ranking, rate
from autotune.session.session import Session
from autotune.strategies.guided.described import Forecaster, Guide
from autotune.strategies.guided.prior import setting_of, shipped_prior
from autotune.strategies.guided.space_forecaster import SpaceForecaster
from autotune.strategies.optuna_samplers import Axes, ObservedTrial
from autotune.strategies.strategy import Strategy
from autotune.strategies.walks import RandomStrategy
from benchmarks.search.contestants import CONTESTANTS, make_contestant
from search_spaces.outcome import Outcome, Purpose
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

INSTALLED = tuple(name for name in CONTESTANTS if name != "smac" or find_spec("smac"))
ABSENT = pytest.mark.skip(reason="smac is not installed")
NAMES = tuple(pytest.param(name, marks=() if name in INSTALLED else ABSENT) for name in CONTESTANTS)
SLOW = ("gp", "smac")
"""Strategies that take about a second to choose once `random` has chosen the first eight."""


def strategy(name: str, space: SearchSpace | None = None) -> Strategy:
    """With predictions for a space; without one, with such that tell nothing."""
    forecaster: Forecaster = FlatForecaster()
    if space is not None:
        setting = setting_of(space.model, space, "native", Ranking(), Fidelity())
        forecaster = SpaceForecaster(setting, shipped_prior(space.cluster, "native"))
    return make_contestant(name, Ranking().score, Guide(forecaster=forecaster, value=rate))


def session(folder: Path, name: str) -> Session:
    """The whole space, or 9 configurations for those that are slow."""
    pins = {"activation_checkpointing": ["none"], "zero_stage": [0, 1, 3]} if name in SLOW else {}
    return table.session(folder, pins=pins)


def trial(number: int, config: TrialConfig, result: TrialResult) -> TrialRecord:
    now = datetime.now(UTC)
    return TrialRecord(
        job_id="j", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full", repeat=0,
        counted=True,
        outcome=result.outcome, result=result, attempts=1, created=now, started=now, finished=now,
    )  # fmt: skip


def walk(session: Session, name: str, steps: int, batch: int = 1) -> list[TrialRecord]:
    """History after `steps` proposals, each answered by the table; every fifth is out of memory."""
    history: list[TrialRecord] = []
    for _ in range(steps):
        for config in strategy(name, session.space).propose(session.space, history, [], batch, seed=3):
            result = table.ended(Outcome.INFEASIBLE) if len(history) % 5 == 4 else table.measured(config)
            history.append(trial(len(history), config, result))
    return history


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_proposed_once_and_then_none(tmp_path: Path, name: str) -> None:
    small = session(tmp_path, name)
    history = walk(small, name, steps=11, batch=3)
    assert len(history) == small.space.count() == len({trial.config.hash for trial in history})
    assert all(trial.config in small.space for trial in history)


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_pending_configurations_are_not_proposed(tmp_path: Path, name: str) -> None:
    small = session(tmp_path, name)
    tried = 7 if name in SLOW else 10
    history = walk(small, name, steps=tried)
    pending = strategy(name, small.space).propose(small.space, history, [], 2, seed=3)
    further = strategy(name, small.space).propose(small.space, history, pending, 30, seed=3)
    assert len(pending) == 2
    assert len({config.hash for config in [*pending, *further]}) == small.space.count() - tried


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_a_large_space_is_proposed_from(tmp_path: Path, name: str) -> None:
    session = table.session(tmp_path, space="zero-buckets", pins={"loss_chunk_size": [0, 16, 32]})
    assert session.space.count() > 20_000
    history = walk(session, name, steps=9)
    assert len({trial.config.hash for trial in history}) == 9
    assert all(trial.config in session.space for trial in history)


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_of_a_table_with_holes_every_configuration_is_proposed(name: str) -> None:
    sizes = [1, 2, 4, 8, 16]
    present = [
        TrialConfig(micro_batch_size=size, tensor_parallel_size=sizes[-1 - number], zero_stage=stage)
        for number, size in enumerate(sizes)
        for stage in (0, 3)
    ]
    history: list[TrialRecord] = []
    while len(history) < len(present):
        config = strategy(name).propose(FewCandidates(present), history, [], 1, seed=3)[0]
        history.append(trial(len(history), config, table.measured(config)))
    assert {trial.config for trial in history} == set(present)
    assert strategy(name).propose(FewCandidates(present), history, [], 1, seed=3) == []


def test_the_nearest_configuration_answers_for_one_that_does_not_exist() -> None:
    near = TrialConfig(micro_batch_size=4, tensor_parallel_size=2)
    far = TrialConfig(micro_batch_size=1, tensor_parallel_size=4)
    axes = Axes(FewCandidates([far, near, TrialConfig(micro_batch_size=2)]))
    assert axes.nearest({"micro_batch_size": 2, "tensor_parallel_size": 2}, [far, near], seed=0) == near


def test_the_genetic_algorithm_breeds_from_the_generation_before() -> None:
    from autotune.strategies.optuna_samplers import Nsga2Strategy

    axes = Axes(
        FewCandidates([TrialConfig(micro_batch_size=size, zero_stage=stage) for size in range(1, 41) for stage in (0, 3)])
    )
    observed = [ObservedTrial(places={"micro_batch_size": 3, "zero_stage": 1}, score=1.0, wins=True)] * 16
    children = list(islice(Nsga2Strategy(Ranking().score).answers(axes, observed, [], seed=0), 20))
    # All parents are equal: what is not mutated is as theirs.
    assert sum(child["micro_batch_size"] == 3 for child in children) >= 8


PRINT_PROPOSALS = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import test_strategies
print(*test_strategies.proposals(Path(sys.argv[3])), sep="\\n")
"""


def proposals(folder: Path) -> list[str]:
    """What each strategy proposes after some trials, while one is pending."""
    small, found = table.session(folder), []
    for name in INSTALLED:
        history = walk(small, name, steps=9 if name in SLOW else 11)
        pending = [history.pop().config]
        found += [config.hash for config in strategy(name, small.space).propose(small.space, history, pending, 2, seed=3)]
    return found


@pytest.mark.nightly
def test_another_process_proposes_the_same(tmp_path: Path) -> None:
    """One with another seed of its hashes: this one's is drawn when it starts."""
    here = Path(__file__).parent
    places = {"PYTHONPATH": str(here.parents[2]), "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRINT_PROPOSALS, str(here), str(here.parent), str(tmp_path)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=places, check=True).stdout
    assert printed.split() == proposals(tmp_path)
    assert len(printed.split()) == 2 * len(INSTALLED)


def test_the_seed_decides_the_random_order_and_not_the_grid(tmp_path: Path) -> None:
    space = table.session(tmp_path).space
    assert strategy("random").propose(space, [], [], 8, 0) != strategy("random").propose(space, [], [], 8, 1)
    assert strategy("grid").propose(space, [], [], 8, 0) == strategy("grid").propose(space, [], [], 8, 1)


@pytest.mark.prove
def test_random_draws_of_a_large_space_end(tmp_path: Path) -> None:
    space = table.session(tmp_path).space
    from autotune.strategies.walks import _draws

    assert len({config.hash for config in _draws(space, 0)}) == space.count()
    assert RandomStrategy().propose(space, [], list(space.enumerate()), 1, 0) == []


@pytest.mark.prove
def test_tpe_finds_the_best_sooner_than_a_random_order(tmp_path: Path) -> None:
    session = table.session(tmp_path)
    best = max(session.space.enumerate(), key=lambda config: table.measured(config).samples_per_second.mean)  # type: ignore[union-attr]
    trials = 0
    for seed in range(12):
        history: list[TrialRecord] = []
        while best.hash not in {trial.config.hash for trial in history}:
            config = strategy("tpe").propose(session.space, history, [], 1, seed=seed)[0]
            history.append(trial(len(history), config, table.measured(config)))
        trials += len(history)
    assert trials / 12 < session.space.count() / 2


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(RequestError, match="guided, tpe, random, grid"):
        strategy("genetic")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_list_is_made(name: str) -> None:
    assert isinstance(strategy(name), Strategy)


@pytest.mark.skipif(find_spec("smac") is not None, reason="smac is installed")
def test_a_missing_package_is_told_with_its_remedy() -> None:
    with pytest.raises(RequestError, match=r"strategy: smac needs .*; pip install 'smac>=2.4,<3'"):
        strategy("smac")
