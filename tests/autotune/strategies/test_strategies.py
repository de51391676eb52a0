"""One test case for every strategy, and what is special to each."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import table

from autotune.errors import RequestError
from autotune.jobs.session import Session
from autotune.objective import Ranking
from autotune.strategies.random import RandomStrategy
from autotune.strategies.strategy import Strategy, make_strategy
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

NAMES = ("random", "grid", "tpe")


def strategy(name: str) -> Strategy:
    return make_strategy(name, Ranking().score)


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
        for config in strategy(name).propose(session.space, history, [], batch, seed=3):
            result = table.ended(Outcome.INFEASIBLE) if len(history) % 5 == 4 else table.measured(config)
            history.append(trial(len(history), config, result))
    return history


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_proposed_once_and_then_none(tmp_path: Path, name: str) -> None:
    session = table.session(tmp_path)
    history = walk(session, name, steps=9, batch=3)
    assert len(history) == session.space.count() == len({trial.config.hash for trial in history})
    assert all(trial.config in session.space for trial in history)


@pytest.mark.parametrize("name", NAMES)
def test_pending_configurations_are_not_proposed(tmp_path: Path, name: str) -> None:
    session = table.session(tmp_path)
    history = walk(session, name, steps=10)
    pending = strategy(name).propose(session.space, history, [], 3, seed=3)
    further = strategy(name).propose(session.space, history, pending, 20, seed=3)
    assert len(pending) == 3
    assert len({config.hash for config in [*pending, *further]}) == session.space.count() - 10


@pytest.mark.parametrize("name", NAMES)
def test_a_large_space_is_proposed_from(tmp_path: Path, name: str) -> None:
    session = table.session(tmp_path, space="zero-buckets", pins={"loss_chunk_size": [0, 16, 32]})
    assert session.space.count() > 20_000
    history = walk(session, name, steps=10)
    assert len({trial.config.hash for trial in history}) == 10
    assert all(trial.config in session.space for trial in history)


PRINT_PROPOSAL = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import table
import test_strategies as case
session = table.session(Path(sys.argv[2]))
for name in case.NAMES:
    history = case.walk(session, name, steps=11)
    pending = [history.pop().config]
    print([config.hash for config in case.strategy(name).propose(session.space, history, pending, 2, seed=3)])
"""


def test_another_process_proposes_the_same(tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = f"import sys; sys.path.insert(0, {str(here)!r})" + PRINT_PROPOSAL
    answers = {
        subprocess.run(
            [sys.executable, "-c", script, str(here.parent), str(tmp_path)],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(here.parents[2])},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1
    assert answers.pop().count("\n") == len(NAMES)


def test_the_seed_decides_the_random_order_and_not_the_grid(tmp_path: Path) -> None:
    space = table.session(tmp_path).space
    assert strategy("random").propose(space, [], [], 8, 0) != strategy("random").propose(space, [], [], 8, 1)
    assert strategy("grid").propose(space, [], [], 8, 0) == strategy("grid").propose(space, [], [], 8, 1)


def test_random_draws_of_a_large_space_end(tmp_path: Path) -> None:
    space = table.session(tmp_path).space
    from autotune.strategies.random import _draws

    assert len({config.hash for config in _draws(space, 0)}) == space.count()
    assert RandomStrategy().propose(space, [], list(space.enumerate()), 1, 0) == []


def test_tpe_finds_the_best_sooner_than_half_the_space(tmp_path: Path) -> None:
    session = table.session(tmp_path)
    best = max(session.space.enumerate(), key=lambda config: table.measured(config).samples_per_second.mean)  # type: ignore[union-attr]
    history: list[TrialRecord] = []
    while best.hash not in {trial.config.hash for trial in history}:
        config = strategy("tpe").propose(session.space, history, [], 1, seed=3)[0]
        history.append(trial(len(history), config, table.measured(config)))
    assert len(history) <= session.space.count() // 2 + 2


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(RequestError, match="tpe, random, grid"):
        strategy("genetic")
