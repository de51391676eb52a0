"""The input of a prediction or plan: a model on a cluster under a workload, and the space to choose from."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import RequestError
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.fitting.residuals import EarlierResidual
from autotune.question.assumption import LINKS, Assumption, Origin, Source, assumption
from autotune.question.field import declared_fields, option_name
from autotune.question.question import SIMPLE_TARGETS, PlanningFields, QuestionFields
from autotune.request.engines import capability_of
from executor.detect import local_gpus
from search_spaces.clusters.cards import assumed_figures
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import cluster_preset_named, local_cluster, resolve_cluster, unstated_figures
from search_spaces.knob import Value
from search_spaces.models.command import CommandModel
from search_spaces.models.huggingface import BUILT, is_factory_reference, resolve_model
from search_spaces.models.model import FactoryModel, Model, ModelSpec, Position
from search_spaces.models.module_profile import traced_precision
from search_spaces.placeholders import names_in, stated_batch
from search_spaces.rules.table import illegal
from search_spaces.space import SearchSpace, parse_domain
from search_spaces.spaces import Pin, device_defaults, settled
from search_spaces.training.data_schedule import documents_problem
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SHIPPED = "shipped coefficients; `autotune calibrate` measures this cluster's own"
MODULE_SEQUENCE = 128
"""Tokens per sample of a user's module if none are given: of the batches of `hf:CONFIG`; elsewhere only a unit of rates."""
SMALL_BATCH = 8
"""Least default samples per step."""
WORKLOAD = ("global_batch_size", "sequence_length")
"""Fields of the workload that have defaults."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One model, cluster, workload and engine.

    Raises:
        RequestError: a size is not positive, documents do not fit into samples, or samples exceed the model's positions.
    """

    model: ModelSpec | FactoryModel
    """A user's module has a profile."""
    cluster: ClusterSpec
    engine: str = "native"
    profile: str | None = None
    """The name in `equations.software.PROFILES` of what trains; None: the engine."""
    stated_arguments: Mapping[str, str] | None = None
    """Arguments of Megatron-LM or Transformers that decide what they keep; None: as exported with `simple`, else neither
    trains."""
    global_batch_size: int
    """Samples per optimizer step, over all ranks."""
    sequence_length: int
    """Tokens per sample."""
    space: str = "parallel"
    """A preset's name or the path of a TOML file: the space of a plan."""
    pins: Mapping[str, Pin] = field(default_factory=dict)
    """Knob -> its value or allowed values."""
    simple: str | None = None
    """The framework whose export must express the plan without loss; None: any configuration of the space."""
    nvme_path: str | None = None
    """A folder for states offloaded to files, which need not exist; None: nothing is offloaded to files."""
    training_steps: int | None = None
    """Optimizer steps of the run, over which data schedules are averaged; None: nothing is scheduled."""
    document_lengths: tuple[int, ...] = ()
    """Tokens of each document of a sample of the data; empty: every sample is whole."""
    most_steps: int | None = None
    """Limit on evaluations of the rules, as `SearchSpace.most_steps`."""
    coefficients: Coefficients | None = None
    """Coefficients for this cluster; None: the shipped ones."""
    residuals: tuple[EarlierResidual, ...] = ()
    """Residuals of earlier trials on this cluster relative to `coefficients`."""
    calibration_source: str = SHIPPED
    """The source of the coefficients, in words."""
    assumed: tuple[Assumption, ...] = ()
    """What nobody stated, besides knobs."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Field or pinned knob -> where its value comes from."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "sequence_length", "training_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, f"{value} is not positive", "give at least 1")
        if self.simple is not None and self.simple not in SIMPLE_TARGETS:
            raise RequestError("simple", f"{self.simple!r} is not known", f"use one of {', '.join(SIMPLE_TARGETS)}")
        if (problem := documents_problem(self.document_lengths, self.sequence_length)) is not None:
            raise RequestError("document_lengths", *problem)
        model = self.model
        if isinstance(model, FactoryModel):
            require_described(model, self.sequence_length)
        elif model.position is Position.LEARNED and self.sequence_length > model.sequence_length:
            beyond = f"{self.sequence_length} tokens are beyond the {model.sequence_length} positions that {model.name} learns"
            raise RequestError("sequence_length", beyond, f"give at most {model.sequence_length}")

    @property
    def arguments(self) -> Mapping[str, str] | None:
        """The arguments of `cases_of`: of a program, or of the framework that plans are exported to."""
        exported = {"megatron": {}, "transformers": {"states": "true", "parameter_width": "4", "update": "fused"}}
        return exported.get(self.simple or "") if self.stated_arguments is None else self.stated_arguments

    @property
    def shape(self) -> ModelSpec:
        """The model's shape.

        Raises:
            RequestError: the model is a user's module.
        """
        if isinstance(self.model, FactoryModel):
            raise RequestError("model", f"{self.model.name} is a module, not a shape", "give a preset or a config.json")
        return self.model

    @property
    def workload(self) -> Workload:
        """The workload of every configuration."""
        return Workload(
            global_batch_size=self.global_batch_size,
            sequence_length=self.sequence_length,
            nvme_path=self.nvme_path,
            training_steps=self.training_steps,
            document_lengths=self.document_lengths,
        )

    @property
    def rates(self) -> Coefficients:
        """The coefficients used for predictions."""
        return self.coefficients or rates_for(self.cluster, self.engine)

    @property
    def tokens(self) -> int:
        """Tokens in an optimizer step."""
        return self.global_batch_size * self.sequence_length

    def config(self) -> TrialConfig:
        """Return the configuration given by the pins; other knobs have the device's defaults.

        Raises:
            RequestError: a pin has several values.
            IllegalConfigError: a rule refuses it.
        """
        pinned = single_values(self.pins)
        module = self.model if isinstance(self.model, FactoryModel) else None
        base = device_defaults(self.cluster, capability_of(self.engine), module).replace(pinned)
        space = self.space_around(base)
        base = settled(base, space.context, pinned)
        if refusals := space.check(base):
            raise illegal(refusals[0], pinned, "config")
        return space.canonical(base)

    def space_around(self, config: TrialConfig) -> SearchSpace:
        """The space of one configuration, for its rules and its canonical form."""
        return SearchSpace(
            model=self.model, cluster=self.cluster, workload=self.workload, world_size=self.cluster.world_size, domains={},
            base=config, capability=capability_of(self.engine),
        )  # fmt: skip


def question_about(
    inputs: QuestionFields, model: ModelSpec | FactoryModel, cluster: ClusterSpec, most_steps: int | None = None
) -> Question:
    """What was asked, about the model and the cluster that its words name.

    The one place where a value that nobody stated gets its default: what is known of the origin of values belongs here, beside
    `assumed`.
    """
    capability_of(inputs.engine)
    sizes = {name: getattr(inputs, name) for name in WORKLOAD}
    defaults = dict(zip(WORKLOAD, default_workload(model, cluster, inputs.pins), strict=True))
    unstated = [name for name, value in sizes.items() if value is None]
    workload: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in sizes.items()}
    assumed = (*assumptions(model, cluster, unstated, workload), *_equal_loads(model), *_of_libraries(inputs.simple))
    return Question(
        model=model, cluster=cluster, engine=inputs.engine, **workload, assumed=assumed,
        origins=_origins(inputs, model, assumed), most_steps=most_steps, space=inputs.space, pins=inputs.pins,
        simple=inputs.simple, nvme_path=inputs.nvme_path, training_steps=inputs.training_steps,
        document_lengths=tuple(inputs.document_lengths),
    )  # fmt: skip


def _of_libraries(simple: str | None) -> tuple[Assumption, ...]:
    """What `Question.arguments` takes of Transformers, where no recipe states it."""
    if simple != "transformers":
        return ()
    text = "Transformers 4.57: full-length samples, trained parameters in fp32 outside of DeepSpeed, a fused optimizer"
    return (Assumption(name="stated_arguments", value=simple, stated_by="a recipe: autotune lint", text=text),)


def _origins(inputs: QuestionFields, model: Model, assumed: Sequence[Assumption]) -> Mapping[str, Origin]:
    """Where the values of a question come from; a field that has the default of `PlanningFields` counts as not stated."""
    origins = {
        name: Origin(Source.FRAMEWORK, "default of Autotune")
        if getattr(inputs, name) == default
        else Origin(Source.STATED, option_name(name))
        for name, _, _, default in declared_fields(PlanningFields)
        if name in Question.__dataclass_fields__ and getattr(inputs, name) and name != "pins"
    }
    origins["model"] = Origin(Source.STATED, "MODEL")
    origins["cluster"] = Origin(Source.MEASURED, "this machine") if inputs.cluster in (None, "local", "ray") else Origin(
        Source.STATED, "--cluster"
    )  # fmt: skip
    link = Origin(Source.DERIVED, f"--cluster {inputs.cluster}") if inputs.cluster else origins["cluster"]
    origins |= dict.fromkeys(LINKS, link)
    if isinstance(model, FactoryModel) and inputs.sequence_length is None:
        origins["sequence_length"] = Origin(Source.DERIVED, model.name)
    origins |= {name: Origin(Source.STATED, f"--pin {name}") for name in inputs.pins}
    return origins | {item.name: Origin(Source.ASSUMED, item.stated_by) for item in assumed if item.stated_by}


def question_of(
    model: ModelSpec | FactoryModel, cluster: ClusterSpec, most_steps: int | None = None, **inputs: Any
) -> Question:
    """`question_about` the fields of `PlanningFields` that are given."""
    return question_about(PlanningFields(**inputs), model, cluster, most_steps)


def model_of(text: str | None, lora_rank: int | None, lora_targets: Iterable[str] | None, frozen_bits: int | None) -> ModelSpec:
    """Return the model that `text` names, with low-rank adapters if a rank is given.

    Raises:
        RequestError: it is missing or a factory, or adapter fields are given without a rank.
        SearchSpaceError: it cannot be resolved, or the adapters are invalid.
    """
    if not text:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
    if is_factory_reference(text):
        raise RequestError("model", f"{text} is code, which is not run here", "give a preset or a config.json")
    return with_adapters(resolve_model(text), lora_rank, lora_targets, frozen_bits)


def default_workload(model: Model, cluster: ClusterSpec, pins: Mapping[str, Pin] | None = None) -> tuple[int, int]:
    """The default samples per optimizer step, and tokens per sample, of every sweep, plan and prediction."""
    batch = stated_batch(model) if isinstance(model, CommandModel) else None
    return batch or default_batch(cluster, pins or {}), default_length(model, cluster)


def default_batch(cluster: ClusterSpec, pins: Mapping[str, Pin]) -> int:
    """At least `SMALL_BATCH` samples, and whole micro-batches on every rank."""
    pin = pins.get("micro_batch_size", 1)
    values = parse_domain("micro_batch_size", pin) if isinstance(pin, str) else pin
    sizes = [size for size in (values if isinstance(values, list | tuple) else (values,)) if isinstance(size, int)]
    samples = cluster.world_size * max(sizes, default=1)
    return samples * -(-SMALL_BATCH // samples)


def default_length(model: Model, cluster: ClusterSpec) -> int:
    """128 tokens on CPUs, 4,096 on GPUs, at most those that the model takes; of a user's module those of its batches."""
    if not isinstance(model, ModelSpec):
        profile = model.profile if isinstance(model, FactoryModel) else None
        return (profile.sequence_length if profile else 0) or MODULE_SEQUENCE
    return min(model.sequence_length, 128 if cluster.device.kind == "cpu" else 4096)


