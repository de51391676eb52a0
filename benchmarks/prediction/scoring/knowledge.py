"""Rows of other tables and jobs from which predictions of a table's rows may learn: none that states its answers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.knowledge.measurement import TrialMeasurement
from autotune.knowledge.read import read_knowledge
from autotune.knowledge.row import GIB, RowOutcome, TableRow, peak_bytes, step_seconds
from autotune.knowledge.row_names import beyond_columns
from autotune.knowledge.table import MeasurementTable
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.table_predictor import TablePredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The rows that predictions may learn from."""

    rows: tuple[TableRow, ...]
    copies: int
    """Rows left out because the table has the same measurement."""
    of_the_table: int
    """Rows left out because the calibration leaves their source, or group, out of the table too."""


def admitted(knowledge: Sequence[TableRow], table: Sequence[TableRow], calibrate: Calibration) -> Admitted:
    """Leave out the table's own measurements, by whatever name, and what the calibration leaves out."""
    answers = {_measurement(row) for row in table}
    others = [row for row in knowledge if _measurement(row) not in answers]
    left_out = {_key(row, calibrate) for row in table} - {None}
    rows = tuple(row for row in others if _key(row, calibrate) not in left_out)
    return Admitted(rows=rows, copies=len(knowledge) - len(others), of_the_table=len(others) - len(rows))


def _key(row: TableRow, calibrate: Calibration) -> tuple[str, str | None] | None:
    if calibrate is Calibration.NONE:
        return None
    if calibrate is Calibration.LEAVE_GROUP_OUT:
        return (row.source, row.rank_group) if row.rank_group else None
    return row.source, None


def _measurement(row: TableRow) -> tuple[object, ...]:
    shape = (row.num_layers, row.hidden, row.seq_len, row.num_gpus, row.tp, row.pp, row.cp, row.zero_stage, row.micro_batch)
    figures = [None if value is None else f"{value:.4g}" for value in (step_seconds(row), peak_bytes(row))]
    return (*shape, *figures, row.outcome)


def informed_predictor(knowledge: str, table: MeasurementTable, calibrate: Calibration) -> TablePredictor:
    """The analytic model with the shipped coefficients, and with the measurements that the user names to learn from.

    Raises:
        KnowledgeError, MeasurementsError, RequestError: these cannot be read, or none of them may be learned from.
    """
    given = read_knowledge(knowledge)
    of_job = [row_of(each.source, each.measured) for each in given.trials if isinstance(each.measured, TrialMeasurement)]
    found = admitted([*given.rows, *(row for row in of_job if row is not None)], table.rows, calibrate)
    notes = [*given.notes, f"{len(found.rows):,} rows of {knowledge} are learned from"]
    if found.copies:
        notes.append(f"{found.copies:,} rows of {knowledge} left out: the table has the same measurements")
    if found.of_the_table:
        notes.append(f"{found.of_the_table:,} rows of {knowledge} left out: {calibrate} leaves them out of the table too")
    print("\n".join(notes), file=sys.stderr)
    if not found.rows:
        raise RequestError(
            "knowledge", f"no row of {knowledge} may be learned from", "give other measurements than the table's"
        )
    return TablePredictor().informed(found.rows)


def row_of(source: str, trial: TrialMeasurement) -> TableRow | None:
    """The trial in the columns of tables; None: they do not describe its model."""
    setting, config = trial.setting, trial.config
    model, cluster = setting.model, setting.cluster
    if beyond_columns(model) or model.lora_rank or cluster.device.kind != "cuda":
        return None
    world = cluster.world_size
    ran = trial.samples_per_second is not None
    return TableRow(
        line=0, row_id="", source=source, num_layers=model.num_layers, hidden=model.hidden_size,
        heads=model.num_attention_heads, kv_heads=model.num_key_value_heads, ffn_hidden=model.ffn_hidden_size,
        vocab=model.vocab_size, seq_len=setting.sequence_length, params_b=model.parameter_count / 1e9,
        gpu_type=cluster.device.name, num_gpus=world, gpus_per_node=cluster.devices_per_node,
        inter_bw=f"{cluster.inter_node_bandwidth * 8 / 1e9:.10g} Gb/s per node", precision=config.precision,
        zero_stage=config.zero_stage, tp=config.tensor_parallel_size, pp=config.pipeline_parallel_size,
        vpp=config.virtual_stages, dp=config.data_parallel_size(world), cp=config.context_parallel_size,
        ep=config.expert_parallel_size, sequence_parallel=bool(config.sequence_parallel),
        recompute=config.activation_checkpointing, micro_batch=config.micro_batch_size,
        global_batch=setting.global_batch_size, optimizer=config.optimizer,
        offload="optimizer" if config.offload_optimizer != "none" else None, framework=f"engine={setting.engine}",
        samples_per_s=trial.samples_per_second,
        peak_mem_gb=trial.peak_memory_bytes / GIB if trial.peak_memory_bytes and ran else None,
        mem_kind="GiB", outcome=RowOutcome.OK if ran else RowOutcome.OOM,
    )  # fmt: skip
