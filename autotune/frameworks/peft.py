"""Notes on how a program adds adapters and virtual tokens to its model with PEFT (0.21) or Megatron-Bridge."""

from collections.abc import Mapping

from autotune.frameworks.best_config import Winner
from search_spaces.knob import METHODS
from search_spaces.training.adapters import ALPHA_PER_RANK, TARGETS, adapted, adapts

ADAPTER_KNOBS = frozenset({*METHODS, "lora_targets", "frozen_dtype"})
"""Knobs that the notes of this module cover."""
_LLAMA = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj",
    "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
}  # fmt: skip
_LATENT = {
    "query_down": "q_a_proj", "query": "q_b_proj", "key_value_down": "kv_a_proj_with_mqa", "key_value": "kv_b_proj",
    "output": "o_proj",
}  # fmt: skip
"""Without a narrow vector of queries they are projected by `q_proj`."""
_EXPERTS = {**_LLAMA, "gate": "experts.gate_up_proj", "up": "experts.gate_up_proj", "down": "experts.down_proj"}
TRANSFORMERS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    **dict.fromkeys(
        ("qwen2", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3_text", "granite", "smollm3"), _LLAMA
    ),
    "phi3": {
        "query": "qkv_proj", "key": "qkv_proj", "value": "qkv_proj", "output": "o_proj",
        "gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj",
    },
    "gpt2": {
        "query": "attn.c_attn", "key": "attn.c_attn", "value": "attn.c_attn", "output": "attn.c_proj",
        "up": "mlp.c_fc", "down": "mlp.c_proj",
    },
    "opt": {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "up": "fc1", "down": "fc2",
    },
    "gpt_neox": {
        "query": "query_key_value", "key": "query_key_value", "value": "query_key_value", "output": "attention.dense",
        "up": "dense_h_to_4h", "down": "dense_4h_to_h",
    },
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LATENT),
}  # fmt: skip
"""Family -> matrix -> its module name in Transformers; matrices with the same name are fused there."""
PARAMETERS = frozenset({"experts.gate_up_proj", "experts.down_proj"})
"""Names of parameters of all experts, which are not modules."""
COMPUTED = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32", "fp64": "torch.float64"}
MEGATRON = {
    "query": "linear_q", "key": "linear_k", "value": "linear_v", "output": "linear_proj",
    "gate": "linear_fc1_gate", "up": "linear_fc1_up", "down": "linear_fc2",
}  # fmt: skip

MEGATRON_LATENT = {
    "query_down": "linear_q_down_proj", "query": "linear_q_up_proj", "key_value_down": "linear_kv_down_proj",
    "key_value": "linear_kv_up_proj",
}  # fmt: skip
"""Those of latent attention."""


def peft_notes(winner: Winner) -> list[str]:
    """How to add the trained parts to a Transformers model, if the configuration freezes the model."""
    if not adapts(winner.config):
        return []
    notes = [_low_rank_note(winner)] if winner.config.lora_rank else _other_notes(winner)
    return [*notes, *_quantised_notes(winner)]


def _low_rank_note(winner: Winner) -> str:
    config, shape = winner.config, winner.shape
    matrices = _matrices(winner)
    names = TRANSFORMERS.get(shape.family, {}) if shape is not None else {}
    if shape is not None and shape.latent is not None and not shape.latent.query_rank:
        names = {**names, "query": "q_proj"}
    called = [names[matrix] for matrix in matrices if matrix in names]
    words = {"target_modules": [*dict.fromkeys(name for name in called if name not in PARAMETERS)]}
    if parameters := [*dict.fromkeys(name for name in called if name in PARAMETERS)]:
        words["target_parameters"] = parameters
    targets = ", ".join(f"{word}={values}" for word, values in words.items()) if called else "target_modules=[…]"
    fused_note = f"; {_fused(called)} has one adapter there" if _fused(called) else ""
    rank = config.lora_rank
    lora_config = f"peft.LoraConfig(r={rank}, lora_alpha={ALPHA_PER_RANK * rank}, {targets}, task_type='CAUSAL_LM')"
    return f"{_lora_knobs(winner)}: give the model to peft.get_peft_model with {lora_config}{fused_note}"


