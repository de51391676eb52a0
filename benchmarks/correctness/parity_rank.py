"""Runs one case of the parity matrix inside a rank: trains three steps and compares with plain PyTorch in one process."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.correctness.parity_cases import NARROW, Case
from benchmarks.correctness.reference_documents import documents_loss
from benchmarks.correctness.reference_optimizers import reference_optimizers
from benchmarks.correctness.reference_router import ReferenceBalance
from benchmarks.correctness.reference_schedule import Schedule, schedule_of, scheduled_loss
from executor.batches import Data, FactoryData, document_data, map_tensors, text_data
from executor.engine import GroupKey, RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.engines.sources import DTYPES
from executor.engines.torch_engines import DdpEngine, Fsdp2Engine
from executor.parallel import context as attention
from executor.parallel.attention import sees
from executor.parallel.collectives import ProcessGroup
from executor.parallel.model import build_transformer
from executor.user_module.factory import load_factory
from executor.user_module.survey import loss_from
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.rules.computation import FLOAT8
from search_spaces.training.adapters import configured
from search_spaces.training.windows import AttentionWindow
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

STEPS = 3
ENGINES = {engine.capability.engine: engine for engine in (NativeEngine, DdpEngine, Fsdp2Engine)}
TIED = {"head.output.weight": "embedding.tokens.weight"}
"""A tied weight has the embedding's name in one process, and the head's on another pipeline rank."""


class KeptGroups(dict[GroupKey, dist.ProcessGroup | None]):
    """Process groups for all cases of a rank: those that a case does not need are kept too, because making groups takes longer
    than most cases do.
    """

    def __bool__(self) -> bool:
        """False, so that the engine finds none to destroy."""
        return False


GROUPS = KeptGroups()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Differences of a rank's results from one process."""

    off: float
    """Largest difference of a loss, a gradient norm or a weight; for inexact types the largest relative one of a loss."""
    weights: frozenset[str]
    """The weights that this rank compared."""


def compare(rank: int, case: Case) -> Report:
    """Train the case on this rank. Every rank must call it."""
    dtype = DTYPES[case.config.precision if case.config.precision in (*NARROW, FLOAT8) else "fp64"]
    model = configured(case.model_of(), case.config)
    config = case.config
    # Of a factory's module the samples depend on the micro-batch size.
    size = config.micro_batch_size if isinstance(model, FactoryModel) else 0
    options = (config.optimizer, schedule_of(config), config.pack_sequences, config.router_bias_update_rate, size)
    losses, norms, weights = _reference(model, case.workload(), dtype, *options)
    context = RankContext(rank=rank, world_size=case.ranks, device=torch.device("cpu"), reusable_groups=GROUPS)
    with _unguarded(case.refused):
        session = ENGINES[case.engine]().build(context, case.model_of(), case.config, case.workload())
    try:
        own_losses, own_norms = _train(session)
        own_weights = session.full_parameters()
        splits = _splits(session)
    finally:
        session.close()
    off = _largest(abs(a - b) for a, b in zip(own_losses, losses, strict=True))
    if not case.exact:
        return Report(off=off / max(losses), weights=frozenset(weights))
    off = max(off, _largest(abs(a - b) for a, b in zip(own_norms, norms, strict=True) if a is not None and b is not None))
    for name, value in own_weights.items():
        expected = weights[name if name in weights else TIED[name]]
        if name in splits:
            dimension, group = splits[name]
            expected = expected.chunk(group.size, dim=dimension)[group.rank]
        off = max(off, _largest([float((value - expected).abs().max())]))
    return Report(off=off, weights=frozenset(name if name in weights else TIED[name] for name in own_weights))


def reference_weights(case: Case) -> frozenset[str]:
    """The names of all trainable weights."""
    return _names(configured(case.model_of(), case.config), case.workload())


@functools.lru_cache(maxsize=64)
def _names(model: Model, workload: Workload) -> frozenset[str]:
    module = _module(model, workload, torch.float64)
    return frozenset(name for name, value in module.named_parameters() if value.requires_grad)


