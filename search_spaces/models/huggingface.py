"""Models by name, and ModelSpec from the `config.json` of Hugging Face's decoder-only families (`FAMILIES`).

A config.json may omit keys with a default in the family's configuration class, so each reader has these defaults
[transformers, `models/FAMILY/configuration_FAMILY.py`]. Sizes that were taken from there are notes of the model.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from search_spaces.errors import ModelFormatError
from search_spaces.file_kinds import MODEL_CONFIG, mistaken
from search_spaces.models.config_keys import ConfigKeys, read_rope_scaling, rope_scaling_of, yarn_magnitude
from search_spaces.models.model import CLAMPED, HeadNorm, Latent, ModelSpec, Norm, NormPlace, Position
from search_spaces.models.named import cached_config, model_names, named_config
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
    """The model that `text` names: a preset, a config.json or a folder that contains one, or an id of the Hugging Face hub.

    An id is looked up in the hub's cache on this machine, then among the known models. Nothing is loaded from the network.

    Raises:
        UnknownNameError: it is none of them.
        ModelFormatError: the file cannot be read as a model.
    """
    presets = preset_tables("models")
    if text in presets:
        return model_spec_from_config(presets[text], text)
    path = Path(text).expanduser()
    if path.exists() or path.suffix == ".json" or re.match(r"[./~]", text) or text.count("/") > 1:
        return read_model_config(path)
    if (file := cached_config(text)) is not None:
        model = read_model_config(file)
        note = f"config.json of the hub's cache, revision {file.parent.name[:8]}"
        return dataclasses.replace(model, name=text.rpartition("/")[2], notes=(note, *model.notes))
    if (known := known_model(text)) is not None:
        return known
    otherwise = "or give the path of a config.json, or module:factory"
    if "/" in text:
        if path.parent.is_dir():  # a file of this folder, which is not there
            return read_model_config(path)
        otherwise = f"or load its config.json into the hub's cache: hf download {text} config.json"
    raise unknown_name("model preset", text, model_names(), otherwise, listed_by="autotune models")


def known_model(text: str) -> ModelSpec | None:
    """The model that a name or an id of the hub means, by the tables of this package alone; None: it is unknown."""
    if (named := named_config(text)) is None:
        return None
    config, shape, bits = named
    model = model_spec_from_config(config, text.rpartition("/")[2])
    notes = [f"the shape of {shape}, by the name"] if shape != text else []
    if shape.startswith(("gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "llama-4-", "mistral-small-3.1-")):
        notes.append("the text model alone, without its vision encoder")
    if bits != 16:
        notes.append(f"weights of {bits} bits beside adapters, by the name (--frozen-bits)")
    return dataclasses.replace(model, frozen_bits=bits, notes=(*model.notes, *notes))


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
    try:
        return model_spec_from_config(config, _display_name(config, file))
    except ModelFormatError as error:
        remedy = error.remedy.replace(f"{BUILT}CONFIG", f"{BUILT}{path}")
        raise ModelFormatError(error.field, error.problem, remedy) from None


def model_spec_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape of the model in a config.json.

    Raises:
        ModelFormatError: a key is missing or of the wrong type, or the family is unknown; the message names the key.
    """
    text, notes = _text_config(config)
    family = ConfigKeys(text).text("model_type")
    part = TEXT_PARTS.get(family.removesuffix("_text"))
    if part is not None:
        family, text = f"{family.removesuffix('_text')}_text", {**part[1], **text}
    reader = FAMILIES.get(part[0] if part else family)
    if reader is None:
        remedy = f"give hf:CONFIG for Hugging Face's own module of it, module:factory, or one of {', '.join(FAMILIES)}"
        raise ModelFormatError("model_type", f"{family!r} is not a supported family", remedy)
    keys = ConfigKeys(text, preset_tables("class_sizes").get(family))
    model = reader(keys, name)
    if keys.defaults_taken:
        sizes = ", ".join(f"{key} {value:,}" for key, value in keys.defaults_taken.items())
        notes.append(f"{sizes} (defaults of Hugging Face's class, which the config.json leaves out)")
    if "auto_map" in config:
        notes.append(f"the class of {family} in transformers, not the code that auto_map names")
    bits, of_weights = _frozen_bits(config.get("quantization_config"))
    return dataclasses.replace(model, frozen_bits=bits, notes=(*notes, *of_weights))


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The keys of the text model, with a note about what is left out if the model reads images or sounds too."""
    family = str(config.get("model_type"))
    text = config.get("text_config", config if family in TEXT_PARTS else None)
    known_types = {*FAMILIES, *TEXT_PARTS, *(f"{part}_text" for part in TEXT_PARTS)}
    if family in FAMILIES or not isinstance(text, Mapping) or str(text.get("model_type")) not in known_types:
        return config, []
    # transformers 5 asks the whole model whether the output projection is the table; the text model's key may be a default.
    tied = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    encoders = [key for key in config if key.endswith("_config") and key not in ("text_config", "quantization_config")]
    return {**text, **tied}, [f"the text model alone, without {' and '.join(encoders) or 'its encoders'}"]


def _frozen_bits(quantization: Any) -> tuple[int, list[str]]:
    """Bits of a frozen weight by `quantization_config`, with a note; 16: it is absent, or not of 4 or 8 bits."""
    if not isinstance(quantization, Mapping):
        return 16, []
    method = quantization.get("quant_method", "bitsandbytes")
    bits = 8 if method == "fp8" else quantization.get("bits")
    if method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None
    if bits not in (4, 8):
        return 16, [f"weights that are not quantised, since quantization_config ({method}) is not read (--frozen-bits)"]
    usage = "beside adapters of --lora-rank (--frozen-bits); beside those of knobs frozen_dtype states them"
    return bits, [f"weights of {bits} bits by quantization_config ({method}) {usage}"]


def _qwen3(keys: ConfigKeys, name: str) -> ModelSpec:
    return _rotary_decoder(
        keys, name, "qwen3", kv_heads=32, epsilon=1e-6, head_dim=128, attention_bias=False, head_norm=HeadNorm.HEAD,
        **_late_windows(keys),
    )  # fmt: skip


def _qwen3_moe(keys: ConfigKeys, name: str) -> ModelSpec:
    step, only = keys.size("decoder_sparse_step", default=1), keys.counts("mlp_only_layers")
    dense = _dense_layers(keys, lambda layer: layer in only or (layer + 1) % step != 0)
    experts_per_token = keys.size("num_experts_per_tok", default=8)
    window = _window(keys, 4096) if keys.flag("use_sliding_window", False) else 0
    return _rotary_decoder(
        keys, name, "qwen3_moe", kv_heads=4, epsilon=1e-6, ffn=keys.size("moe_intermediate_size", default=768),
        attention_bias=False, head_norm=HeadNorm.HEAD, sliding_window=window,
        num_experts=keys.size("num_experts", "num_local_experts", default=128), experts_per_token=experts_per_token,
        normalised_routing=keys.flag("norm_topk_prob", False), load_balance=_load_balance(keys, experts_per_token),
        **dense,
    )  # fmt: skip


def _dense_layers(keys: ConfigKeys, is_dense: Callable[[int], bool], width: int = 0) -> dict[str, Any]:
    """The layers with an MLP of this width, 0: of `intermediate_size`, instead of experts."""
    dense = tuple(is_dense(layer) for layer in range(keys.size("num_hidden_layers")))
    if not any(dense):
        return {}
    return {"dense_layers": _shortest_pattern(dense), "dense_ffn_size": width or keys.size("intermediate_size")}


def _deepseek_v3(keys: ConfigKeys, name: str) -> ModelSpec:
    keys.must_be("rope_interleave", True, "rotations of halves are not supported for this family")
    return _deepseek(
        keys, name, keys.text("model_type"), first_dense=3, experts=256, shared=1, ffn=2048,
        **_sigmoid_routing(keys, groups=8, kept_groups=4, scale=2.5),
    )  # fmt: skip


def _deepseek_v2(keys: ConfigKeys, name: str) -> ModelSpec:
    if keys.size("moe_layer_freq", default=1) > 1:
        raise ModelFormatError("moe_layer_freq", "is not supported", "leave it out, or give hf:CONFIG")
    groups, method = {}, keys.text("topk_method", default="greedy")
    if method == "group_limited_greedy":
        groups = {"router_groups": keys.size("n_group"), "router_groups_kept": keys.size("topk_group")}
    elif method != "greedy":
        raise ModelFormatError("topk_method", f"{method!r} is not supported", "use greedy or group_limited_greedy")
    return _deepseek(
        keys, name, "deepseek_v2", first_dense=0, experts=64, shared=2, ffn=1407,
        experts_per_token=keys.size("num_experts_per_tok"), normalised_routing=False,
        routing_scale=keys.number("routed_scaling_factor", default=1.0), **groups,
    )  # fmt: skip


def _deepseek(
    keys: ConfigKeys, name: str, family: str, *, first_dense: int, experts: int, shared: int, ffn: int,
    **more: Any,
) -> ModelSpec:  # fmt: skip
    """DeepSeek: latent attention, shared experts, and dense layers first. Its modules for multi-token prediction are not
    counted: Hugging Face's class has none."""
    latent = Latent(
        key_value_rank=keys.size("kv_lora_rank", default=512), rotated=keys.size("qk_rope_head_dim", default=64),
        value_size=keys.size("v_head_dim", default=128),
        # Null and 0, which TOML has instead, mean that there is none; an absent key means the class's default.
        query_rank=0 if keys.has("q_lora_rank") and keys.is_null("q_lora_rank") else keys.count("q_lora_rank", default=1536),
    )  # fmt: skip
    head_dim = keys.size("qk_nope_head_dim", default=128) + latent.rotated
    return _rotary_decoder(
        keys, name, family, kv_heads=None, epsilon=1e-6, exact_head_dim=head_dim, latent=latent, attention_bias=False,
        attention_scale=head_dim**-0.5 * _magnitude(keys) ** 2,
        **_routed_and_shared(keys, first_dense, experts, shared, ffn), **more,
    )  # fmt: skip


