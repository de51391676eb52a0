"""Memory on a GPU: dry run and memory account against the allocator, and recovery from a real out-of-memory."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import BACKEND, LOSS_CHUNK, model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, request, why
from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig

BOUND, RESERVED_BOUND = 0.02, 0.05
LEFT_BOUND = 1 << 20
"""Bytes that may stay on the device after a trial that ran out of memory."""
TRIAL = "benchmarks.gpu.capacity:run_trial"
BRIEF = Fidelity(warmup_updates=3, max_warmup_steps=3, min_steps=2, max_steps=2)


def configurations(size: str) -> dict[str, TrialConfig]:
    """Configurations that differ in what fills the memory."""
    knobs: dict[str, dict[str, Any]] = {
        "plain": {},
        "full checkpointing": {"activation_checkpointing": "full"},
        "selective checkpointing": {"activation_checkpointing": "selective"},
        "stage 3": {"zero_stage": 3},
        "optimizer on the host": {"zero_stage": 1, "offload_optimizer": "cpu"},
        "chunked loss": {"loss_chunk_size": LOSS_CHUNK[size]},
        "adapters": {"lora_rank": 16},
        "adapters on 4-bit weights": {"lora_rank": 16, "frozen_dtype": "nf4"},
    }
    return {name: TrialConfig(precision="bf16", micro_batch_size=2).replace(changes) for name, changes in knobs.items()}


def items(setting: Setting) -> list[Item]:
    """Items of the part correctness."""
    found = []
    for name, config in configurations(setting.size).items():
        run_dry = partial(measure_dry_run, config=config)
        found.append(Item(name=f"dry run: {name}", show=run_dry, seconds=20.0, group="dry run", needs_device=False))
    for name, config in configurations(setting.size).items():
        show = partial(prove_memory, name=name, config=config)
        found.append(Item(name=f"memory: {name}", show=show, seconds=30.0, group="memory"))
    return [*found, Item(name="out of memory in backward", show=prove_out_of_memory, seconds=90.0)]


def measure_dry_run(proof: Proof, config: TrialConfig) -> None:
    """The dry run's peak: it needs no device, so any machine can compute it beforehand."""
    size = proof.setting.size
    peak = dry_run(model_of(size), config, workload_of(size), 1, backend=BACKEND[size]).peak_memory_bytes
    proof.measured(f"{peak:,} bytes at the peak of a step", peak=peak)


def prove_memory(proof: Proof, name: str, config: TrialConfig) -> None:
    """Compare the peak of one step: by the dry run, by the account, and by the allocator."""
    device, size = proof.setting.device, proof.setting.size
    earlier = proof.needs("correctness", f"dry run: {name}", "peak")
    if earlier is None:
        return
    predicted = earlier["peak"]
    proof.setting.close()  # ranks hold memory of the device
    session = NativeEngine().build(
        RankContext(rank=0, world_size=1, device=device), model_of(size), config, workload_of(size)
    )  # fmt: skip
    try:
        session.prepare(0)
        for _ in range(2):
            session.train_step()
        if proof.setting.on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        account = account_step(session.train_step, session.tagged_storages, device)
    finally:
        session.close()
    tags = ", ".join(f"{tag} {count:,}" for tag, count in account.by_tag.items())
    proof.claim(sum(account.by_tag.values()) == account.peak, f"the account's tags sum to its peak of {account.peak:,}: {tags}")
    if not proof.setting.on_gpu:
        _compare(proof, "dry run", predicted, "account", account.peak, BOUND)
        return
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    proof.values |= {"dry_run": predicted, "account": account.peak, "allocated": allocated, "reserved": reserved}
    _compare(proof, "account", account.peak, "allocator", allocated, BOUND)
    _compare(proof, "dry run", predicted, "allocator", allocated, BOUND)
    _compare(proof, "dry run", predicted, "reserved", reserved, RESERVED_BOUND)


def _compare(proof: Proof, one: str, found: int, other: str, expected: int, bound: float) -> None:
    off = abs(found / expected - 1)
    proof.claim(off <= bound, f"{one} {found:,} bytes, {other} {expected:,}: {off:.2%} apart (bound {bound:.0%})")


def prove_out_of_memory(proof: Proof) -> None:
    """Backward runs out of memory: INFEASIBLE. The next trial starts from the same baseline, and trains the same."""
    setting = proof.setting
    model, workload = model_of(setting.size), workload_of(setting.size)
    runner = setting.ranks(1, TRIAL)

    def run(name: str) -> Any:
        return runner.run(request(name, model, workload, 1, BRIEF, precision="bf16", micro_batch_size=2))

    first, before = run("first"), run("before")
    failed = run("out-of-memory")
    after = run("after")
    proof.claim(failed.outcome is Outcome.INFEASIBLE, f"memory ran out in backward: {why(failed)}")
    proof.claim(after.outcome is Outcome.OK, f"the next trial: {why(after)} (warm: {after.warm})")
    if not {before.outcome, after.outcome} <= {Outcome.OK}:
        return
    held = [int(result.environment["allocated_before"]) for result in (before, after)]
    proof.claim(held[1] - held[0] <= LEFT_BOUND, f"bytes on the device before a trial: {held[0]:,} then {held[1]:,} afterwards")
    off = apart(after.losses, first.losses)
    proof.claim(off <= LOSS_BOUND["bf16"], f"losses afterwards {off:.1e} off those before")
