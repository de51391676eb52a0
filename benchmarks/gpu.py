"""Every proof that needs a GPU, in one command, with torch and the standard library alone.

    python benchmarks/gpu.py [--markdown docs/gpu.md]

1. Trials through the `local` runner on one GPU: throughput, MFU, the allocator's peak, reservation, clocks, retries.
2. The memory account's peak against `torch.cuda.max_memory_allocated` of the same step.
3. A real CUDA out-of-memory: INFEASIBLE, and the next trial runs.
4. Two ranks on the one GPU (gloo carries CUDA tensors; NCCL refuses that): losses of stages 0-3 against one rank.

Without a GPU it says so and ends with status 0. `--device cpu` goes through the same steps on the CPU at a small size, to
test this file.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step
from executor.runners.local import LocalRunner
from search_spaces.clusters import local_cluster
from search_spaces.huggingface import resolve_model
from search_spaces.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

STAGES = range(4)
MEMORY_BOUND = 0.02
LOSS_BOUND = 2e-2
"""Relative, bf16: two ranks add the same numbers in another order."""


class Proof:
    """Collects what was shown; a claim that does not hold is kept, and told at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def claim(self, holds: bool, line: str) -> None:
        self.say(f"- {'holds' if holds else 'FAILS'}: {line}")
        if not holds:
            self.failed.append(line)


def request(name: str, model: ModelSpec, workload: Workload, ranks: int, **knobs: Any) -> TrialRequest:
    return TrialRequest(
        attempt=name,
        model=model,
        config=TrialConfig().replace(knobs),
        workload=workload,
        world_size=ranks,
        fidelity=Fidelity(max_seconds=4.0),
        timeout_seconds=180.0,
        peak_flops_per_device=_peak_flops(str(knobs.get("precision", "fp32"))),
    )


def prove_trials(proof: Proof, model: ModelSpec, workload: Workload, device: str) -> None:
    proof.say(f"\n## Trials of {model.name} ({model.parameter_count:,} parameters), sequence {workload.sequence_length}\n")
    proof.say("| configuration | samples/s | TFLOP/s | MFU | peak | reserved | SM clock | retries |")
    proof.say("|---|---|---|---|---|---|---|---|")
    variants: list[dict[str, Any]] = [
        {"micro_batch_size": 1}, {"micro_batch_size": 4}, {"micro_batch_size": 4, "activation_checkpointing": "full"},
        {"micro_batch_size": 4, "loss_chunk_size": 2048}, {"micro_batch_size": 4, "fused_optimizer": False},
    ]  # fmt: skip
    with LocalRunner(1, device=device) as runner:
        for knobs in variants:
            result = runner.run(request(str(knobs), model, workload, 1, precision="bf16", **knobs))
            if result.outcome is not Outcome.OK or result.samples_per_second is None:
                proof.claim(False, f"{knobs} ran: {result.outcome} {result.message} {result.traceback or ''}")
                continue
            rank, rate = result.ranks[0], result.samples_per_second
            mfu = "-" if result.mfu is None else f"{result.mfu:.1%}"
            reserved = "-" if rank.reserved_bytes is None else f"{rank.reserved_bytes / 2**30:.2f} GiB"
            proof.say(
                f"| {', '.join(f'{k}={v}' for k, v in knobs.items())} | {rate.mean:.2f} [{rate.low:.2f}, {rate.high:.2f}] | "
                f"{result.tflops_per_device or 0:.1f} | {mfu} | {rank.peak_memory_bytes / 2**30:.2f} GiB | {reserved} | "
                f"{rank.sm_clock_mhz or '-'} | {rank.allocation_retries if rank.allocation_retries is not None else '-'} |"
            )


def prove_memory(proof: Proof, model: ModelSpec, workload: Workload, device: torch.device) -> None:
    proof.say("\n## The memory account against the allocator\n")
    for knobs in ({}, {"activation_checkpointing": "full"}, {"zero_stage": 3}):
        config = TrialConfig(precision="bf16", micro_batch_size=2).replace(knobs)
        session = NativeEngine().build(RankContext(rank=0, world_size=1, device=device), model, config, workload)
        session.prepare(0)
        for _ in range(2):
            session.train_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        account = account_step(session.train_step, session.tagged_storages, device)
        allocators = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else account.peak
        off = abs(account.peak - allocators) / allocators
        proof.claim(
            off <= MEMORY_BOUND and sum(account.by_tag.values()) == account.peak,
            f"{knobs or 'default'}: account {account.peak:,} bytes, allocator {allocators:,}, {off:.2%} apart "
            f"(bound {MEMORY_BOUND:.0%}); " + ", ".join(f"{tag} {size:,}" for tag, size in account.by_tag.items()),
        )
        session.close()
        del session
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prove_out_of_memory(proof: Proof, model: ModelSpec, workload: Workload, device: str) -> None:
    proof.say("\n## Out of memory\n")
    huge = Workload(global_batch_size=65536, sequence_length=workload.sequence_length)
    with LocalRunner(1, device=device) as runner:
        if device != "cpu":
            result = runner.run(request("huge", model, huge, 1, precision="bf16", micro_batch_size=65536))
            proof.claim(
                result.outcome is Outcome.INFEASIBLE, f"a micro-batch of 65536 is {result.outcome}: {result.message[:160]}"
            )
        after = runner.run(request("after", model, workload, 1, precision="bf16", micro_batch_size=1))
        proof.claim(after.outcome is Outcome.OK, f"the next trial is {after.outcome} (warm: {after.warm})")


def prove_two_ranks(proof: Proof, device: str) -> None:
    proof.say("\n## Two ranks on one device\n")
    model, workload = resolve_model("llama-tiny"), Workload(global_batch_size=8, sequence_length=128)
    with LocalRunner(1, device=device) as single:
        alone = single.run(request("alone", model, workload, 1, precision="bf16", micro_batch_size=8)).losses
    with LocalRunner(2, device=device) as pair:
        for stage in STAGES:
            result = pair.run(
                request(f"stage-{stage}", model, workload, 2, precision="bf16", micro_batch_size=2, zero_stage=stage)
            )
            off = max((abs(a - b) / b for a, b in zip(result.losses, alone, strict=False)), default=float("inf"))
            backend = result.environment.get("backend", "")
            proof.claim(
                result.outcome is Outcome.OK and off <= LOSS_BOUND,
                f"stage {stage} over {backend}: {result.outcome}, losses within {off:.1e} of one rank's {result.message}",
            )


def _peak_flops(precision: str) -> float | None:
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return local_cluster(1, None, name, 1, memory).device.peak_flops.get(precision)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device")
        return 0
    began, proof = time.monotonic(), Proof()
    on_gpu = arguments.device == "cuda"
    device = torch.device(arguments.device, 0) if on_gpu else torch.device("cpu")
    proof.say("# On a GPU\n")
    proof.say(f"Written by `make gpu`: torch {torch.__version__} on {torch.cuda.get_device_name() if on_gpu else 'the CPU'}.")
    model = resolve_model("gpt2-medium" if on_gpu else "llama-tiny")
    workload = Workload(global_batch_size=8 if on_gpu else 4, sequence_length=1024 if on_gpu else 64)
    prove_trials(proof, model, workload, arguments.device)
    prove_memory(proof, model, workload, device)
    prove_out_of_memory(proof, model, workload, arguments.device)
    prove_two_ranks(proof, arguments.device)
    proof.say(f"\n{time.monotonic() - began:.0f} s; {len(proof.failed)} claims fail.")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(proof.lines) + "\n")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
