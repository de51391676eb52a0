"""What people bring, on the device against a CPU: low-rank adapters, Hugging Face's modules, a training script."""

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bundle import ROOT
from benchmarks.gpu.models import SMALL, TEXT
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, apart, first_losses, request, why
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Workload
from search_spaces.trial_config import TrialConfig

STEPS = 3
FROZEN = ("same", "int8", "nf4")
"""How the frozen weights under adapters are stored."""
HUGGING_FACE = ("gpt2", "llama", "mixtral", "modernbert", "lora")
"""Folders of benchmarks/huggingface; the adapters of the last need PEFT."""
WORKLOAD = Workload(global_batch_size=4, sequence_length=64, data_path=str(TEXT))


def items() -> list[Item]:
    """Items of the part correctness."""
    adapters = [
        Item(
            name=f"adapters, frozen weights: {dtype}", seconds=10.0, group="user models",
            show=partial(prove_losses, model=SMALL, lora_rank=8, lora_targets="both", frozen_dtype=dtype),
        )
        for dtype in FROZEN
    ]  # fmt: skip
    absent = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    skipped = f"needs {' and '.join(absent)}" if absent else ""
    modules = []
    for name in HUGGING_FACE:
        model = FactoryModel(reference=f"hf:{ROOT}/benchmarks/huggingface/{name}", parameter_count=0)
        show = partial(prove_losses, model=model)
        modules.append(Item(name=f"hf: {name}", show=show, seconds=10.0, group="user models", skipped=skipped))
    return [*adapters, *modules, Item(name="a training script", show=prove_script, seconds=25.0)]


def prove_losses(proof: Proof, model: Model, **knobs: Any) -> None:
    """Compare the losses of the first steps in each precision."""
    for precision, bound in LOSS_BOUND.items():
        config = TrialConfig().replace({"precision": precision, "micro_batch_size": 2, **knobs})
        on_cpu, on_device = (
            first_losses(device, model, config, WORKLOAD, STEPS) for device in (torch.device("cpu"), proof.setting.device)
        )
        off = apart(on_device, on_cpu)
        proof.claim(off <= bound, f"{precision}: {STEPS} losses {off:.1e} off a CPU's (bound {bound:.1e})")
    proof.setting.free()


def prove_script(proof: Proof) -> None:
    """Run the example of a training script, which reports by `autotune.report`."""
    words = ("python", "examples/torch_script/train.py", "--batch", "{micro_batch_size}")
    model = CommandModel(arguments=words, folder=str(ROOT))
    trial_request = request("script", model, WORKLOAD, 1, Fidelity(max_seconds=2.0), micro_batch_size=4)
    result = proof.setting.ranks(1).run(dataclasses.replace(trial_request, engine="command"))
    proof.claim(result.outcome is Outcome.OK, f"it ran: {why(result)}")
    if result.outcome is Outcome.OK and result.samples_per_second is not None:
        rate, peak = result.samples_per_second.mean, result.peak_memory_bytes
        proof.claim(bool(peak), f"{rate:,.0f} samples/s, peak {peak or 0:,} bytes")
