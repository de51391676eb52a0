"""Every proof that needs a GPU, in one command, with torch and the standard library alone.

    python benchmarks/gpu.py [--markdown docs/gpu.md] [--only trials memory …]

trials         trials through the `local` runner on one GPU: throughput, MFU, the allocator's peak, reservation, clocks, retries
memory         the memory account's peak against `torch.cuda.max_memory_allocated` of the same step, and the dry run's
by-hand        a 1B llama by our engine against one written by hand with every trick (`gpu_by_hand.py`)
packing        flex attention inside of packed documents, forward and backward, against a mask (`gpu_packing.py`)
float8         products in 8 bits against bf16, each block compiled or not (`gpu_float8.py`)
windows        flex attention to a window, forward and backward, against every score under a mask (`gpu_windows.py`)
kernels        fused kernels of packages, where they are installed, against torch's operators (`gpu_kernels.py`)
graphs         blocks as CUDA graphs against eager ones: losses, step time, memory (`gpu_graphs.py`)
two-ranks      two ranks on the one GPU (`gpu_pair.py`): layouts, offload, checkpointing, overlap against one rank
out-of-memory  a real CUDA out-of-memory: INFEASIBLE, and the next trial runs

A claim that does not hold, or a proof that ends early, is told and ends none of the others; the status is then 1.
Without a GPU it says so and ends with status 0. `--device cpu` goes through the same steps on the CPU at a small size, to
test this file.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu_by_hand import prove_against_hand
from benchmarks.gpu_float8 import prove_float8
from benchmarks.gpu_graphs import prove_graphs
from benchmarks.gpu_kernels import prove_kernels
from benchmarks.gpu_packing import prove_packing
from benchmarks.gpu_pair import prove_two_ranks
from benchmarks.gpu_proof import Proof, request
from benchmarks.gpu_windows import prove_windows
from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step
from executor.runners.local import LocalRunner
from search_spaces.huggingface import resolve_model
from search_spaces.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MEMORY_BOUND, RESERVED_BOUND = 0.02, 0.05
LIMIT_SECONDS = 480
"""After these no further proof is begun: a command on a lent GPU has ten minutes."""


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
        _claim_foretold(proof, model, config, workload, device, allocators)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _claim_foretold(
    proof: Proof, model: ModelSpec, config: TrialConfig, workload: Workload, device: torch.device, allocated: int
) -> None:
    """The dry run's peak against the allocator's; against what it has reserved too, since that is what must fit."""
    foretold = dry_run(model, config, workload, 1, backend="nccl" if device.type == "cuda" else "gloo").peak_memory_bytes
    off = abs(foretold / allocated - 1)
    proof.claim(off <= MEMORY_BOUND, f"dry run {foretold:,} bytes, allocator {allocated:,}, {off:.2%} apart")
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        off = abs(foretold / reserved - 1)
        proof.claim(off <= RESERVED_BOUND, f"dry run {foretold:,} bytes, reserved {reserved:,}, {off:.2%} apart")


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


def _proofs(proof: Proof, device: torch.device) -> dict[str, Callable[[], None]]:
    """Name -> the proof, in the order in which they are run."""
    kind, on_gpu = device.type, device.type == "cuda"
    model = resolve_model("gpt2-medium" if on_gpu else "llama-tiny")
    workload = Workload(global_batch_size=8 if on_gpu else 4, sequence_length=1024 if on_gpu else 64)
    return {
        "trials": lambda: prove_trials(proof, model, workload, kind),
        "memory": lambda: prove_memory(proof, model, workload, device),
        "packing": lambda: prove_packing(proof, device),
        "float8": lambda: prove_float8(proof, kind),
        "windows": lambda: prove_windows(proof, device),
        "kernels": lambda: prove_kernels(proof, resolve_model("qwen2-0.5b" if on_gpu else "llama-tiny"), workload, device),
        "graphs": lambda: prove_graphs(proof, device),
        "by-hand": lambda: prove_against_hand(proof, device),
        "two-ranks": lambda: prove_two_ranks(proof, kind),
        "out-of-memory": lambda: prove_out_of_memory(proof, model, workload, kind),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", nargs="+", metavar="PROOF", help="names of proofs")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device")
        return 0
    on_gpu = arguments.device == "cuda"
    began, proof = time.monotonic(), Proof(times=on_gpu)
    proofs = _proofs(proof, torch.device(arguments.device, 0) if on_gpu else torch.device("cpu"))
    if unknown := {*(arguments.only or ())} - {*proofs}:
        parser.error(f"there is no proof {', '.join(sorted(unknown))}; choose from {', '.join(proofs)}")
    proof.say("# On a GPU\n")
    proof.say(f"Written by `make gpu`: torch {torch.__version__} on {torch.cuda.get_device_name() if on_gpu else 'the CPU'}.")
    for name in arguments.only or proofs:
        started = time.monotonic()
        if on_gpu and started - began > LIMIT_SECONDS:
            proof.claim(False, f"the proof {name!r} was begun: {LIMIT_SECONDS} s are over")
            continue
        proof.attempt(name, proofs[name])
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
        proof.say(f"\n({name}: {time.monotonic() - started:.0f} s)")
    proof.say(f"\n{time.monotonic() - began:.0f} s; {len(proof.failed)} claims fail.")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(proof.lines) + "\n")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
