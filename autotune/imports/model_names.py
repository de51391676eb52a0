"""Finds our preset of a model by the name that another framework gives it."""

import re
from functools import cache

from search_spaces.models.huggingface import model_preset_names, plain_name, resolve_model
from search_spaces.models.model import ModelSpec

SAME_SHAPE = {
    "llama318b": "llama-3-8b", "llama3170b": "llama-3-70b", "llama3370b": "llama-3-70b", "llama3405b": "llama-3.1-405b",
    "deepseekv3671b": "deepseek-v3", "deepseekv31": "deepseek-v3", "deepseekr1": "deepseek-v3",
    "deepseekv316b": "deepseek-v2-lite",
}  # fmt: skip
"""Other names of presets, and models of the same shape."""
FURTHER = re.compile(
    r"(instruct|base|chat|hf|v0\d|pretrain|sft|peft|lora|finetune|config|\d+gpus?|[hab]\d{3}|gb\d{3}|bf16|fp8\w*)*"
)
"""What may follow a model's name in the name of a recipe or of a checkpoint."""


def model_named(text: str) -> ModelSpec | None:
    """The model that a Hugging Face id, a flavour or a recipe's name means; None: no preset has it."""
    words = plain_name(text.rsplit("/", 1)[-1])
    for prefix in ("meta", "nvidia"):
        words = words.removeprefix(prefix)
    names = _names()
    fitting = [name for name in names if words.startswith(name) and FURTHER.fullmatch(words[len(name) :])]
    return resolve_model(names[max(fitting, key=len)]) if fitting else None


@cache
def _names() -> dict[str, str]:
    return {**{plain_name(name): name for name in model_preset_names()}, **SAME_SHAPE}
