"""One strategy on one group: what costs a trial, what a trial shows, what ends a game."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.strategies.strategy import Candidates, Strategy
from benchmarks.prediction.scoring.outcomes import Fate, Labels
from benchmarks.search.tables import contest
from benchmarks.search.tables.contest import Played, play
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from tests.autotune.measurements import row
from tests.benchmarks.search.grouped import gathered


def measured(name: str, micro_batch: int, rate: float | None, **cells: Any) -> dict[str, Any]:
    failed = {} if rate else {"outcome": "fail_unknown", "oom": None}
    return row(name, micro_batch=micro_batch, tokens_per_s_per_gpu=rate, **failed) | cells


TABLE = [
    measured("slow", 1, 100),
    measured("fast", 2, 190),
    measured("again", 2, 210),
    measured("full", 8, None, outcome="oom", oom="true"),
    measured("crashed", 4, None),
]
"""Four candidates: 100, the median of 190 and 210, out of memory, and crashed of what the table does not say."""


class Scripted(Strategy):
    """Proposes micro-batches in turn; None: a configuration that no table has; then what `then` does."""

    def __init__(self, *micro_batches: int | None, then: Exception | None = None) -> None:
        self._left = list(micro_batches)
        self._then = then
        self.shown: list[list[TrialRecord]] = []

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        self.shown.append(list(history))
        if not self._left:
            if self._then:
                raise self._then
            return []
        wanted = self._left.pop(0)
        if wanted is None:
            return [TrialConfig(prefetch_bucket_size=1 + len(self._left))]
        return [config for config in candidates.enumerate() if config.micro_batch_size == wanted]


def played(folder: Path, *micro_batches: int | None, trials: int = 4, then: Exception | None = None) -> Played:
    [group] = gathered(folder, TABLE).groups
    return play(group, Scripted(*micro_batches, then=then), 0, trials)


def test_shares_by_hand_and_what_failed_costs_a_trial(tmp_path: Path) -> None:
    found = played(tmp_path, 4, 1, 8, 2)
    assert found.shares == (0.0, 0.5, 0.5, 1.0)
    assert found.failed == (True, False, True, False)
    assert found.out_of_memory == (False, False, True, False)
    assert (found.refused, found.error, len(found.seconds)) == (0, "", 4)


def test_rows_of_one_configuration_are_one_candidate(tmp_path: Path) -> None:
    [group] = gathered(tmp_path, TABLE).groups
    assert (group.rows, len(group.candidates), group.timed, group.space.count()) == (5, 4, 2, 4)
    assert group.best == 200


def test_what_the_table_does_not_have_costs_nothing(tmp_path: Path) -> None:
    found = played(tmp_path, None, 1, None, 2, trials=2)
    assert (found.shares, found.refused, len(found.seconds)) == ((0.5, 1.0), 2, 4)


def test_illegal_proposals_without_end_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "MOST_REFUSED", 3)
    found = played(tmp_path, 1, None, None, None, 2)
    assert (found.shares, found.error) == ((0.5,), "proposed 3 configurations that the table does not have")


def test_asking_twice_ends_the_game(tmp_path: Path) -> None:
    found = played(tmp_path, 1, 1, 2)
    assert (found.shares, found.error) == ((0.5,), "proposed a configuration twice")


def test_what_a_strategy_raises_is_kept_on_one_line(tmp_path: Path) -> None:
    found = played(tmp_path, 1, then=ValueError("no\nidea"))
    assert (found.shares, found.error) == ((0.5,), "ValueError: no idea")


def test_a_trial_shows_what_the_table_says_and_no_label(tmp_path: Path) -> None:
    labels = Labels(fates={"crashed": Fate.OUT_OF_MEMORY})
    [group] = gathered(tmp_path, TABLE, labels).groups
    strategy = Scripted(4, 8, 2)
    found = play(group, strategy, 0, 4)
    assert found.out_of_memory == (True, True, False)  # the score believes the label
    assert strategy.shown[0] == []
    shown = strategy.shown[-1]
    assert [trial.outcome for trial in shown] == [Outcome.FAILED, Outcome.INFEASIBLE, Outcome.OK]
    assert all(trial.result is not None and "memory" not in (trial.result.message or "") for trial in shown)
    assert shown[-1].result is not None
    assert shown[-1].result.samples_per_second is not None
    assert shown[-1].result.samples_per_second.mean == 200


def test_the_order_of_the_table_tells_nothing(tmp_path: Path) -> None:
    [one] = gathered(tmp_path, TABLE).groups
    [other] = gathered(tmp_path, TABLE[::-1]).groups
    assert one.configs == other.configs
    assert [candidate.rate for candidate in one.candidates if candidate.repeats] == [100, 200]


def test_configurations_that_no_knob_tells_apart_do_not_depend_on_the_order(tmp_path: Path) -> None:
    rows = [measured(f"r{kernel}", 1, 100 * kernel, notes=f"kernel=k{kernel}") for kernel in (3, 1, 2)]
    [one], [other] = (gathered(tmp_path, each).groups for each in (rows, rows[::-1]))
    assert one.configs == other.configs
    assert [config.variant for config in one.configs] == ["kernel=k1", "kernel=k2", "kernel=k3"]
    assert [candidate.rate for candidate in one.candidates] == [100, 200, 300]


def test_groups_that_are_small_or_all_failing_are_named(tmp_path: Path) -> None:
    rows = [*TABLE, *(cells | {"rank_group": "failing"} for cells in TABLE[3:])]
    found = gathered(tmp_path, rows, min_timed=2)
    assert [group.key[1] for group in found.groups] == ["small-8"]
    assert found.small == {("lab", "failing"): 0}
    assert gathered(tmp_path, TABLE, min_timed=3).groups == ()
