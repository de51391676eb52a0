"""What the search must know of a user's module before the first trial."""

from dataclasses import replace

from executor.data import FactoryData
from executor.engines.native.tensor_plan import tensor_divisor
from executor.user_module.factory import UserModule, load_factory
from executor.user_module.survey import UndividedError, survey
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
    parameters = list(user.module.parameters())
    stages, why = _stages(user, workload)
    return FactoryModel(
        reference=reference,
        parameter_count=sum(parameter.numel() for parameter in parameters),
        frozen_parameter_count=sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        tensor_divisor=tensor_divisor(user),
        pipeline_stages=stages,
        no_stages=why,
    )


def _stages(user: UserModule, workload: Workload) -> tuple[int, str]:
    """The most stages of a pipeline, and where there is but one, why."""
    batch = FactoryData(batch=user.batch, workload=replace(workload, global_batch_size=LEAST_SAMPLES)).global_batch(0)
    try:
        found = survey(user.module, batch, user.plan)
    except UndividedError as error:
        return 1, str(error)
    except Exception as error:
        # A module may run on an accelerator alone. What is wrong with it, its first trial tells.
        first = (str(error).strip().splitlines() or [""])[0]
        return 1, f"it does not run on the CPU ({type(error).__name__}: {first})"
    return len(found.starts), ""