def _routed_and_shared(keys: ConfigKeys, first_dense: int, experts: int, shared: int, ffn: int) -> dict[str, Any]:
    """Experts of DeepSeek and GLM, by the defaults of their classes."""
    width, first = keys.size("moe_intermediate_size", default=ffn), keys.count("first_k_dense_replace", default=first_dense)
    return {
        "ffn": width,
        "num_experts": keys.size("n_routed_experts", "num_experts", "num_local_experts", default=experts),
        "shared_expert_size": keys.count("n_shared_experts", default=shared) * width,
        **_dense_layers(keys, lambda layer: layer < first),
    }


def _sigmoid_routing(keys: ConfigKeys, groups: int, kept_groups: int, scale: float) -> dict[str, Any]:
    """Routing of DeepSeek-V3 and GLM, by the defaults of their classes."""
    return {
        "experts_per_token": keys.size("num_experts_per_tok", default=8),
        "sigmoid_routing": True,
        "router_correction": True,
        "router_groups": keys.size("n_group", default=groups),
        "router_groups_kept": keys.size("topk_group", default=kept_groups),
        "normalised_routing": keys.flag("norm_topk_prob", True),
        "routing_scale": keys.number("routed_scaling_factor", default=scale),
    }


def _magnitude(keys: ConfigKeys) -> float:
    """DeepSeek's factor of queries and keys in rotations stretched by YaRN."""
    table = keys.table("rope_parameters") or keys.table("rope_scaling")
    if table is None or not table.given("mscale_all_dim") or table.text("rope_type", "type", default="default") == "default":
        return 1.0
    return yarn_magnitude(table.number("factor"), table.number("mscale_all_dim"))


