"""One row of a table of measurements: a training configuration on a cluster, and its measurements."""

import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Fields are named like the table's columns; None: not stated by the source. Parsed values are finite and in range."""

    line: int
    """First line of the row in the file; the header is line 1."""
    row_id: str
    """The table's name of the row; `line N` if missing. Need not be unique."""
    source: str = ""
    """Who measured. Rows of one source share a protocol: the definition of a step, and where memory was read."""
    source_locator: str | None = None
    model_name: str | None = None
    num_layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    """Width of the MLP; with experts: of layers without them."""
    experts: int | None = None
    """Experts of a layer; 0: the MLPs are dense."""
    topk: int | None = None
    """Experts to which a token goes."""
    moe_ffn: int | None = None
    """Width of an expert; None: `ffn_hidden`."""
    shared_expert: int | None = None
    """Width of the MLP that every token passes through in addition to its experts; 0: none."""
    dense_first_layers: int | None = None
    """Layers without experts before those with them."""
    moe_layer_freq: str | None = None
    """Layers with experts, as Megatron-LM states them: every so many, or a pattern as `([0]*3+[1]*12)`."""
    vocab: int | None = None
    seq_len: int | None = None
    """Tokens per sample."""
    params_b: float | None = None
    """Billions of parameters, as stated by the source."""
    gpu_type: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    intra_bw: str | None = None
    """The link in a node, in the source's words."""
    inter_bw: str | None = None
    """The link between nodes, in the source's words."""
    precision: str | None = None
    zero_stage: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    """Pipeline stages per rank."""
    dp: int | None = None
    """Data-parallel size; if the cell is blank, derived from the device count and the other sizes."""
    cp: int | None = None
    ep: int | None = None
    """Expert-parallel size: part of the data-parallel ranks, not a factor of the device count."""
    sequence_parallel: bool | None = None
    recompute: str | None = None
    """none, selective or full."""
    micro_batch: int | None = None
    """Samples per micro-batch of one data-parallel rank."""
    global_batch: int | None = None
    """Samples per optimizer step."""
    optimizer: str | None = None
    offload: str | None = None
    framework: str | None = None
    measured_tflops_per_gpu: float | None = None
    measured_mfu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    """Over all devices."""
    step_time_s: float | None = None
    peak_mem_gb: float | None = None
    """In the unit that `mem_kind` names; see `peak_bytes`."""
    oom: bool | None = None
    notes: str = ""
    """`key=value` parts between semicolons, and free text."""
    outcome: RowOutcome = RowOutcome.UNKNOWN
    """As stated by the table; else derived from `oom` or from the measurements."""
    hfu: float | None = None
    mem_kind: str | None = None
    tflops_kind: str | None = None
    rank_group: str | None = None
    """Rows of one group share model, cluster and software and are comparable by rank."""
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
    return replace(
        row,
        measured_tflops_per_gpu=None,
        measured_mfu=None,
        hfu=None,
        tokens_per_s_per_gpu=None,
        samples_per_s=None,
        step_time_s=None,
        peak_mem_gb=None,
        oom=None,
        outcome=RowOutcome.UNKNOWN,
    )


def noted_accumulation(notes: str) -> int | None:
    """Gradient accumulation steps named in notes; None: not named."""
    match = re.search(r"(?:^|[;\s])grad_acc(?:um)?=(\d{1,9})(?=$|[;\s])", notes)
    return (int(match[1]) or None) if match else None


_NOT_CONFIGURATION = frozenset(
    {
        "line", "row_id", "source_locator", "measured_tflops_per_gpu", "measured_mfu", "tokens_per_s_per_gpu", "samples_per_s",
        "step_time_s", "peak_mem_gb", "oom", "notes", "outcome", "hfu", "mem_kind", "tflops_kind", "batch_problem",
    }
)  # fmt: skip
CONFIGURATION_FIELDS = tuple(field.name for field in fields(TableRow) if field.name not in _NOT_CONFIGURATION)


def configuration_of(row: TableRow) -> tuple[Any, ...]:
    """The configuration without results: rows with equal ones are repeats."""
    return (*(getattr(row, name) for name in CONFIGURATION_FIELDS), row.kernel)
