"""Builds Hugging Face models from their config.json, with random weights (`hf:CONFIG`). Needs the extra `transformers`."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.data.batches import BatchFunction, long_text
from executor.errors import FactoryError
from executor.user_module.plan import Style
from search_spaces.models.huggingface import BUILT
from search_spaces.trial import Workload

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MASKED_SHARE = 0.15
"""Fraction of masked tokens [Devlin et al. 2019, BERT, 3.1]; every sample has the same number, so samples weigh equally."""
IGNORED = -100
"""Label of a token that the loss ignores."""


def make_huggingface(reference: str, workload: Workload) -> tuple[nn.Module, BatchFunction]:
    """The model of `hf:FOLDER` or `hf:FOLDER/config.json`, with the adapters of an adapter_config.json in the same folder.

    It is trained on bytes of text, to predict the next byte (`…ForCausalLM`) or masked bytes (`…ForMaskedLM`). For a
    `…ForConditionalGeneration` with a `text_config`, the model is the text tower: batches have no images or sound.

    Raises:
        FactoryError: the file does not exist, a package is missing, or the architecture is not one of these.
        DataError: the text is shorter than one sample.
    """
    file = _find(reference)
    transformers = _import("transformers", reference)
    config = transformers.AutoConfig.from_pretrained(str(file))
    named = (config.architectures or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, named, None)
    text = getattr(config, "text_config", None)
    if text is not None and named.endswith("ForConditionalGeneration"):
        model = _text_tower(transformers, config)
    elif kind is not None and named.endswith(("ForCausalLM", "ForMaskedLM")):
        model = kind.from_config(config) if named.startswith("Auto") else kind._from_config(config)
    else:
        raise FactoryError(
            f"{reference}: architectures {named!r} is not a …ForCausalLM or …ForMaskedLM of transformers "
            f"{transformers.__version__} and has no text_config; write a factory that returns the model and its batches"
        )
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # the cache of keys and values is for generation only
    adapter = file.parent / ADAPTER
    if adapter.is_file():
        model = _with_adapters(model, adapter, reference)
    return model, _Text(workload, (text or config).vocab_size, masked=named.endswith("ForMaskedLM")).draw


def _text_tower(transformers: Any, config: Any) -> Any:
    """The language model of `config.text_config`: its …ForCausalLM, or if there is none, its layers with an added head."""
    if type(config.text_config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_config(config.text_config)
    model = transformers.AutoModel.from_config(config.text_config)
    return _TextTower(model, tied=getattr(config, "tie_word_embeddings", False))


class _TextTower(nn.Module):
    """A text model without a head, such as Qwen2-VL's, as a causal language model."""

    def __init__(self, model: Any, tied: bool) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        table = model.get_input_embeddings()
        self.lm_head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False, dtype=table.weight.dtype)
        if tied:
            self.lm_head.weight = table.weight
        plan = getattr(model, "tp_plan", None) or {}
        self.tp_plan = {**{f"model.{name}": style for name, style in plan.items()}, "lm_head": Style.COLWISE_GATHER.value}

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; `input_ids` and `labels` are [size, tokens]."""
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _Text:
    """Bytes of text as samples of a language model."""

    def __init__(self, workload: Workload, vocab_size: int, masked: bool) -> None:
        self.length, self.vocab_size, self.masked = workload.sequence_length, vocab_size, masked
        self.text = long_text(workload)

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """`input_ids` and `labels` [size, tokens], int64."""
        starts = torch.randint(0, self.text.numel() - self.length, (size, 1), generator=generator)
        tokens = self.text[starts + torch.arange(self.length)].long() % self.vocab_size
        if not self.masked:
            return {"input_ids": tokens, "labels": tokens.clone()}
        count = max(round(MASKED_SHARE * self.length), 1)
        places = torch.rand(size, self.length, generator=generator).argsort(dim=1)[:, :count]
        labels = torch.full_like(tokens, IGNORED).scatter(1, places, tokens.gather(1, places))
        return {"input_ids": tokens.scatter(1, places, 0), "labels": labels}


def _with_adapters(model: nn.Module, file: Path, reference: str) -> nn.Module:
    peft = _import("peft", reference)
    config = peft.PeftConfig.from_pretrained(str(file.parent))
    config.inference_mode = False
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _find(reference: str) -> Path:
    """Path of config.json. A relative path is also searched on `sys.path`, since ranks may run in another folder."""
    path = Path(reference.removeprefix(BUILT)).expanduser()
    for folder in ("", *sys.path):
        file = Path(folder) / path
        file = file / CONFIG if file.is_dir() else file
        if file.is_file():
            return file
    raise FactoryError(f"{reference}: there is no {path}; give hf:FOLDER or hf:FOLDER/config.json of a Hugging Face model")


def _import(package: str, reference: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        remedy = "pip install 'autotune[transformers]'"
        raise FactoryError(f"{reference}: the package {package} is not installed here; {remedy}") from None