def _glm4_moe(keys: ConfigKeys, name: str) -> ModelSpec:
    return _rotary_decoder(
        keys, name, "glm4_moe", kv_heads=8, epsilon=1e-5, qkv_bias=keys.flag("attention_bias", False),
        rotary_fraction=0.5,
        head_norm=HeadNorm.HEAD if keys.flag("use_qk_norm", False) else HeadNorm.NONE,
        **_sigmoid_routing(keys, groups=1, kept_groups=1, scale=1.0),
        **_routed_and_shared(keys, 1, 128, 1, 1408),
    )  # fmt: skip


def _llama4(keys: ConfigKeys, name: str) -> ModelSpec:
    """The text model. Its classes do not compute the balance loss that `router_aux_loss_coef` weights."""
    layers, step = keys.size("num_hidden_layers"), keys.size("interleave_moe_layer_step", default=1)
    period = keys.size("no_rope_layer_interval", default=4)
    layer_flags = keys.flags("no_rope_layers", layers) if keys.given("no_rope_layers") else None
    rotated = layer_flags or tuple((layer + 1) % period != 0 for layer in range(layers))
    with_experts = range(step - 1, layers, step) if keys.is_null("moe_layers") else keys.counts("moe_layers")
    dense = _dense_layers(keys, lambda layer: layer not in with_experts, keys.size("intermediate_size_mlp", default=16384))
    windows = _windows(keys, _window(keys, 8192, "attention_chunk_size"), lambda layer: not rotated[layer], "chunked_attention")
    # A number in older files.
    tuned = keys.given("attn_temperature_tuning") or not keys.has("attn_temperature_tuning")
    if tuned and not all(rotated):
        windows |= {
            "query_temperature": keys.number("attn_scale", default=0.1),
            "temperature_span": keys.size("floor_scale", default=8192),
        }
    return _rotary_decoder(
        keys, name, "llama4_text", kv_heads=8, epsilon=1e-5, rope_theta=5e5, head_dim=128, attention_bias=False,
        rotated_layers=() if all(rotated) else _shortest_pattern(rotated),
        head_norm=HeadNorm.ROTATED if keys.flag("use_qk_norm", True) else HeadNorm.NONE,
        chunked_attention=bool(windows.get("sliding_window")), num_experts=keys.size("num_local_experts", default=16),
        experts_per_token=keys.size("num_experts_per_tok", default=1), sigmoid_routing=True, normalised_routing=False,
        weighted_inputs=True, shared_expert_size=keys.size("intermediate_size"), **dense, **windows,
    )  # fmt: skip


