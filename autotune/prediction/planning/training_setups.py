"""The ways in which people fine-tune a model: method, sharding and recomputation, each with the question that plans it.

Ways of a model's shape are those of Transformers, PEFT, bitsandbytes, DeepSpeed and FSDP (`equations.transformers`); a user's
module is trained as its factory makes it, by the engine of the question.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.errors import RequestError
from autotune.prediction.equations.software import unknown_words
from autotune.prediction.planning.question import Question, single_values, with_adapters
from autotune.question.assumption import Assumption, assumption
from autotune.question.field import option_name
from autotune.question.question import METHODS, PlanningFields
from autotune.request.engines import capability_of
from search_spaces.capability import SpaceContext
from search_spaces.errors import IllegalConfigError
from search_spaces.knob import Value
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.rules.table import check_config, illegal
from search_spaces.spaces import device_defaults
from search_spaces.training.data_schedule import MOST_DOCUMENTS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

ADAPTER_RANK, BATCH = 16, 64
"""Rank of adapters, and least samples per optimizer step, where none are stated."""
ROWS = 16
"""Least number of rows that documents are packed into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What is trained, and in which types."""

    name: str
    """One of `METHODS`; empty: a user's module, as its factory makes it."""
    title: str = ""
    bits: int = 16
    """Of frozen matrices."""
    adapts: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Of `equations.software.Transformers`, besides those that the model and the knobs decide (`library_arguments`)."""
    optimizer: str = "adamw"


WHOLE = {"states": "true", "update": "fused", "parameter_width": "4"}
PREPARED = {**WHOLE, "whole_norms": "true", "whole_tables": "true"}
"""As PEFT prepares quantised models: what is not quantised is in fp32."""
HALF = {**WHOLE, "parameter_width": "2"}
EVERY_METHOD: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name="full", title="full, fp32 masters", arguments=WHOLE),
        Method(name="full-bf16", title="full, all in bf16", arguments=HALF),
        Method(
            name="full-8bit", title="full in bf16, 8-bit AdamW", arguments={**HALF, "moments": "bnb8"}, optimizer="adamw8bit"
        ),
        Method(name="lora", title="LoRA", adapts=True, arguments=WHOLE),
        Method(name="lora-8bit", title="LoRA on 8-bit weights", adapts=True, bits=8, arguments=PREPARED),
        Method(
            name="qlora", title="QLoRA", adapts=True, bits=4,
            arguments={**PREPARED, "double_quantised": "true"},
        ),
    )
}  # fmt: skip
"""Name -> method, in the order of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How the states are divided over ranks, and which of them are in main memory."""

    name: str
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    library: str = ""
    """Word of `equations.software.Transformers.sharding`; empty: as of the stage."""

    @property
    def knobs(self) -> dict[str, Value]:
        """Its knobs and their values."""
        device = {False: "none", True: "cpu"}
        return {
            "zero_stage": self.zero_stage,
            "offload_optimizer": device[self.offload_optimizer],
            "offload_param": device[self.offload_param],
        }


ALONE = Sharding(name="one card")
SHARDINGS = (
    Sharding(name="DDP"),
    Sharding(name="ZeRO-2", zero_stage=2),
    Sharding(name="ZeRO-3", zero_stage=3),
    Sharding(name="FSDP2", zero_stage=3, library="fsdp2"),
)
OFFLOADING = (
    Sharding(name="ZeRO-2, optimizer offloaded", zero_stage=2, offload_optimizer=True),
    Sharding(name="ZeRO-3, all offloaded", zero_stage=3, offload_optimizer=True, offload_param=True),
)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A method, a sharding, and whether activations are recomputed: a row of the table."""

    method: Method
    sharding: Sharding
    recomputes: bool
    question: Question
    """With the method's model and arguments."""
    base: TrialConfig
    """With micro-batches of one sample."""

    @property
    def name(self) -> str:
        """`qlora, one card, recomputed`."""
        recomputed = "recomputed" if self.recomputes else ""
        return ", ".join(filter(None, (self.method.name, self.sharding.name, recomputed)))

    def config(self, micro_batch_size: int) -> TrialConfig:
        """The configuration with such micro-batches."""
        return self.base.replace({"micro_batch_size": micro_batch_size})


def question_fields(inputs: PlanningFields) -> PlanningFields:
    """The fields of the question: Transformers trains a model's shape, and no data are scheduled over the steps of the run."""
    simple = None if is_factory_reference(inputs.model) else "transformers"
    rank = ADAPTER_RANK if inputs.lora_rank is None and inputs.lora_targets else inputs.lora_rank
    return dataclasses.replace(inputs, simple=simple, training_steps=None, lora_rank=rank)


