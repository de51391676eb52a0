"""One row of a table of measurements: a training configuration on a cluster, its measurements, and how the cells of its columns
are parsed.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from autotune.prediction.equations.software import Megatron

GIB = 2**30


class RowOutcome(StrEnum):
    """The outcome of a row's run.

    - ok: it ran.
    - oom: it ran out of device memory.
    - error: it failed for a reason other than memory.
    - fail_unknown: it failed; the source does not state why.
    - unknown: the table does not state it.
    """

    OK = "ok"
    OOM = "oom"
    ERROR = "error"
    FAIL_UNKNOWN = "fail_unknown"
    UNKNOWN = "unknown"


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
    # Figures of a training run are below it and above its inverse; products of larger cells would overflow.
    largest = 1e15
    if not 1 / largest <= value <= largest:
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
    true = ("true", "yes", "1", "1.0")
    if lower not in (*true, "false", "no", "0", "0.0"):
        raise CellError("is neither true nor false")
    return lower in true


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """How the cells of a column are parsed, and the consequences of errors."""

    read: Callable[[str], int | float | bool | str] = str
    """Parses the stripped text of a non-blank cell; raises CellError."""
    configures: bool = False
    """Whether an invalid cell makes the row unusable; else only the cell is lost."""
    essential: bool = False
    """Whether a table without the column cannot be predicted at all."""
    learned: bool = True
    """Whether predictions read it or learn from it."""
    measured: bool = False
    """Whether it is known only after the run."""


_SHAPE = TableColumn(read=_whole, configures=True, essential=True)
_DETAIL = TableColumn(read=_whole, configures=True)
_EXPERTS = TableColumn(read=_count, configures=True)
_FIGURE = TableColumn(read=_number)
_SHARE = TableColumn(read=_share)
_WORD = TableColumn()


def _column(column: TableColumn, *, default: object = None, learned: bool = True, measured: bool = False) -> Any:
    return field(default=default, metadata={"column": replace(column, learned=learned, measured=measured)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Fields are named like the table's columns; None: not stated by the source. Parsed values are finite and in range."""

    line: int
    """First line of the row in the file; the header is line 1."""
    source: str = _column(_WORD, default="", learned=False)
    """Who measured. Rows of one source share a protocol: the definition of a step, and where memory was read."""
    source_locator: str | None = _column(_WORD, learned=False)
    model_name: str | None = _column(_WORD)
    num_layers: int | None = _column(_SHAPE)
    hidden: int | None = _column(_SHAPE)
    heads: int | None = _column(_DETAIL)
    kv_heads: int | None = _column(_DETAIL)
    ffn_hidden: int | None = _column(_DETAIL)
    """Width of the MLP; with experts: of layers without them."""
    experts: int | None = _column(_EXPERTS)
    """Experts of a layer; 0: the MLPs are dense."""
    topk: int | None = _column(_EXPERTS)
    """Experts to which a token goes."""
    moe_ffn: int | None = _column(_EXPERTS)
    """Width of an expert; None: `ffn_hidden`."""
    shared_expert: int | None = _column(_EXPERTS)
    """Width of the MLP that every token passes through in addition to its experts; 0: none."""
    dense_first_layers: int | None = _column(_EXPERTS)
    """Layers without experts before those with them."""
    moe_layer_freq: str | None = _column(_WORD)
    """Layers with experts, as Megatron-LM states them: every so many, or a pattern as `([0]*3+[1]*12)`."""
    vocab: int | None = _column(_SHAPE)
    seq_len: int | None = _column(_SHAPE)
    """Tokens per sample."""
    params_b: float | None = _column(_FIGURE)
    """Billions of parameters, as stated by the source."""
    gpu_type: str | None = _column(TableColumn(essential=True))
    num_gpus: int | None = _column(_SHAPE)
    gpus_per_node: int | None = _column(_DETAIL)
    intra_bw: str | None = _column(_WORD)
    """The link in a node, in the source's words."""
    inter_bw: str | None = _column(_WORD)
    """The link between nodes, in the source's words."""
    precision: str | None = _column(_WORD)
    zero_stage: int | None = _column(TableColumn(read=_stage, configures=True, essential=True))
    tp: int | None = _column(_SHAPE)
    pp: int | None = _column(_SHAPE)
    vpp: int | None = _column(_DETAIL)
    """Pipeline stages per rank."""
    dp: int | None = _column(_SHAPE)
    """Data-parallel size; if the cell is blank, derived from the device count and the other sizes."""
    cp: int | None = _column(_DETAIL)
    ep: int | None = _column(_DETAIL)
    """Expert-parallel size: part of the data-parallel ranks, not a factor of the device count."""
    sequence_parallel: bool | None = _column(TableColumn(read=_flag, configures=True))
    recompute: str | None = _column(_WORD)
    """none, selective or full."""
    micro_batch: int | None = _column(_SHAPE)
    """Samples per micro-batch of one data-parallel rank."""
    global_batch: int | None = _column(_DETAIL)
    """Samples per optimizer step."""
    optimizer: str | None = _column(_WORD)
    offload: str | None = _column(_WORD)
    framework: str | None = _column(_WORD)
    measured_tflops_per_gpu: float | None = _column(_FIGURE, measured=True, learned=False)
    measured_mfu: float | None = _column(_SHARE, measured=True, learned=False)
    tokens_per_s_per_gpu: float | None = _column(_FIGURE, measured=True)
    samples_per_s: float | None = _column(_FIGURE, measured=True)
    """Over all devices."""
    step_time_s: float | None = _column(_FIGURE, measured=True)
    peak_mem_gb: float | None = _column(_FIGURE, measured=True)
    """In the unit that `mem_kind` names; see `peak_bytes`."""
    oom: bool | None = _column(TableColumn(read=_flag), measured=True, learned=False)
    notes: str = _column(_WORD, default="")
    """`key=value` parts between semicolons, and free text."""
    outcome: RowOutcome = field(default=RowOutcome.UNKNOWN, metadata={"column": _WORD})
    """As stated by the table; else derived from `oom` or from the measurements."""
    hfu: float | None = _column(_SHARE, measured=True, learned=False)
    mem_kind: str | None = _column(_WORD)
    tflops_kind: str | None = _column(_WORD, learned=False)
    rank_group: str | None = _column(_WORD, learned=False)
    """Rows of one group share model, cluster and software and are comparable by rank."""
    row_id: str = field(metadata={"column": TableColumn(learned=False)})
    """The table's name of the row; `line N` if missing. Need not be unique."""
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The cells of the columns `ARGUMENTS`, if the table has them."""
    batch_problem: str | None = None
    """Why micro-batch, accumulation and data-parallel size contradict the batch: then its step time is not compared."""

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Micro-batches per step: from the notes, else from the batch if it is a whole number."""
        if noted := noted_accumulation(self.notes):
            return noted
        if not (self.global_batch and self.micro_batch and self.dp):
            return None
        steps, remainder = divmod(self.global_batch, self.micro_batch * self.dp)
        return None if remainder else steps

    @property
    def kernel(self) -> str | None:
        """The attention kernel named in the notes."""
        match = re.search(r"(?:^|;)\s*kernel=([^;]*)", self.notes)
        return (match[1].strip() or None) if match else None

    @property
    def samples_per_step(self) -> int | None:
        """Samples per step: the batch; if missing, computed from the micro-batches in the notes, else from one."""
        if self.global_batch:
            return self.global_batch
        if not (self.micro_batch and self.dp):
            return None
        return self.micro_batch * self.dp * (noted_accumulation(self.notes) or 1)


