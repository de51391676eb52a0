"""The whole contest on small tables: the document, what reaches predictions, equal in every process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import RequestError
from autotune.knowledge.table import read_table
from autotune.strategies.strategy import Strategy
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.contestants import make_contestant
from benchmarks.search.tables import tournament
from benchmarks.search.tables.contest import play, score
from benchmarks.search.tables.markdown import markdown_page, method_lines
from benchmarks.search.tables.report import bench_search
from benchmarks.search.tables.tournament import Rounds, predict_groups
from tests.autotune.measurements import row, sweep, write_table
from tests.benchmarks.search.grouped import gathered
from tests.sampling import sampled

TIMES = ("propose_ms_p95", "first_propose_ms")
OOM = row("oom", micro_batch=16, dp=4, pp=2, outcome="oom", oom="true")
CRASH = row("crash", micro_batch=32, dp=2, pp=4, outcome="fail_unknown", oom=None)
TWO = [*sweep(9), OOM, CRASH, *sweep(10, source="other", rank_group="second", num_layers=6)]
"""Two groups of two sources."""
FEW = ("guided", "random")


def document(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    rounds = {"strategies": FEW, "trials": 12, "seeds": 2, "processes": 1, "min_timed": 2} | changes
    return bench_search(read_table(write_table(folder / "t.csv", rows)), Rounds(**rounds))


def without_times(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: without_times(each) for name, each in told.items() if name not in TIMES}
    return [without_times(each) for each in told] if isinstance(told, list) else told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def played(folder: Path) -> dict[str, Any]:
    """Two groups, one process."""
    return document(folder, TWO, strategies=(*FEW, "tpe"))


@pytest.mark.prove
def test_the_document(played: dict[str, Any]) -> None:
    found = played
    assert set(found["strategies"]) == {*FEW, "tpe"}
    assert list(found["strategies"]["guided"]["share"]) == ["1", "3", "5", "8", "10", "12"]
    assert [(each["rank_group"], each["rows"], each["candidates"], each["timed"]) for each in found["groups"]] == [
        ("small-8", 11, 11, 9), ("second", 10, 10, 10)
    ]  # fmt: skip
    assert [each["group_count"] for each in found["by_source"].values()] == [1, 1]
    assert found["strategies"]["random"]["share"]["12"] == 1.0  # all were tried
    assert found["groups"][0]["strategies"]["random"]["failed_in_first_10"] >= 1
    assert (found["cut_short"], found["in_sample_rows"]) == ([], 0)
    assert "NaN" not in json.dumps(found, allow_nan=False)
    assert markdown_page(found).count("| guided |") > 6


@pytest.mark.nightly
def test_the_same_in_several_processes(folder: Path, played: dict[str, Any]) -> None:
    """But for times."""
    again = document(folder, TWO, strategies=(*FEW, "tpe"), processes=2)
    assert without_times(again) == without_times(played)


def test_one_group_has_no_interval_and_its_source_is_the_only_one(tmp_path: Path) -> None:
    found = document(tmp_path, sweep(5), calibrate=Calibration.NONE)
    assert found["group_count"] == 1
    assert found["strategies"]["guided"]["share_interval"]["1"] is None
    assert markdown_page(found)


def test_no_group_at_all_is_a_document_too(tmp_path: Path) -> None:
    found = document(tmp_path, sweep(5), min_timed=9)
    assert (found["groups"], found["strategies"]["guided"]["share"]) == ([], {})
    assert found["small_groups"] == [{"source": "lab", "rank_group": "small-8", "timed": 5}]
    assert "No group has enough" in method_lines(found)[-1]
    assert "1 group with fewer than 9" in markdown_page(found)


@pytest.mark.parametrize("calibrate", sampled([Calibration.NONE, Calibration.LEAVE_GROUP_OUT], every=2))
def test_what_a_group_measured_does_not_reach_its_predictions(tmp_path: Path, calibrate: Calibration) -> None:
    other = [*sweep(9, tokens_per_s_per_gpu=77, peak_mem_gb=5), OOM, CRASH | {"outcome": "error"}, *TWO[11:]]
    told = []
    for rows in (TWO, other):
        groups = gathered(tmp_path, rows, min_timed=8, calibrate=calibrate)
        [known] = predict_groups(groups, TablePredictor(), map)
        told.append([known[at].pool(group.space).described for at, group in enumerate(groups.groups)])
    ours, changed = told[0][0], told[1][0]
    for name in ("log_rate", "learned", "needed", "features", "memory_spread"):
        assert np.array_equal(getattr(ours, name), getattr(changed, name)), name
    # The other group's may: where its predictions are fitted, they are fitted on this one.
    same = np.array_equal(told[0][1].log_rate, told[1][1].log_rate)
    assert same == (calibrate is Calibration.NONE)


@pytest.mark.parametrize("name", ["guided", "grid"])
def test_strategies_that_say_so_do_not_depend_on_the_seed(tmp_path: Path, name: str) -> None:
    groups = gathered(tmp_path, TWO, min_timed=8)
    [known] = predict_groups(groups, TablePredictor(), map)
    games = [play(groups.groups[0], make_contestant(name, score, tournament._guide(known[0])), seed, 12) for seed in (0, 1)]
    assert games[0].shares == games[1].shares


def test_a_strategy_that_raises_does_not_end_the_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Strategy):
        def propose(self, *_: object, **__: object) -> list[Any]:
            raise ZeroDivisionError("of course")

    monkeypatch.setattr(
        tournament, "make_contestant", lambda name, *rest: Broken() if name == "tpe" else make_contestant(name, *rest)
    )
    found = document(tmp_path, TWO, strategies=("tpe", "random"), calibrate=Calibration.NONE)
    assert found["strategies"]["tpe"]["share"]["12"] == 0.0
    assert found["strategies"]["random"]["share"]["12"] == 1.0
    [told] = found["cut_short"]
    assert (told["strategy"], told["games"], told["error"]) == ("tpe", 4, "ZeroDivisionError: of course")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategies": ("guided", "nope")}, "'nope' is not known; use one of guided, tpe"),
        ({"strategies": ()}, "none is named"),
        ({"strategies": ("tpe", "tpe")}, "tpe is named twice"),
        ({"calibrate": Calibration.FEW_ROWS}, "use none, leave-group-out or leave-source-out"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_is_computed(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Rounds(**{"strategies": FEW} | changes)


CELLS = {
    "source": ["lab", "other", ""], "rank_group": ["a", "b", ""], "micro_batch": [1, 2, 4], "pp": [1, 2], "tp": [1, 2],
    "zero_stage": [0, 1, 3], "recompute": ["none", "full", ""], "outcome": ["ok", "ok", "", "oom", "error", "fail_unknown"],
    "oom": ["", "", "true", "false"], "tokens_per_s_per_gpu": [1, 10.5, 1e12, ""], "samples_per_s": ["", 3],
    "peak_mem_gb": ["", 9], "gpu_type": ["A100-SXM-80GB", "A100-SXM-80GB", "H100", "abacus"], "global_batch": ["", 64],
    "kv_heads": ["", 8], "notes": ["", "kernel=x"], "sequence_parallel": ["", "true"], "optimizer": ["", "AdamW"],
}  # fmt: skip


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.fixed_dictionaries({name: st.sampled_from(cells) for name, cells in CELLS.items()}), min_size=6, max_size=16
    ),
    calibrate=st.sampled_from(["none", "none", "none", "none", "leave-group-out"]),
)
@pytest.mark.nightly
def test_random_tables(tmp_path: Path, rows: list[dict[str, Any]], calibrate: str) -> None:
    table = [row(f"r{number}", dp=8 // (cells["tp"] * cells["pp"]), **cells) for number, cells in enumerate(rows)]
    found = document(
        tmp_path, table, calibrate=Calibration(calibrate), min_timed=1, seeds=1, strategies=("guided", "random", "grid")
    )
    assert "NaN" not in json.dumps(found, allow_nan=False)
    assert (found["cut_short"], bool(markdown_page(found))) == ([], True)
    told = [found, *found["by_source"].values(), *found["groups"]]
    for figures in [each for part in told for each in (*part["strategies"].values(), *part["oracles"].values()) if each]:
        shares = list(figures["share"].values())
        assert shares == sorted(shares)
        assert all(0 <= share <= 1 for share in (*shares, *figures["within_5_percent"].values()))
