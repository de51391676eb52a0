"""The same training steps without an engine: the losses that a user's module must have under every configuration."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.batches import map_tensors
from executor.engine import RankContext
from executor.engines.session import RepeatableSteps
from executor.engines.sources import load_user_module
from executor.measurement.trial_report import gather_numbers
from executor.user_module.survey import loss_from
from search_spaces.clusters.presets import host_memory_bytes
from search_spaces.models.model import FactoryModel
from search_spaces.optimizers import BETAS, EPSILON
from search_spaces.trial import TrialRequest

STATE_BYTES = 20
"""Most bytes for each trained parameter: values, gradient, fp32 master values and two moments."""


def plain_losses(context: RankContext, request: TrialRequest) -> tuple[float, ...]:
    """Losses of the first `plain_steps` steps of the module itself, on this configuration's division into micro-batches.

    1. Every rank builds the whole module and computes its share of the step's micro-batches one after the other, whatever the
       configuration's layout. So the result depends on the size of micro-batches, not on the number of data-parallel ranks.
    2. Gradients are summed over micro-batches and ranks; each loss counts 1 / number of micro-batches.
    3. torch's AdamW updates, after clipping.

    Empty: the whole module with its optimizer does not fit on a rank. The result is the same on every rank.
    """
    assert isinstance(request.model, FactoryModel)
    needed = STATE_BYTES * request.model.parameter_count
    available = host_memory_bytes() // context.ranks_on_host
    if context.device.type == "cuda":
        available = torch.cuda.mem_get_info(context.device)[0]
    steps: _PlainSteps | None = None
    losses: list[float] = []
    for step in range(request.plain_steps):
        fits = steps is not None or needed < available
        try:
            if fits:
                steps = steps or _PlainSteps(context, request, request.model)
                steps.run_micro_batches(step)
        except torch.OutOfMemoryError:
            fits = False
        if not all(row[0] for row in gather_numbers(context, [float(fits)])) or steps is None:
            losses.clear()
            break
        losses.append(steps.finish())
    if steps is not None:
        steps.repeatable.close()
    del steps
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return tuple(losses)


class _PlainSteps:
    """Plain training steps on this rank's share of the micro-batches."""

    def __init__(self, context: RankContext, request: TrialRequest, model: FactoryModel) -> None:
        workload = request.workload
        self.context, self.workload, self.size = context, workload, request.config.micro_batch_size
        self.count = workload.global_batch_size // self.size
        self.loaded = load_user_module(model, request.config, workload)
        self.module = self.loaded.user.module.to(context.device)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # Updates of narrow types would be lost in rounding.
        precise = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self.trained]
        self.masters = [
            nn.Parameter(parameter.detach().to(dtype, copy=True))
            for parameter, dtype in zip(self.trained, precise, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=workload.learning_rate, weight_decay=workload.weight_decay, betas=BETAS, eps=EPSILON
        )
        self.repeatable = RepeatableSteps([self.module], workload, context.rank, context.world_size, self.loaded.trains_only)
        self.loss = torch.zeros((), dtype=torch.float64)

    def run_micro_batches(self, step: int) -> None:
        """Forward and backward of this rank's micro-batches; no communication."""
        mine = range(self.context.rank, self.count, self.context.world_size)
        self.repeatable.begin(step, max(len(mine), 1))
        self.loss.zero_()
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for index in mine:
            batch = map_tensors(self.loaded.data.micro_batch(step, index, self.size), self._to_device)
            loss = loss_from(self.module(**batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += loss.detach().to("cpu", torch.float64)
            for parameter, master in zip(self.trained, self.masters, strict=True):
                if parameter.grad is not None:
                    assert master.grad is not None
                    master.grad += parameter.grad.to_dense().to(master.dtype) / self.count
                    parameter.grad = None

    @torch.no_grad()
    def finish(self) -> float:
        """Sum over ranks and update; return the mean loss."""
        for master in self.masters if self.context.world_size > 1 else ():
            dist.all_reduce(master.grad)
        if self.workload.gradient_clipping:
            nn.utils.clip_grad_norm_(self.masters, self.workload.gradient_clipping)
        self.optimizer.step()
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.copy_(master)
        return sum(row[0] for row in gather_numbers(self.context, [float(self.loss)])) / self.count

    def _to_device(self, value: Tensor) -> Tensor:
        return self.loaded.converted(value).to(self.context.device)
