"""Fused kernels of packages on a GPU against torch's operators: losses of the first steps, rate, the allocator's peak.

A package that is not there is told as skipped, with the reason.
"""

import torch

from benchmarks.gpu_proof import LOSS_BOUND, Proof, request
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.runners.local import LocalRunner
from search_spaces.fused_kernels import NONE, PACKAGES, installed_kernels, kernel_refusals
from search_spaces.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

STEPS = 3


def prove_kernels(proof: Proof, model: ModelSpec, workload: Workload, device: torch.device) -> None:
    proof.say("\n## Fused kernels\n")
    for name in PACKAGES:
        refusals = kernel_refusals(name, "bf16", device.type, str(device), installed_kernels())
        if refusals:
            proof.say(f"- skipped: {name}: {refusals[0]}")
            continue
        for precision in ("fp32", "bf16"):
            plain, fused = (_losses(model, workload, kernels, precision, device) for kernels in (NONE, name))
            off = max(abs(one / other - 1) for one, other in zip(fused, plain, strict=True))
            bound = LOSS_BOUND[precision]
            proof.claim(off <= bound, f"{name}, {precision}: losses of {STEPS} steps {off:.1e} off torch's (bound {bound:g})")
        _measure(proof, model, workload, name, device)


def _losses(model: ModelSpec, workload: Workload, kernels: str, precision: str, device: torch.device) -> list[float]:
    config = TrialConfig(precision=precision, micro_batch_size=2, fused_kernels=kernels)
    session = NativeEngine().build(RankContext(rank=0, world_size=1, device=device), model, config, workload)
    try:
        losses = []
        for step in range(STEPS):
            session.prepare(step)
            loss = session.train_step().loss
            assert loss is not None
            losses.append(loss)
        return losses
    finally:
        session.close()


def _measure(proof: Proof, model: ModelSpec, workload: Workload, name: str, device: torch.device) -> None:
    proof.say("\n| kernels | samples/s | peak |\n|---|---|---|")
    with LocalRunner(1, device=device.type) as runner:
        for kernels in (NONE, name):
            knobs = {"precision": "bf16", "micro_batch_size": 4, "fused_kernels": kernels}
            result = runner.run(request(kernels, model, workload, 1, **knobs))
            if result.outcome is not Outcome.OK or result.samples_per_second is None:
                proof.claim(False, f"{kernels} ran: {result.outcome} {result.message}")
                continue
            rate, peak = result.samples_per_second, result.ranks[0].peak_memory_bytes / 2**30
            proof.say(f"| {kernels} | {rate.mean:.2f} [{rate.low:.2f}, {rate.high:.2f}] | {peak:.2f} GiB |")
