"""Two ranks on one device (gloo carries CUDA tensors; NCCL refuses that): layouts, offload, checkpointing, overlap."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, ratio, request, why
from executor.parallel.copies import BUFFERS
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.training.states import CHUNK_ELEMENTS
from search_spaces.trial import Fidelity, TrialResult, Workload

Knobs = Mapping[str, Any]

RANKS = 2
TRIAL = "benchmarks.gpu.rank:run_trial"
SINGLE_RANK = "two ranks: one rank alone"
LARGE = ModelSpec(
    name="llama-32m", family="llama", num_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, ffn_hidden_size=1408, vocab_size=8192, sequence_length=512,
)  # fmt: skip
NANO = ModelSpec(
    name="llama-nano", family="llama", num_layers=4, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, ffn_hidden_size=64, vocab_size=256, sequence_length=64,
)  # fmt: skip
BRIEF = Fidelity(warmup_updates=3, max_warmup_steps=3, min_steps=2, max_steps=2)
"""Enough for three losses and the memory; step times are not used."""
LAYOUTS: Mapping[str, Knobs] = {
    **{f"zero_stage={stage}": {"zero_stage": stage} for stage in range(4)},
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 2 with sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline 2, 1f1b": {"pipeline_parallel_size": 2},
    "pipeline 2, zbv": {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv"},
    "context 2": {"context_parallel_size": 2},
    "context 2, cudnn": {"context_parallel_size": 2, "attention_backend": "cudnn"},
}
"""The last has two calls of a kernel without a mask, in 16 bits only."""
OFFLOADS: Mapping[int, tuple[Knobs, ...]] = {
    1: ({"offload_optimizer": "cpu"}, {"offload_optimizer": "cpu", "offload_ratio": 0.3}),
    3: (
        {"offload_param": "cpu"},
        {"offload_param": "cpu", "offload_optimizer": "cpu"},
        {"offload_param": "cpu", "offload_optimizer": "cpu", "offload_ratio": 0.3},
    ),
}
"""ZeRO stage -> the offload settings tested at it."""
FALL_BOUND = 0.02
ALLOCATOR_BYTES = {"cuda": 8 << 20, "cpu": 1 << 12}
"""Further tolerance of a peak, in bytes: CUDA's allocator hands out rounded parts of 2 MiB segments."""


def items(setting: Setting) -> list[Item]:
    """Items of the part correctness."""
    found = [Item(name=SINGLE_RANK, show=measure_single_rank, seconds=25.0)]
    for label, knobs in LAYOUTS.items():
        show = partial(prove_layout, label=label, knobs=knobs)
        reason = "" if setting.on_gpu or "attention_backend" not in knobs else "cuDNN runs on CUDA only"
        found.append(Item(name=f"two ranks: {label}", show=show, seconds=12.0, group="two ranks", skipped=reason))
    for stage in OFFLOADS:
        show = partial(prove_offload, stage=stage)
        found.append(Item(name=f"two ranks: offloading at stage {stage}", show=show, seconds=25.0, group="offloading"))
    found.append(Item(name="two ranks: checkpointing", show=prove_checkpointing, seconds=20.0))
    for stage in (2, 3):
        show = partial(prove_overlap, stage=stage)
        found.append(Item(name=f"two ranks: overlap at stage {stage}", show=show, seconds=25.0, group="overlap"))
    return found


def trained(setting: Setting) -> tuple[ModelSpec, Workload]:
    """The model and workload of the ranks. Trained in fp32 too, and twice on the device, so smaller than in other parts."""
    model = LARGE if setting.size == "large" else NANO
    return model, Workload(global_batch_size=8, sequence_length=model.sequence_length)


def run(proof: Proof, name: str, fidelity: Fidelity = BRIEF, **knobs: Any) -> TrialResult:
    """Run a trial of two ranks."""
    model, workload = trained(proof.setting)
    return proof.setting.ranks(RANKS, TRIAL).run(request(name, model, workload, RANKS, fidelity, **knobs))


def measure_single_rank(proof: Proof) -> None:
    """Measure the losses of one rank in each precision."""
    model, workload = trained(proof.setting)
    for precision in LOSS_BOUND:
        knobs = {"precision": precision, "micro_batch_size": workload.global_batch_size}
        result = proof.setting.ranks(1).run(request("alone", model, workload, 1, BRIEF, **knobs))
        proof.claim(result.outcome is Outcome.OK, f"one rank in {precision}: {why(result)}")
        if result.outcome is Outcome.OK:
            proof.values[precision] = result.losses


def prove_layout(proof: Proof, label: str, knobs: Knobs) -> None:
    """Compare a layout's losses with one rank's: in bf16 with the usual kernels, and in fp32 with a narrow bound."""
    single = proof.needs("correctness", SINGLE_RANK, *LOSS_BOUND)
    if single is None:
        return
    for precision, bound in LOSS_BOUND.items():
        if "attention_backend" in knobs and precision != "bf16":
            continue
        result = run(proof, label, precision=precision, micro_batch_size=2, **knobs)
        off = apart(result.losses, single[precision])
        backend = result.environment.get("backend", "")
        holds = result.outcome is Outcome.OK and off <= bound
        proof.claim(holds, f"{precision} over {backend}: losses {off:.1e} off one rank's (bound {bound:.1e}){_why(result)}")


