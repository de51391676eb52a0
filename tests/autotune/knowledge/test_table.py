"""Reading a table: what each kind of bad input costs, by line."""

from pathlib import Path
from typing import Any

import pytest
from measurements import ROW, row, write_table

from autotune.errors import MeasurementsError
from autotune.knowledge.row import COLUMNS, GIB, RowOutcome, TableRow, peak_bytes, step_seconds
from autotune.knowledge.table import MeasurementTable, read_table
from benchmarks.prediction.scoring.configurations import configuration_of, problems_of


def read(folder: Path, *rows: dict[str, Any], **how: Any) -> MeasurementTable:
    return read_table(write_table(folder / "t.csv", list(rows), **how))


def test_a_row_is_read_as_its_columns_say(tmp_path: Path) -> None:
    cells = {"tokens_per_s_per_gpu": "2048", "peak_mem_gb": 2, "notes": "a=1; kernel=flash v2 ; grad_acc=8"}
    (got,) = read(tmp_path, row("a", **cells)).rows
    assert (got.line, got.row_id, got.hidden, got.sequence_parallel, got.outcome) == (2, "a", 512, False, RowOutcome.OK)
    assert (got.kernel, got.gradient_accumulation_steps, got.samples_per_step) == ("flash v2", 8, 64)
    assert step_seconds(got) == 64 * 1024 / (2048 * 8)
    assert peak_bytes(got) == 2 * GIB


@pytest.mark.parametrize(("notes", "assumes"), [("", True), ("kernel=flash attention", False)])
def test_an_attention_kernel_that_is_assumed_is_named(notes: str, assumes: bool, tmp_path: Path) -> None:
    problems = read(tmp_path, row("a", framework="Megatron-LM", notes=notes)).problems
    assert any("states no attention kernel" in problem.problem for problem in problems) == assumes


def test_every_field_of_a_row_is_a_column() -> None:
    own = {"line", "batch_problem", "arguments"}
    assert {name for name in TableRow.__dataclass_fields__ if name not in own} == set(COLUMNS)
    assert "kernel" not in COLUMNS
    assert len(configuration_of(TableRow(line=2, row_id="a"))) == len(TableRow.__dataclass_fields__) - 17 + 1


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"samples_per_s": 32, "step_time_s": 7}, 2.0),
        ({"step_time_s": 7}, 7.0),
        ({"tokens_per_s_per_gpu": 2048, "samples_per_s": 1, "seq_len": 1024}, 4.0),
        ({"global_batch": None, "samples_per_s": 32}, 0.25),
        ({"global_batch": None, "samples_per_s": 32, "notes": "grad_accum=2"}, 0.5),
        ({"step_time_s": 7, "outcome": "oom", "oom": "true"}, None),
        ({"step_time_s": 7, "notes": "grad_acc=3"}, None),
        ({}, None),
    ],
)
def test_one_truth_of_time(tmp_path: Path, cells: dict[str, Any], seconds: float | None) -> None:
    (got,) = read(tmp_path, row("a", **cells)).rows
    assert step_seconds(got) == seconds


def test_memory_is_gb_where_the_unit_is_not_gib(tmp_path: Path) -> None:
    for kind, expected in (("nvidia-smi, rounded GB", 3e9), (None, 3e9), ("reserved GiB", 3 * GIB)):
        (got,) = read(tmp_path, row("a", peak_mem_gb=3, mem_kind=kind)).rows
        assert peak_bytes(got) == expected


