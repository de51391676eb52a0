"""Files of weights: kinds of files, and whose weights they are."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.errors import WeightsError
from executor.files.convert import convert_weights, read_weights, write_weights
from executor.files.huggingface_weights import checkpoint_names
from executor.parallel.model import build_transformer
from search_spaces.models.huggingface import model_spec_from_config, resolve_model
from search_spaces.models.model import ModelSpec

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "deepseek_v3": {**DEEPSEEK, "model_type": "deepseek_v3"},
}  # fmt: skip


def spec_of(name: str, modules: int = 0) -> ModelSpec:
    return dataclasses.replace(model_spec_from_config({**SHAPE, **CONFIGS[name]}, "small"), mtp_layers=modules)


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    state = build_transformer(spec, 16, seed=0, dtype=torch.float64).state_dict()
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(value.shape, dtype=value.dtype, generator=generator) for name, value in state.items()}
    if spec.tied_embeddings:
        drawn["head.output.weight"] = drawn["embedding.tokens.weight"]
    return drawn


@pytest.mark.parametrize("name", ["llama, tied", "qwen3_moe", "deepseek_v3"])
def test_a_round_through_all_kinds_of_files_changes_nothing(tmp_path: Path, name: str) -> None:
    spec = spec_of(name, 1 if name == "deepseek_v3" else 0)
    state = checkpoint_names(spec).theirs(spec, weights_of(spec))
    files = [tmp_path / part for part in ("first.pt", "second.bin", "shards", "last.pth")]
    write_weights(files[0], state)
    for source, target in pairwise(files):
        assert convert_weights(spec, source, target) == len(state)
    last = read_weights(files[3])
    assert last.keys() == state.keys() and all(torch.equal(value, last[key]) for key, value in state.items())
    assert (tmp_path / "shards" / ".metadata").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    spec = spec_of("llama")
    state = checkpoint_names(spec).theirs(spec, weights_of(spec))
    write_weights(tmp_path / "whole.pt", {**state, "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(WeightsError, match="weight_scale_inv is not one of its weights"):
        convert_weights(spec, tmp_path / "whole.pt", tmp_path / "made.pt")
    torch.save({"model": state}, tmp_path / "nested.pt")
    with pytest.raises(WeightsError, match="more than tensors by name"):
        read_weights(tmp_path / "nested.pt")
    for path, problem in (("absent.pt", "holds no weights"), ("", "holds no weights"), ("text.txt", "unknown suffix")):
        (tmp_path / "text.txt").write_text("")
        with pytest.raises(WeightsError, match=problem):
            read_weights(tmp_path / path)
    with pytest.raises(WeightsError, match="exists already"):
        write_weights(tmp_path / "whole.pt", state)
    with pytest.raises(WeightsError, match="unknown suffix"):
        write_weights(tmp_path / "made.txt", state)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_files_are_those_that_transformers_writes(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    pytest.importorskip("safetensors", reason="needs the extra transformers")
    config = {**SHAPE, **CONFIGS[name], "pad_token_id": 0}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    theirs.save_pretrained(tmp_path / "hub")
    spec = resolve_model(str(tmp_path / "hub"))
    written = read_weights(tmp_path / "hub")
    ours = checkpoint_names(spec).ours(spec, written)
    assert ours.keys() == weights_of(spec).keys()
    again = checkpoint_names(spec).theirs(spec, ours)
    assert again.keys() == written.keys() and all(torch.equal(value, written[key]) for key, value in again.items())
    write_weights(tmp_path / "made.safetensors", {key: value.contiguous() for key, value in again.items()})
    assert read_weights(tmp_path / "made.safetensors").keys() == written.keys()
