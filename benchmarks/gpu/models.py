"""Models of the GPU proofs: about a billion parameters, or a tiny model where the proofs are tested on a CPU."""

from typing import Any

from benchmarks.gpu.bundle import ROOT
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload

_SHAPE: dict[str, Any] = {"family": "llama", "tied_embeddings": False}
LARGE = ModelSpec(
    name="llama-1b", num_layers=16, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, head_dim=128,
    ffn_hidden_size=5632, vocab_size=32000, sequence_length=2048, **_SHAPE,
)  # fmt: skip
SMALL = ModelSpec(
    name="llama-0.2m", num_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
    ffn_hidden_size=176, vocab_size=512, sequence_length=64, **_SHAPE,
)  # fmt: skip
SAMPLES = {"large": 8, "small": 4}
"""Samples in a step; the large model's fit into one micro-batch on 80 GB."""
LOSS_CHUNK = {"large": 2048, "small": 64}
"""Tokens whose logits are in memory at once."""


TEXT = ROOT / "docs" / "knobs.md"
"""The same text everywhere; the standard library's differs between versions of Python."""
BACKEND = {"large": "nccl", "small": "gloo"}
"""Backend of dry runs: the large model is for a GPU, wherever its dry run runs; the small one is measured on a CPU."""


def model_of(size: str) -> ModelSpec:
    """The model of `size`: large or small."""
    return LARGE if size == "large" else SMALL


def workload_of(size: str) -> Workload:
    """The workload of the model of that size."""
    return Workload(global_batch_size=SAMPLES[size], sequence_length=model_of(size).sequence_length)
