"""The file of the fastest way that `fit` found, for the program that trains."""

import dataclasses

from autotune.errors import NothingFeasibleError, RequestError
from autotune.frameworks.export import Export
from autotune.frameworks.fine_tuning import FineTuning, fine_tuning_file
from autotune.prediction.planning.fit import Fit
from autotune.prediction.planning.question import single_values
from autotune.question.question import PlanningFields
from search_spaces.knob_values import value_text
from search_spaces.models.model import ModelSpec

WRITTEN = frozenset({
    "zero_stage", "offload_optimizer", "offload_param", "activation_checkpointing", "micro_batch_size", "precision",
    "optimizer", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
    "max_live_parameters", "overlap_comm", "contiguous_gradients", "reduce_dtype",
})  # fmt: skip
"""Knobs that a file has: those of the Trainer and of DeepSpeed."""


def file_of(result: Fit, inputs: PlanningFields, format_name: str, dataset: str) -> Export:
    """The file of a program.

    Raises:
        NothingFeasibleError: nothing fits.
        RequestError: the model is a user's module, or there is no such program.
        ExportRefusedError: as `fine_tuning_file`.
    """
    best = result.fastest
    if best is None:
        raise NothingFeasibleError("memory", "nothing fits, so there is no file", "ask without a file to see what would")
    if not isinstance(result.question.model, ModelSpec):
        raise RequestError("program", f"{result.question.model.name} is your own program's", "leave it out")
    question = dataclasses.replace(best.way.question, global_batch_size=result.question.global_batch_size)
    name = inputs.model or question.shape.name
    run = FineTuning(
        method=best.way.method.name, shape=question.shape, model_name=name.removesuffix("/config.json"),
        config=best.estimate.config, cluster=question.cluster, with_fsdp=best.way.sharding.library == "fsdp2",
        workload=question.workload, dataset=dataset, epochs=inputs.epochs, steps=inputs.training_steps,
    )  # fmt: skip
    exported = fine_tuning_file(format_name, run)
    pins = single_values(question.pins).items()
    missing = [f"{name}={value_text(value)}: not in this file; set it yourself" for name, value in pins if name not in WRITTEN]
    return dataclasses.replace(exported, notes=(*exported.notes, *missing))
