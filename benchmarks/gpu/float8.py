"""Products in 8 bits against bf16 on one device: every recipe at width 4096, and how compiling changes the time of rounding."""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.models import SMALL, model_of, workload_of
from benchmarks.gpu.proof import Item, Proof, Setting, apart, peak_flops, ratio, request, why, written
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.parallel.quantised import float8_linear
from search_spaces.knobs.computation import FP8_RECIPES, MXFP8
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

BOUND = 2.0**-7
"""Relative difference of the first steps' losses; a CPU stays four times below."""
LEAST_CAPABILITY = (8, 9)
WIDE = ModelSpec(
    name="llama-wide", family="llama", num_layers=4, hidden_size=4096, num_attention_heads=32, num_key_value_heads=32,
    head_dim=128, ffn_hidden_size=11008, vocab_size=8192, sequence_length=2048,
)  # fmt: skip
"""Products of width 4096, where 8 bits should gain."""
MODELS = {
    "large": WIDE,
    "small": dataclasses.replace(SMALL, num_layers=1, ffn_hidden_size=192, sequence_length=16),
}
"""The small one is for CPUs, whose products in 8 bits may be a hundred times as slow as those in bf16."""
MICRO_BATCH = 4
ALIKE_STEPS = 3
"""First steps, whose losses are compared; on a GPU as many again follow before the first round, in which all is compiled."""
STEPS_A_ROUND = {"large": 3, "small": 1}
ROUNDS = {"large": 8, "small": 2}


def problem_of(setting: Setting, recipe: str) -> str:
    """Why the device has no products of a recipe; empty: it has them."""
    if setting.on_gpu:
        name, capability = setting.card, torch.cuda.get_device_capability(setting.device)
        if capability < LEAST_CAPABILITY:
            return f"{name} has no float8 products"
        return f"{name} has no products of blocks" if recipe == MXFP8 and peak_flops(MXFP8) is None else ""
    try:
        float8_linear(torch.ones(32, 32).bfloat16(), torch.ones(32, 32).bfloat16(), recipe)
    except (RuntimeError, ValueError):
        return f"torch {torch.__version__} has no products of {recipe} on CPUs"
    return ""


def items_by_recipe(setting: Setting) -> Iterator[tuple[str, partial[None], float, str]]:
    """Of the part first: name, proof, seconds and why it is skipped."""
    known = not setting.on_gpu or torch.cuda.is_available()
    for recipe in FP8_RECIPES:
        show = partial(prove_recipe, recipe=recipe)
        yield f"float8 at width 4096: {recipe}", show, 60.0, problem_of(setting, recipe) if known else ""


def prove_recipe(proof: Proof, recipe: str) -> None:
    """Steps in 8 bits and in bf16, timed in turns in one process: their rates, and the distance of their first losses."""
    setting, model = proof.setting, MODELS[proof.setting.size]
    setting.close()  # ranks hold memory of the device
    workload = Workload(global_batch_size=MICRO_BATCH, sequence_length=model.sequence_length)
    base = TrialConfig(precision="bf16", micro_batch_size=MICRO_BATCH, compile_blocks=setting.on_gpu)
    configs = {"bf16": base, recipe: base.replace({"precision": "fp8", "fp8_recipe": recipe})}
    context = RankContext(rank=0, world_size=1, device=setting.device)
    sessions = {name: NativeEngine().build(context, model, config, workload) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    count = STEPS_A_ROUND[setting.size]

    def steps(name: str, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            sessions[name].prepare(step)
            losses.append(sessions[name].train_step().loss or 0.0)  # waits for the device
        return losses

    try:
        losses = {name: steps(name, 0, ALIKE_STEPS) for name in sessions}
        for name in sessions if setting.on_gpu else ():
            steps(name, ALIKE_STEPS, ALIKE_STEPS)
        for number in range(ROUNDS[setting.size]):
            for name in [*sessions][:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                steps(name, 2 * ALIKE_STEPS + number * count, count)
                seconds[name].append((time.perf_counter() - began) / count)
    finally:
        for session in sessions.values():
            session.close()
        setting.free()
    off, gained = apart(losses[recipe], losses["bf16"]), ratio(seconds["bf16"], seconds[recipe])
    proof.claim(0.0 < off <= BOUND, f"{ALIKE_STEPS} losses {off:.1e} off bf16's, but not equal (bound {BOUND:.1e})")
    rates = {name: workload.global_batch_size * len(times) / sum(times) for name, times in seconds.items()}
    text = f"{model.name}, width {model.hidden_size}: {rates[recipe]:.2f} samples/s, bf16 {rates['bf16']:.2f}"
    proof.measured(f"{text}; rate as a multiple of bf16's: {written(gained)}", gained=gained.mean, **rates)


def items(setting: Setting) -> list[Item]:
    """Items of the part by-hand."""
    reason = problem_of(setting, FP8_RECIPES[0]) if not setting.on_gpu or torch.cuda.is_available() else ""
    return [
        Item(
            name=f"float8: {'compiled' if compiled else 'eager'} blocks",
            show=partial(prove_float8, compiled=compiled),
            seconds=120.0 if compiled else 50.0,
            skipped=reason or ("needs CUDA: blocks are compiled only there" if compiled and not setting.on_gpu else ""),
        )
        for compiled in (False, True)
    ]


def prove_float8(proof: Proof, compiled: bool) -> None:
    """Measure the rates of both precisions, and compare their losses."""
    size = proof.setting.size
    workload, losses = workload_of(size), {}
    for precision in ("bf16", "fp8"):
        knobs = {"precision": precision, "compile_blocks": compiled, "micro_batch_size": 4}
        result = proof.setting.ranks(1).run(request(precision, model_of(size), workload, 1, **knobs))
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            proof.claim(False, f"{precision} ran: {why(result)}")
            return
        losses[precision] = result.losses
        peak = result.ranks[0].peak_memory_bytes / 2**30
        rate = result.samples_per_second
        proof.measured(f"{precision}: {written(rate)} samples/s, peak {peak:.2f} GiB", **{precision: rate.mean})
    off = apart(losses["fp8"], losses["bf16"])
    text = f"{len(losses['bf16'])} losses within {off:.1e} of bf16's, but not equal (bound {BOUND:.1e})"
    proof.claim(0.0 < off <= BOUND, text)
