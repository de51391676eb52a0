"""The frameworks by whose names weights are read and written. Does not import torch, since the command line reads it."""

from enum import StrEnum


class Framework(StrEnum):
    """A framework and its names of a model's weights."""

    HUGGINGFACE = "huggingface"
    """Those of checkpoint files on Hugging Face's hub."""
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    """Megatron-LM's GPTModel with Transformer Engine's layers."""
