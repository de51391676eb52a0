"""Packages' fused kernels on a GPU against torch's operators: losses of the first steps, rate, the allocator's peak."""

from functools import partial

import torch
from torch.utils.benchmark import Timer

from benchmarks.gpu.models import model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, first_losses, request, why, written
from executor.parallel.summed_products import add_product, can_add
from search_spaces.kernels import LIGER, NONE, PACKAGES, installed_kernels, kernel_refusals
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

STEPS = 3


def items(setting: Setting) -> list[Item]:
    """Items of the part by-hand; one is skipped, with the reason, if its package is missing."""
    adds = can_add(setting.device, torch.bfloat16, torch.float32)
    skipped = "" if adds else f"{setting.device} does not add products of bf16 to fp32"
    found = [Item(name="products that add to fp32", show=prove_sums, seconds=20.0, skipped=skipped)]
    for name in PACKAGES:
        refusals = kernel_refusals(name, "bf16", setting.device.type, str(setting.device), installed_kernels())
        show = partial(prove_kernels, kernels=name)
        found.append(Item(name=f"kernels: {name}", show=show, seconds=60.0, skipped=str(refusals[0]) if refusals else ""))
    return found


def prove_sums(proof: Proof) -> None:
    """Compare products of bf16 that add to an fp32 sum with float64, and their time with that of a second pass."""
    device, (rows, outputs, inputs) = proof.setting.device, (8192, 4096, 4096)
    gradient, x = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for width in (outputs, inputs))
    total = torch.full((outputs, inputs), torch.nan, device=device)
    exact = gradient.double().T @ x.double()
    for count in (1, 2):
        add_product(total, gradient, x, first=count == 1)
        off = float((total - count * exact).abs().max() / (count * exact).abs().max())
        proof.claim(off <= 1e-5, f"the sum of {count} is {off:.1e} off (bound 1e-05)")
    values = {"add_product": add_product, "total": total, "gradient": gradient, "x": x}
    one, two = (
        Timer(statement, globals=values).blocked_autorange().median
        for statement in ("add_product(total, gradient, x, False)", "total.add_(gradient.T @ x)")
    )
    proof.claim(one <= two, f"{one * 1e3:.3f} ms, with a second pass {two * 1e3:.3f} ms")


def prove_kernels(proof: Proof, kernels: str) -> None:
    """Compare losses and rates of one package; Liger's in compiled blocks, too."""
    ways = (False, True) if kernels == LIGER else (False,)
    for compiled in ways:
        prove_losses(proof, kernels, compiled)
    size = proof.setting.size
    for compiled, name in ((compiled, name) for compiled in ways for name in (NONE, kernels)):
        each = f"{name}, compiled" if compiled else name
        knobs = {"precision": "bf16", "micro_batch_size": 4, "fused_kernels": name, "compile_blocks": compiled}
        result = proof.setting.ranks(1).run(request(each, model_of(size), workload_of(size), 1, **knobs))
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            proof.claim(False, f"{each} ran: {why(result)}")
            continue
        peak = result.ranks[0].peak_memory_bytes / 2**30
        proof.measured(f"{each}: {written(result.samples_per_second)} samples/s, peak {peak:.2f} GiB")


def prove_losses(proof: Proof, kernels: str, compiled: bool = False) -> None:
    """Compare the losses of the first steps with those of torch's operators."""
    proof.setting.close()  # ranks hold memory of the device
    for precision in ("fp32", "bf16"):
        plain, fused = (_losses(proof.setting, each, precision, compiled) for each in (NONE, kernels))
        off, bound = apart(fused, plain), LOSS_BOUND[precision]
        blocks = " of compiled blocks" if compiled else ""
        proof.claim(off <= bound, f"{precision}{blocks}: losses of {STEPS} steps {off:.1e} off torch's (bound {bound:.1e})")


def _losses(setting: Setting, kernels: str, precision: str, compiled: bool) -> list[float]:
    """Losses of the small model: in fp32 the large one would take long."""
    config = TrialConfig(precision=precision, micro_batch_size=2, fused_kernels=kernels, compile_blocks=compiled)
    return first_losses(setting.device, model_of("small"), config, workload_of("small"), STEPS)
