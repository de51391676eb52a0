"""Four autograd functions. Kernels write past autograd's version counters: so does `.data` here."""

from typing import Any

import torch
from torch import Tensor

CALLS: list[tuple[str, tuple[Tensor, ...]]] = []
"""Function -> the tensors of each call of its forward, as they came, without their memory."""


def _note(name: str, *tensors: Tensor) -> None:
    CALLS.append((name, tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors)))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None) -> Any:
        assert casting_mode == "gemma" and offset == 0.0 and row_mode is None
        _note("norm", X, W)
        precise = _precise(X)
        rstd = (precise.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(X, W, rstd.flatten())
        ctx.in_place = in_place
        return (precise * rstd * _precise(W)).to(X.dtype)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        X, W, numbers = ctx.saved_tensors
        X, rstd = X.view(dY.shape), numbers.view(*dY.shape[:-1], 1)
        precise, gradient = _precise(X), _precise(dY) * _precise(W)
        mean = (gradient * precise).mean(-1, keepdim=True)
        dX = (rstd * (gradient - rstd.square() * mean * precise)).to(X.dtype)
        dW = (_precise(dY) * precise * rstd).flatten(0, -2).sum(0).to(W.dtype)
        if ctx.in_place:
            dY.data.copy_(dX)
            dX = dY
        return dX, dW, None, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x [batch, tokens, heads, head_dim] in place."""
    first, second = x.clone().chunk(2, dim=-1)
    x.data.copy_(torch.cat((first, second), -1) * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None])


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None) -> Any:
        _note("rotate", q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        assert cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        _turn(q, cos, sin)
        _turn(k, cos, sin)
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        dq, dk = dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous()
        _turn(dq, cos, -sin)
        _turn(dk, cos, -sin)
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None, None, None, None


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0) -> Any:
        _note("gate", a, b)
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(_precise(a)).to(b.dtype) * b

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:
        a, b = ctx.saved_tensors
        precise = _precise(a)
        sigmoid = precise.sigmoid()
        silu = precise * sigmoid
        da, db = _precise(dc) * (silu * (1 - sigmoid) + sigmoid) * b, _precise(dc) * silu
        a.data.copy_(da)
        b.data.copy_(db)
        return a, b, None, None


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
        reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
        return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1,
    ) -> Any:  # fmt: skip
        _note("loss", _input, weight, target)
        assert bias is None and ce_weight is None and reduction == "sum" and not return_z_loss
        assert accum_dtype is (torch.float32 if weight.dtype == torch.bfloat16 else None)
        rows, made = torch.zeros_like(_input), torch.zeros_like(weight, dtype=accum_dtype or weight.dtype)
        losses = []
        # Some rows at a time, as many as Liger takes: by vocabulary over width, to a power of two.
        at_once = 1 << (-(-len(_input) // -(-len(weight) // weight.shape[1])) - 1).bit_length()
        for start in range(0, len(_input), at_once):
            own, place = _input[start : start + at_once], target[start : start + at_once, None]
            logits = _precise(own @ weight.t())
            losses.append((logits.logsumexp(-1) - logits.gather(-1, place).squeeze(-1)).sum())
            slope = logits.softmax(-1).scatter_add(-1, place, -torch.ones_like(place, dtype=logits.dtype)).to(_input.dtype)
            rows[start : start + at_once] = slope @ weight
            made += (slope.t() @ own).to(made.dtype)
        ctx.save_for_backward(rows, made.to(weight.dtype) if weight.requires_grad else None)
        return torch.stack(losses).sum(), None, None, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, made = ctx.saved_tensors
        for value in (rows, made):
            if value is not None:
                value.data.mul_(gradients[0])
        return (rows, made, *(None,) * 10)[: len(ctx.needs_input_grad)]