def _train(session: ParallelSession) -> tuple[list[float], list[float | None]]:
    """Losses, as means over the ranks that have them, and gradient norms."""
    known = torch.zeros(STEPS, 2, dtype=torch.float64)
    norms = []
    for step in range(STEPS):
        session.prepare(step)
        report = session.train_step()
        while report.skipped:
            report = session.train_step()
        norms.append(report.gradient_norm)
        if report.loss is not None:
            known[step] = torch.tensor([report.loss, 1.0], dtype=torch.float64)
    dist.all_reduce(known)
    return (known[:, 0] / known[:, 1]).tolist(), norms


@functools.lru_cache(maxsize=64)
def _reference(
    model: Model,
    workload: Workload,
    dtype: torch.dtype,
    optimizer: str = "adamw",
    schedule: Schedule = (),
    packed: bool = False,
    bias_rate: float = 0.0,
    micro_batch_size: int = 0,
) -> tuple[list[float], list[float | None], dict[str, Tensor]]:
    """Plain PyTorch on the whole batch (a factory's module: on its micro-batches), in float64 from weights rounded to `dtype`.

    A part that no sample of a step used (an expert, a branch) has a zero gradient, as with sharded gradients, so that momentum
    and decay act on it; plain AdamW would skip it.
    """
    module = _module(model, workload, dtype).to(torch.float64)
    optimizers = reference_optimizers(optimizer, module, workload)
    balance = ReferenceBalance(module, bias_rate)
    data = _data(model, workload, packed)
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(STEPS):
        with patch.object(attention, "attend_to_window", _attend_by_a_mask):
            if isinstance(data, FactoryData):
                indices = range(workload.global_batch_size // micro_batch_size)
                batches = [map_tensors(data.micro_batch(step, index, micro_batch_size), _exact) for index in indices]
                output: object = torch.stack([loss_from(module(**batch)) for batch in batches]).mean()
            elif workload.document_lengths:
                output = documents_loss(module, data.global_batch(step))
            else:
                output = scheduled_loss(module, model, workload, schedule, step, data.global_batch(step), balance)
        loss = loss_from(output)
        loss.backward()
        for parameter in module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        clipping = workload.gradient_clipping
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clipping)) if clipping else None)
        for one in optimizers:
            one.step()
            one.zero_grad()
        balance.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() for name, value in module.named_parameters()}


def _attend_by_a_mask(query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, start: int, grouped: bool) -> Tensor:
    """Full attention with a mask over the scores outside the window."""
    places = torch.arange(key.shape[2])
    seen = sees(window)(places[start : start + query.shape[2], None], places)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=grouped)


def _exact(value: Tensor) -> Tensor:
    """Floating inputs as float64."""
    return value.double() if value.is_floating_point() else value


def _module(model: Model, workload: Workload, dtype: torch.dtype) -> nn.Module:
    if isinstance(model, ModelSpec):
        return build_transformer(model, workload.sequence_length, workload.seed, dtype)
    torch.manual_seed(workload.seed)
    return load_factory(model.reference, workload).module.to(dtype).eval()  # engines disable dropout in the first steps


def _data(model: Model, workload: Workload, packed: bool) -> Data | FactoryData:
    if isinstance(model, ModelSpec) and workload.document_lengths:
        return document_data(TrialConfig(pack_sequences=packed), workload, model.vocab_size)
    if isinstance(model, ModelSpec):
        return text_data(workload, model.vocab_size)
    return FactoryData(batch=load_factory(model.reference, workload).batch, seed=workload.seed)


def _splits(session: ParallelSession) -> dict[str, tuple[int, ProcessGroup]]:
    """Weight -> the dimension that is sliced, and the ranks that have the slices."""
    groups = session.groups
    return {
        name: (dimension, groups.expert_tensor if name in part.experts else groups.tensor)
        for part in session.parts
        for name, dimension in part.split.items()
    }


def _largest(values: Iterator[float] | Sequence[float]) -> float:
    """The largest value; NaN counts as infinite."""
    return max((value if value == value else float("inf") for value in values), default=0.0)


@contextlib.contextmanager
def _unguarded(really: bool) -> Iterator[None]:
    """If `really`, build configurations that the engines refuse."""
    with contextlib.ExitStack() as stack:
        for module in ("native.engine", "torch_engines") if really else ():
            stack.enter_context(patch(f"executor.engines.{module}.refuse"))
        yield
