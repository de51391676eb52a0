"""fp8 products against bf16 on one device: similar losses, and how compiling changes the time that rounding takes."""

from functools import partial

import torch

from benchmarks.gpu.models import model_of, workload_of
from benchmarks.gpu.proof import Item, Proof, Setting, apart, request, why, written
from search_spaces.outcome import Outcome

BOUND = 2.0**-7
"""Relative difference of the first steps' losses; a CPU stays four times below."""
LEAST_CAPABILITY = (8, 9)


def items(setting: Setting) -> list[Item]:
    """Items of the part by-hand."""
    reason = ""
    if setting.on_gpu and torch.cuda.is_available() and torch.cuda.get_device_capability(setting.device) < LEAST_CAPABILITY:
        reason = f"{torch.cuda.get_device_name(setting.device)} has no float8 products"
    return [
        Item(
            name=f"float8: {'compiled' if compiled else 'eager'} blocks",
            show=partial(prove_float8, compiled=compiled),
            seconds=120.0 if compiled else 50.0,
            skipped=reason or ("needs CUDA: blocks are compiled only there" if compiled and not setting.on_gpu else ""),
        )
        for compiled in (False, True)
    ]


def prove_float8(proof: Proof, compiled: bool) -> None:
    """Measure the rates of both precisions, and compare their losses."""
    size = proof.setting.size
    workload, losses = workload_of(size), {}
    for precision in ("bf16", "fp8"):
        knobs = {"precision": precision, "compile_blocks": compiled, "micro_batch_size": 4}
        result = proof.setting.ranks(1).run(request(precision, model_of(size), workload, 1, **knobs))
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            proof.claim(False, f"{precision} ran: {why(result)}")
            return
        losses[precision] = result.losses
        peak = result.ranks[0].peak_memory_bytes / 2**30
        rate = result.samples_per_second
        proof.measured(f"{precision}: {written(rate)} samples/s, peak {peak:.2f} GiB", **{precision: rate.mean})
    off = apart(losses["fp8"], losses["bf16"])
    text = f"{len(losses['bf16'])} losses within {off:.1e} of bf16's, but not equal (bound {BOUND:.1e})"
    proof.claim(0.0 < off <= BOUND, text)
