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
}
"""Family -> the class of its layers, the unit in which FSDP gathers parameters."""
