"""A llama written by hand in plain PyTorch, as fast as possible: the reference for our engine in `by_hand.py`.

bf16 weights with an fp32 master under fused AdamW (the stronger choice: autocast over fp32 weights casts each of them in
every step and moves fp32 gradients), one product for queries, keys and values and one for gate and up, a `torch.compile`
of each block, flash attention, and a cross-entropy in chunks that computes its gradients in forward, so that nothing is
computed twice.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from executor.engines.session import ParallelSession
from executor.parallel.operators import rotary_table, rotate
from search_spaces.models.model import ModelSpec


class Block(nn.Module):
    """One layer, [batch, tokens, hidden] to the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, self.head_dim = spec.hidden_size, spec.head_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=spec.norm_epsilon)
        self.qkv = nn.Linear(hidden, 3 * spec.num_attention_heads * spec.head_dim, bias=False)
        self.output = nn.Linear(spec.num_attention_heads * spec.head_dim, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=spec.norm_epsilon)
        self.gate_up = nn.Linear(hidden, 2 * spec.ffn_hidden_size, bias=False)
        self.down = nn.Linear(spec.ffn_hidden_size, hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, -1, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result


class Llama(nn.Module):
    """Tokens and labels [batch, tokens] to the mean cross-entropy."""

    def __init__(self, spec: ModelSpec, length: int, chunk: int, compiled: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        cosines, sines = rotary_table(spec, length)
        self.register_buffer("cosines", cosines)
        self.register_buffer("sines", sines)
        self.chunk_loss = chunk_loss
        if compiled:
            for block in self.blocks:
                block.compile(fullgraph=True)  # full graph: raises instead of silently running parts uncompiled
            self.chunk_loss = torch.compile(chunk_loss, fullgraph=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosines, sines = self.get_buffer("cosines").to(x.dtype), self.get_buffer("sines").to(x.dtype)
        for block in self.blocks:
            x = block(x, cosines, sines)
        rows = self.norm(x).flatten(0, 1)
        loss: Tensor = ChunkedLoss.apply(rows, self.head.weight, labels.flatten(), self)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def take(self, theirs: Mapping[str, Tensor]) -> None:
        """Copy the weights of a `Transformer` of the same shape; `theirs` maps its parameter names to tensors."""
        self.embedding.weight.copy_(theirs["embedding.tokens.weight"])
        self.norm.weight.copy_(theirs["head.norm.weight"])
        self.head.weight.copy_(theirs["head.output.weight"])
        for index, block in enumerate(self.blocks):
            for name, parameter in block.named_parameters():
                parameter.copy_(torch.cat([theirs[f"blocks.{index}.{source}.weight"] for source in SOURCES[name]]))


SOURCES = {
    "attention_norm.weight": ("attention_norm",),
    "qkv.weight": ("attention.query", "attention.key", "attention.value"),
    "output.weight": ("attention.output",),
    "mlp_norm.weight": ("mlp_norm",),
    "gate_up.weight": ("mlp.gate", "mlp.up"),
    "down.weight": ("mlp.down",),
}
"""Parameter of a handwritten block -> the parameters of our model that it concatenates."""


def chunk_loss(rows: Tensor, weight: Tensor, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's share of the mean cross-entropy of `tokens` tokens, and its gradients for `rows` [n, hidden] and `weight`."""
    logits = rows @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sums = logits.logsumexp(dim=-1, keepdim=True)
    loss = (log_sums - logits.gather(-1, targets[:, None])).sum() / tokens
    hit = torch.arange(logits.shape[-1], device=targets.device) == targets[:, None]
    gradient = (((logits - log_sums).exp() - hit.to(logits.dtype)) / tokens).to(rows.dtype)
    return loss, gradient @ weight, gradient.t() @ rows


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy that computes the logits once, for `model.chunk` tokens at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, model: Llama) -> Tensor:
        precise = torch.promote_types(weight.dtype, torch.float32)
        by_weight = torch.zeros(weight.shape, dtype=precise, device=weight.device)
        losses, by_rows = [], []
        for part, labels in zip(rows.split(model.chunk), targets.split(model.chunk), strict=True):
            loss, by_part, by_weight_here = model.chunk_loss(part, weight, labels, targets.numel())
            losses.append(loss)
            by_rows.append(by_part)
            by_weight += by_weight_here
        ctx.save_for_backward(torch.cat(by_rows), by_weight.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_rows, by_weight = ctx.saved_tensors
        return by_rows * gradients[0].to(by_rows.dtype), by_weight * gradients[0].to(by_weight.dtype), None, None


class ByHand:
    """The llama above with its master weights and its optimizer."""

    def __init__(self, session: ParallelSession, spec: ModelSpec, chunk: int, device: torch.device, compiled: bool) -> None:
        """`session` provides the weights and the batches."""
        self.data, self.workload, self.device = session.data, session.workload, device
        model = Llama(spec, self.workload.sequence_length, chunk, compiled)
        self.model = model.to(device)
        self.model.take(session.full_parameters())
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=self.workload.learning_rate, weight_decay=self.workload.weight_decay, fused=True
        )

    def prepare(self, step: int) -> None:
        self.batch = {name: value.to(self.device) for name, value in self.data.global_batch(step).items()}

    def step(self) -> tuple[float, float]:
        with _flash(self.device):
            loss = self.model(**self.batch)
            loss.backward()
        parameters = [*self.model.parameters()]
        for master, parameter in zip(self.masters, parameters, strict=True):
            # One at a time, so that never all gradients exist in both types.
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.masters, self.workload.gradient_clipping, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.masters)
        return float(loss.detach()), float(norm)


def _flash(device: torch.device) -> AbstractContextManager[object]:
    """Only flash attention on CUDA; any kernel on a CPU."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()
