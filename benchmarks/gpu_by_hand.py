"""Our engine against the llama of `gpu_baseline.py` on one device, in turns in one process.

Both start from the same weights, see the same batches and clip the same gradient norm.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from benchmarks.gpu_baseline import ByHand
from benchmarks.gpu_proof import LOSS_BOUND, Proof, peak_flops, ratio, written
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.measurement.flops import flops_utilization, tflops_per_device
from search_spaces.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

_SHAPE: dict[str, Any] = {"family": "llama", "tied_embeddings": False}
LARGE = ModelSpec(
    name="llama-1b", num_layers=16, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, head_dim=128,
    ffn_hidden_size=5632, vocab_size=32000, sequence_length=2048, **_SHAPE,
)  # fmt: skip
SMALL = ModelSpec(
    name="llama-0.2m", num_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
    ffn_hidden_size=176, vocab_size=512, sequence_length=64, **_SHAPE,
)  # fmt: skip
ALIKE_STEPS = 3
"""First steps of both, whose losses and gradient norms are compared; by then everything is compiled."""
STEPS_A_ROUND = 3
NORM_BOUND = 1e-2
"""Relative: bf16 gradients of both, rounded in other places."""


class Contestant(Protocol):
    """What is timed."""

    def prepare(self, step: int) -> None:
        """Bring the step's batch to the device."""

    def step(self) -> tuple[float, float]:
        """One update over it: loss and gradient norm before clipping."""


class ByEngine:
    """Our session."""

    def __init__(self, session: ParallelSession) -> None:
        self.session = session

    def prepare(self, step: int) -> None:
        self.session.prepare(step)

    def step(self) -> tuple[float, float]:
        report = self.session.train_step()
        return report.loss or 0.0, report.gradient_norm or 0.0


def prove_against_hand(proof: Proof, device: torch.device) -> None:
    large = device.type == "cuda"
    spec, samples, chunk, rounds = (LARGE, 8, 2048, 10) if large else (SMALL, 4, 64, 3)
    workload = Workload(global_batch_size=samples, sequence_length=spec.sequence_length)
    proof.say(
        f"\n## Against a model written by hand\n\n{spec.name} ({spec.parameter_count:,} parameters), {samples} sequences of "
        f"{spec.sequence_length} in one micro-batch, bf16 with fp32 master, loss in chunks of {chunk} tokens. By hand: "
        f"{'each block compiled, flash attention' if large else 'nothing compiled on a CPU'}.\n"
    )
    config = TrialConfig(precision="bf16", micro_batch_size=samples, loss_chunk_size=chunk)
    context = RankContext(rank=0, world_size=1, device=device)
    levels = [_allocated(device)]
    session = NativeEngine().build(context, spec, config, workload)
    try:
        levels.append(_allocated(device))
        contestants: dict[str, Contestant] = {
            "native": ByEngine(session), "by hand": ByHand(session, spec, chunk, device, compiled=large)
        }  # fmt: skip
        levels.append(_allocated(device))
        told = {}
        for name, contestant in contestants.items():
            told[name] = [_step(contestant, step, device)[1:] for step in range(ALIKE_STEPS)]
            levels.append(_allocated(device))
        built, by_hand, moments, by_hand_moments = (after - before for before, after in pairwise(levels))
        resident = {"native": built + moments, "by hand": by_hand + by_hand_moments}
        _claim_alike(proof, told["native"], told["by hand"])
        seconds, peaks = _race(contestants, resident, rounds, device)
    finally:
        session.close()
    _tell(proof, spec, workload, seconds, peaks)


def _race(
    contestants: Mapping[str, Contestant], resident: Mapping[str, int], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Mean step seconds of each round, and the peak bytes of each as if it stood alone. Who begins takes turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    peaks = dict.fromkeys(contestants, 0)
    step = ALIKE_STEPS
    for number in range(rounds):
        for name in [*contestants][:: 1 if number % 2 else -1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times = [_step(contestants[name], step + index, device)[0] for index in range(STEPS_A_ROUND)]
            seconds[name].append(statistics.fmean(times))
            if device.type == "cuda":
                others = sum(size for other, size in resident.items() if other != name)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - others)
        step += STEPS_A_ROUND
    return seconds, peaks


def _step(contestant: Contestant, step: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds, loss and gradient norm of one step, its batch being there."""
    contestant.prepare(step)
    _wait(device)
    began = time.perf_counter()
    loss, norm = contestant.step()
    _wait(device)
    return time.perf_counter() - began, loss, norm


def _claim_alike(proof: Proof, ours: Sequence[Sequence[float]], by_hand: Sequence[Sequence[float]]) -> None:
    off = [max(abs(a[index] - b[index]) / abs(b[index]) for a, b in zip(ours, by_hand, strict=True)) for index in range(2)]
    proof.claim(
        off[0] <= LOSS_BOUND["bf16"] and off[1] <= NORM_BOUND,
        f"both train the same: losses of {ALIKE_STEPS} steps within {off[0]:.1e}, gradient norms within {off[1]:.1e}",
    )


def _tell(
    proof: Proof, spec: ModelSpec, workload: Workload, seconds: Mapping[str, Sequence[float]], peaks: Mapping[str, int]
) -> None:
    proof.say("\n| | samples/s | TFLOP/s | MFU | peak memory |")
    proof.say("|---|---|---|---|---|")
    for name, times in seconds.items():
        rate = workload.global_batch_size / statistics.fmean(times)
        tflops = tflops_per_device(spec, workload, rate, 1)
        mfu = flops_utilization(tflops, peak_flops("bf16"))
        peak = f"{peaks[name] / 2**30:.2f} GiB" if peaks[name] else "-"
        proof.say(f"| {name} | {rate:.2f} | {tflops:.2f} | {'-' if mfu is None else f'{mfu:.1%}'} | {peak} |")
    faster = ratio(seconds["by hand"], seconds["native"])
    rounds = len(seconds["native"])
    proof.say("")
    proof.claim_time(
        faster.mean >= 1.0,
        f"samples/s at least 1.0 of the model by hand: {written(faster)} over {rounds} interleaved rounds of "
        f"{STEPS_A_ROUND} steps",
    )
    if all(peaks.values()):
        share = peaks["native"] / peaks["by hand"]
        proof.claim(share <= 1.0, f"peak memory at most that of the model by hand: {share:.3f} of it")


def _allocated(device: torch.device) -> int:
    """Bytes that stand on the device between steps; 0 on a CPU, where torch does not tell."""
    _wait(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