def assumptions(
    model: Model, cluster: ClusterSpec, names: Collection[str], workload: Mapping[str, int]
) -> tuple[Assumption, ...]:
    """What was assumed of the workload, the model and the cluster.

    `names`: those of `WORKLOAD` that nobody stated. A user's module has batches of its own length, and a script its own samples
    if its command receives no length.
    """
    most = model.sequence_length if isinstance(model, ModelSpec) else None
    sizes = [
        assumption(name, workload[name], option_name(name), most=most if name == "sequence_length" else None)
        for name in ("sequence_length", "global_batch_size")
        if name in open_sizes(model, names)
    ]
    notes = () if isinstance(model, CommandModel) else model.notes
    of_model = [Assumption(name="model", value=model.name, stated_by="", text=note) for note in notes]
    figures = [
        Assumption(name=item.name, value=item.value, stated_by=item.stated_by, alternatives=item.alternatives, text=item.text)
        for item in assumed_figures(cluster)
    ]
    if any(item.name == "host_memory_bytes" for item in figures):  # named by its cards
        figures.append(_figure(cluster, "cores_per_node"))
    return (*sizes, *figures, *_figures_of_preset(cluster), *of_model)


def open_sizes(model: Model, names: Collection[str]) -> tuple[str, ...]:
    """Those of `names`, of `WORKLOAD`, that the model leaves to the question: a user's module has batches of its own length,
    and a script its own samples if its command receives no length, and its own batch if its command states one."""
    if isinstance(model, CommandModel):
        stated_by_model = {"sequence_length": "sequence_length" not in names_in(model)}
        stated_by_model["global_batch_size"] = stated_batch(model) is not None
    else:
        stated_by_model = {"sequence_length": not isinstance(model, ModelSpec) and not model.reference.startswith(BUILT)}
    return tuple(name for name in names if not stated_by_model.get(name))


