"""Class names of Transformers models whose shape is known."""

from collections.abc import Mapping

DECODER_LAYERS: Mapping[str, str] = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "gpt2": "GPT2Block",
    "opt": "OPTDecoderLayer",
    "gpt_neox": "GPTNeoXLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "olmo3": "Olmo3DecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "granite": "GraniteDecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
    "llama4_text": "Llama4TextDecoderLayer",
}
"""Family -> the class of its layers, the unit in which FSDP gathers parameters."""


def layer_module(family: str) -> str:
    """The module of transformers that has the class of the family's layers."""
    package = family.removesuffix("_text")
    return f"transformers.models.{package}.modeling_{package}"