def fine_tuning(question: Question, inputs: PlanningFields, methods: Sequence[str]) -> Question:
    """The question with what nobody stated of a fine-tuning: `BATCH` samples a step, adapters of rank `ADAPTER_RANK`; and with
    what was stated of the libraries.

    Raises:
        RequestError: no library does that.
    """
    assumed = [item for item in question.assumed if item.name not in ("global_batch_size", "stated_arguments")]
    if isinstance(question.model, ModelSpec):
        padded = "padded documents" if inputs.document_lengths else "samples of full length (--document-lengths)"
        samples = "packed samples" if packs(question) else padded
        stated = f"with {', '.join(inputs.libraries)}, else as " if inputs.libraries else ""
        text = (
            f"{stated}Transformers 4.57: 16-bit products, {samples}, its own norms and loss, scaled dot-product attention, no "
            "dropout, a fused optimizer"
        )
        assumed.append(Assumption(name="stated_arguments", value="transformers", stated_by="--library", text=text))
    if inputs.global_batch_size is None:
        ranks = question.cluster.world_size
        batch = -(-BATCH // ranks) * ranks
        question = dataclasses.replace(question, global_batch_size=batch)
        assumed.append(assumption("global_batch_size", batch, option_name("global_batch_size")))
    if isinstance(question.model, ModelSpec):
        question = dataclasses.replace(question, document_lengths=_repeated(question))
    words = {}
    for text in inputs.libraries:
        name, equals, word = text.partition("=")
        if not equals:
            raise RequestError("libraries", f"{text!r} is not NAME=VALUE", "write for example loss=projection")
        words[name.strip()] = word.strip()
    if (problem := unknown_words(words)) is not None:
        raise RequestError("libraries", *problem.split("; "))
    question = dataclasses.replace(question, stated_arguments=words)
    if isinstance(question.model, ModelSpec) and question.cluster.world_size > 1 and "loading" not in words:
        text = (
            "each card loads its shard, as Transformers, Accelerate and torchtune do; a program that first moves the whole "
            "model to each card needs that much at once (loading=whole)"
        )
        assumed.append(Assumption(name="loading", value="shards", stated_by="--library", text=text))
    if inputs.lora_rank is None and any(method.adapts for method in methods_of(question.model, methods)):
        targets = "" if inputs.lora_targets else ", on queries, keys, values and the outputs of attention"
        text, options = f"adapters have rank {ADAPTER_RANK}{targets}", f"--lora-rank{', --lora-targets' if targets else ''}"
        assumed.append(Assumption(name="lora_rank", value=ADAPTER_RANK, stated_by=options, text=text))
    return dataclasses.replace(question, assumed=tuple(assumed))


def packs(question: Question) -> bool:
    """Whether documents are packed into samples: libraries do it unless it is pinned, an own module only if it is."""
    default = bool(question.document_lengths) and isinstance(question.model, ModelSpec)
    return bool(single_values(question.pins).get("pack_sequences", default))


def _repeated(question: Question) -> tuple[int, ...]:
    """The sample of documents so often that the last row, which they hardly fill, counts for little, as in a dataset."""
    lengths = question.document_lengths
    if not lengths:
        return ()
    times = -(-ROWS * question.sequence_length // sum(lengths))
    return lengths * max(min(times, MOST_DOCUMENTS // len(lengths)), 1)


def setups_of(question: Question, methods: Sequence[str] = ()) -> list[TrainingSetup]:
    """Every way that the pins, the rules and the model allow.

    Raises:
        RequestError: a pin has several values.
        IllegalConfigError: they leave none.
    """
    model, pins = question.model, single_values(question.pins)
    shape = model if isinstance(model, ModelSpec) else None
    defaults = device_defaults(question.cluster, capability_of(question.engine), None if shape else model)
    if shape is not None:
        # By default the Trainer neither compiles nor sets torch's allocator. Cards without bf16 train in fp16.
        half = "bf16" if question.cluster.device.supports("bf16") else "fp16"
        defaults = defaults.replace({"compile_blocks": False, "expandable_segments": False, "precision": half})
        defaults = defaults.replace({"pack_sequences": packs(question)})
    base = defaults.replace({"micro_batch_size": 1, **pins})
    words = question.stated_arguments or {}
    alone = question.cluster.world_size == 1
    shardings = (*((ALONE,) if alone else SHARDINGS), *OFFLOADING)
    setups, refusals = [], []
    for method in methods_of(model, methods):
        if base.precision == "fp16" and method.arguments.get("parameter_width") == "2":
            continue  # fp16 is not trained without parameters in fp32
        changed = model
        if shape is not None and method.adapts:
            targets = ("query", "key", "value", "output")
            changed = shape if shape.lora_rank else with_adapters(shape, ADAPTER_RANK, targets)
            changed = dataclasses.replace(changed, frozen_bits=method.bits)
        for sharding in shardings:
            if not _exists(method, sharding, shape):
                continue
            arguments = None
            if shape is not None:
                arguments = {**method.arguments, **({"sharding": sharding.library} if sharding.library else {}), **words}
            of_method = dataclasses.replace(question, model=changed, stated_arguments=arguments)
            for recomputes in (False, True):
                knobs: dict[str, Value] = {**sharding.knobs, "activation_checkpointing": "full" if recomputes else "none"}
                if shape is not None:
                    knobs["optimizer"] = method.optimizer
                if any(pins.get(name, value) != value for name, value in knobs.items()):
                    continue
                setup = TrainingSetup(
                    method=method, sharding=sharding, recomputes=recomputes, question=of_method, base=base.replace(knobs)
                )  # fmt: skip
                refused = check_config(setup.base.replace({"pack_sequences": False}), _context(setup))  # libraries pack all
                refusals += refused
                if not refused:
                    setups.append(setup)
    if setups:
        return setups
    if refusals:
        raise illegal(refusals[0], pins)
    pinned = ", ".join(f"{name}={value}" for name, value in pins.items())
    raise IllegalConfigError("pins", f"no way of training is possible with {pinned}", "pin fewer knobs")


def _exists(method: Method, sharding: Sharding, shape: ModelSpec | None) -> bool:
    """Whether libraries do it, and it is something of its own."""
    if shape is None:
        return not sharding.library
    by_deepspeed = sharding.zero_stage > 0 and not sharding.library
    masters = method.name == "full-bf16" and by_deepspeed  # it keeps fp32 masters of 16-bit parameters, as of `full`
    whole = method.bits == 8 and sharding.zero_stage == 3  # int8 matrices are divided by none of the libraries
    small = method.adapts and sharding.offload_optimizer and not sharding.offload_param  # the states of adapters
    return not (masters or whole or small)


def methods_of(model: ModelSpec | FactoryModel, names: Sequence[str] = ()) -> list[Method]:
    """The methods of that name, by default all that the model leaves open: adapters, if it has some.

    Raises:
        RequestError: a name is not one of `METHODS`, or is not possible with the model.
    """
    for name in names:
        if name not in METHODS:
            raise RequestError("methods", f"{name!r} is not known", f"use some of {', '.join(METHODS)}")
    if isinstance(model, FactoryModel):
        if names:
            raise RequestError("methods", f"{model.name} is trained as its factory makes it", "leave it out")
        return [Method(name="", title="as its factory makes it")]
    has_adapters = model.lora_rank > 0
    possible = [
        method
        for method in EVERY_METHOD.values()
        if (method.adapts or not has_adapters) and (not has_adapters or model.frozen_bits in (16, method.bits))
        and (model.frozen_bits == 16 or (method.adapts and method.bits == model.frozen_bits))
    ]  # fmt: skip
    chosen = [method for method in possible if not names or method.name in names]
    if not chosen:
        available = ", ".join(method.name for method in possible)
        problem = f"{', '.join(names)} is not possible with {model.name} as it is stated"
        raise RequestError("methods", problem, f"use some of {available}, or leave --lora-rank and --frozen-bits out")
    return chosen


def _context(setup: TrainingSetup) -> SpaceContext:
    question = setup.question
    return SpaceContext(
        model=question.model, cluster=question.cluster, workload=step_workload(setup.base, question, question.sequence_length),
        world_size=question.cluster.world_size, capability=capability_of(question.engine),
    )  # fmt: skip


def step_workload(config: TrialConfig, question: Question, tokens: int) -> Workload:
    """A step in which memory is that of any number of micro-batches."""
    replicas = max(config.data_parallel_size(question.cluster.world_size), 1)
    # Two micro-batches per step: gradients are held for accumulation, so that more micro-batches need no more memory.
    return Workload(global_batch_size=2 * config.micro_batch_size * replicas, sequence_length=tokens)
