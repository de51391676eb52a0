"""Packages' fused kernels on a GPU against torch's operators: losses of the first steps, rate, the allocator's peak."""

from functools import partial

from benchmarks.gpu.models import model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, first_losses, request, why, written
from search_spaces.kernels import NONE, PACKAGES, installed_kernels, kernel_refusals
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

STEPS = 3


def items(setting: Setting) -> list[Item]:
    """Items of the part by-hand; one is skipped, with the reason, if its package is missing."""
    found = []
    for name in PACKAGES:
        refusals = kernel_refusals(name, "bf16", setting.device.type, str(setting.device), installed_kernels())
        show = partial(prove_kernels, kernels=name)
        found.append(Item(name=f"kernels: {name}", show=show, seconds=60.0, skipped=str(refusals[0]) if refusals else ""))
    return found


def prove_kernels(proof: Proof, kernels: str) -> None:
    """Compare losses and rates of one package."""
    prove_losses(proof, kernels)
    size = proof.setting.size
    for each in (NONE, kernels):
        knobs = {"precision": "bf16", "micro_batch_size": 4, "fused_kernels": each}
        result = proof.setting.ranks(1).run(request(each, model_of(size), workload_of(size), 1, **knobs))
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            proof.claim(False, f"{each} ran: {why(result)}")
            continue
        peak = result.ranks[0].peak_memory_bytes / 2**30
        proof.measured(f"{each}: {written(result.samples_per_second)} samples/s, peak {peak:.2f} GiB")


def prove_losses(proof: Proof, kernels: str) -> None:
    """Compare the losses of the first steps with those of torch's operators."""
    proof.setting.close()  # ranks hold memory of the device
    for precision in ("fp32", "bf16"):
        plain, fused = (_losses(proof.setting, each, precision) for each in (NONE, kernels))
        off, bound = apart(fused, plain), LOSS_BOUND[precision]
        proof.claim(off <= bound, f"{precision}: losses of {STEPS} steps {off:.1e} off torch's (bound {bound:.1e})")


def _losses(setting: Setting, kernels: str, precision: str) -> list[float]:
    """Losses of the small model: in fp32 the large one would take long."""
    config = TrialConfig(precision=precision, micro_batch_size=2, fused_kernels=kernels)
    return first_losses(setting.device, model_of("small"), config, workload_of("small"), STEPS)
