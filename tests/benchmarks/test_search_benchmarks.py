"""The pure parts of the search benchmarks: the grid's design, its file, its agenda, and how winners are compared."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.common.paired_statistics import estimate, paired_gain, pooled_deviation
from benchmarks.search.against_deepspeed import page
from benchmarks.search.grid import agenda, header, remaining
from benchmarks.search.grid_design import DOMAINS, REFERENCE_EVERY, REPEAT_EVERY, TOP, TOP_ROUNDS, WORLDS, Grid
from benchmarks.search.grid_figures import best_points, mean_rates, noise_of, remeasured_best
from benchmarks.search.grid_file import GridFile, Role, Row, read_rows
from benchmarks.search.sweep_play import Sweep, Tried, play, read_sweeps, replay_runner
from benchmarks.search.sweep_scores import GUIDED, score, trials_until
from benchmarks.search.tuner_answers import Answer, between
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

GRIDS = {ranks: Grid(ranks) for ranks in WORLDS}


def row(order: int, role: Role, config: TrialConfig, rate: float) -> Row:
    return Row(order=order, role=role, config=config, outcome=Outcome.OK, rate=rate, low=rate - 1, high=rate + 1,
               within=0.01, peak=1_000 + order, steps=9, seconds=1.5)  # fmt: skip


def whole_grid(grid: Grid, rate: Callable[[TrialConfig], float]) -> list[Row]:
    rows: list[Row] = []
    while todo := remaining(grid, rows):
        rows += [row(len(rows) + place, role, config, rate(config)) for place, (role, config) in enumerate(todo)]
    return rows


@pytest.mark.prove
@pytest.mark.parametrize("ranks", WORLDS)
def test_the_grid_has_at_least_300_legal_points_none_twice(ranks: int) -> None:
    grid = GRIDS[ranks]
    assert len(grid.points) >= 300
    assert len({config.hash for config in grid.points}) == len(grid.points)
    assert all(config in grid.space for config in grid.points)
    assert grid.reference in grid.points
    assert Grid(ranks).points == grid.points


@pytest.mark.prove
@pytest.mark.parametrize("ranks", WORLDS)
def test_every_configuration_of_the_space_has_a_point_that_stands_for_it(ranks: int) -> None:
    grid = GRIDS[ranks]
    assert {grid.representative(config) for config in grid.space.enumerate()} | set(grid.twins) == set(grid.points)


@pytest.mark.prove
@pytest.mark.parametrize("ranks", WORLDS)
def test_every_value_of_every_knob_is_measured_where_it_matters(ranks: int) -> None:
    grid = GRIDS[ranks]
    for knob, values in DOMAINS[ranks].items():
        assert {getattr(config, knob) for config in grid.points if grid.matters(knob, config)} == set(values), knob


def test_the_reference_bounds_drift_and_points_are_repeated() -> None:
    grid = GRIDS[2]
    wanted = agenda(grid)
    places = [place for place, (role, _) in enumerate(wanted) if role is Role.REFERENCE]
    assert max(later - earlier for earlier, later in itertools.pairwise(places)) == REFERENCE_EVERY + 1
    assert [config for role, config in wanted if role is Role.POINT] == list(grid.points)
    assert sum(role is Role.REPEAT for role, _ in wanted) == math.ceil(len(grid.points) / REPEAT_EVERY)


def test_a_grid_that_was_cut_off_goes_on_with_what_is_missing() -> None:
    grid = GRIDS[2]
    rows = whole_grid(grid, lambda config: 1.0 + int(config.hash[:4], 16))
    assert remaining(grid, rows) == []
    assert len(rows) == len(agenda(grid)) + TOP_ROUNDS * (TOP + 1)
    for cut in (0, 7, len(agenda(grid)) - 1, len(rows) - 3):
        following = [(each.role, each.config) for each in rows[cut:]]
        assert remaining(grid, rows[:cut]) == following[: len(remaining(grid, rows[:cut]))]
    again = [each.config for each in rows if each.role is Role.TOP]
    assert again == best_points(rows[: len(agenda(grid))], TOP) * TOP_ROUNDS


def test_the_file_gives_back_what_was_written_and_loses_a_line_that_was_cut_off(tmp_path: Path) -> None:
    grid, path = GRIDS[2], tmp_path / "grid.csv"
    file = GridFile(path, header(grid), tuple(DOMAINS[2]))
    rows = [row(place, Role.POINT, config, 10.0 + place) for place, config in enumerate(grid.points[:30])]
    rows.append(Row(order=30, role=Role.POINT, config=grid.points[30], outcome=Outcome.TIMEOUT, unstable=True))
    for each in rows:
        file.add(each)
    assert [*GridFile(path, header(grid), tuple(DOMAINS[2])).rows] == rows
    path.write_text(path.read_text()[:-4])
    assert read_rows(path) == rows[:-1]


def test_a_file_of_another_grid_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    GridFile(path, header(GRIDS[2]), tuple(DOMAINS[2]))
    with pytest.raises(ValueError, match="another header"):
        GridFile(path, header(GRIDS[2]) | {"link": "1000 Mbit/s"}, tuple(DOMAINS[2]))


def test_the_best_are_told_by_what_was_measured_after_they_were_chosen() -> None:
    one, other = GRIDS[2].points[:2]
    rows = [row(0, Role.POINT, one, 20.0), row(1, Role.POINT, other, 19.0)]
    assert remeasured_best(rows, 2) == [one, other]
    assert remeasured_best([*rows, row(2, Role.TOP, one, 15.0), row(3, Role.TOP, other, 18.0)], 2) == [other, one]


def test_noise_is_that_of_the_repeats() -> None:
    random, grid = Random(1), GRIDS[2]
    rows = whole_grid(grid, lambda _: 50.0 * math.exp(random.gauss(0.0, 0.05)))
    noise = noise_of(rows)
    assert noise.repeat == pytest.approx(0.05, rel=0.4)
    assert noise.reference == pytest.approx(0.05, rel=0.5)
    assert noise.between == pytest.approx(math.sqrt(noise.repeat**2 - 0.01**2))
    assert abs(noise.drift) < 2 * noise.drift_error


def test_drift_is_seen() -> None:
    grid = GRIDS[2]
    rows = [row(place, Role.REFERENCE, grid.reference, 50.0 * math.exp(-0.001 * place)) for place in range(0, 401, 20)]
    assert noise_of(rows).drift == pytest.approx(-0.4)


def test_an_interval_is_students() -> None:
    told = estimate([1.0, 2.0, 3.0, 4.0])
    assert told.mean == 2.5
    assert told.half == pytest.approx(3.18245 * math.sqrt(5 / 3) / 2, rel=1e-4)


def test_pairs_leave_out_what_both_share() -> None:
    day = [10.0, 20.0, 40.0]
    gain = paired_gain([1.1 * value for value in day], day)
    assert gain.mean == pytest.approx(math.log(1.1))
    assert gain.half == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="pairs"):
        paired_gain([1.0], [1.0, 2.0])


def test_deviations_within_groups_are_pooled() -> None:
    spread, freedom = pooled_deviation([[math.e, 1.0], [5.0, 5.0], [7.0]])
    assert freedom == 2
    assert spread == pytest.approx(0.5)


def sweep(contestant: str, seed: int, configs: list[TrialConfig], winner: TrialConfig | None) -> Sweep:
    trials = tuple(Tried(config=config.differences(TrialConfig()), outcome="OK", rate=1.0, seconds=1.0) for config in configs)
    won = None if winner is None else winner.differences(TrialConfig())
    return Sweep(ranks=2, contestant=contestant, seed=seed, trials=trials, winner=won, seconds=3.0)


def test_winners_are_held_against_the_best_and_against_each_other() -> None:
    slow, near, best = GRIDS[2].points[:3]
    rates = {slow: 50.0, near: 98.0, best: 100.0, None: 25.0}
    sweeps = [sweep(GUIDED, 0, [slow, near], near), sweep(GUIDED, 1, [best], best)]
    sweeps += [sweep("random", 0, [slow], slow), sweep("random", 1, [slow], None)]
    guided, random = score(sweeps, lambda config: rates[config], [near, best])
    assert (guided.contestant, random.contestant) == (GUIDED, "random")
    assert guided.below_best.mean == pytest.approx(0.01)
    assert guided.trials_until_near == (2, 1)
    assert random.below_best.mean == pytest.approx(0.625)
    assert random.worst == pytest.approx(0.75)
    assert random.lead is not None
    assert random.lead.mean == pytest.approx((math.log(98 / 50) + math.log(4)) / 2)
    assert random.median_trials == math.inf
    assert trials_until(sweeps[0], lambda config: rates[config], 99.0) is None


def test_sweeps_are_kept_line_by_line(tmp_path: Path) -> None:
    path, played = tmp_path / "sweeps.jsonl", sweep("random", 3, [GRIDS[2].points[5]], GRIDS[2].points[5])
    path.write_text(played.line() + "\n" + played.line()[:40])
    assert read_sweeps(path) == [played]


@pytest.mark.prove
def test_a_replayed_sweep_finds_its_winner_in_the_grid_and_repeats_itself(tmp_path: Path) -> None:
    grid = GRIDS[4]
    rows = whole_grid(grid, lambda config: 40.0 + 10.0 * config.micro_batch_size)
    truth = mean_rates(rows)
    one, other = (
        play(grid, "random", 1, replay_runner(grid, rows, 1), trials=4, confirm=0, warm=tmp_path / "warm.db") for _ in range(2)
    )
    assert one.trials[0].config == other.trials[0].config
    assert [tried.rate for tried in one.trials] == [tried.rate for tried in other.trials]
    assert len(one.trials) == 4
    assert one.best is not None
    assert one.winner in [tried.config for tried in one.trials]
    for tried in one.trials:
        config = grid.representative(TrialConfig().replace(tried.config))
        assert tried.rate == pytest.approx(truth[config], rel=0.1)


def test_a_bound_that_is_missed_against_deepspeed_is_told() -> None:
    theirs, ours = TrialConfig(zero_stage=1), TrialConfig()
    rates = {"our engine": {ours: [10.0, 11.0], theirs: [9.0, 9.5]}}
    their_answer = Answer(name="deepspeed", config=theirs, seconds=100.0, trials=5, runs=6, trial_seconds=20.0)
    quick = Answer(name="autotune", config=ours, seconds=4.0, trials=5, runs=6, trial_seconds=0.9)
    assert page(their_answer, [quick, replace(quick, seconds=30.0), replace(quick, seconds=5.0)], rates, "")[1]
    lines, good = page(their_answer, [replace(quick, trial_seconds=1.1)], rates, "")
    assert not good
    assert sum("DOES NOT HOLD" in line for line in lines) == 1


def test_what_one_more_trial_costs_is_the_median_of_what_lies_between() -> None:
    assert between([1.0, 2.0, 12.0, 13.5]) == 1.5
    with pytest.raises(SystemExit, match="fewer than two"):
        between([1.0])
