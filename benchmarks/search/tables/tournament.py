"""Every strategy on every group: first the predictions for the groups, then the games, both in several processes."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from typing import Protocol, TypeVar

from autotune.errors import RequestError
from autotune.objective.ranking import rate
from autotune.strategies.guided.described import Guide
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.contestants import SEEDLESS, SLOW, make_contestant
from benchmarks.search.tables.contest import Played, play, score
from benchmarks.search.tables.groups import Gathered, Group
from benchmarks.search.tables.table_forecaster import Disturb, TableForecaster, forecasters

Progress = Callable[[str, int, int], None]
"""Called with the counted unit, the number done, and the total."""
Games = list[dict[str, list[Played]]]
"""For each group the games of each strategy: one per seed, or a single one if seeds have no effect."""
SLOW_GAMES = 1
"""Games per group of a strategy that takes seconds to decide."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The settings of a contest."""

    strategies: tuple[str, ...]
    calibrate: Calibration = Calibration.LEAVE_GROUP_OUT
    trials: int = 20
    seeds: int = 20
    """Games of a strategy per group: with the seeds 0, 1, …"""
    min_timed: int = 8
    seed: int = 0
    """For intervals and the oracle's noise."""
    processes: int = 0
    """0: one per core."""

    def __post_init__(self) -> None:
        if not self.strategies:
            raise RequestError("strategies", "none is named", "name them, with commas between")
        for name in self.strategies:
            if self.strategies.count(name) > 1:
                raise RequestError("strategies", f"{name} is named twice", "name each once")
            make_contestant(name, score, _guide(_Nothing()))
        if self.calibrate is Calibration.FEW_ROWS:
            raise RequestError(
                "calibrate", "few-rows draws rows anew each time", "use none, leave-group-out or leave-source-out"
            )


class Spread(Protocol):
    """Calls a function for each item, in any process; yields results in the order of the items."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]: ...


@contextmanager
def workers(processes: int) -> Iterator[Spread]:
    """Newly spawned processes: modules and threads of this one must not affect them.

    Raises:
        RequestError: one of them died.
    """
    if processes == 1:
        yield map
        return
    others = set(active_children())
    with (
        _one_thread_each(),
        ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn"), _leave_interrupts_to_the_parent) as pool,
    ):
        try:
            yield pool.map
        except BrokenProcessPool as error:
            remedy = "give fewer, or 1: each needs memory"
            raise RequestError("processes", "a process of the contest has died", remedy) from error
        except BaseException:
            # Leaving the pool waits for running games: minutes if a strategy is slow.
            for child in set(active_children()) - others:
                child.terminate()
            raise


def predict_groups(
    gathered: Gathered,
    predictor: TablePredictor,
    spread: Spread,
    disturbs: Sequence[Disturb | None] = (None,),
) -> list[list[TableForecaster]]:
    """For each disturbance, the predictions for each group, fitted on the split without its rows."""
    found: list[list[TableForecaster | None]] = [[None] * len(gathered.groups) for _ in disturbs]
    split_groups = [(split, [gathered.groups[place] for place in split.groups]) for split in gathered.splits]
    predict = partial(forecasters, predictor=predictor, disturbs=disturbs)
    for split, predictions in zip(gathered.splits, spread(predict, split_groups), strict=True):
        for row, each in zip(found, predictions, strict=True):
            for place, forecaster in zip(split.groups, each, strict=True):
                row[place] = forecaster
    return [[forecaster for forecaster in row if forecaster is not None] for row in found]


def play_all(
    groups: Sequence[Group],
    forecasters: Sequence[TableForecaster],
    rounds: Rounds,
    spread: Spread,
    progress: Progress | None = None,
) -> Games:
    """Play all games. The result does not depend on the order in which they end."""
    pairs = [(name, group, known) for group, known in zip(groups, forecasters, strict=True) for name in rounds.strategies]
    found: Games = [{} for _ in groups]
    for done, games in enumerate(spread(partial(_games, rounds=rounds), pairs)):
        found[done // len(rounds.strategies)][rounds.strategies[done % len(rounds.strategies)]] = games
        if progress:
            progress("strategies on groups", done + 1, len(pairs))
    return found


def _games(pair: tuple[str, Group, TableForecaster], rounds: Rounds) -> list[Played]:
    name, group, forecaster = pair
    seeds = range(games_of(name, rounds))
    # A new strategy for each game: data cached in one game must not affect another, least of all its decision times.
    return [play(group, make_contestant(name, score, _guide(forecaster)), seed, rounds.trials) for seed in seeds]


def _guide(forecaster: TableForecaster) -> Guide:
    return Guide(forecaster=forecaster, value=rate)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit child processes to one thread: linear-algebra threads that wait for cores take ten times as long."""
    ours = [name for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def games_of(name: str, rounds: Rounds) -> int:
    """Games of a strategy per group: one if seeds have no effect, `SLOW_GAMES` if it takes seconds to decide."""
    if name in SEEDLESS:
        return 1
    return min(rounds.seeds, SLOW_GAMES) if name in SLOW else rounds.seeds


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Nothing(TableForecaster):
    """A placeholder for predictions, to check strategy names."""

    def __init__(self) -> None:
        pass
