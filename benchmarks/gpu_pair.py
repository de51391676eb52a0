"""Two ranks on one device (gloo carries CUDA tensors; NCCL refuses that): layouts, offload, checkpointing, overlap."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import LOSS_BOUND, Proof, ratio, request, written
from executor.engines.native.copies import BUFFERS
from executor.runners.local import LocalRunner
from search_spaces.huggingface import resolve_model
from search_spaces.model import ModelSpec
from search_spaces.offload_files import CHUNK_ELEMENTS
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialResult, Workload

Knobs = Mapping[str, Any]

RANKS = 2
LARGE = ModelSpec(
    name="llama-32m", family="llama", num_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, ffn_hidden_size=1408, vocab_size=8192, sequence_length=512,
)  # fmt: skip
BRIEF = Fidelity(warmup_updates=3, max_warmup_steps=3, min_steps=2, max_steps=2)
"""Three losses and the memory; its step time is not looked at."""
LAYOUTS: Mapping[str, Knobs] = {
    **{f"zero_stage={stage}": {"zero_stage": stage} for stage in range(4)},
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 2 with sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline 2, 1f1b": {"pipeline_parallel_size": 2},
    "pipeline 2, zbv": {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv"},
    "context 2": {"context_parallel_size": 2},
}
OFFLOADS: Mapping[int, tuple[Knobs, ...]] = {
    1: ({"offload_optimizer": "cpu"}, {"offload_optimizer": "cpu", "offload_ratio": 0.3}),
    3: (
        {"offload_param": "cpu"},
        {"offload_param": "cpu", "offload_optimizer": "cpu"},
        {"offload_param": "cpu", "offload_optimizer": "cpu", "offload_ratio": 0.3},
    ),
}
"""ZeRO stage -> what is offloaded at it."""
FALL_BOUND = 0.02
ALLOCATOR_BYTES = {"cuda": 8 << 20, "cpu": 1 << 12}
"""What a peak may be off by beside that: CUDA's allocator hands out parts of segments of 2 MiB, rounded."""


@dataclass(frozen=True)
class Pair:
    """The device with its ranks, and what they train."""

    device: str
    runner: LocalRunner
    model: ModelSpec
    workload: Workload
    rounds: int
    round_seconds: float

    def run(self, name: str, fidelity: Fidelity = BRIEF, **knobs: Any) -> TrialResult:
        return self.runner.run(request(name, self.model, self.workload, RANKS, fidelity, **knobs))

    @cached_property
    def alone(self) -> dict[str, tuple[float, ...]]:
        """Precision -> the losses of one rank."""
        losses = {}
        with LocalRunner(1, device=self.device) as single:
            for precision in LOSS_BOUND:
                knobs = {"precision": precision, "micro_batch_size": self.workload.global_batch_size}
                losses[precision] = single.run(request("alone", self.model, self.workload, 1, BRIEF, **knobs)).losses
        return losses


def prove_two_ranks(proof: Proof, device: str) -> None:
    large = device == "cuda"
    model = LARGE if large else resolve_model("llama-tiny")
    workload = Workload(global_batch_size=8, sequence_length=512 if large else 128)
    proof.say(f"\n## Two ranks on one device: {model.name} ({model.parameter_count:,} parameters)\n")
    root = str(Path(__file__).resolve().parents[1])
    runner = LocalRunner(RANKS, device=device, environment={"PYTHONPATH": root}, trial_function="benchmarks.gpu_rank:run_trial")
    with runner:
        pair = Pair(device, runner, model, workload, rounds=5 if large else 3, round_seconds=1.0 if large else 0.3)
        for prove in (prove_layouts, prove_offload, prove_checkpointing, prove_overlap):
            name = prove.__name__.removeprefix("prove_")
            proof.say(f"\n### {name.capitalize()}\n")
            proof.attempt(name, lambda prove=prove: prove(proof, pair))  # type: ignore[misc]


def prove_layouts(proof: Proof, pair: Pair) -> None:
    """Losses of every layout, in bf16 with the kernels that it is trained with, and in fp32 with a narrow bound."""
    for label, knobs in LAYOUTS.items():
        for precision, bound in LOSS_BOUND.items():
            result = pair.run(label, precision=precision, micro_batch_size=2, **knobs)
            off = _off(result.losses, pair.alone[precision])
            backend = result.environment.get("backend", "")
            holds = result.outcome is Outcome.OK and off <= bound
            proof.claim(holds, f"{label}, {precision} over {backend}: losses within {off:.1e} of one rank's{_why(result)}")


