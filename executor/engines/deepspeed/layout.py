"""The module that DeepSpeed is given: whole, with the plan by which AutoTP divides it, or cut into the stages of a pipeline."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from executor.data.batches import Data, FactoryData, text_data
from executor.engines.session import loss_from
from executor.engines.sources import blocks_of
from executor.errors import EngineRefusalError
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.model import Part, Transformer, build_transformer, whole
from executor.user_module.factory import load_factory
from search_spaces.model import FactoryModel, Model, ModelSpec
from search_spaces.pipeline import split_layers
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TENSOR_PLAN: Mapping[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attention\.(query|key|value)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.(.*\.)?(gate|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.attention\.output\.weight$", r".*\.mlp\.(.*\.)?down\.weight$"], "partition_type": "row"},
        {"patterns": [r"head\.output\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}
"""AutoTP's `partition_config` for our Transformer, as DeepSpeed has it for Llama. Embeddings and norms stay whole on each rank;
so does the output projection where it is the embedding's table."""


def whole_module(model: Model, config: TrialConfig, workload: Workload, dtype: torch.dtype) -> tuple[nn.Module, Data]:
    """The model in one piece on the CPU, and what it is trained on: the weights and samples that every other engine has.

    Raises:
        EngineRefusalError: the model has adapters, or is a user's own and to be divided.
        FactoryError, DataError: the user's module or text cannot be used.
    """
    if isinstance(model, ModelSpec):
        module = _transformer(model, config, workload, dtype, whole(model))
        return module, text_data(workload, model.vocab_size)
    assert isinstance(model, FactoryModel)  # a user's command has an engine of its own
    if config.tensor_parallel_size > 1:
        # AutoTP takes the plan for ours without a word, finds nothing of it, and every rank computes the whole.
        raise EngineRefusalError(
            "factory-shape", "the plan of a module:factory is not AutoTP's; use tensor_parallel_size=1, or the native engine"
        )
    torch.manual_seed(workload.seed)
    user = load_factory(model.reference, workload)
    checkpoint_blocks(blocks_of(user), config)
    # Its hooks find tensors in tuples and dicts: of another object stage 3 would not see that a backward begins.
    user.module.forward = functools.partial(_loss_alone, user.module.forward)
    return user.module.to(dtype), FactoryData(batch=user.batch, workload=workload)


def pipeline_module(
    package: Any, spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, stage: int
) -> tuple[nn.Module, Data]:
    """A PipelineModule with this rank's stage as its only layer here, and what it is trained on.

    The head is the loss function of the last stage, for DeepSpeed hands the labels to that alone. As a module it is part of
    the PipelineModule all the same.

    Raises:
        EngineRefusalError: the model has adapters, or one weight at both ends.
        DataError: the text cannot be used.
    """
    if spec.tied_embeddings:
        problem = "the embedding's table is the output projection too, and they are on different ranks"
        raise EngineRefusalError(
            "deepspeed-tied-pipeline", f"{problem}; use a model without tied embeddings, or the native engine"
        )
    layers = split_layers(spec, config, workload.sequence_length)
    last = stage == len(layers) - 1
    part = dataclasses.replace(whole(spec), layers=layers[stage], first=stage == 0, last=last)
    mine = _transformer(spec, config, workload, dtype, part)
    head, mine.head = mine.head, None
    module: nn.Module = package.PipelineModule(
        # One layer a stage, of which only this rank's is ever used.
        layers=[mine if other == stage else nn.Identity() for other in range(len(layers))],
        num_stages=len(layers),
        loss_fn=head if last else _no_loss,
        partition_method="uniform",
    )
    for parameter in module.parameters():
        # Else the norm of the gradients, at stage 0, would be that of the first stage's alone.
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return module, text_data(workload, spec.vocab_size)


def _loss_alone(call: Callable[..., object], *args: Any, **batch: Any) -> Tensor:
    return loss_from(call(*args, **batch))


def _no_loss(_outputs: Tensor, _labels: Tensor) -> Tensor:
    raise RuntimeError("a stage before the last has no loss")


def _transformer(spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, part: Part) -> Transformer:
    if spec.adapts:
        raise EngineRefusalError(
            "adapters", "this engine trains every parameter; leave adapters at 0, or give a module:factory"
        )
    module = build_transformer(spec, workload.sequence_length, workload.seed, dtype, config.loss_chunk_size, part)
    checkpoint_blocks(module.layers(), config, draws=False)
    return module
