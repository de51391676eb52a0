"""What `autotune.tune` shows while it runs, and its result in terminals, notebooks and data frames."""

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import table
from rich.pretty import pretty_repr

import autotune
from autotune import tuning
from autotune.errors import MissingPackageError
from autotune.loop import loop
from autotune.loop.listener import LoopListener
from autotune.text import progress_bar as progress
from autotune.tuning import TuneResult
from search_spaces.outcome import JobState
from search_spaces.trial_config import KNOB_NAMES


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Notebook:
    """What IPython gives a kernel of a notebook."""

    kernel = object()


@pytest.fixture(autouse=True)
def table_instead_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "make_runner", lambda session: table.runner())


def tuned(folder: Path, **changes: Any) -> TuneResult:
    fields = {"trials": 4, "strategy": "grid", "confirm_repeats": 0, "database": str(folder / "db")} | changes
    return autotune.tune(table.request(folder).model, **fields)


def test_a_terminal_has_one_line_that_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(loop, "ANSWER_SECONDS", 0.0)  # else the job ends before there is a second answer
    result = tuned(tmp_path)
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    lines = written.split("\r")
    assert lines[1].startswith("[..........] 0/4 trials, 0:00")
    assert any(line.startswith("[#####.....] 2/4 trials, 0:0") and ", best " in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert written.count("\n") == 1
    assert lines[-1].strip() == f"job {result.job_id}: succeeded: 4 of 4 trials are spent"


@pytest.mark.prove
def test_a_file_has_nothing_unless_asked_and_then_a_line_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    tuned(tmp_path)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    tuned(tmp_path, progress=True)
    lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(":")[0] for line in lines[:-1]] == [f"trial {number}" for number in range(4)]
    assert lines[0].endswith("zero_stage=0 micro_batch_size=1")


@pytest.mark.prove
def test_a_terminal_has_nothing_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    tuned(tmp_path, progress=False)
    tuned(tmp_path, listener=LoopListener())
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_notebook_has_the_bar_on_its_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = Notebook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert progress.in_notebook()
    tuned(tmp_path)
    told = capsys.readouterr()
    assert (told.err, "\r[##########] 4/4 trials" in told.out) == ("", True)


def test_a_listener_hears_everything_beside_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(LoopListener):
        trials: list[int] = []  # noqa: RUF012
        states: list[JobState] = []  # noqa: RUF012

        def on_trial(self, trial: Any, snapshot: Any) -> None:
            self.trials.append(trial.number)

        def on_state(self, state: JobState, message: str, snapshot: Any) -> None:
            self.states.append(state)

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    tuned(tmp_path, listener=Heard(), progress=True)
    assert Heard.trials == [0, 1, 2, 3]
    assert Heard.states == [JobState.RUNNING, JobState.SUCCEEDED]


def test_a_result_prints_what_differs_from_the_defaults(tmp_path: Path) -> None:
    result = tuned(tmp_path)
    assert result.best is not None
    differing = result.best.differences(type(result.best)())
    assert str(result.best) == f"TrialConfig({', '.join(f'{name}={value!r}' for name, value in differing.items())})"
    assert len(repr(result)) < 500
    assert str(result.best) in pretty_repr(result, max_width=200)
    assert "best_config" not in pretty_repr(result)


def test_a_notebook_shows_what_the_command_prints(tmp_path: Path) -> None:
    result = tuned(tmp_path, pins={"zero_stage": 0})  # the third is the best of four
    html = result._repr_html_()
    assert html.startswith("<pre>")
    for told in (f"job {result.job_id}: succeeded: 4 of 4 trials are spent", "Best configuration of 4 trials", "baseline"):
        assert told in html


def test_trials_are_records_and_a_data_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(tmp_path)
    assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError) as refused:
        result.trials_dataframe()
    assert str(refused.value) == "pandas: is not installed; run pip install pandas, or take the records of `trials`"
    assert isinstance(refused.value, ImportError)
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = lambda rows, columns: (rows, columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    rows, columns = result.trials_dataframe()
    assert all(set(row) == set(columns) for row in rows)
    assert columns[:4] == ["number", "purpose", "repeat", "outcome"]
    assert columns[-len(KNOB_NAMES) :] == list(KNOB_NAMES)
    rates = [trial.result.samples_per_second.mean for trial in result.trials]  # type: ignore[union-attr]
    assert [row["samples_per_second"] for row in rows] == rates


def test_a_data_frame_of_pandas_itself(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="`make extras` has it")
    frame = tuned(tmp_path).trials_dataframe()
    assert list(frame["number"]) == [0, 1, 2, 3]
    assert frame["samples_per_second"].max() > 0
