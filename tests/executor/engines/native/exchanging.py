"""The real trial, or, where the request's `engine` is `exchange@FOLDER`, a block that exchanges in the midst of what is kept.

Rank processes import it by name from this folder, as they import `executor.trial.run` otherwise.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from executor.parallel.checkpointing import checkpoint_blocks, keep_collective
from executor.trial import run as trial
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig

WIDTH = 32


class _SumOfRanks(torch.autograd.Function):
    """All-reduce in place, as the tensor-parallel layers do it."""

    @staticmethod
    def forward(ctx, x, sent, through_keep):
        def exchange():
            sent.append("all_reduce")
            total = x.detach().contiguous()
            dist.all_reduce(total)
            return total

        return keep_collective(exchange) if through_keep else exchange()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None, None


class _GatherOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent):
        def exchange():
            sent.append("all_gather")
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts, dim=-1)

        return keep_collective(exchange)

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()], None


class Exchanging(nn.Module):
    """A sum that overwrites a product's result, and a gather, between cheap operators that need both again."""

    def __init__(self, through_keep=True):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)
        self.through_keep = through_keep
        self.sent = []

    def forward(self, x):
        total = _SumOfRanks.apply(self.inner(torch.tanh(x)), self.sent, self.through_keep)
        gathered = _GatherOfRanks.apply(torch.tanh(total), self.sent)
        return x + torch.tanh(self.outer(gathered.sin()))


def outcome(model, x):
    """The loss, the input's gradient and every parameter's."""
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def inputs():
    return torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)


def exchange(rank, folder):
    """What each kind of checkpointing computes and sends, as a file of each rank."""
    found, counts = {}, {}
    for kind in ("none", "selective", "full"):
        torch.manual_seed(rank)
        block = Exchanging().double()
        checkpoint_blocks([block], TrialConfig(activation_checkpointing=kind))
        found[kind], counts[kind] = outcome(block, inputs()), block.sent
    block = Exchanging(through_keep=False).double()
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="selective"))
    refused = ""
    try:
        block(inputs())
    except RuntimeError as error:
        refused = str(error)
    torch.save({"found": found, "counts": counts, "refused": refused}, Path(folder, f"{rank}.pt"))


def run_trial(context, request, progress):
    _, _, folder = request.engine.partition("@")
    if not folder:
        return trial.run_trial(context, request, progress)
    exchange(context.rank, folder)
    dist.barrier()  # every file is there when the first rank answers
    return TrialResult(attempt=request.attempt, outcome=Outcome.OK)
