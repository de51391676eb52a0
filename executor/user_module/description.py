"""What the search must know of a user's module before the first trial."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from executor.data.batches import FactoryData
from executor.measurement.flop_counter import FlopCounter
from executor.user_module.factory import UserModule, load_factory
from executor.user_module.survey import LARGEST_RUN, UndividedError, loss_of, on_meta, survey
from executor.user_module.tensor_plan import tensor_divisor
from search_spaces.model import FactoryModel
from search_spaces.trial import Workload

LEAST_SAMPLES = 2
"""Of the batch that is looked at: some modules take one sample for none."""


def describe(reference: str, workload: Workload) -> FactoryModel:
    """Build `module:factory` and look at it: its parameters, and where it can be divided.

    Raises:
        FactoryError: the factory does not keep the Protocol, or raises; so does its batch function.
    """
    user = load_factory(reference, workload)
    batch = FactoryData(batch=user.batch, workload=replace(workload, global_batch_size=LEAST_SAMPLES)).global_batch(0)
    parameters = list(user.module.parameters())
    stages, why = _stages(user, batch)
    return FactoryModel(
        reference=reference,
        parameter_count=sum(parameter.numel() for parameter in parameters),
        frozen_parameter_count=sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        tensor_divisor=tensor_divisor(user),
        pipeline_stages=stages,
        no_stages=why,
        flops_per_sample=flops_per_sample(user.module, batch),
    )


def flops_per_sample(module: nn.Module, batch: Mapping[str, Tensor]) -> float | None:
    """FLOPs of a forward and backward of each sample of `batch`; None where they cannot be counted here.

    The module runs on the meta device, where nothing is computed; a small one that cannot runs on the CPU. It stays as it is.
    """
    try:
        return _counted(on_meta(module), {name: value.to("meta") for name, value in batch.items()})
    except Exception:
        # Some modules look at values, which a meta tensor has none of.
        if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_RUN:
            return None
    try:
        return _counted(copy.deepcopy(module), batch)
    except Exception:
        # Some run on an accelerator alone. The first trial reports what is wrong with a module.
        return None


def _counted(module: nn.Module, batch: Mapping[str, Tensor]) -> float | None:
    with FlopCounter() as counter:
        loss = loss_of(module(**batch))
        if loss is None:
            return None
        loss.backward()  # type: ignore[no-untyped-call]
    return counter.total / LEAST_SAMPLES if counter.total else None


def _stages(user: UserModule, batch: Mapping[str, Tensor]) -> tuple[int, str]:
    """The most stages of a pipeline, and where there is but one, why."""
    try:
        found = survey(user.module, batch, user.plan)
    except UndividedError as error:
        return 1, str(error)
    except Exception as error:
        # A module may run on an accelerator alone. What is wrong with it, its first trial tells.
        first = (str(error).strip().splitlines() or [""])[0]
        return 1, f"it does not run on the CPU ({type(error).__name__}: {first})"
    return len(found.starts), ""
