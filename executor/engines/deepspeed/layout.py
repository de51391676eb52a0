"""The module that DeepSpeed gets: whole, with a plan for AutoTP, or cut into pipeline stages."""

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
from executor.parallel.model import RankModel, Transformer, build_transformer, whole
from executor.user_module.factory import load_factory
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.models.pipeline import split_layers
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
"""AutoTP's `partition_config` for our Transformer, like DeepSpeed's for Llama. Embeddings and norms stay whole on each rank, as
does the output projection if it is tied to the embedding."""


def whole_module(model: Model, config: TrialConfig, workload: Workload, dtype: torch.dtype) -> tuple[nn.Module, Data]:
    """The whole model on the CPU and its data: the same weights and samples as on every other engine.

    Raises:
        EngineRefusalError: the model has adapters, or is a user's module that the configuration divides.
        FactoryError, DataError: the user's module or text is invalid.
    """
    if isinstance(model, ModelSpec):
        module = _transformer(model, config, workload, dtype, whole(model))
        return module, text_data(workload, model.vocab_size)
    assert isinstance(model, FactoryModel)  # the command engine runs a user's command
    if config.tensor_parallel_size > 1:
        # AutoTP silently accepts the plan of our Transformer, matches nothing, and every rank computes the whole module.
        raise EngineRefusalError(
            "factory-shape", "the plan of a module:factory is not AutoTP's; use tensor_parallel_size=1, or the native engine"
        )
    torch.manual_seed(workload.seed)
    user = load_factory(model.reference, workload)
    checkpoint_blocks(blocks_of(user), config)
    # DeepSpeed's hooks find tensors only in tuples and dicts: with other objects, stage 3 would miss the start of a backward.
    user.module.forward = functools.partial(_loss_only, user.module.forward)
    return user.module.to(dtype), FactoryData(batch=user.batch, workload=workload)


def pipeline_module(
    package: Any, spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, stage: int
) -> tuple[nn.Module, Data]:
    """A PipelineModule whose only real layer on this rank is the rank's stage, and its data.

    The head is the loss function of the last stage, because DeepSpeed passes the labels only to that. Being a module, it is
    still part of the PipelineModule.

    Raises:
        EngineRefusalError: the model has adapters or tied embeddings.
        DataError: the text is invalid.
    """
    if spec.tied_embeddings:
        problem = "the output projection is tied to the embedding, and they are on different ranks"
        raise EngineRefusalError(
            "deepspeed-tied-pipeline", f"{problem}; use a model without tied embeddings, or the native engine"
        )
    layers = split_layers(spec, config, workload.sequence_length)
    last = stage == len(layers) - 1
    part = dataclasses.replace(whole(spec), layers=layers[stage], first=stage == 0, last=last)
    mine = _transformer(spec, config, workload, dtype, part)
    head, mine.head = mine.head, None
    module: nn.Module = package.PipelineModule(
        # One layer per stage; only this rank's is ever used.
        layers=[mine if other == stage else nn.Identity() for other in range(len(layers))],
        num_stages=len(layers),
        loss_fn=head if last else _no_loss,
        partition_method="uniform",
    )
    for parameter in module.parameters():
        # Otherwise the gradient norm at stage 0 would include only the first pipeline stage.
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return module, text_data(workload, spec.vocab_size)


def _loss_only(call: Callable[..., object], *args: Any, **batch: Any) -> Tensor:
    return loss_from(call(*args, **batch))


def _no_loss(_outputs: Tensor, _labels: Tensor) -> Tensor:
    raise RuntimeError("a stage before the last has no loss")


def _transformer(spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, part: RankModel) -> Transformer:
    if spec.adapts:
        raise EngineRefusalError(
            "adapters", "this engine trains every parameter; leave adapters at 0, or give a module:factory"
        )
    module = build_transformer(spec, workload.sequence_length, workload.seed, dtype, config.loss_chunk_size, part)
    checkpoint_blocks(module.layers(), config, draws=False)
    return module
