"""Scheduled data in plain PyTorch: the reference for the engine's shorter samples and dropped tokens."""

import functools
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.correctness.reference_router import ReferenceBalance
from executor.parallel.model import Transformer, build_transformer
from search_spaces.knob import Value
from search_spaces.models.model import Model, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

KNOBS = ("curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps")

Schedule = tuple[tuple[str, Value], ...]
"""The knobs of `KNOBS` with their values."""


def schedule_of(config: TrialConfig) -> Schedule:
    """The schedule of a configuration; empty if nothing is scheduled."""
    knobs = tuple((name, getattr(config, name)) for name in KNOBS)
    return knobs if any(value for _, value in knobs) else ()


def grown(start: int, steps: int, whole: int, step: int) -> int:
    """Tokens of a step: from `start` to `whole` in `steps` steps, in multiples of eight."""
    if not start or step >= steps:
        return whole
    reached = start + (whole - start) * step / steps
    return min(int(reached) - (int(reached) - start) % 8, whole)


def scheduled_loss(
    module: nn.Module,
    model: Model,
    workload: Workload,
    schedule: Schedule,
    step: int,
    batch: Mapping[str, Tensor],
    balance: ReferenceBalance,
) -> object:
    """The module's output for a step with scheduled data."""
    if not schedule or not isinstance(model, ModelSpec):
        return module(**batch)
    knobs, whole = {name: int(value) for name, value in schedule}, workload.sequence_length
    length = grown(knobs["curriculum_start_length"], knobs["curriculum_steps"], whole, step)
    kept = grown(knobs["random_ltd_start_tokens"], knobs["random_ltd_steps"], length, step)
    dtype = next(module.parameters()).dtype
    # A model built for samples of this length, with the weights of the trained one.
    made = build_transformer(model, length, workload.seed, dtype)
    balance.watch(made)
    if kept < length:
        drop(made, model.num_layers, workload.seed, step, length, kept)
    shorter = {name: value[:, :length] for name, value in batch.items()}
    return functional_call(made, dict(module.named_parameters()), kwargs=shorter)


def drop(made: Transformer, layers: int, seed: int, step: int, length: int, kept: int) -> None:
    """Restrict every layer but the first and the last to `kept` tokens."""
    for layer in range(1, layers - 1):
        digest = hashlib.sha256(f"random-ltd:{seed}:{step}:{layer}".encode()).digest()
        drawn = torch.randperm(length, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
        seen = torch.zeros(length, dtype=torch.bool)
        seen[drawn[:kept]] = True
        block = made.blocks[str(layer)]
        block.forward = functools.partial(_seeing, block.forward, seen)


def _seeing(
    call: Callable[..., Tensor], seen: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: None
) -> Tensor:
    if documents is not None:
        raise ValueError("samples with documents cannot be scheduled")
    turned = None if rotary is None else (rotary[0][seen], rotary[1][seen])
    result = x.clone()
    result[:, seen] = call(x[:, seen], turned)
    return result