def _olmo3(keys: ConfigKeys, name: str) -> ModelSpec:
    windows = _windows(keys, _window(keys, 4096), lambda layer: (layer + 1) % 4 == 0)
    theta = keys.number("rope_theta", default=5e5)
    return _normed_outputs(keys, name, "olmo3", **_rope_by_kind(keys, theta, theta), **windows)


def _normed_outputs(keys: ConfigKeys, name: str, family: str, **more: Any) -> ModelSpec:
    """OLMo: norms of the sub-layers' outputs, and of all queries and of all keys."""
    return _rotary_decoder(
        keys, name, family, kv_heads=None, epsilon=1e-5, attention_bias=False, norm_place=NormPlace.OUTPUT,
        head_norm=HeadNorm.WIDTH, **more,
    )  # fmt: skip


def _gemma3(keys: ConfigKeys, name: str) -> ModelSpec:
    period = keys.size("sliding_window_pattern", default=6)
    windows = _windows(keys, _window(keys, 4096), lambda layer: (layer + 1) % period == 0)
    thetas = keys.number("rope_theta", default=1e6), keys.number("rope_local_base_freq", default=1e4)
    return _gemma(
        keys, name, "gemma3_text", cap=0.0, output_cap=0.0, head_norm=HeadNorm.HEAD, **_rope_by_kind(keys, *thetas), **windows
    )


def _rope_by_kind(keys: ConfigKeys, whole_theta: float, near_theta: float) -> dict[str, Any]:
    """Rotations of whole layers, which alone are scaled, and of those with the window: nested since transformers 5."""
    nested = keys.table("rope_parameters")
    whole, window = (None if nested is None else nested.table(kind) for kind in ("full_attention", "sliding_attention"))
    scaled = whole or keys.table("rope_scaling")
    return {
        "rope_theta": whole_theta if whole is None else whole.number("rope_theta", default=whole_theta),
        "window_rope_theta": near_theta if window is None else window.number("rope_theta", default=near_theta),
        "rope_scaling": None if scaled is None else rope_scaling_of(scaled, keys.size("max_position_embeddings")),
    }


def _gemma(keys: ConfigKeys, name: str, family: str, cap: float, output_cap: float, **more: Any) -> ModelSpec:
    keys.must_be("use_bidirectional_attention", False, "a model whose tokens attend to later ones is not a decoder")
    return _rotary_decoder(
        keys, name, family, kv_heads=4, epsilon=1e-6, head_dim=256, tied=True,
        activation=keys.activation("hidden_activation" if keys.given("hidden_activation") else "hidden_act", "gelu_tanh"),
        attention_bias=False, norm_place=NormPlace.BOTH, zero_centered_norms=True,
        attention_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
        attention_softcap=_softcap(keys, "attn_logit_softcapping", cap),
        output_softcap=_softcap(keys, "final_logit_softcapping", output_cap),
        embedding_scale=keys.size("hidden_size") ** 0.5, **more,
    )  # fmt: skip


def _softcap(keys: ConfigKeys, key: str, default: float) -> float:
    """The limit of scores; an explicit null means none."""
    if not keys.is_null(key):
        return keys.number(key)
    return 0.0 if keys.has(key) else default


