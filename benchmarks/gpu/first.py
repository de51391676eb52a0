"""What a GPU should show first: engines as users run them, own scripts, memory of adapters, and figures with a bound."""

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu import float8, memory, one_rank, pair
from benchmarks.gpu.bundle import ROOT
from benchmarks.gpu.models import BACKEND, LARGE, SMALL, model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, first_losses, ratio, request, why
from executor.batches import rank_batches, text_data
from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.parallel.model import build_transformer
from search_spaces.models.command import CommandModel
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Workload
from search_spaces.trial_config import TrialConfig

STEPS = 3
SCRIPT = "benchmarks/gpu/own_script.py"
RATE_BOUND, PEAK_BOUND = 0.02, 0.01
"""Relative difference of a script's rate and peak, as a trial reports them and as the script itself does."""
BATCHES = {"large": (64, 256, 1024, 2**24), "small": (8,)}
"""Micro-batches of the script's trials; the last of a GPU does not fit."""
PAIRS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp2 2": ("fsdp2", {"zero_stage": 2}),
    "fsdp2 3": ("fsdp2", {"zero_stage": 3}),
    **{f"deepspeed {stage}": ("deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)},
    "experts 2": ("native", {"expert_parallel_size": 2, "zero_stage": 1}),
    "ulysses 2": ("native", {"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    "hsdp 1": ("native", {"zero_stage": 3, "hsdp_shard_size": 1}),
}
"""Layouts of two ranks, which wrap and send: engine and knobs."""
SEVEN = ModelSpec(
    name="llama-7b", family="llama", num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=32,
    head_dim=128, ffn_hidden_size=11008, vocab_size=32000, sequence_length=1024,
)  # fmt: skip
LORA_BYTES, LORA_BOUND = 10 << 30, 0.02
UPDATE_MILLISECONDS = 25.0
"""Of 8-bit AdamW for a billion parameters."""
ROUNDS = {"large": 10, "small": 2}
CLOCK_SECONDS = {"large": 45.0, "small": 2.0}
CLOCK_BOUND = 0.02


def items(setting: Setting) -> list[Item]:
    """Items of the part first, by descending value."""
    on_cpu = "" if setting.on_gpu else "times and memory of a GPU"
    deepspeed = "" if importlib.util.find_spec("deepspeed") else "needs the package deepspeed"
    made: list[tuple[str, Callable[[Proof], None], float, str]] = [
        ("an own script against itself", prove_script, 90.0, ""),
        ("stage 3 over one rank", prove_stage_3, 60.0, ""),
        ("stage 3 over one rank against fully_shard", prove_fully_shard, 60.0, ""),
        ("orders of recomputation", prove_orders, 60.0, "" if setting.on_gpu else "blocks are compiled on a GPU only"),
        (pair.SINGLE_RANK, pair.measure_single_rank, 25.0, ""),
        *(
            (f"wrapped pair: {label}", partial(prove_pair, label=label, engine=engine, knobs=knobs), 15.0,
             deepspeed if engine == "deepspeed" else "")
            for label, (engine, knobs) in PAIRS.items()
        ),
        ("adapters on a 4-bit 7B", prove_adapters, 120.0, on_cpu),
        *float8.items_by_recipe(setting),
        ("8-bit AdamW of 1B", prove_update, 30.0, on_cpu),
        ("windows against the wall clock", prove_clock, 80.0, ""),
        ("out of memory on two ranks", prove_out_of_memory, 40.0, ""),
    ]  # fmt: skip
    return [
        Item(
            name=name, show=show, seconds=seconds, skipped=skipped, value=float(len(made) - index),
            deadline=0.0 if setting.size == "small" else 3 * seconds,
        )
        for index, (name, show, seconds, skipped) in enumerate(made)
    ]  # fmt: skip


def prove_script(proof: Proof) -> None:
    """Trials of a script against the rate and the peak that it reports itself, in the same way, without a trial."""
    *fitting, last = BATCHES[proof.setting.size]
    if not proof.setting.on_gpu:
        fitting = [*fitting, last]
    words = ("python", SCRIPT, "--batch", "{micro_batch_size}")
    model = CommandModel(arguments=words, folder=str(ROOT))
    asked = request("script", model, Workload(global_batch_size=last, sequence_length=1), 1, Fidelity(max_seconds=4.0))

    threads = {} if proof.setting.on_gpu else {"OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **threads}

    def trial(batch: int) -> Any:
        config = TrialConfig(micro_batch_size=batch)
        return proof.setting.ranks(1).run(
            dataclasses.replace(asked, config=config, engine="command", attempt=f"script-{batch}")
        )

    for batch in fitting:
        command = [sys.executable, SCRIPT, "--batch", str(batch), "--seconds", "4"]
        own = json.loads(
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout
        )
        result = trial(batch)
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            proof.claim(False, f"batch {batch}: {why(result)}")
            continue
        rate, peak = result.samples_per_second.mean / own["rate"] - 1, (result.peak_memory_bytes or 0) / max(own["peak"], 1) - 1
        texts = (
            f"batch {batch}: rate {rate:+.1%} of the script's own",
            f"batch {batch}: peak {peak:+.1%} of its own allocator's",
        )
        if not proof.setting.on_gpu:
            proof.measured(f"{texts[0]} (no claims about times on a CPU)")
            continue
        proof.claim(abs(rate) <= RATE_BOUND, f"{texts[0]} (bound {RATE_BOUND:.0%})")
        proof.claim(abs(peak) <= PEAK_BOUND, f"{texts[1]} (bound {PEAK_BOUND:.0%})")
    if proof.setting.on_gpu:
        result = trial(last)
        proof.claim(result.outcome is Outcome.INFEASIBLE, f"batch {last}: {why(result)}")


def prove_stage_3(proof: Proof) -> None:
    """Steps of stage 3 that gather over a group of one rank, against stage 0."""
    times: dict[int, list[float]] = {0: [], 3: []}
    for number in range(ROUNDS[proof.setting.size]):
        for stage in (0, 3) if number % 2 else (3, 0):
            knobs = {"zero_stage": stage, "param_persistence_threshold": 0}
            with one_rank.one_rank(proof.setting.device), one_rank._sending():
                times[stage].append(
                    _step_seconds(proof.setting, TrialConfig(precision="bf16", micro_batch_size=2).replace(knobs))
                )
    slower = ratio(times[0], times[3])
    proof.at_least(slower, 1 / 1.05, "the time of a step at stage 0 as a multiple of that at stage 3")


def prove_fully_shard(proof: Proof) -> None:
    """Steps of stage 3 that gather over a group of one rank against `fully_shard` on every block and the root, in bf16 with
    sums and masters in fp32. With one rank torch copies where the engine sends."""
    setting, config = proof.setting, TrialConfig(precision="bf16", micro_batch_size=2)
    ours, theirs = [], []
    for number in range(ROUNDS[setting.size]):
        for is_ours in (True, False) if number % 2 else (False, True):
            with one_rank.one_rank(setting.device):
                if is_ours:
                    with one_rank._sending():
                        knobs = {"zero_stage": 3, "param_persistence_threshold": 0}
                        ours.append(_step_seconds(setting, config.replace(knobs)))
                else:
                    theirs.append(_fully_sharded_seconds(proof, config))
    proof.at_least(ratio(theirs, ours), 0.98, "the time of a step by fully_shard as a multiple of that at stage 3")


def _fully_sharded_seconds(proof: Proof, config: TrialConfig) -> float:
    """Median of some steps after others; the first losses are compared with the engine's."""
    setting, spec, workload = proof.setting, model_of(proof.setting.size), workload_of(proof.setting.size)
    module = build_transformer(spec, workload.sequence_length, workload.seed, torch.float32).to(setting.device)
    mesh = init_device_mesh(setting.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*module.blocks.children(), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=workload.learning_rate, weight_decay=workload.weight_decay, fused=True
    )
    data, count = text_data(workload, spec.vocab_size), workload.global_batch_size // config.micro_batch_size
    losses, seconds = [], []
    for step in range(3 + STEPS):
        parts = rank_batches(data.global_batch(step), step, rank=0, ranks=1, size=config.micro_batch_size, count=count)
        batches = [{name: value.to(setting.device) for name, value in part.items()} for part in parts]
        began, total = time.perf_counter(), torch.zeros((), device=setting.device)
        for batch in batches:
            loss = module(**batch) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), workload.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))  # waits for the device
        seconds.append(time.perf_counter() - began)
    del module, optimizer
    setting.free()
    if not proof.claims:
        off = apart(losses[:STEPS], first_losses(setting.device, spec, config, workload, STEPS))
        proof.claim(off <= LOSS_BOUND["bf16"], f"{STEPS} losses {off:.1e} off those of the engine")
    return statistics.median(seconds[3:])


def _step_seconds(setting: Setting, config: TrialConfig, model: ModelSpec | None = None) -> float:
    """Median of some steps after others."""
    context = RankContext(rank=0, world_size=1, device=setting.device)
    workload = workload_of(setting.size)
    session = NativeEngine().build(context, model or model_of(setting.size), config, workload)
    seconds = []
    try:
        for step in range(3 + STEPS):
            session.prepare(step)
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            began = time.perf_counter()
            session.train_step()
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            seconds.append(time.perf_counter() - began)
    finally:
        session.close()
        setting.free()
    return statistics.median(seconds[3:])


def prove_orders(proof: Proof) -> None:
    """Losses of recomputed blocks, compiled and not, against blocks that keep everything; and their times."""
    device, config = proof.setting.device, TrialConfig(precision="bf16", micro_batch_size=2)
    expected = first_losses(device, SMALL, config, workload_of("small"), STEPS)
    for policy in ("none", "selective", "full"):
        for compiled in (False, True):
            changed = config.replace({"activation_checkpointing": policy, "compile_blocks": compiled})
            off = apart(first_losses(device, SMALL, changed, workload_of("small"), STEPS), expected)
            text = f"{policy}, {'compiled' if compiled else 'eager'}"
            proof.claim(off <= LOSS_BOUND["bf16"], f"{text}: {STEPS} losses {off:.1e} off those of eager blocks that keep all")
            proof.measured(f"{text}: {1000 * _step_seconds(proof.setting, changed):.1f} ms a step")


def prove_pair(proof: Proof, label: str, engine: str, knobs: dict[str, Any]) -> None:
    """Losses of two ranks that wrap the model and send, against one rank's."""
    needed = ("fp32",) if engine == "deepspeed" or knobs.get("expert_parallel_size") else tuple(LOSS_BOUND)
    single = proof.needs("first", pair.SINGLE_RANK, *needed)
    if single is None:
        return
    model, workload = pair.trained(proof.setting)
    if "expert_parallel_size" in knobs:
        model = dataclasses.replace(model, name="experts", num_experts=4, experts_per_token=2)
        alone = proof.setting.ranks(1).run(
            request("alone", model, workload, 1, pair.BRIEF, precision="fp32", micro_batch_size=8)
        )
        single = {"fp32": alone.losses}
    for precision in needed:
        asked = request(label, model, workload, pair.RANKS, pair.BRIEF, precision=precision, micro_batch_size=2, **knobs)
        result = proof.setting.ranks(pair.RANKS, pair.TRIAL).run(dataclasses.replace(asked, engine=engine))
        off, bound = apart(result.losses, single[precision]), LOSS_BOUND[precision]
        sent = sum(count.count for rank in result.ranks[:1] for count in rank.collectives)
        holds = result.outcome is Outcome.OK and off <= bound
        reason = "" if result.outcome is Outcome.OK else f"; {why(result)}"
        proof.claim(holds, f"{precision}: losses {off:.1e} off one rank's (bound {bound:.1e}){reason}")
        if engine == "native":
            proof.claim(sent > 0, f"{precision}: {sent} collectives were counted")


def prove_adapters(proof: Proof) -> None:
    """Adapters on a 7B whose frozen weights have 4 bits: within its memory, and as the dry run says."""
    knobs = {"lora_rank": 16, "lora_targets": "both", "frozen_dtype": "nf4", "activation_checkpointing": "full"}
    config = TrialConfig(precision="bf16", micro_batch_size=1, loss_chunk_size=1024).replace(knobs)
    workload = Workload(global_batch_size=1, sequence_length=SEVEN.sequence_length)
    predicted = dry_run(SEVEN, config, workload, 1, backend=BACKEND["large"]).peak_memory_bytes
    proof.setting.close()
    context = RankContext(rank=0, world_size=1, device=proof.setting.device)
    session = NativeEngine().build(context, SEVEN, config, workload)
    try:
        for step in range(2):
            session.prepare(step)
            torch.cuda.reset_peak_memory_stats(proof.setting.device)
            session.train_step()
        peak = torch.cuda.max_memory_allocated(proof.setting.device)
    finally:
        session.close()
        proof.setting.free()
    proof.claim(peak <= LORA_BYTES, f"peak {peak:,} bytes (bound {LORA_BYTES:,})")
    memory._compare(proof, "dry run", predicted, "allocator", peak, LORA_BOUND)


def prove_update(proof: Proof) -> None:
    """The update of 8-bit AdamW alone."""
    config = TrialConfig(precision="bf16", micro_batch_size=1, optimizer="adamw8bit")
    context = RankContext(rank=0, world_size=1, device=proof.setting.device)
    session = NativeEngine().build(context, LARGE, config, Workload(global_batch_size=1, sequence_length=128))
    milliseconds = []
    try:
        update = session._update

        def timed() -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = update()
            end.record()
            torch.cuda.synchronize(proof.setting.device)
            milliseconds.append(start.elapsed_time(end))
            return result

        session._update = timed  # type: ignore[method-assign]
        for step in range(8):
            session.prepare(step)
            session.train_step()
    finally:
        session.close()
        proof.setting.free()
    taken = statistics.median(milliseconds[3:])
    proof.claim(taken <= UPDATE_MILLISECONDS, f"{taken:.1f} ms for {LARGE.parameter_count:,} (bound {UPDATE_MILLISECONDS:g})")


def prove_clock(proof: Proof) -> None:
    """A trial's rate against all samples of a long window by the wall clock of another process."""
    size = proof.setting.size
    fidelity = Fidelity(max_seconds=CLOCK_SECONDS[size], min_steps=3, measure_memory=False)
    asked = request("clock", model_of(size), workload_of(size), 1, fidelity, precision="bf16", micro_batch_size=2)
    result = proof.setting.ranks(1).run(asked)
    if result.outcome is not Outcome.OK or result.samples_per_second is None:
        proof.claim(False, f"it ran: {why(result)}")
        return
    context = RankContext(rank=0, world_size=1, device=proof.setting.device)
    session = NativeEngine().build(context, model_of(size), asked.config, workload_of(size))
    try:
        session.prepare(0)
        for _ in range(3):
            session.train_step()
        began, count = time.monotonic(), 0
        while time.monotonic() - began < CLOCK_SECONDS[size]:
            session.prepare(count)
            session.train_step()  # reads its loss, so that it ends with the device
            count += 1
        elapsed = time.monotonic() - began
    finally:
        session.close()
        proof.setting.free()
    rate = workload_of(size).global_batch_size * count / elapsed
    quicker = result.samples_per_second.mean / rate
    proof.measured(
        f"{len(result.step_seconds)} steps timed by the trial, {count} by the clock in {elapsed:.1f} s",
        trial_over_clock=quicker,
    )
    text = f"the trial's rate is {quicker:.3f} of the clock's"
    if proof.setting.on_gpu:
        proof.claim(abs(quicker - 1) <= CLOCK_BOUND, f"{text} (bound {CLOCK_BOUND:.0%})")
    else:
        proof.measured(f"{text} (no claims about times on a CPU)")


def prove_out_of_memory(proof: Proof) -> None:
    """Memory runs out on two ranks; the next trial runs in the same processes."""
    model, workload = pair.trained(proof.setting)
    runner = proof.setting.ranks(pair.RANKS, memory.TRIAL)

    def run(name: str) -> Any:
        return runner.run(request(name, model, workload, pair.RANKS, pair.BRIEF, precision="bf16", micro_batch_size=2))

    before, failed, after = run("before"), run("out-of-memory"), run("after")
    proof.claim(failed.outcome is Outcome.INFEASIBLE, f"memory ran out: {why(failed)}")
    proof.claim(after.outcome is Outcome.OK and after.warm, f"the next trial: {why(after)} (warm: {after.warm})")
    off = apart(after.losses, before.losses)
    proof.claim(off <= LOSS_BOUND["bf16"], f"losses afterwards {off:.1e} off those before")