def prove_offload(proof: Proof, stage: int) -> None:
    """The peak falls by the offloaded states, and the host memory equals the closed forms.

    Master and moments are 12 bytes an element; of E elements of this rank's share, round(ratio E) are offloaded. At stage 3 the
    master itself serves gathers while all of it is on the device, so offloading only the parameters saves nothing there.
    """
    single = proof.needs("correctness", SINGLE_RANK, "bf16")
    if single is None:
        return
    model, _ = trained(proof.setting)
    kept = run(proof, "kept", precision="bf16", micro_batch_size=4, zero_stage=stage)
    for knobs in OFFLOADS[stage]:
        label = _written(knobs)
        result = run(proof, label, precision="bf16", micro_batch_size=4, zero_stage=stage, **knobs)
        off = apart(result.losses, single["bf16"])
        if result.outcome is not Outcome.OK or not kept.peak_memory_bytes or not result.peak_memory_bytes:
            proof.claim(False, f"{label}: ran{_why(result)}{_why(kept)}")
            continue
        fell = kept.peak_memory_bytes - result.peak_memory_bytes
        leaves, host = _offloaded_bytes(model.parameter_count // RANKS, knobs)
        bound = FALL_BOUND * leaves + ALLOCATOR_BYTES[proof.setting.device.type]
        held = [rank.host_memory_bytes for rank in result.ranks]
        proof.claim(off <= LOSS_BOUND["bf16"], f"{label}: losses {off:.1e} off one rank's")
        proof.claim(abs(fell - leaves) <= bound, f"{label}: device peak falls by {fell:,} bytes, {leaves:,} offloaded")
        proof.claim(all(size == host for size in held), f"{label}: host memory {held} bytes, {host:,} by the closed form")


def _offloaded_bytes(elements: int, knobs: Knobs) -> tuple[int, int]:
    """Bytes of offloaded states, and bytes of the host pool, for a share of `elements` elements in one bucket.

    Host: 12 for each offloaded element, a step counter for each chunk of the update, fp32 gradients of two chunks, and bf16
    parameters: of two chunks on their way back, or all of the share's.
    """
    away = round(knobs.get("offload_ratio", 1.0) * elements) if knobs.get("offload_optimizer") == "cpu" else 0
    chunk = min(away, CHUNK_ELEMENTS)
    chunks = -(-away // CHUNK_ELEMENTS)
    parameters = 2 * elements if knobs.get("offload_param") == "cpu" else BUFFERS * 2 * chunk
    return 12 * away, 12 * away + 4 * chunks + BUFFERS * 4 * chunk + parameters


def prove_checkpointing(proof: Proof) -> None:
    """More recomputation must need less memory."""
    single = proof.needs("correctness", SINGLE_RANK, "bf16")
    if single is None:
        return
    peaks: list[float] = []
    for kind in ("none", "selective", "full"):
        result = run(proof, kind, precision="bf16", micro_batch_size=4, zero_stage=2, activation_checkpointing=kind)
        off = apart(result.losses, single["bf16"])
        holds = result.outcome is Outcome.OK and off <= LOSS_BOUND["bf16"]
        proof.claim(holds, f"{kind}: losses {off:.1e} off one rank's{_why(result)}")
        peaks.append(result.peak_memory_bytes or math.nan)
    proof.claim(
        peaks[0] > peaks[1] > peaks[2], f"none, selective, full need {', '.join(f'{peak:,.0f}' for peak in peaks)} bytes"
    )


def prove_overlap(proof: Proof, stage: int) -> None:
    """Compare step times with `overlap_comm` off and on, in rounds of one trial each."""
    model, _ = trained(proof.setting)
    rounds, seconds = (5, 1.0) if proof.setting.size == "large" else (2, 0.1)
    fidelity = Fidelity(max_seconds=seconds, max_warmup_steps=10 if proof.setting.size == "large" else 3, measure_memory=False)
    # Eight buckets: with one there is nothing to overlap with.
    knobs = {"precision": "bf16", "micro_batch_size": 2, "reduce_bucket_size": model.parameter_count // 8}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for overlap in (True, False) if number % 2 else (False, True):
            result = run(proof, "overlap", fidelity, zero_stage=stage, overlap_comm=overlap, **knobs)
            if not result.step_seconds:
                proof.claim(False, f"overlap_comm={overlap} ran{_why(result)}")
                return
            times[overlap].append(sum(result.step_seconds) / len(result.step_seconds))
    gained = ratio(times[False], times[True])
    proof.at_least(gained, 0.97, f"a step without overlap as a multiple of one with it, {rounds} rounds")


def _why(result: TrialResult) -> str:
    """The reason of a failure; empty for OK."""
    return "" if result.outcome is Outcome.OK else f"; {why(result)}"


def _written(knobs: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in knobs.items())
