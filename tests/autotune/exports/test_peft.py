"""How adapters are told to those who train by PEFT or by Megatron-Bridge."""

from pathlib import Path
from typing import Any

import exported
import pytest

from autotune.exports import EXPORTERS
from autotune.exports.torch_code import TARGET as TORCH


def note(name: str, session: Any, **knobs: Any) -> str:
    made = EXPORTERS[name](exported.document(session, lora_rank=8, **knobs))
    (told,) = [note for note in made.notes if note.startswith("lora_rank=8")]
    return told


@pytest.mark.parametrize("name", ["transformers", "accelerate-fsdp", "accelerate-deepspeed", "deepspeed"])
def test_transformers_models_get_them_from_peft(tmp_path: Path, name: str) -> None:
    told = note(name, exported.small(tmp_path), lora_targets="both")
    assert "peft.LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', " in told
    assert "['q_proj', 'k_proj', 'v_proj', 'o_proj']" in note(name, exported.small(tmp_path))


@pytest.mark.parametrize(
    ("knobs", "made"),
    [
        (
            {"frozen_dtype": "nf4", "zero_stage": 3, "precision": "bf16"},
            "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype=",
        ),
        ({"frozen_dtype": "int8", "zero_stage": 0, "precision": "bf16"}, "load_in_8bit=True); bitsandbytes scales"),
    ],
)
def test_bitsandbytes_quantises_them(tmp_path: Path, knobs: dict[str, Any], made: str) -> None:
    notes = EXPORTERS["transformers"](exported.document(exported.small(tmp_path), lora_rank=8, **knobs)).notes
    (told,) = [note for note in notes if note.startswith(f"frozen_dtype={knobs['frozen_dtype']}")]
    assert f"quantization_config=transformers.BitsAndBytesConfig({made}" in told


def test_megatron_is_left_for_its_bridge(tmp_path: Path) -> None:
    told = note("megatron", exported.small(tmp_path), lora_targets="mlp")
    assert told.endswith("CanonicalLoRA(target_modules=['linear_fc1_gate', 'linear_fc1_up', 'linear_fc2'], dim=8, alpha=16)")


def test_others_say_that_they_have_none(tmp_path: Path) -> None:
    assert note("torch", exported.small(tmp_path)).startswith(f"lora_rank=8: not part of {TORCH.name}; freeze the model")
