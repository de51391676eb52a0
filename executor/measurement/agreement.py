"""Exchanges between ranks while they measure, over the control group, separate from the engine's own traffic."""

from typing import Any

import torch
import torch.distributed as dist

from executor.engine import RankContext


def gather_numbers(context: RankContext, values: list[float]) -> list[list[float]]:
    """Gather every rank's values on every rank."""
    if context.control_group is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(rows, mine, group=context.control_group)
    return [row.tolist() for row in rows]


def gather_plain(context: RankContext, value: Any) -> list[Any]:
    """Gather every rank's plain data on every rank."""
    if context.control_group is None:
        return [value]
    rows: list[Any] = [None] * context.world_size
    dist.all_gather_object(rows, value, group=context.control_group)
    return rows