_FIGURES = {
    "inter_node_bandwidth": ("{:g} Gbit/s from a machine to the others", 8e-9),
    "host_memory_bytes": ("{:,.0f} GiB of main memory per machine", 2**-30),
    "cores_per_node": ("{:,} processor cores per machine", 1),
}
"""Figure of a cluster -> its text for the figure times a factor."""


def _figure(cluster: ClusterSpec, name: str) -> Assumption:
    """A figure that nobody states; half and twice as much are plausible too."""
    value, (text, factor) = getattr(cluster, name), _FIGURES[name]
    return Assumption(
        name=name, value=value, stated_by="--cluster FILE.toml", alternatives=(value // 2 or 1, value * 2),
        text=text.format(value * factor),
    )  # fmt: skip


def _figures_of_preset(cluster: ClusterSpec) -> list[Assumption]:
    """The figures of a preset that no page states."""
    if (preset := cluster_preset_named(cluster.name.partition(":")[0])) is None or cluster.groups:
        return []
    # A file may describe a cluster with such a name.
    described = resolve_cluster(preset)
    return [
        _figure(cluster, name)
        for name in unstated_figures(preset)
        if (name != "inter_node_bandwidth" or cluster.nodes > 1) and getattr(cluster, name) == getattr(described, name)
    ]


def _equal_loads(model: Model) -> tuple[Assumption, ...]:
    """Predictions take experts to be chosen equally often, unless loads are stated."""
    if not isinstance(model, ModelSpec) or not model.num_experts or model.expert_loads:
        return ()
    text = "each expert is chosen equally often"
    return (Assumption(name="expert_loads", value="equal", stated_by=option_name("expert_loads"), text=text),)


def described_model(
    text: str | None,
    lora_rank: int | None = None,
    lora_targets: Iterable[str] | None = None,
    frozen_bits: int | None = None,
    *,
    sequence_length: int | None = None,
    precisions: Sequence[str] = (),
    device_kind: str = "cpu",
    python_path: Sequence[str] = (),
) -> ModelSpec | FactoryModel:
    """`model_of`, or a user's module (`module:factory`, `hf:CONFIG`), described in a process of its own.

    Args:
        text: the model.
        lora_rank, lora_targets, frozen_bits: see `model_of`; not for modules, whose factory adds its adapters itself.
        sequence_length: tokens per sample of the batches of `hf:CONFIG`; None: `MODULE_SEQUENCE`.
        precisions: precisions of the configurations that will be predicted.
        device_kind: kind of the devices that they are predicted for.
        python_path: folders that the process prepends to `sys.path`.

    Raises:
        RequestError, SearchSpaceError: as `model_of`.
        FactoryError: the module cannot be described.
    """
    if not text or not is_factory_reference(text):
        return model_of(text, lora_rank, lora_targets, frozen_bits)
    for name, value in (("lora_rank", lora_rank), ("lora_targets", lora_targets), ("frozen_bits", frozen_bits)):
        if value:
            raise RequestError(name, f"{text} has its own parameters", "leave it out; the factory adds adapters itself")
    # Only modules need a process with torch.
    from executor.runners.one_process import describe_factory

    workload = Workload(global_batch_size=SMALL_BATCH, sequence_length=sequence_length or MODULE_SEQUENCE)
    traced = dict.fromkeys(traced_precision(precision) for precision in precisions or ("fp32",))
    return describe_factory(text, workload, python_path, tuple(traced), without_data=True, device_kind=device_kind)


def precisions_of(cluster: ClusterSpec, engine: str, pins: Mapping[str, Pin]) -> tuple[str, ...]:
    """The precisions that configurations of a user's module may have: the pinned ones, or the device's default."""
    pin = pins.get("precision")
    if pin is None:
        return (device_defaults(cluster, capability_of(engine)).precision,)
    parsed = parse_domain("precision", pin) if isinstance(pin, str) else pin
    values = parsed if isinstance(parsed, list | tuple) else (parsed,)
    return tuple(str(value) for value in values if str(value) in ("fp64", "fp32", "bf16", "fp16"))


def require_described(model: FactoryModel, sequence_length: int) -> None:
    """Check that predictions for a module are possible at this length.

    Raises:
        RequestError: they are not.
    """
    profile = model.profile
    if profile is None:
        remedy = "measure it by trials (`autotune sweep`)"
        raise RequestError("model", f"{model.name} cannot be predicted: {model.no_profile or 'it has no profile'}", remedy)
    if profile.sequence_length and profile.sequence_length != sequence_length:
        problem = f"{model.name} is described for {profile.sequence_length} tokens, not for {sequence_length}"
        raise RequestError("sequence_length", problem, f"give {profile.sequence_length}, or describe it again")


def with_adapters(
    model: ModelSpec, rank: int | None, targets: Iterable[str] | None = None, frozen_bits: int | None = None
) -> ModelSpec:
    """The model with low-rank adapters and all other parameters frozen; unchanged without a rank.

    Raises:
        RequestError: targets or bits are given without a rank.
        ModelFormatError: the adapters are invalid.
    """
    if not rank:
        for name, value in (("lora_targets", targets), ("frozen_bits", frozen_bits)):
            if value is not None:
                raise RequestError(name, "says how adapters are, and there are none", "give lora_rank too")
        return model
    return dataclasses.replace(
        model,
        lora_rank=rank,
        lora_targets=model.lora_targets if targets is None else tuple(targets),
        frozen_bits=model.frozen_bits if frozen_bits is None else frozen_bits,
    )


def cluster_of(text: str, ranks: int | None, memory_limit_bytes: int | None, live: ClusterSpec | None = None) -> ClusterSpec:
    """The cluster that `text` names; `local` is this machine with its GPUs, if any; `ray` is the cluster found, `live`."""
    gpus = local_gpus() if text == "local" else None
    if gpus is not None:
        return local_cluster(ranks, memory_limit_bytes, gpus.name, gpus.count, gpus.memory_bytes)
    return resolve_cluster(text, ranks, memory_limit_bytes, live)


def single_values(pins: Mapping[str, Pin]) -> dict[str, Value]:
    """The single value of each pin.

    Raises:
        RequestError: a pin has several values.
    """
    values: dict[str, Value] = {}
    for name, pin in pins.items():
        parsed = parse_domain(name, pin) if isinstance(pin, str) else pin
        several = parsed if isinstance(parsed, list | tuple) else (parsed,)
        if len(several) != 1 or isinstance(parsed, str):
            raise RequestError(name, "has several values, and one configuration is predicted", f"write {name}=VALUE")
        values[name] = several[0]
    return values