COLUMNS: Mapping[str, TableColumn] = {
    item.name: item.metadata["column"] for item in fields(TableRow) if "column" in item.metadata
}
"""The columns of a table, declared by the fields of a row."""
ARGUMENTS = frozenset({item.name for item in fields(Megatron)} - {"states"}) | {
    "account_embedding", "account_loss", "cp_comm_type", "cublas_workspace", "etp", "first_stage_layers", "kv_channels",
    "kv_lora_rank", "last_stage_layers", "max_positions", "mla", "mtp_layers", "normalization", "pipeline_layout", "position",
    "q_lora_rank", "qk_head_dim", "qk_pos_dim", "swiglu", "tied_embeddings", "v_head_dim",
}  # fmt: skip
"""Columns that state Megatron-LM's arguments: with one of `transformer_impl`, all others are as stated or Megatron-LM's."""
LEARNED_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.learned)
"""Columns that predictions read, or learn from; a measurement has no others."""
TIME_COLUMNS = ("tokens_per_s_per_gpu", "samples_per_s", "step_time_s")
"""Each of them determines the duration of a step."""


def step_seconds(row: TableRow) -> float | None:
    """Seconds of an optimizer step of a row that ran: from tokens/s, else from samples/s, else as stated.

    None: it did not run, has no time, or contradicts itself on the size of a step.
    """
    if row.outcome is not RowOutcome.OK or row.batch_problem:
        return None
    samples = row.samples_per_step
    if row.tokens_per_s_per_gpu and samples and row.seq_len and row.num_gpus:
        return samples * row.seq_len / (row.tokens_per_s_per_gpu * row.num_gpus)
    if row.samples_per_s and samples:
        return samples / row.samples_per_s
    return row.step_time_s


def peak_bytes(row: TableRow) -> float | None:
    """Peak memory of a row that ran: in GiB if `mem_kind` names GiB, else in GB of 1e9 bytes."""
    if row.outcome is not RowOutcome.OK or row.peak_mem_gb is None:
        return None
    return row.peak_mem_gb * (GIB if re.search(r"\bGiB\b|\bgibi", row.mem_kind or "", re.IGNORECASE) else 1e9)


def blinded(row: TableRow) -> TableRow:
    """The row without measurements and outcome: what is known before a run."""
    unknown: dict[str, Any] = {name: None for name, column in COLUMNS.items() if column.measured}
    return replace(row, outcome=RowOutcome.UNKNOWN, **unknown)


def noted_accumulation(notes: str) -> int | None:
    """Gradient accumulation steps named in notes; None: not named."""
    match = re.search(r"(?:^|[;\s])grad_acc(?:um)?=(\d{1,9})(?=$|[;\s])", notes)
    return (int(match[1]) or None) if match else None
