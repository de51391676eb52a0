"""Weights of a model in files: safetensors, torch's own, and torch.distributed.checkpoint."""

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from executor.errors import WeightsError
from executor.files.huggingface_weights import checkpoint_names
from search_spaces.models.model import ModelSpec

SAFETENSORS, TORCH, SHARDS = ".safetensors", (".pt", ".pth", ".bin"), ".metadata"
KINDS = "name a .safetensors or .pt file, or a folder of .safetensors files or of torch.distributed.checkpoint"


def convert_weights(spec: ModelSpec, source: Path, target: Path) -> int:
    """Write the weights in `source` to `target`, which may be of another kind. Both have Hugging Face's names.

    All weights are in memory at once; values and dtypes stay.

    Returns:
        The number of tensors written.

    Raises:
        WeightsError: a file cannot be read or written, or its weights are not the model's.
    """
    names = checkpoint_names(spec)
    weights = names.theirs(spec, names.ours(spec, read_weights(source)))
    # Views of what was read; files keep each tensor by itself, and tied names get tensors of their own.
    write_weights(target, {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()})
    return len(weights)


def read_weights(source: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder.

    Raises:
        WeightsError: it is not a file or folder of weights.
    """
    if source.is_dir() and (source / SHARDS).exists():
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "weights.pt"
            dcp_to_torch_save(source, whole)
            return _tensors(torch.load(whole, weights_only=True), source)
    files = sorted(source.glob(f"*{SAFETENSORS}")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise WeightsError(f"{source} holds no weights: {KINDS}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def write_weights(target: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors to a .safetensors or .pt file, or without a suffix to a folder of torch.distributed.checkpoint.

    Raises:
        WeightsError: the target exists, or has another suffix.
    """
    if target.exists():
        raise WeightsError(f"{target} exists already: name a new file or folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == SAFETENSORS:
        _safetensors().save_file(dict(state), target)
    elif target.suffix in TORCH:
        torch.save(dict(state), target)
    elif not target.suffix:
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "weights.pt"
            torch.save(dict(state), whole)
            torch_save_to_dcp(whole, target)
    else:
        raise WeightsError(f"{target} has an unknown suffix: {KINDS}")


def _read_file(file: Path) -> dict[str, Tensor]:
    if file.suffix == SAFETENSORS:
        return dict(_safetensors().load_file(file))
    if file.suffix in TORCH:
        return _tensors(torch.load(file, weights_only=True, map_location="cpu"), file)
    raise WeightsError(f"{file} has an unknown suffix: {KINDS}")


def _tensors(state: object, file: Path) -> dict[str, Tensor]:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"{file} holds more than tensors by name: give the weights alone, without the optimizer's state")
    return state


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise WeightsError("safetensors is not installed: pip install safetensors, or name a .pt file") from None