def prove_offload(proof: Proof, pair: Pair) -> None:
    """The peak falls by the states that leave, and the host holds what the closed forms say.

    Master and moments are 12 bytes an element; of E elements of this rank's share, round(ratio E) leave. At stage 3 the master
    itself serves gathers as long as it is all on the device, so that parameters on the host alone save nothing there.
    """
    for stage, offloads in OFFLOADS.items():
        kept = pair.run("kept", precision="bf16", micro_batch_size=4, zero_stage=stage)
        for knobs in offloads:
            label = f"stage {stage}, {_written(knobs)}"
            result = pair.run(label, precision="bf16", micro_batch_size=4, zero_stage=stage, **knobs)
            off = _off(result.losses, pair.alone["bf16"])
            if result.outcome is not Outcome.OK or not kept.peak_memory_bytes or not result.peak_memory_bytes:
                proof.claim(False, f"{label}: ran{_why(result)}{_why(kept)}")
                continue
            fell = kept.peak_memory_bytes - result.peak_memory_bytes
            leaves, host = _offloaded_bytes(pair.model.parameter_count // RANKS, knobs)
            bound = FALL_BOUND * leaves + ALLOCATOR_BYTES[pair.device]
            told = [rank.host_memory_bytes for rank in result.ranks]
            proof.claim(off <= LOSS_BOUND["bf16"], f"{label}: losses within {off:.1e} of one rank's")
            proof.claim(abs(fell - leaves) <= bound, f"{label}: device peak falls by {fell:,} bytes, {leaves:,} leave")
            proof.claim(all(size == host for size in told), f"{label}: host memory {told} bytes, {host:,} by the closed form")


def _offloaded_bytes(elements: int, knobs: Knobs) -> tuple[int, int]:
    """Bytes of states that leave the device, and bytes of the host pool, for a share of so many elements in one bucket.

    Host: 12 an element that leaves, a step counter for each chunk of its update, fp32 gradients of two chunks, and either bf16
    parameters of two chunks on their way back or all of the share's.
    """
    away = round(knobs.get("offload_ratio", 1.0) * elements) if knobs.get("offload_optimizer") == "cpu" else 0
    chunk = min(away, CHUNK_ELEMENTS)
    chunks = -(-away // CHUNK_ELEMENTS)
    parameters = 2 * elements if knobs.get("offload_param") == "cpu" else BUFFERS * 2 * chunk
    return 12 * away, 12 * away + 4 * chunks + BUFFERS * 4 * chunk + parameters


def prove_checkpointing(proof: Proof, pair: Pair) -> None:
    peaks: list[float] = []
    for kind in ("none", "selective", "full"):
        result = pair.run(kind, precision="bf16", micro_batch_size=4, zero_stage=2, activation_checkpointing=kind)
        off = _off(result.losses, pair.alone["bf16"])
        holds = result.outcome is Outcome.OK and off <= LOSS_BOUND["bf16"]
        proof.claim(holds, f"{kind}: losses within {off:.1e} of one rank's{_why(result)}")
        peaks.append(result.peak_memory_bytes or math.nan)
    proof.claim(
        peaks[0] > peaks[1] > peaks[2], f"none, selective, full need {', '.join(f'{peak:,.0f}' for peak in peaks)} bytes"
    )


def prove_overlap(proof: Proof, pair: Pair) -> None:
    """Step time with `overlap_comm` off against on, in rounds of one trial each."""
    fidelity = Fidelity(max_seconds=pair.round_seconds, measure_memory=False)
    # Eight buckets: with one there is nothing to run beside.
    knobs = {"precision": "bf16", "micro_batch_size": 2, "reduce_bucket_size": pair.model.parameter_count // 8}
    for stage in (2, 3):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(pair.rounds):
            for overlap in (True, False) if number % 2 else (False, True):
                result = pair.run("overlap", fidelity, zero_stage=stage, overlap_comm=overlap, **knobs)
                if not result.step_seconds:
                    proof.claim(False, f"stage {stage}, overlap_comm={overlap} ran{_why(result)}")
                    return
                seconds[overlap].append(sum(result.step_seconds) / len(result.step_seconds))
        gained = ratio(seconds[False], seconds[True])
        proof.claim_time(
            gained.high >= 1.0,
            f"stage {stage}: a step without overlap takes {written(gained)} of one with it over {pair.rounds} rounds",
        )


def _off(losses: tuple[float, ...], alone: tuple[float, ...]) -> float:
    """Largest relative difference; infinite where losses are missing."""
    if not losses or len(losses) != len(alone):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))


def _why(result: TrialResult) -> str:
    """What went wrong, where something did."""
    if result.outcome is Outcome.OK:
        return ""
    last = (result.traceback or "").strip().splitlines()[-1:]
    return f"; {result.outcome} {result.message[:200]} {' '.join(last)[:200]}".rstrip()


def _written(knobs: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in knobs.items())
