"""Encoders and encoder-decoders at their published sizes, as modules of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import pytest

from executor.dry.module_profile import profile_module
from search_spaces.trial import Workload
from tests.search_spaces.models.test_published import as_published

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
T5 = {"decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bert-base": ("BertForMaskedLM", {}, 0.11),
    "bert-large": ("BertForMaskedLM", LARGE, 0.34),
    "roberta-base": ("RobertaForMaskedLM", ROBERTA, 0.125),
    "roberta-large": ("RobertaForMaskedLM", {**ROBERTA, **LARGE}, 0.355),
    "modernbert-base": ("ModernBertForMaskedLM", {}, 0.149),
    "modernbert-large": (
        "ModernBertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624},
        0.395,
    ),
    "t5-base": ("T5ForConditionalGeneration", {**T5, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, 0.22),
    "t5-large": ("T5ForConditionalGeneration", {**T5, "d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}, 0.77),
    "vit-base": ("ViTForImageClassification", {}, 0.086),
    "vit-huge": (
        "ViTForImageClassification",
        {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14},
        0.632,
    ),
    "whisper-tiny": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
            "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
        },
        0.039,
    ),
    "whisper-large": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
            "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
        },
        1.55,
    ),
}  # fmt: skip
"""Name -> class, what differs from the defaults of its configuration, billions of parameters in its paper or on its card."""


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_has_as_many_parameters_as_its_class_and_as_published(name: str, tmp_path: Path) -> None:
    import torch

    architecture, fields, published = MODELS[name]
    kind = getattr(transformers, architecture)
    config = kind.config_class(**fields, architectures=[architecture])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    profile = profile_module(f"hf:{tmp_path}", Workload(global_batch_size=2, sequence_length=64), ("fp32",)).profile
    assert profile is not None
    counted = profile.frozen + sum(parameter.elements for parameter in profile.trained)
    with torch.device("meta"):
        assert counted == sum(parameter.numel() for parameter in kind(config).parameters())
    assert counted / 1e9 == as_published(published)