def _other_notes(winner: Winner) -> list[str]:
    """Notes about virtual tokens, which PEFT has, and bottleneck adapters, which it does not have."""
    config = winner.config
    if size := config.adapter_size:
        hidden = f"{winner.shape.hidden_size} / {size}" if winner.shape is not None else f"HIDDEN_SIZE / {size}"
        call = f"adapters.BnConfig(mh_adapter=True, output_adapter=True, reduction_factor={hidden}, non_linearity='gelu')"
        return [f"adapter_size={size}: PEFT has no bottleneck adapters; the package adapters (AdapterHub) has: {call}"]
    if length := config.prefix_length:
        call = f"peft.PrefixTuningConfig(num_virtual_tokens={length}, task_type='CAUSAL_LM')"
        return [
            f"prefix_length={length}: give the model to peft.get_peft_model with {call}; it counts positions from the prefix"
        ]
    length = config.prompt_length
    call = f"peft.PromptTuningConfig(num_virtual_tokens={length}, task_type='CAUSAL_LM')"
    return [f"prompt_length={length}: give the model to peft.get_peft_model with {call}"]


def megatron_bridge_notes(winner: Winner) -> list[str]:
    """How to add the trained parts to a Megatron model, if the configuration freezes the model."""
    config = winner.config
    if not adapts(config):
        return []
    if config.lora_rank:
        notes = [_canonical_note(winner)]
    else:
        remedy = "neither Megatron-LM nor Megatron-Bridge has it; train by Transformers"
        notes = [f"{name}={value}: {remedy}" for name in METHODS if (value := getattr(config, name))]
    if config.frozen_dtype != "same":
        setting = f"frozen_dtype={config.frozen_dtype}"
        notes.append(f"{setting}: it keeps frozen matrices in the precision; expect their memory")
    return notes


def _canonical_note(winner: Winner) -> str:
    latent = winner.shape.latent if winner.shape is not None else None
    names = {**MEGATRON, **MEGATRON_LATENT} if latent is not None else MEGATRON
    if latent is not None and not latent.query_rank:
        names = {**names, "query": "linear_q_proj"}
    rank, targets = winner.config.lora_rank, [names[matrix] for matrix in _matrices(winner)]
    experts = ", share_expert_adapters=False" if winner.shape is not None and winner.shape.num_experts else ""
    if latent is not None:
        # LoRA adapts matrices as they are; only fused ones need CanonicalLoRA.
        call = f"LoRA(target_modules={targets}, dim={rank}, alpha={ALPHA_PER_RANK * rank})"
    else:
        call = f"CanonicalLoRA(target_modules={targets}, dim={rank}, alpha={ALPHA_PER_RANK * rank}{experts})"
    return (
        f"{_lora_knobs(winner)}: pretrain_gpt.py has no adapters; train by Megatron-Bridge with megatron.bridge.peft's {call}"
    )


def _quantised_notes(winner: Winner) -> list[str]:
    dtype, precision = winner.config.frozen_dtype, COMPUTED[winner.config.precision]
    if dtype == "same":
        return []
    computed = f", bnb_4bit_compute_dtype={precision}" if dtype == "nf4" else ""
    # FSDP shards the packed bytes in their storage dtype, which must equal that of the other parameters.
    stored = f", bnb_4bit_quant_storage={precision}" if dtype == "nf4" and winner.config.zero_stage == 3 else ""
    scaled = "; bitsandbytes scales 8 bits by the row, not by 64 values, and multiplies in 8 bits" if dtype == "int8" else ""
    if dtype == "int8" and winner.config.zero_stage == 3:
        scaled += ", and frameworks that shard floating-point types alone do not shard them"
    loaded = {
        "nf4": "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=False",
        "int8": "load_in_8bit=True",
    }
    quantization_config = f"transformers.BitsAndBytesConfig({loaded[dtype]}{computed}{stored})"
    return [f"frozen_dtype={dtype}: give from_pretrained quantization_config={quantization_config}{scaled}"]


def _matrices(winner: Winner) -> list[str]:
    gated = winner.shape is None or winner.shape.gated_mlp
    targets = TARGETS[winner.config.lora_targets]
    if winner.shape is not None:
        adapted_names = {name for name, _, _ in adapted(winner.shape, winner.config).adapted_matrices}
        return [matrix for matrix in targets if matrix in adapted_names]
    return [matrix for matrix in targets if matrix in MEGATRON and (matrix != "gate" or gated)]


def _fused(called: list[str]) -> str:
    """The first module name that covers several matrices; empty: none."""
    return next((name for position, name in enumerate(called) if name in called[:position]), "")


def _lora_knobs(winner: Winner) -> str:
    return f"lora_rank={winner.config.lora_rank}, lora_targets={winner.config.lora_targets}"
