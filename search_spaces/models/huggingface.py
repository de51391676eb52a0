"""Models by name, and ModelSpec from the `config.json` of Hugging Face's Llama, Mistral, Qwen2, GPT-2, OPT, GPT-NeoX, Mixtral.

A config.json may omit keys with a default in the family's configuration class, so each reader has these defaults
[transformers, `models/FAMILY/configuration_FAMILY.py`]. Sizes have no defaults.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from search_spaces.errors import ModelFormatError
from search_spaces.file_kinds import MODEL_CONFIG, mistaken
from search_spaces.models.config_keys import ConfigKeys
from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.preset_files import preset_tables, unknown_name

BUILT = "hf:"
"""Prefix of a reference to Hugging Face's own module for a config.json. It trains on text, like our models."""


def is_factory_reference(text: str) -> bool:
    """Whether `text` refers to a user's module, `module:factory`, or to Hugging Face's own module for a config, `hf:CONFIG`."""
    return text.startswith(BUILT) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def model_preset_names() -> tuple[str, ...]:
    """The preset names that `resolve_model` accepts."""
    return tuple(preset_tables("models"))


def resolve_model(text: str) -> ModelSpec:
    """The model that `text` names: a preset, a config.json, or a folder that contains one.

    Raises:
        UnknownNameError: it is neither a preset nor a path.
        ModelFormatError: the file cannot be read as a model.
    """
    presets = preset_tables("models")
    if text in presets:
        return model_spec_from_config(presets[text], text)
    path = Path(text).expanduser()
    if path.exists() or path.suffix == ".json" or "/" in text:
        return read_model_config(path)
    raise unknown_name("model preset", text, presets, "or give the path of a config.json, or module:factory")


def read_model_config(path: str | Path) -> ModelSpec:
    """The model of a config.json, or of the config.json in a folder.

    Raises:
        ModelFormatError: the file does not exist, is not JSON, or is not a model of a known family.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ModelFormatError(str(file), reason, "give the path of a Hugging Face config.json") from None
    except ValueError as error:
        problem = mistaken(file, MODEL_CONFIG) or f"is not JSON ({error})"
        raise ModelFormatError(str(file), problem, "give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ModelFormatError(str(file), "is not a JSON object", "give a Hugging Face config.json")
    if "model_type" not in config and (other := mistaken(file, MODEL_CONFIG)):
        raise ModelFormatError(str(file), other, "give a Hugging Face config.json as MODEL")
    return model_spec_from_config(config, _display_name(config, file))


def model_spec_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape of the model in a config.json.

    Raises:
        ModelFormatError: a key is missing or of the wrong type, or the family is unknown; the message names the key.
    """
    keys = ConfigKeys(config)
    family = keys.text("model_type")
    reader = FAMILIES.get(family)
    if reader is None:
        remedy = f"give hf:CONFIG for Hugging Face's own module of it, module:factory, or one of {', '.join(FAMILIES)}"
        raise ModelFormatError("model_type", f"{family!r} is not a supported family", remedy)
    return reader(keys, name)


def _llama(keys: ConfigKeys, name: str) -> ModelSpec:
    bias = keys.flag("attention_bias", False)
    return _rotary_decoder(
        keys, name, "llama", kv_heads=None, epsilon=1e-6, qkv_bias=bias, attention_output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )  # fmt: skip


def _mistral(keys: ConfigKeys, name: str) -> ModelSpec:
    return _rotary_decoder(keys, name, "mistral", kv_heads=8, epsilon=1e-6, sliding_window=_window(keys, 4096))


def _qwen2(keys: ConfigKeys, name: str) -> ModelSpec:
    window = _window(keys, 4096) if keys.flag("use_sliding_window", False) else 0
    return _rotary_decoder(keys, name, "qwen2", kv_heads=32, epsilon=1e-6, qkv_bias=True, sliding_window=window)


def _mixtral(keys: ConfigKeys, name: str) -> ModelSpec:
    """`expert_capacity_factor` is our own key: Hugging Face's Mixtral drops no tokens."""
    experts_per_token = keys.size("num_experts_per_tok", default=2)
    return _rotary_decoder(
        keys, name, "mixtral", kv_heads=8, epsilon=1e-5, rope_theta=1e6, sliding_window=_window(keys, 0),
        num_experts=keys.size("num_local_experts", default=8),
        experts_per_token=experts_per_token,
        capacity_factor=keys.number("expert_capacity_factor", default=1.0) if keys.has("expert_capacity_factor") else 0.0,
        load_balance=_load_balance(keys, experts_per_token),
    )  # fmt: skip


def _load_balance(keys: ConfigKeys, experts_per_token: int) -> float:
    """The weight of each layer's loss that is equivalent to Hugging Face's weight of one loss over all layers.

    With balanced experts, their loss is k, averaged over the layers; ours is 1 for each layer. Without `output_router_logits`
    there is none.
    """
    if not keys.flag("output_router_logits", False):
        return 0.0
    return keys.number("router_aux_loss_coef", default=1e-3) * experts_per_token / keys.size("num_hidden_layers")