def _granite(keys: ConfigKeys, name: str) -> ModelSpec:
    return _rotary_decoder(
        keys, name, "granite", kv_heads=None, epsilon=1e-6, attention_bias=False,
        mlp_bias=keys.flag("mlp_bias", False), attention_scale=keys.number("attention_multiplier", default=1.0),
        embedding_scale=keys.number("embedding_multiplier", default=1.0),
        residual_scale=keys.number("residual_multiplier", default=1.0),
        output_scale=1 / keys.number("logits_scaling", default=1.0),
    )  # fmt: skip


def _smollm3(keys: ConfigKeys, name: str) -> ModelSpec:
    layers = keys.size("num_hidden_layers")
    period = keys.size("no_rope_layer_interval", default=4)
    rotated = keys.flags("no_rope_layers", layers) or tuple((layer + 1) % period != 0 for layer in range(layers))
    window = _window(keys, 0) if keys.flag("use_sliding_window", False) else 0
    windows = _windows(keys, window, lambda layer: rotated[layer])
    return _rotary_decoder(
        keys, name, "smollm3", kv_heads=4, epsilon=1e-6, rope_theta=2e6, tied=True, attention_bias=False,
        mlp_bias=keys.flag("mlp_bias", False), rotated_layers=rotated, **windows,
    )  # fmt: skip


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


def _window(keys: ConfigKeys, default: int, key: str = "sliding_window") -> int:
    """Window length in tokens; an explicit null (or 0) means no window, an absent key means the class's default."""
    if not keys.is_null(key):
        return keys.count(key, default=default)
    return 0 if keys.has(key) else default


def _gpt_oss(keys: ConfigKeys, name: str) -> ModelSpec:
    for key, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if keys.number(key, default=only) != only:
            raise ModelFormatError(key, f"another factor than {only} is not supported", "leave it out, or give hf:CONFIG")
    experts_per_token = keys.size("num_experts_per_tok", default=4)
    longest = keys.size("max_position_embeddings")
    # Where a config.json has no settings of the rotations.
    default_rope = ConfigKeys({
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    })  # fmt: skip
    stated = keys.given("rope_parameters") or keys.given("rope_scaling")
    return _rotary_decoder(
        keys, name, "gpt_oss", kv_heads=8, epsilon=1e-5, rope_theta=150_000.0, head_dim=64, activation=CLAMPED,
        attention_bias=True, mlp_bias=True, router_bias=True, attention_sinks=True,
        num_experts=keys.size("num_local_experts", "num_experts", default=128), experts_per_token=experts_per_token,
        load_balance=_load_balance(keys, experts_per_token),
        rope_scaling=None if stated else rope_scaling_of(default_rope, longest),
        **_windows(keys, _window(keys, 128), lambda layer: layer % 2 == 1),
    )  # fmt: skip


def _late_windows(keys: ConfigKeys) -> dict[str, Any]:
    """Qwen: the layers from `max_window_layers` on have the window."""
    window = _window(keys, 4096) if keys.flag("use_sliding_window", False) else 0
    first = keys.count("max_window_layers", default=28)
    return _windows(keys, window, lambda layer: layer < first)


def _windows(
    keys: ConfigKeys, window: int, is_whole: Callable[[int], bool], window_kind: str = "sliding_attention"
) -> dict[str, Any]:
    """The window, and the layers without it: by `layer_types`, in which `window_kind` is its name, or by `is_whole` if the key
    is absent."""
    layers = keys.size("num_hidden_layers")
    kinds = keys.texts("layer_types", layers)
    unknown = set(kinds or ()) - {"full_attention", window_kind}
    if unknown:
        raise ModelFormatError("layer_types", f"{min(unknown)!r} is not supported", f"use full_attention and {window_kind}")
    whole = tuple(is_whole(layer) if kinds is None else kinds[layer] == "full_attention" for layer in range(layers))
    if not window or all(whole):
        return {}
    return {"sliding_window": window, "whole_layers": _shortest_pattern(whole) if any(whole) else ()}


