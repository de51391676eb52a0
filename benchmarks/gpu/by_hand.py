"""Our engine against the llama of `baseline.py` on one device, timed in turns in one process.

Both start from the same weights, see the same batches and clip the same gradient norm.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from benchmarks.gpu import float8, kernels, packing, sweep, windows
from benchmarks.gpu.baseline import ByHand
from benchmarks.gpu.design import label_of
from benchmarks.gpu.grid import measured_rates
from benchmarks.gpu.models import LOSS_CHUNK, SAMPLES, model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, peak_flops, ratio
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.measurement.flops import flops_utilization, tflops_per_device
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TUNED = "a model by hand"
ROUNDS = {"large": 10, "small": 3}
ALIKE_STEPS = 3
"""First steps of both, whose losses and gradient norms are compared; afterwards everything is compiled."""
STEPS_A_ROUND = 3
NORM_BOUND = 1e-2
"""Relative: both have bf16 gradients, but round in different places."""


class Contestant(Protocol):
    """The interface of a timed model."""

    def prepare(self, step: int) -> None:
        """Bring the step's batch to the device."""

    def step(self) -> tuple[float, float]:
        """Update once on that batch; return loss and gradient norm before clipping."""


class ByEngine:
    """Our session."""

    def __init__(self, session: ParallelSession) -> None:
        self.session = session

    def prepare(self, step: int) -> None:
        self.session.prepare(step)

    def step(self) -> tuple[float, float]:
        report = self.session.train_step()
        return report.loss or 0.0, report.gradient_norm or 0.0


def items(setting: Setting) -> list[Item]:
    """Items of the part by-hand."""
    return [
        Item(name=TUNED, show=prove_tuned, seconds=150.0),
        *float8.items(setting), packing.item(), windows.item(), *kernels.items(setting),
    ]  # fmt: skip


def tuned(setting: Setting) -> tuple[str, TrialConfig]:
    """Source and configuration of the fastest known run that computes the same as the model by hand."""
    line, size = setting.known.get((sweep.PART, sweep.SWEEP)), setting.size
    found = {"the sweep's winner": TrialConfig().replace(line.values["winner"])} if line and "winner" in line.values else {}
    for config, _ in measured_rates(setting.known).values():
        found.setdefault("the grid's best" if config.optimizer == "adamw" else "", config)
    for source, config in found.items():
        if source and config.optimizer == "adamw":
            return source, config.replace({"precision": "bf16"})
    knobs = {"micro_batch_size": SAMPLES[size], "loss_chunk_size": LOSS_CHUNK[size], "compile_blocks": setting.on_gpu}
    return "neither sweep nor grid has run; a guess", TrialConfig(precision="bf16").replace(knobs)


def prove_tuned(proof: Proof) -> None:
    """Compare the training of both, then time them in turns."""
    setting, device = proof.setting, proof.setting.device
    setting.close()  # ranks hold memory of the device
    spec, workload, chunk = model_of(setting.size), workload_of(setting.size), LOSS_CHUNK[setting.size]
    source, config = tuned(setting)
    proof.measured(
        f"{spec.name} ({spec.parameter_count:,} parameters), {workload.global_batch_size} sequences of {spec.sequence_length}, "
        f"bf16 with fp32 master; ours: {source} ({label_of(config, setting.size)}); by hand: one micro-batch, loss in chunks "
        f"of {chunk} tokens, {'each block compiled, flash attention' if setting.on_gpu else 'nothing compiled on a CPU'}"
    )
    context = RankContext(rank=0, world_size=1, device=device)
    levels = [_allocated(device)]
    session = NativeEngine().build(context, spec, config, workload)
    try:
        levels.append(_allocated(device))
        contestants: dict[str, Contestant] = {
            "native": ByEngine(session), "by hand": ByHand(session, spec, chunk, device, compiled=setting.on_gpu)
        }  # fmt: skip
        levels.append(_allocated(device))
        firsts = {}
        for name, contestant in contestants.items():
            firsts[name] = [_step(contestant, step, device)[1:] for step in range(ALIKE_STEPS)]
            levels.append(_allocated(device))
        built, by_hand, moments, by_hand_moments = (after - before for before, after in pairwise(levels))
        resident = {"native": built + moments, "by hand": by_hand + by_hand_moments}
        _claim_alike(proof, firsts["native"], firsts["by hand"])
        seconds, peaks = _race(contestants, resident, ROUNDS[setting.size], device)
    finally:
        session.close()
    _report_rates(proof, spec, workload, seconds, peaks)


def _race(
    contestants: Mapping[str, Contestant], resident: Mapping[str, int], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Mean step seconds of each round, and each one's peak bytes without the other. They take turns in beginning."""
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
    """Seconds, loss and gradient norm of one step, without preparing its batch."""
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


def _report_rates(
    proof: Proof, spec: ModelSpec, workload: Workload, seconds: Mapping[str, Sequence[float]], peaks: Mapping[str, int]
) -> None:
    for name, times in seconds.items():
        rate = workload.global_batch_size / statistics.fmean(times)
        tflops = tflops_per_device(spec, workload, rate, 1)
        mfu = flops_utilization(tflops, peak_flops("bf16"))
        peak = f", peak {peaks[name] / 2**30:.2f} GiB" if peaks[name] else ""
        share = "" if mfu is None else f", {mfu:.1%} of the peak FLOP/s"
        proof.measured(f"{name}: {rate:.2f} samples/s, {tflops:.2f} TFLOP/s{share}{peak}", **{name: rate})
    faster = ratio(seconds["by hand"], seconds["native"])
    rounds = len(seconds["native"])
    proof.values["ratio"] = [faster.mean, faster.low, faster.high]
    text = f"samples/s as a multiple of the model's by hand, {rounds} interleaved rounds of {STEPS_A_ROUND} steps"
    proof.at_least(faster, 1.0, text)
    if all(peaks.values()):
        share = peaks["native"] / peaks["by hand"]
        proof.claim(share <= 1.0, f"peak memory at most that of the model by hand: {share:.3f} of it")


def _allocated(device: torch.device) -> int:
    """Bytes allocated on the device between steps; 0 on a CPU, where torch does not count them."""
    _wait(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
