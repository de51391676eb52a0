"""Products in 8 bits against bf16 on one device: losses alike, and what compiling makes of the time that rounding takes."""

from itertools import product

import torch

from benchmarks.gpu_by_hand import LARGE, SMALL
from benchmarks.gpu_proof import Proof, request, written
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload

BOUND = 2.0**-7
"""Relative, of the losses of the first steps: a CPU stays four times below."""
LEAST_CAPABILITY = (8, 9)


def prove_float8(proof: Proof, kind: str) -> None:
    """`kind`: of the device, cuda or cpu."""
    proof.say("\n## Products in 8 bits\n")
    if kind == "cuda" and torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        proof.say(f"Not run: {torch.cuda.get_device_name()} has no float8 products.")
        return
    spec, samples = (LARGE, 4) if kind == "cuda" else (SMALL, 4)
    workload = Workload(global_batch_size=samples, sequence_length=spec.sequence_length)
    proof.say(f"{spec.name} ({spec.parameter_count:,} parameters), {samples} sequences of {spec.sequence_length}.\n")
    proof.say("| precision | compiled | samples/s | peak GiB |")
    proof.say("|---|---|---|---|")
    losses: dict[tuple[bool, str], tuple[float, ...]] = {}
    with LocalRunner(1, device=kind) as runner:
        for compiled, precision in product((False, True) if kind == "cuda" else (False,), ("bf16", "fp8")):
            name = f"{precision}{', compiled' if compiled else ''}"
            knobs = {"precision": precision, "compile_blocks": compiled, "micro_batch_size": samples}
            result = runner.run(request(name, spec, workload, 1, **knobs))
            if result.outcome is not Outcome.OK or result.samples_per_second is None:
                proof.claim(False, f"{name} ran: {result.outcome} {result.message} {result.traceback or ''}")
                continue
            losses[compiled, precision] = tuple(result.losses)
            peak = result.ranks[0].peak_memory_bytes / 2**30
            proof.say(f"| {precision} | {compiled} | {written(result.samples_per_second)} | {peak:.2f} |")
    for (compiled, precision), narrow in losses.items():
        wide = losses.get((compiled, "bf16"))
        if precision == "fp8" and wide is not None:
            off = max(abs(one / other - 1) for one, other in zip(narrow, wide, strict=True))
            told = f"{len(wide)} losses{' of compiled blocks' if compiled else ''} within {off:.1e} of bf16's"
            proof.claim(0.0 < off <= BOUND, f"{told}, and not the same (bound {BOUND:g})")
