"""Builds Hugging Face models from their config.json, with random weights (`hf:CONFIG`). Needs the extra `transformers`."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.batches import BatchFunction, long_text
from executor.errors import FactoryError, one_line
from executor.user_module.plan import Style
from search_spaces.models.huggingface import BUILT
from search_spaces.trial import Workload

CONFIG, ADAPTER, QUANTISATION = "config.json", "adapter_config.json", "quantization_config"
IGNORED = -100
"""Label of a token that the loss ignores."""


def make_huggingface(reference: str, workload: Workload) -> tuple[nn.Module, BatchFunction]:
    """The model of `hf:FOLDER` or `hf:FOLDER/config.json`, with the adapters of an adapter_config.json in the same folder.

    It is trained on bytes of text: to predict the next byte (`…ForCausalLM`), masked bytes (`…ForMaskedLM`), the same text from
    the text or from noise as sound (`…ForConditionalGeneration`), or classes (`…ForSequenceClassification`,
    `…ForTokenClassification`); or on noise as images (`…ForImageClassification`). For a `…ForConditionalGeneration` with a
    `text_config`, the model is the text tower: batches have no images or sound. A model without a head (`BertModel`) gets the
    head that transformers has for its family. Code that a config.json names (`auto_map`) is never run. The random weights are
    quantised as its `quantization_config` says.

    Raises:
        FactoryError: the file does not exist, a package is missing, the architecture is not one of these, or transformers
            cannot quantise weights so here.
        DataError: the text is shorter than one sample.
    """
    file = _find(reference)
    transformers = _import("transformers", reference)
    config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    architecture = _architecture(transformers, config)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False  # the cache of keys and values is for generation only; a decoder copies the config
    quantisation = config.__dict__.pop(QUANTISATION, None)  # with it in place, transformers would expect quantised weights
    kind = getattr(transformers, architecture, None)
    text = getattr(config, "text_config", None)
    task = next((task for task in _BATCHES if architecture.endswith(task)), None)
    if text is not None and architecture.endswith("ForConditionalGeneration"):
        model, task = _text_tower(transformers, config), "ForCausalLM"
    elif kind is not None and task is not None:
        model = kind.from_config(config) if architecture.startswith("Auto") else kind._from_config(config)
    else:
        raise FactoryError(
            f"{reference}: architectures {architecture!r} is not a {', '.join(f'…{task}' for task in _BATCHES)} of "
            f"transformers {transformers.__version__} and has no text_config; write a factory that returns the model and its "
            "batches"
        )
    if quantisation is not None:
        model = _quantised(transformers, model, quantisation, reference)
    adapter = file.parent / ADAPTER
    if adapter.is_file():
        model = _with_adapters(model, adapter, reference)
    return model, _BATCHES[task](workload, text or config, reference).draw


def _architecture(transformers: Any, config: Any) -> str:
    """The class of the model; for one without a head the first class with a head that its family has."""
    architecture = (config.architectures or ["AutoModelForCausalLM"])[0]
    if not architecture.endswith(("Model", "EncoderModel")) or architecture.startswith("Auto"):
        return str(architecture)
    for mapping in ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION"):
        head_class = getattr(transformers, f"MODEL_FOR_{mapping}_MAPPING", {}).get(type(config), None)
        if head_class is not None:
            return str((head_class[0] if isinstance(head_class, tuple | list) else head_class).__name__)
    return str(architecture)


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
    """Bytes of text as samples of a language model, from left to right or from text to text."""

    def __init__(self, workload: Workload, config: Any, reference: str) -> None:
        self.length, self.config, self.reference = workload.sequence_length, config, reference
        self.text = long_text(workload)

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """`input_ids` and `labels` [size, tokens], int64."""
        tokens = self._tokens(size, self.length, generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    def _tokens(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(0, self.text.numel() - length, (size, 1), generator=generator)
        tokens: Tensor = self.text[starts + torch.arange(length)].long() % self._size("vocab_size")
        return tokens

    def _size(self, *names: str) -> int:
        """The first of these sizes that the config has."""
        for name in names:
            value = getattr(self.config, name, None)
            value = value[0] if isinstance(value, list | tuple) else value
            if isinstance(value, int):
                return value
        raise FactoryError(f"{self.reference}: its config has no {' or '.join(names)}; write a factory that makes its batches")


class _Masked(_Text):
    """Bytes of text, some of which are masked."""

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        tokens = self._tokens(size, self.length, generator)
        # 15% [Devlin et al. 2019, BERT, 3.1]; every sample has the same number of masked tokens, so samples weigh equally.
        count = max(round(0.15 * self.length), 1)
        places = torch.rand(size, self.length, generator=generator).argsort(dim=1)[:, :count]
        labels = torch.full_like(tokens, IGNORED).scatter(1, places, tokens.gather(1, places))
        return {"input_ids": tokens.scatter(1, places, 0), "labels": labels}


class _Classes(_Text):
    """Bytes of text with a class for each sample."""

    per_token = False

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        shape = (size, self.length) if self.per_token else (size,)
        labels = torch.randint(0, self._size("num_labels"), shape, generator=generator)
        return {"input_ids": self._tokens(size, self.length, generator), "labels": labels}


class _TokenClasses(_Classes):
    """Bytes of text with a class for each token."""

    per_token = True


class _Images(_Text):
    """Noise as images, with a class for each."""

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """`pixel_values` [size, channels, height, width], fp32; `labels` [size], int64."""
        side, channels = self._size("image_size"), self._size("num_channels")
        pixels = torch.randn(size, channels, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, self._size("num_labels"), (size,), generator=generator)}


class _TextOrSound(_Text):
    """Text to the same text; for a model of sound, noise to text."""

    def draw(self, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """`input_features` [size, mel bins, frames] fp32, and `labels` [size, tokens] int64; or as `_Text`."""
        if not hasattr(self.config, "num_mel_bins"):
            return super().draw(size, generator)
        frames = 2 * self._size("max_source_positions")
        length = min(self.length, self._size("max_target_positions"))
        sound = torch.randn(size, self._size("num_mel_bins"), frames, generator=generator)
        return {"input_features": sound, "labels": self._tokens(size, length, generator)}


_BATCHES: Mapping[str, type[_Text]] = {
    "ForCausalLM": _Text,
    "LMHeadModel": _Text,
    "ForMaskedLM": _Masked,
    "ForConditionalGeneration": _TextOrSound,
    "ForSequenceClassification": _Classes,
    "ForTokenClassification": _TokenClasses,
    "ForImageClassification": _Images,
}
"""End of an architecture's name -> its batches."""


def _quantised(transformers: Any, model: Any, settings: Any, reference: str) -> nn.Module:
    """The model with its weights quantised as transformers quantises those that it loads, in host memory."""
    stated = settings if isinstance(settings, dict) else settings.to_dict()
    transformers.utils.logging.disable_progress_bar()
    try:
        quantised: nn.Module = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), device_map={"": "cpu"},
            quantization_config=transformers.quantizers.AutoQuantizationConfig.from_dict(stated),
        )  # fmt: skip
    except Exception as error:
        problem = f"{QUANTISATION} ({stated.get('quant_method')}) of its {CONFIG} cannot be applied to random weights here"
        remedy = f"install what it asks for, or remove {QUANTISATION} to train without it"
        raise FactoryError(f"{reference}: {problem} ({one_line(error)}); {remedy}") from None
    return quantised.train()


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
        remedy = "pip install 'autotune-parallel[transformers]'"
        raise FactoryError(f"{reference}: the package {package} is not installed here; {remedy}") from None