def _shortest_pattern(layers: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest beginning that repeated gives all layers."""
    lengths = range(1, len(layers) + 1)
    return next(layers[:length] for length in lengths if all(flag == layers[i % length] for i, flag in enumerate(layers)))


def _rotary_decoder(
    keys: ConfigKeys, name: str, family: str, *, kv_heads: int | None, epsilon: float, rope_theta: float = 1e4,
    head_dim: int = 0, exact_head_dim: int = 0, ffn: int = 0, rotary_fraction: float = 1.0, tied: bool = False,
    activation: str = "", attention_bias: bool | None = None, **more: Any,
) -> ModelSpec:  # fmt: skip
    """Llama and similar models.

    Args:
        kv_heads: the class's default if the key is absent; None: the number of heads.
        head_dim: the class's default; 0: the hidden size over the heads.
        ffn: width of the MLP; 0: `intermediate_size`.
        exact_head_dim: the width of a head with latent attention, whatever the keys of heads say; 0: those of the keys.
        rotary_fraction: the class's default.
        tied: the class's default of `tie_word_embeddings`.
        activation: ours; empty: that of `hidden_act`.
        attention_bias: the class's default of `attention_bias`, for queries, keys, values and the output; None: it has none.
    """
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    absent = kv_heads if kv_heads and not keys.has("num_key_value_heads") else heads
    if not exact_head_dim and heads % absent and not keys.has("num_key_value_heads"):
        problem = f"is missing, and the class's default of {absent} does not divide {heads} attention heads"
        raise ModelFormatError("num_key_value_heads", problem, "add it")
    longest = keys.size("max_position_embeddings")
    if attention_bias is not None:
        more["qkv_bias"] = more["attention_output_bias"] = keys.flag("attention_bias", attention_bias)
    return ModelSpec(
        name=name,
        family=family,
        num_layers=keys.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads if exact_head_dim else keys.size("num_key_value_heads", default=absent),
        head_dim=exact_head_dim or (head_dim if head_dim and keys.is_null("head_dim") else _head_dim(keys, hidden, heads)),
        ffn_hidden_size=ffn or keys.size("intermediate_size"),
        vocab_size=keys.size("vocab_size"),
        sequence_length=longest,
        tied_embeddings=keys.flag("tie_word_embeddings", tied),
        norm_epsilon=keys.number("rms_norm_eps", default=epsilon),
        activation=activation or keys.activation("hidden_act", "silu"),
        rope_theta=keys.rope("rope_theta", rope_theta),
        rotary_fraction=keys.rope("partial_rotary_factor", rotary_fraction),
        rope_scaling=more.pop("rope_scaling", None) or read_rope_scaling(keys, longest),
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
        norm_place=NormPlace.INPUT if keys.flag("do_layer_norm_before", True) else NormPlace.SUM,
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
    "llama": lambda keys, name: _rotary_decoder(
        keys, name, "llama", kv_heads=None, epsilon=1e-6, attention_bias=False, mlp_bias=keys.flag("mlp_bias", False)
    ),
    "mistral": lambda keys, name: _rotary_decoder(
        keys, name, "mistral", kv_heads=8, epsilon=1e-6, sliding_window=_window(keys, 4096)
    ),
    "qwen2": lambda keys, name: _rotary_decoder(
        keys, name, "qwen2", kv_heads=32, epsilon=1e-6, qkv_bias=True, **_late_windows(keys)
    ),
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "phi3": lambda keys, name: _rotary_decoder(
        keys, name, "phi3", kv_heads=None, epsilon=1e-5, sliding_window=_window(keys, 0)
    ),
    "olmo2": lambda keys, name: _normed_outputs(keys, name, "olmo2"),
    "olmo3": _olmo3,
    "gemma2": lambda keys, name: _gemma(
        keys, name, "gemma2", cap=50.0, output_cap=30.0, **_windows(keys, _window(keys, 4096), lambda layer: layer % 2 == 1)
    ),
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "smollm3": _smollm3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "llama4_text": _llama4,
}
"""`model_type` of a config.json -> its reader."""


TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2", {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6})),
    "qwen3_vl": ("qwen3", {"rope_theta": 5e5}),
    "qwen3_vl_moe": (
        "qwen3_moe",
        {
            "num_key_value_heads": 16, "head_dim": 128, "moe_intermediate_size": 1408, "num_local_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": True, "rope_theta": 5e5,
        },
    ),
}  # fmt: skip
"""Models of images and text, in old files without `text_config` -> family of the text model, and what its class takes for
absent keys where that family's class takes something else."""


def _display_name(config: Mapping[str, Any], file: Path) -> str:
    """`_name_or_path` if it is set; else the folder's name, or the file's name if that is not config.json."""
    path_name = config.get("_name_or_path")
    if isinstance(path_name, str) and path_name:
        return path_name.rstrip("/").rsplit("/", 1)[-1]
    return file.resolve().parent.name if file.name == "config.json" else file.stem
