"""Describes a user's module for the search, before the first trial."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from executor.batches import FactoryData, map_tensors
from executor.measurement.flop_counter import FlopCounter
from executor.user_module.calls import called_blocks
from executor.user_module.factory import LEAST_SAMPLES, UserModule, load_factory
from executor.user_module.loss_check import loss_traits
from executor.user_module.survey import LARGEST_RUN, Survey, UndividedError, loss_of, on_meta, survey
from executor.user_module.tensor_plan import tensor_divisor
from search_spaces.models.model import FactoryModel
from search_spaces.trial import Workload

PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtype of parameters -> precision."""


def describe(reference: str, workload: Workload) -> FactoryModel:
    """Build `module:factory`, count its parameters and find where it can be divided.

    Raises:
        FactoryError: the factory or its batch function violates the Protocol, or raises.
    """
    user = load_factory(reference, workload)
    data = FactoryData(batch=user.batch, seed=workload.seed)
    batch = data.micro_batch(0, 0, LEAST_SAMPLES)
    traits = loss_traits(user.module, data)  # first, as a run without data may leave its tensors in what the module shares
    return replace(
        described(user, batch)[0],
        flops_per_sample=flops_per_sample(user.module, batch),
        refused_knobs=called_blocks(user, batch).refused_knobs,
        loss_traits=traits,
    )


def described(user: UserModule, batch: Mapping[str, Any]) -> tuple[FactoryModel, Survey | None]:
    """The parameters of a module, which may have no memory, and where it can be divided; `batch`: of a few samples."""
    parameters = list(user.module.parameters())
    module_survey, why = _surveyed(user, batch)
    precision, other_types = _types(parameters)
    model = FactoryModel(
        reference=user.reference,
        parameter_count=sum(parameter.numel() for parameter in parameters),
        frozen_parameter_count=sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        tensor_divisor=tensor_divisor(user),
        pipeline_stages=1 if module_survey is None else len(module_survey.starts),
        no_stages=why,
        precision=precision,
        other_types=other_types,
    )
    return model, module_survey


def _types(parameters: list[nn.Parameter]) -> tuple[str, str]:
    """The precision of the trained parameters, empty if they have several; and the parameters of other types, in a clause."""
    elements = Counter[tuple[str, bool]]()
    for parameter in parameters:
        if parameter.dtype in PRECISIONS:
            elements[PRECISIONS[parameter.dtype], parameter.requires_grad] += parameter.numel()
    trained = {precision for precision, is_trained in elements if is_trained}
    precision = trained.pop() if len(trained) == 1 else ""
    return precision, ", ".join(
        f"{count:,} {'trained' if is_trained else 'frozen'} in {kind}"
        for (kind, is_trained), count in elements.items()
        if kind != precision
    )


def flops_per_sample(module: nn.Module, batch: Mapping[str, Any]) -> float | None:
    """FLOPs of a forward and backward per sample of `batch`; None if they cannot be counted here.

    The module runs on the meta device, where nothing is computed. If that fails and the module is small, it runs on the CPU.
    The module is not changed.
    """
    try:
        return _counted(on_meta(module), map_tensors(batch, lambda value: value.to("meta")))
    except Exception:
        # Some modules read values, which meta tensors do not have.
        if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_RUN:
            return None
    try:
        return _counted(copy.deepcopy(module), batch)
    except Exception:
        # Some modules run only on an accelerator. The first trial reports errors of a module.
        return None


def _counted(module: nn.Module, batch: Mapping[str, Any]) -> float | None:
    with FlopCounter() as counter:
        loss = loss_of(module(**batch))
        if loss is None:
            return None
        loss.backward()  # type: ignore[no-untyped-call]
    return counter.total / LEAST_SAMPLES if counter.total else None


def _surveyed(user: UserModule, batch: Mapping[str, Any]) -> tuple[Survey | None, str]:
    """Where a pipeline can cut the module, or the reason why it cannot."""
    sizes = {len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in batch.values()}
    if len(sizes) != 1 or 0 in sizes:
        return None, "the first dimension of the entries of its batch is not the samples"
    try:
        return survey(user.module, batch, user.plan), ""
    except UndividedError as error:
        return None, str(error)
    except Exception as error:
        # Some modules run only on an accelerator. The first trial reports errors of a module.
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"it does not run on the CPU ({type(error).__name__}: {first})"
