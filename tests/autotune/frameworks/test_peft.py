"""How adapters and virtual tokens are told to those who train by PEFT or by Megatron-Bridge."""

from pathlib import Path
from typing import Any

import exported
import pytest

from autotune.frameworks.exporters import EXPORTERS
from autotune.frameworks.fsdp2 import TARGET as TORCH


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


@pytest.mark.parametrize("name", ["transformers", "accelerate-fsdp", "accelerate-deepspeed", "deepspeed"])
@pytest.mark.parametrize(
    ("knob", "made"),
    [
        ("prefix_length", "peft.PrefixTuningConfig(num_virtual_tokens=16, task_type='CAUSAL_LM')"),
        ("prompt_length", "peft.PromptTuningConfig(num_virtual_tokens=16, task_type='CAUSAL_LM')"),
        ("adapter_size", "PEFT has no bottleneck adapters; the package adapters (AdapterHub) has: adapters.BnConfig("),
    ],
)
def test_what_else_is_trained_beside_a_frozen_model(tmp_path: Path, name: str, knob: str, made: str) -> None:
    notes = EXPORTERS[name](exported.document(exported.small(tmp_path), **{knob: 16})).notes
    (told,) = [note for note in notes if note.startswith(f"{knob}=16")]
    assert made in told


@pytest.mark.parametrize("knob", ["prefix_length", "prompt_length", "adapter_size"])
def test_megatron_has_low_rank_adapters_alone(tmp_path: Path, knob: str) -> None:
    notes = EXPORTERS["megatron"](exported.document(exported.small(tmp_path), **{knob: 16})).notes
    assert f"{knob}=16: neither Megatron-LM nor Megatron-Bridge has it; train by Transformers" in notes


def test_megatron_is_left_for_its_bridge(tmp_path: Path) -> None:
    told = note("megatron", exported.small(tmp_path), lora_targets="mlp")
    assert told.endswith("CanonicalLoRA(target_modules=['linear_fc1_gate', 'linear_fc1_up', 'linear_fc2'], dim=8, alpha=16)")


@pytest.mark.parametrize(
    ("model", "names", "bridge"),
    [
        (
            "deepseek-v3", ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"],
            ["linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"],
        ),
        ("deepseek-v2-lite", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], ["linear_q_proj"]),
    ],
)  # fmt: skip
def test_projections_of_latent_attention(model: str, names: list[str], bridge: list[str]) -> None:
    told = [note(name, exported.large(model)) for name in ("transformers", "megatron")]
    for name in names:
        assert f"'{name}'" in told[0]
    assert not {"k_proj'", "v_proj'"} & {word.strip(" '") + "'" for word in told[0].split("'")}
    assert "peft's LoRA(target_modules=" in told[1]
    for name in bridge:
        assert f"'{name}'" in told[1]


def test_others_say_that_they_have_none(tmp_path: Path) -> None:
    assert note("torch", exported.small(tmp_path)).startswith(f"lora_rank=8: not part of {TORCH.name}; freeze the model")
