"""What became of a run, with labels."""

from pathlib import Path

import pytest

from autotune.errors import MeasurementsError
from autotune.knowledge.row import RowOutcome, TableRow
from benchmarks.prediction.scoring.outcomes import Fate, Labels, fate_of, read_labels

HEADER = "row_id,label_DERIVED_HERE\n"


def labels(folder: Path, text: str) -> Labels:
    (folder / "labels.csv").write_text(text)
    return read_labels(folder / "labels.csv")


@pytest.mark.parametrize(
    ("label", "fate"),
    [
        ("certain_oom_by_states", Fate.OUT_OF_MEMORY),
        ("likely_oom", Fate.OUT_OF_MEMORY),
        ("likely_not_oom", Fate.FAILED_OTHERWISE),
        ("not_oom", Fate.FAILED_OTHERWISE),
        ("undetermined", Fate.UNKNOWN),
    ],
)
def test_a_label_tells_of_a_failure_of_unstated_cause_alone(tmp_path: Path, label: str, fate: Fate) -> None:
    found = labels(tmp_path, f"{HEADER}a,{label}\n")
    assert fate_of(TableRow(line=2, row_id="a", outcome=RowOutcome.FAIL_UNKNOWN), found) is fate
    assert fate_of(TableRow(line=2, row_id="b", outcome=RowOutcome.FAIL_UNKNOWN), found) is Fate.UNKNOWN
    assert fate_of(TableRow(line=2, row_id="a", outcome=RowOutcome.OK), found) is Fate.RAN
    assert fate_of(TableRow(line=2, row_id="a", outcome=RowOutcome.OOM), found) is Fate.OUT_OF_MEMORY
    assert fate_of(TableRow(line=2, row_id="a", outcome=RowOutcome.ERROR), found) is Fate.FAILED_OTHERWISE


def test_labels_that_cannot_be_used_are_told_by_line(tmp_path: Path) -> None:
    found = labels(tmp_path, f"{HEADER}a,likely_oom\nb,perhaps\na,not_oom\nc\nd,not_oom\nd,not_oom\n")
    assert found.fates == {"a": Fate.UNKNOWN, "d": Fate.FAILED_OTHERWISE}
    assert [(each.line, each.row_id) for each in found.problems] == [(3, "b"), (4, "a"), (5, "")]
    assert "label 'perhaps' is none of certain_oom_by_states" in found.problems[0].problem


@pytest.mark.parametrize("text", ["row_id,label\na,not_oom\n", "label_DERIVED_HERE\nnot_oom\n"])
def test_labels_without_their_columns(tmp_path: Path, text: str) -> None:
    with pytest.raises(MeasurementsError, match="no such column; give labels as row_id and label_DERIVED_HERE"):
        labels(tmp_path, text)
