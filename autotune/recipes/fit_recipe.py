"""A recipe of the Trainer, TRL, Axolotl or LLaMA-Factory as fields of `autotune fit`, and the answer as such a recipe."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ExportRefusedError, NothingFeasibleError, RequestError
from autotune.frameworks.export import Export
from autotune.frameworks.fine_tuning import (
    FineTuning,
    accelerate_file,
    axolotl_file,
    deepspeed_file,
    llama_factory_file,
    torchtune_file,
    trl_file,
)
from autotune.frameworks.fine_tuning_scripts import lightning_file, trainer_file
from autotune.frameworks.read import FRAMEWORKS, read_written
from autotune.prediction.planning.fit import Fit, SetupAnswer
from autotune.prediction.planning.question import single_values
from autotune.question.question import PlanningFields
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob_values import value_text
from search_spaces.models.huggingface import known_model
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import FROZEN_BITS, TARGETS
from search_spaces.trial_config import TrialConfig

OF_SETUPS = ("states", "sharding", "parameter_width", "whole_norms", "whole_tables")
"""Words of `Transformers` that a way of `fit` decides itself."""


def fields_of_recipe(path: Path, cluster: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields that the recipe states: the model, the samples, adapters, and what the libraries do; and notes on what was
    not read, or was taken where the recipe does not state it.

    Raises:
        RequestError: it cannot be read, is not of such a program, or names a model that is not known here.
    """
    written = read_written(path)[0]
    framework = FRAMEWORKS.get(written.format)
    if framework is None or framework.memory_arguments is None or written.format not in ("trainer", "axolotl", "llama-factory"):
        problem = f"{path} is no recipe of the Trainer, TRL, Axolotl or LLaMA-Factory"
        raise RequestError("from", problem, "give such a file, or state what you train by options")
    imported = written.read()
    if imported.unreadable is not None:
        raise imported.unreadable
    knobs, words = imported.knobs, framework.memory_arguments(imported.settings) or {}
    fields: dict[str, Any] = {
        "libraries": tuple(f"{name}={value.lower()}" for name, value in words.items() if name not in OF_SETUPS),
        "training_steps": None,
    }
    if imported.model is not None and known_model(imported.model.name) is not None:
        fields["model"] = imported.model.name
    if imported.sequence_length is not None:
        fields["sequence_length"] = imported.sequence_length
    ranks = imported.ranks or (None if cluster in (None, "local", "ray") else resolve_cluster(cluster).world_size)
    if imported.samples_per_rank is not None and ranks is not None:
        fields["global_batch_size"] = imported.samples_per_rank * ranks
    if knobs.get("lora_rank"):
        targets = TARGETS[str(knobs.get("lora_targets", "attention"))]
        fields |= {
            "lora_rank": knobs["lora_rank"],
            "lora_targets": tuple(name for name in targets if "_" not in name),
            "frozen_bits": FROZEN_BITS[str(knobs.get("frozen_dtype", "same"))],
        }
    else:
        half = words.get("parameter_width") == "2"
        of_optimizer = ("full-8bit",) if knobs.get("optimizer") == "adamw8bit" else ("full-bf16",) if half else ("full",)
        fields["methods"] = of_optimizer
    return {name: value for name, value in fields.items() if value is not None}, imported.notes


WRITTEN = frozenset({
    "zero_stage", "offload_optimizer", "offload_param", "activation_checkpointing", "micro_batch_size", "precision",
    "optimizer", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
    "max_live_parameters", "overlap_comm", "contiguous_gradients", "reduce_dtype",
})  # fmt: skip
"""Knobs that a file has: those of the Trainer and of DeepSpeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of fine-tuners, and its files."""

    write: Callable[[FineTuning], Export]
    suffix: str = ".yaml"
    """Of the file's name."""
    command: str = ""
    """What each rank runs, where `{file}` is the file; empty: the user's own program, which reads it."""
    loss: str = ""
    """Its own loss, a word of `equations.software.Transformers.loss`; empty: that of Transformers."""


FORMATS: Mapping[str, Program] = {
    "trl": Program(write=trl_file, command="python -m trl.scripts.sft --config {file}", loss="chunked"),
    "trainer": Program(write=trainer_file, suffix=".py", command="python {file}"),
    "axolotl": Program(write=axolotl_file, command="python -m axolotl.cli.train {file}"),
    "llamafactory": Program(write=llama_factory_file, command="python -m llamafactory.launcher {file}"),
    "torchtune": Program(write=torchtune_file),
    "lightning": Program(write=lightning_file, suffix=".py", command="python {file}"),
    "accelerate": Program(write=accelerate_file),
    "deepspeed": Program(write=deepspeed_file, suffix=".json"),
}
"""Name -> program."""


def fastest_file(result: Fit, inputs: PlanningFields, program: str, dataset: str) -> tuple[SetupAnswer, Export]:
    """The fastest way that a program can train, and its file; a note says so if it is not the fastest that fits.

    Raises:
        NothingFeasibleError: nothing fits.
        RequestError: the model is a user's module, or there is no such program.
        ExportRefusedError: the program can train none of the ways.
    """
    if not result.fitting:
        raise NothingFeasibleError("memory", "nothing fits, so there is no file", "ask without a file to see what would")
    refusals = []
    for answer in result.ranked:
        try:
            exported = file_of(result, inputs, program, dataset, answer, answer.estimate.config)
        except ExportRefusedError as error:
            refusals.append(error)
            continue
        notes = [f"the fastest that fits is {result.ranked[0].setup.name}, but {refusals[0].problem}"] if refusals else []
        return answer, dataclasses.replace(exported, notes=(*notes, *exported.notes))
    raise refusals[0]


def file_of(
    result: Fit,
    inputs: PlanningFields,
    program: str,
    dataset: str,
    answer: SetupAnswer,
    config: TrialConfig,
    measured: str = "",
) -> Export:
    """The file of a program for a way with a configuration; `measured` says what a sweep measured of it.

    Raises:
        RequestError: the model is a user's module, or there is no such program.
        ExportRefusedError: the program cannot train so.
    """
    if not isinstance(result.question.model, ModelSpec):
        raise RequestError("program", f"{result.question.model.name} is your own program's", "leave it out")
    setup = answer.setup
    question = dataclasses.replace(setup.question, global_batch_size=result.question.global_batch_size)
    name = inputs.model or question.shape.name
    run = FineTuning(
        method=setup.method.name, shape=question.shape, model_name=name.removesuffix("/config.json"), config=config,
        cluster=question.cluster, with_fsdp=setup.sharding.library == "fsdp2", workload=question.workload, dataset=dataset,
        epochs=inputs.epochs, steps=inputs.training_steps, measured=measured,
    )  # fmt: skip
    exported = program_of(program).write(run)
    pins = single_values(question.pins).items()
    missing = [f"{name}={value_text(value)}: not in this file; set it yourself" for name, value in pins if name not in WRITTEN]
    return dataclasses.replace(exported, notes=(*exported.notes, *missing))


def with_program(inputs: PlanningFields, name: str) -> PlanningFields:
    """The fields with the loss of the program's present release, if none is stated. Raises as `program_of`."""
    loss = program_of(name).loss
    if not loss or any(text.partition("=")[0].strip() == "loss" for text in inputs.libraries):
        return inputs
    return dataclasses.replace(inputs, libraries=(*inputs.libraries, f"loss={loss}"))


def program_of(name: str) -> Program:
    """The program of that name.

    Raises:
        RequestError: there is none.
    """
    if name not in FORMATS:
        raise RequestError("program", f"{name!r} is not known", f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]
