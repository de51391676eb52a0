"""Every causal family against Hugging Face's module, in float64: logits, gradients and three steps from the same weights."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.errors import WeightsError
from executor.files.huggingface_weights import from_huggingface, to_huggingface
from executor.parallel.attention import soft_cap
from executor.parallel.model import Transformer, build_transformer
from search_spaces.models.huggingface import FAMILIES, model_spec_from_config
from search_spaces.training.adapters import adapted
from search_spaces.trial_config import TrialConfig

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

TOKENS, VOCABULARY, BOUND, STEPS = 24, 64, 1e-9, 3
SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED = {"num_key_value_heads": 4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **SHARED,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text", "head_dim": 16, "num_hidden_layers": 5, "num_local_experts": 4, "intermediate_size_mlp": 56,
    "attention_chunk_size": 8, "floor_scale": 6, "attn_scale": 0.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, stretched": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "qwen3, windows": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "qwen3_moe, weights of all": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "phi3": {"model_type": "phi3", "sliding_window": 8},
    "phi3, long": {"model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 16},
    "phi3, short": {"model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 32},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": {"full_attention": YARN}},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 8},
    "gemma3_text, stretched": {
        "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8,
        "attn_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    "granite": {
        "model_type": "granite", "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "qwen3_moe, dense layers": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [0], "num_hidden_layers": 5,
    },
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2", "num_experts_per_tok": 3},
    "deepseek_v2, groups": {
        **DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "q_lora_rank": None,
        "routed_scaling_factor": 3.0, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {**DEEPSEEK, "model_type": "deepseek_v3", "attention_bias": True},
    "deepseek_v3, stretched": {
        **DEEPSEEK, "model_type": "deepseek_v3", "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "norm_topk_prob": False, "rms_norm_eps": 1e-4,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "routed_scaling_factor": 1.5,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5},
    "llama4_text": {
        **LLAMA4, "attention_bias": True, "interleave_moe_layer_step": 2,
        "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
    },
    "llama4_text, several experts": {
        **LLAMA4, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_chunk_size": 10, "moe_layers": [0, 1],
        "no_rope_layers": [0, 1, 1, 0, 1], "attn_temperature_tuning": False, "rope_parameters": LLAMA3,
    },
    "gpt2": {"model_type": "gpt2", **SHARED},
    "opt": {"model_type": "opt", "ffn_dim": 48, "dropout": 0.0, **SHARED},
    "opt, norms after": {
        "model_type": "opt", "ffn_dim": 48, "dropout": 0.0, "do_layer_norm_before": False, "word_embed_proj_dim": 16, **SHARED,
    },
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 128, **SHARED},
}  # fmt: skip


class Precise:
    """The module torch, whose fp32 is fp64: norms and softmaxes of transformers compute in fp32 whatever their inputs are."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class ByCosine:
    """The module torch, whose polar form rounds cosines and sines as their functions do."""

    def __getattr__(self, name: str) -> Any:
        return (
            (lambda size, angle: torch.complex(size * angle.cos(), size * angle.sin()))
            if name == "polar"
            else getattr(torch, name)
        )


@contextmanager
def in_float64(theirs: torch.nn.Module) -> Iterator[None]:
    """All of the module computes in fp64 but its rotations, which ours makes in fp32 as well."""
    modeling = importlib.import_module(type(theirs).__module__)
    rotary = [module for name, module in theirs.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    to_float = torch.Tensor.float

    def in_fp32(forward: Any) -> Any:
        def rotated(*args: Any, **options: Any) -> Any:
            with patch.object(modeling, "torch", ByCosine()), patch.object(torch.Tensor, "float", to_float):
                return forward(*args, **options)

        return rotated

    for module in rotary:
        module.forward = in_fp32(module.forward)
    with patch.object(modeling, "torch", Precise()), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def their_module(case: dict[str, Any]) -> torch.nn.Module:
    """Hugging Face's module with weights of which none is 0 or 1."""
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**{**SHAPE, **case})
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    module = module.to(torch.float64)
    for part in module.modules():
        if hasattr(part, "scalar_embed_scale"):  # which was rounded to fp32
            part.embed_scale = torch.tensor(part.scalar_embed_scale, dtype=torch.float64)
    with torch.no_grad():
        corrections = [value for name, value in module.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*module.parameters(), *corrections):
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    return module


def our_module(case: dict[str, Any], state: dict[str, Tensor]) -> Transformer:
    spec = model_spec_from_config({**SHAPE, **case}, "tiny")
    module = build_transformer(spec, TOKENS, seed=0, dtype=torch.float64)
    module.load_state_dict(from_huggingface(spec, state), strict=not spec.tied_embeddings)
    return module