@pytest.mark.parametrize(
    ("cells", "outcome"),
    [
        ({"outcome": None, "oom": "true"}, "oom"),
        ({"outcome": None, "oom": "FALSE"}, "ok"),
        ({"outcome": None, "oom": None, "step_time_s": 1}, "ok"),
        ({"outcome": None, "oom": None}, "unknown"),
        ({"outcome": "OOM", "oom": "true"}, "oom"),
        ({"outcome": "error", "oom": None}, "error"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, cells: dict[str, Any], outcome: str) -> None:
    table = read(tmp_path, row("a", **cells))
    assert ([each.outcome for each in table.rows], table.problems) == ([outcome], ())


SKIPPED = {
    "words": ({"hidden": "wide"}, "hidden 'wide' is not a number"),
    "fraction": ({"micro_batch": 1.5}, "micro_batch '1.5' is not a whole number"),
    "nan": ({"seq_len": "nan"}, "seq_len 'nan' is not a finite number"),
    "infinite": ({"vocab": "inf"}, "vocab 'inf' is not a finite number"),
    "negative": ({"num_layers": -4}, "num_layers '-4' is not positive"),
    "huge": ({"ffn_hidden": "1e300"}, "ffn_hidden '1e300' is out of any range"),
    "stage": ({"zero_stage": 4}, "zero_stage '4' is none of the stages 0 to 3"),
    "flag": ({"sequence_parallel": "maybe"}, "sequence_parallel 'maybe' is neither true nor false"),
    "two": ({"tp": "x", "pp": "y"}, "tp 'x' is not a number; pp 'y' is not a number"),
    "devices": ({"tp": 2}, "tp 2 x pp 1 x dp 8 x cp 1 is 16, not the 8 devices of num_gpus"),
    "context": ({"cp": 2}, "tp 1 x pp 1 x dp 8 x cp 2 is 16, not the 8 devices of num_gpus"),
    "no-dp": ({"dp": None, "tp": 3}, "tp 3 x pp 1 x dp ? x cp 1 is the 8 devices of num_gpus for no dp"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_a_configuration_that_is_not_known_is_skipped_by_line(tmp_path: Path, case: str) -> None:
    cells, reason = SKIPPED[case]
    table = read(tmp_path, row("good"), row("bad", **cells), row("last", micro_batch=2))
    assert [each.row_id for each in table.rows] == ["good", "last"]
    assert [(each.line, each.row_id, each.reason) for each in table.skipped] == [(3, "bad", reason)]


TOLD = {
    "time": ({"step_time_s": "fast"}, "step_time_s 'fast' is not a number: the cell is left out"),
    "memory": ({"peak_mem_gb": "-3"}, "peak_mem_gb '-3' is not positive: the cell is left out"),
    "nan": ({"samples_per_s": "NaN"}, "samples_per_s 'NaN' is not a finite number: the cell is left out"),
    "long": ({"params_b": "x" * 90}, f"params_b '{'x' * 40}…' is not a number: the cell is left out"),
    "outcome": ({"outcome": "fine"}, "outcome 'fine' is none of ok, oom, error, fail_unknown, unknown: the row"),
    "oom": ({"oom": "true"}, "outcome ok and oom true contradict each other: the row counts as unknown"),
    "batch": ({"notes": "grad_acc=3"}, "micro_batch 1 x dp 8 x accumulation 3 is 24, not global_batch 64: left out"),
    "network": ({"inter_bw": "InfiniBand"}, "inter_bw 'InfiniBand' states no rate that is understood: the device"),
    "rest": ({"micro_batch": 3}, "micro_batch 3 x dp 8 does not divide global_batch 64: left out of times and ranks"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_a_measurement_that_is_not_known_costs_itself_alone(tmp_path: Path, case: str) -> None:
    cells, problem = TOLD[case]
    table = read(tmp_path, row("good"), row("bad", **cells))
    assert ([each.row_id for each in table.rows], table.skipped) == (["good", "bad"], ())
    assert [(each.line, each.row_id) for each in table.problems] == [(3, "bad")]
    assert table.problems[0].problem.startswith(problem)


def test_experts_do_not_multiply_the_devices_and_a_blank_dp_is_what_is_left(tmp_path: Path) -> None:
    table = read(tmp_path, row("a", ep=4), row("b", dp=None, tp=2, cp=None, global_batch=None))
    assert [each.dp for each in table.rows] == [8, 4]
    assert (table.skipped, table.problems) == ((), ())


def test_repeated_row_ids(tmp_path: Path) -> None:
    table = read(tmp_path, row("a", step_time_s=1), row("a", step_time_s=2), row("a", step_time_s=1), row(None), row(None))
    assert [(each.line, each.row_id) for each in table.rows] == [(2, "a"), (3, "a"), (5, "line 5"), (6, "line 6")]
    assert [(each.line, each.reason) for each in table.skipped] == [(4, "is a copy of an earlier line, its row_id too")]
    assert [(each.line, each.problem[:24]) for each in table.problems] == [(3, "line 2 has this row_id t")]


def test_line_ends_byte_order_mark_blank_lines_and_strange_columns(tmp_path: Path) -> None:
    rows = [row("a", color="red"), row("b", step_time_s=3)]
    plain = read(tmp_path, *rows)
    path = write_table(tmp_path / "odd.csv", rows, extra=("color", ""), ends="\r\n")
    head, first, second = path.read_bytes().split(b"\r\n")[:3]
    path.write_bytes(b"\xef\xbb\xbf\r\n" + head + b"\r\n\r\n" + first + b"\r\n,,,\r\n" + second)
    odd = read_table(path)
    assert [each.line for each in odd.rows] == [4, 6]
    assert [configuration_of(each) for each in odd.rows] == [configuration_of(each) for each in plain.rows]
    assert (odd.skipped, odd.problems) == ((), ())


def test_lines_too_short_and_too_long(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", [row("a"), row("b"), row("c")])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1] + ",,", lines[2] + ",7", "1,2", lines[3]]))
    table = read_table(path)
    assert [each.row_id for each in table.rows] == ["a", "c"]
    assert [(each.line, each.reason) for each in table.skipped] == [
        (3, f"has {len(COLUMNS) + 1} cells where the header has {len(COLUMNS)}"),
        (4, f"has 2 cells where the header has {len(COLUMNS)}"),
    ]


def test_a_column_that_only_some_scores_need_is_named(tmp_path: Path) -> None:
    missing = ("rank_group", "peak_mem_gb", "outcome", "oom", "tokens_per_s_per_gpu", "samples_per_s", "step_time_s", "hfu")
    table = read(tmp_path, row("a"), without=missing)
    assert len(table.rows) == 1
    assert [each.problem for each in problems_of(table)] == [
        "no column peak_mem_gb: memory error is not scored",
        "no column outcome: how runs ended is taken from the column oom and from what was measured",
        "no column rank_group: ranks are not scored",
        "no column tokens_per_s_per_gpu, samples_per_s, step_time_s: time error and ranks are not scored",
        "no column outcome, oom: out-of-memory recall is not scored",
    ]
    assert {each.line for each in problems_of(table)} == {1}


def test_a_column_twice(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",".join([*ROW, "hidden"]) + "\n" + ",".join([*map(str, ROW.values()), "7"]) + "\n")
    table = read_table(path)
    assert [each.hidden for each in table.rows] == [512]
    assert "more than one column hidden: the first is read" in [each.problem for each in table.problems]


REFUSED = {
    "missing": (None, "no such file; give the path of a CSV file of measurements"),
    "empty": (b"", "is empty; give a CSV file of measurements with a header line"),
    "binary": (b"\x89PNG\0\0", "is not UTF-8 text; give the path"),
    "utf-16": ("source,row_id".encode("utf-16"), "is not UTF-8 text; give the path"),
    "prose": (b"Once upon a time\n", ": num_layers, hidden, vocab, seq_len, gpu_type, num_gpus, zero_stage, tp,"),
    "semicolons": (";".join(COLUMNS).encode(), "give a comma-separated table"),
    "one-column-less": (",".join(set(COLUMNS) - {"hidden"}).encode(), ": hidden: no such column among its 50"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_nothing_can_be_done_with_is_one_line(tmp_path: Path, case: str) -> None:
    content, says = REFUSED[case]
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MeasurementsError) as caught:
        read_table(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(MeasurementsError, match="cannot be read: Is a directory; give the path"):
        read_table(tmp_path)


def test_a_header_alone_is_a_table_without_rows(tmp_path: Path) -> None:
    assert read(tmp_path).rows == ()
