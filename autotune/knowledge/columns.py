"""The columns of a table of measurements: how cells are parsed, and what is lost without a column."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Cell = int | float | bool | str

LARGEST = 1e15
"""Figures of a training run are below it and above its inverse; products of larger cells would overflow."""
_TRUE = frozenset({"true", "yes", "1", "1.0"})
_FALSE = frozenset({"false", "no", "0", "0.0"})


class CellError(ValueError):
    """A cell's content is invalid for its column; the message describes it."""


def _number(text: str) -> float:
    try:
        # float() accepts `1_000`, which no table intends.
        value = float("" if "_" in text else text)
    except ValueError:
        raise CellError("is not a number") from None
    if not math.isfinite(value):
        raise CellError("is not a finite number")
    if value <= 0:
        raise CellError("is not positive")
    if not 1 / LARGEST <= value <= LARGEST:
        raise CellError("is out of any range")
    return value


def _share(text: str) -> float:
    # Rounded to two digits, a very low utilization is 0.
    return 0.0 if text.strip("0.") == "" and "0" in text else _number(text)


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise CellError("is not a whole number")
    return int(value)


def _count(text: str) -> int:
    return 0 if text in {"0", "0.0"} else _whole(text)


def _stage(text: str) -> int:
    if text not in {"0", "0.0"} and _whole(text) > 3:
        raise CellError("is none of the stages 0 to 3")
    return int(float(text))


def _flag(text: str) -> bool:
    lower = text.lower()
    if lower not in _TRUE | _FALSE:
        raise CellError("is neither true nor false")
    return lower in _TRUE


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """How the cells of a column are parsed, and the consequences of errors."""

    read: Callable[[str], Cell] = str
    """Parses the stripped text of a non-blank cell; raises CellError."""
    configures: bool = False
    """Whether an invalid cell makes the row unusable; else only the cell is lost."""
    essential: bool = False
    """Whether a table without the column cannot be predicted at all."""
    lost: str = ""
    """Scores that a table without the column lacks, or assumptions made instead."""


_SHAPE = TableColumn(read=_whole, configures=True, essential=True)
_DETAIL = TableColumn(read=_whole, configures=True)
_EXPERTS = TableColumn(read=_count, configures=True)
_MEASURED = TableColumn(read=_number)
_WORD = TableColumn()

COLUMNS: Mapping[str, TableColumn] = {
    "source": TableColumn(lost="all rows count as one source: figures and calibration by source are meaningless"),
    "source_locator": _WORD,
    "model_name": TableColumn(lost="models are distinguished only by their shapes"),
    "num_layers": _SHAPE,
    "hidden": _SHAPE,
    "heads": _DETAIL,
    "kv_heads": _DETAIL,
    "ffn_hidden": _DETAIL,
    "experts": _EXPERTS,
    "topk": _EXPERTS,
    "moe_ffn": _EXPERTS,
    "shared_expert": _EXPERTS,
    "dense_first_layers": _EXPERTS,
    "moe_layer_freq": _WORD,
    "vocab": _SHAPE,
    "seq_len": _SHAPE,
    "params_b": _MEASURED,
    "gpu_type": TableColumn(essential=True),
    "num_gpus": _SHAPE,
    "gpus_per_node": _DETAIL,
    "intra_bw": _WORD,
    "inter_bw": _WORD,
    "precision": _WORD,
    "zero_stage": TableColumn(read=_stage, configures=True, essential=True),
    "tp": _SHAPE,
    "pp": _SHAPE,
    "vpp": _DETAIL,
    "dp": _SHAPE,
    "cp": _DETAIL,
    "ep": _DETAIL,
    "sequence_parallel": TableColumn(read=_flag, configures=True),
    "recompute": _WORD,
    "micro_batch": _SHAPE,
    "global_batch": TableColumn(
        read=_whole, configures=True, lost="a step counts as one micro-batch unless the notes name more"
    ),
    "optimizer": _WORD,
    "offload": _WORD,
    "framework": _WORD,
    "measured_tflops_per_gpu": _MEASURED,
    "measured_mfu": TableColumn(read=_share),
    "tokens_per_s_per_gpu": _MEASURED,
    "samples_per_s": _MEASURED,
    "step_time_s": _MEASURED,
    "peak_mem_gb": TableColumn(read=_number, lost="memory error is not scored"),
    "oom": TableColumn(read=_flag),
    "notes": TableColumn(lost="attention kernels and noted gradient accumulation are unknown"),
    "outcome": TableColumn(lost="how runs ended is taken from the column oom and from what was measured"),
    "hfu": TableColumn(read=_share),
    "mem_kind": TableColumn(lost="peak memory counts as GB of 1e9 bytes"),
    "tflops_kind": _WORD,
    "rank_group": TableColumn(lost="ranks are not scored"),
    "row_id": TableColumn(lost="rows are named by their lines, and labels match none"),
}

TIME_COLUMNS = ("tokens_per_s_per_gpu", "samples_per_s", "step_time_s")
"""Each of them determines the duration of a step."""


def lost_without(missing: frozenset[str]) -> dict[str, str]:
    """The loss for each missing column; columns that no score needs are omitted."""
    lost = {name: column.lost for name, column in COLUMNS.items() if name in missing and column.lost}
    if missing.issuperset(TIME_COLUMNS):
        lost[", ".join(TIME_COLUMNS)] = "time error and ranks are not scored"
    if missing.issuperset({"outcome", "oom"}):
        lost["outcome, oom"] = "out-of-memory recall is not scored"
    return lost