def our_logits(module: Transformer, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    assert module.head is not None
    handle = module.head.output.register_forward_hook(lambda _module, _args, result: seen.append(result))
    module(tokens, tokens)
    handle.remove()
    logits = seen[0].view(*tokens.shape, -1)
    return soft_cap(logits, module.spec.output_softcap) if module.spec.output_softcap else logits


def far(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max().clamp(min=1)).detach())


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    # Beyond the token of padding, whose embedding transformers does not train.
    drawn = torch.randint(3, VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("name", CASES)
def test_the_same_weights_train_the_same(name: str, tokens: tuple[Tensor, Tensor]) -> None:
    theirs = their_module(CASES[name])
    ours = our_module(CASES[name], dict(theirs.state_dict()))
    inputs, labels = tokens
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    with in_float64(theirs):
        assert far(our_logits(ours, inputs), theirs(inputs).logits) < BOUND
        for _ in range(STEPS):
            expected = functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())
            expected.backward()
            loss = ours(inputs, labels)
            loss.backward()
            assert far(loss, expected) < BOUND
            wanted = {key: value for key, value in theirs.named_buffers() if key.endswith("correction_bias")}
            wanted |= {key: value.grad for key, value in theirs.named_parameters()}
            gradients = {key: value.grad for key, value in ours.named_parameters()}
            for key, value in from_huggingface(ours.spec, wanted).items():
                if key.endswith("correction"):
                    continue
                assert far(gradients[key], value) < BOUND, key  # type: ignore[arg-type]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


PROJECTIONS = {
    "q_a_proj": "query_down", "q_b_proj": "query", "q_proj": "query", "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value", "o_proj": "output",
}  # fmt: skip
"""Name of a projection of latent attention in transformers -> ours."""


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which PEFT reads
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2, groups"])
def test_adapters_of_latent_attention_train_as_those_of_peft(name: str, tokens: tuple[Tensor, Tensor]) -> None:
    """Losses of steps of AdamW. The second factors are 0 at first, as theirs, so that their rows need no common order."""
    peft = pytest.importorskip("peft")
    base = their_module(CASES[name])
    spec = model_spec_from_config({**SHAPE, **CASES[name]}, "tiny")
    state = from_huggingface(spec, dict(base.state_dict()))
    spec = adapted(spec, TrialConfig(lora_rank=4))
    ours = build_transformer(spec, TOKENS, seed=0, dtype=torch.float64)
    ours.load_state_dict({**ours.state_dict(), **state})
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[*PROJECTIONS], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config).to(torch.float64)
    trained = {key: value for key, value in theirs.named_parameters() if value.requires_grad}
    own = {key: value for key, value in ours.named_parameters() if value.requires_grad}
    assert sum(value.numel() for value in trained.values()) == spec.adapter_parameters == sum(map(torch.numel, own.values()))
    with torch.no_grad():
        for key, value in trained.items():
            if "lora_A" in key:
                layer, _, projection = key.partition("layers.")[2].split(".")[:3]
                own[f"blocks.{layer}.attention.{PROJECTIONS[projection]}.adapter.lora_a"].copy_(value)
    inputs, labels = tokens
    optimizers = [torch.optim.AdamW(values.values(), lr=1e-2) for values in (trained, own)]
    losses = []
    with in_float64(base):
        for _ in range(STEPS + 1):
            expected = functional.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
            losses.append((ours(inputs, labels), expected))
            for optimizer, loss in zip(reversed(optimizers), losses[-1], strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(far(loss, expected) < BOUND for loss, expected in losses)
    assert losses[0][0] > losses[-1][0]


@pytest.mark.parametrize("name", CASES)
def test_weights_go_both_ways(name: str) -> None:
    theirs = their_module(CASES[name])
    spec = model_spec_from_config({**SHAPE, **CASES[name]}, "tiny")
    state = dict(theirs.state_dict())
    back = to_huggingface(spec, our_module(CASES[name], state).state_dict())
    assert set(state) - set(back) <= {"lm_head.weight"}
    assert all(torch.equal(value, state[key]) for key, value in back.items())
    assert spec.parameter_count == sum(parameter.numel() for parameter in theirs.parameters())


def test_every_family_is_compared() -> None:
    assert {case["model_type"] for case in CASES.values()} | {"kimi_k2"} == set(FAMILIES)  # which has DeepSeek's class


def test_weights_of_another_model_are_refused() -> None:
    spec = model_spec_from_config({**SHAPE, **CASES["llama"]}, "tiny")
    state = dict(their_module(CASES["mistral"]).state_dict())
    with pytest.raises(WeightsError, match=r"bias is missing: give the weights of a llama model of the shape of tiny"):
        from_huggingface(
            spec, {key: value for key, value in state.items() if "k_proj" not in key} | {"x": state["lm_head.weight"]}
        )