def _window(keys: ConfigKeys, default: int) -> int:
    """Window length in tokens; an explicit null means no window, an absent key means the class's default."""
    if not keys.is_null("sliding_window"):
        return keys.size("sliding_window")
    return 0 if keys.has("sliding_window") else default


def _rotary_decoder(
    keys: ConfigKeys, name: str, family: str, *, kv_heads: int | None, epsilon: float, rope_theta: float = 1e4, **more: Any
) -> ModelSpec:
    """Llama and similar models. `kv_heads`: the class's default if the key is absent; None: the number of heads."""
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    absent = kv_heads if kv_heads and not keys.has("num_key_value_heads") else heads
    return ModelSpec(
        name=name,
        family=family,
        num_layers=keys.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=keys.size("num_key_value_heads", default=absent),
        head_dim=_head_dim(keys, hidden, heads),
        ffn_hidden_size=keys.size("intermediate_size"),
        vocab_size=keys.size("vocab_size"),
        sequence_length=keys.size("max_position_embeddings"),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        norm_epsilon=keys.number("rms_norm_eps", default=epsilon),
        activation=keys.activation("hidden_act", "silu"),
        rope_theta=keys.rope("rope_theta", rope_theta),
        rotary_fraction=keys.rope("partial_rotary_factor", 1.0),
        **more,
    )


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    """`head_dim` if it is stated; else hidden / heads, which must be an integer."""
    if not keys.is_null("head_dim"):
        return keys.size("head_dim")
    if hidden % heads:
        raise ModelFormatError(
            "num_attention_heads", f"{heads} does not divide the hidden size {hidden}", "correct it, or state head_dim"
        )
    return hidden // heads


def _gpt2(keys: ConfigKeys, name: str) -> ModelSpec:
    keys.must_be("add_cross_attention", False, "a model with cross-attention is not a decoder-only transformer")
    heads, hidden = keys.size("n_head", "num_attention_heads"), keys.size("n_embd", "hidden_size")
    return ModelSpec(
        name=name,
        family="gpt2",
        num_layers=keys.size("n_layer", "num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_head_dim(keys, hidden, heads),
        ffn_hidden_size=keys.size("n_inner", default=4 * hidden),
        vocab_size=keys.size("vocab_size"),
        sequence_length=keys.size("n_positions", "n_ctx", "max_position_embeddings"),
        tied_embeddings=keys.flag("tie_word_embeddings", True),
        norm=Norm.LAYERNORM,
        norm_epsilon=keys.number("layer_norm_epsilon", default=1e-5),
        activation=keys.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        position=Position.LEARNED,
    )


def _opt(keys: ConfigKeys, name: str) -> ModelSpec:
    keys.must_be("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    keys.must_be("_remove_final_layer_norm", False, "a pre-norm model without its final norm is not supported")
    heads, hidden, bias = keys.size("num_attention_heads"), keys.size("hidden_size"), keys.flag("enable_bias", True)
    embedding = keys.size("word_embed_proj_dim", default=hidden)
    return ModelSpec(
        name=name,
        family="opt",
        num_layers=keys.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_head_dim(keys, hidden, heads),
        ffn_hidden_size=keys.size("ffn_dim"),
        vocab_size=keys.size("vocab_size"),
        sequence_length=keys.size("max_position_embeddings"),
        tied_embeddings=keys.flag("tie_word_embeddings", True),
        norm=Norm.LAYERNORM,
        activation=keys.activation("activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        position=Position.LEARNED,
        position_offset=2,
        pre_norm=keys.flag("do_layer_norm_before", True),
        embedding_size=0 if embedding == hidden else embedding,
    )


def _gpt_neox(keys: ConfigKeys, name: str) -> ModelSpec:
    heads, hidden, bias = keys.size("num_attention_heads"), keys.size("hidden_size"), keys.flag("attention_bias", True)
    return ModelSpec(
        name=name,
        family="gpt_neox",
        num_layers=keys.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_head_dim(keys, hidden, heads),
        ffn_hidden_size=keys.size("intermediate_size"),
        vocab_size=keys.size("vocab_size"),
        sequence_length=keys.size("max_position_embeddings"),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        norm=Norm.LAYERNORM,
        norm_epsilon=keys.number("layer_norm_eps", default=1e-5),
        activation=keys.activation("hidden_act", "gelu"),
        gated_mlp=False,
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=True,
        rotary_fraction=keys.rope("partial_rotary_factor", 0.25, "rotary_pct"),
        rope_theta=keys.rope("rope_theta", 1e4, "rotary_emb_base"),
        parallel_residual=keys.flag("use_parallel_residual", True),
    )


FAMILIES: dict[str, Callable[[ConfigKeys, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
}
"""`model_type` of a config.json -> its reader."""


def _display_name(config: Mapping[str, Any], file: Path) -> str:
    """`_name_or_path` if it is set; else the folder's name, or the file's name if that is not config.json."""
    stated = config.get("_name_or_path")
    if isinstance(stated, str) and stated:
        return stated.rstrip("/").rsplit("/", 1)[-1]
    return file.resolve().parent.name if file.name == "config.json" else file.stem
