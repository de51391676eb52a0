"""Measured values of a row: step seconds, peak bytes."""

import re

from autotune.evaluation.validation.row import Row, RowOutcome

GIB = 2**30
_GIB = re.compile(r"\bGiB\b|\bgibi", re.IGNORECASE)


def step_seconds(row: Row) -> float | None:
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


def peak_bytes(row: Row) -> float | None:
    """Peak memory of a row that ran: in GiB if `mem_kind` names GiB, else in GB of 1e9 bytes."""
    if row.outcome is not RowOutcome.OK or row.peak_mem_gb is None:
        return None
    return row.peak_mem_gb * (GIB if _GIB.search(row.mem_kind or "") else 1e9)
