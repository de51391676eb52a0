"""A tiny model of each family on the device against the same on a CPU: losses of the first steps, in the same process."""

from functools import partial

import torch

from benchmarks.common.tiny_models import tiny
from benchmarks.gpu.models import TEXT
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, Setting, apart, first_losses
from search_spaces.models.huggingface import FAMILIES, model_spec_from_config
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

STEPS, LENGTH, SAMPLES = 3, 64, 4
FACTOR = 4
"""Bounds are so many times those of dense models: in bf16 a router may choose another expert for a token."""
ON_A_CPU = ("llama", "deepseek_v3")


def items(setting: Setting) -> list[Item]:
    """Items of the part correctness. Families with windows compile their attention on a GPU."""
    found = []
    for family in FAMILIES:
        compiles = any("window" in name or "chunk" in name for name in tiny(family)) or family == "gpt_oss"
        show = partial(prove_family, family=family)
        group = "families, compiled" if compiles else "families"
        skipped = (
            "" if setting.on_gpu or family in ON_A_CPU else "a CPU compared with itself: a few families show that this runs"
        )
        seconds = 40.0 if compiles else 8.0
        found.append(Item(name=f"family: {family}", show=show, seconds=seconds, group=group, skipped=skipped))
    return found


def prove_family(proof: Proof, family: str) -> None:
    """Compare the losses in each precision."""
    model = model_spec_from_config(tiny(family), family)
    for precision, dense in LOSS_BOUND.items():
        bound = dense * (FACTOR if model.num_experts else 1)
        expected, found = (_losses(model, precision, device) for device in (torch.device("cpu"), proof.setting.device))
        off = apart(found, expected)
        proof.claim(off <= bound, f"{precision}: {STEPS} losses {off:.1e} off a CPU's (bound {bound:.1e})")
    proof.setting.free()


def _losses(model: ModelSpec, precision: str, device: torch.device) -> list[float]:
    workload = Workload(global_batch_size=SAMPLES, sequence_length=LENGTH, data_path=str(TEXT))
    return first_losses(device, model, TrialConfig(precision=precision, micro_batch_size=2), workload, STEPS)
