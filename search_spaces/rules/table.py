"""All rules, and checking a configuration against them."""

from collections.abc import Iterable

from search_spaces.capability import ENGINE_HONOURS, HONOURS_REMEDY, Capability, Combination, Rule, SpaceContext
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.errors import IllegalConfigError, Refusal
from search_spaces.models.model import Model
from search_spaces.plugins import PluginGroup, load_plugins
from search_spaces.rules.computation import COMPUTATION_RULES, GRAPH_RULES, KERNEL_RULES
from search_spaces.rules.parallelism import PARALLELISM_RULES, ZERO_RULES
from search_spaces.rules.training import DOCUMENT_RULES, PACKING_RULES, SCHEDULE_RULES, TRAINING_RULES
from search_spaces.trial import Workload
from search_spaces.trial_config import KNOB_NAMES, TrialConfig

HONOURS = Rule(
    ENGINE_HONOURS,
    KNOB_NAMES,
    HONOURS_REMEDY,
    lambda config, context: context.capability.refusal(config) if context.capability else None,
)
"""The only rule that reads every knob; it checks knob by knob (`Capability.honours`)."""

RULES: tuple[Rule, ...] = (
    *PARALLELISM_RULES,
    *ZERO_RULES,
    *COMPUTATION_RULES,
    *TRAINING_RULES,
    *SCHEDULE_RULES,
    *DOCUMENT_RULES,
    *PACKING_RULES,
    *KERNEL_RULES,
    *GRAPH_RULES,
    # Those of plug-ins:
    *(rule for added in load_plugins(PluginGroup.RULES).values() for rule in ((added,) if isinstance(added, Rule) else added)),
    HONOURS,
)
"""The rules of every engine, in the order in which refusals are listed."""
SHAPES = frozenset({
    "world-divides", "tensor-divides", "tensor-head-norms", "batch-divides", "sequence-divides", "pipeline-layers",
    "pipeline-layout", "virtual-stages", "pipeline-micro-batches", "experts-divide", "expert-slices", "expert-tokens",
    "experts-context", "hsdp-shards", "secondary-shards", "ulysses-heads", "attention-window", "curriculum-divides",
})  # fmt: skip
"""Divisibility rules of model, data and ranks. Ignoring one would train a smaller model or batch."""


def check_config(config: TrialConfig, context: SpaceContext) -> list[Refusal]:
    """Every rule that refuses the configuration, in the order of `rules_of`; empty: it is legal."""
    messages = ((rule, rule.check(config, context)) for rule in rules_of(context.capability))
    return [Refusal(rule.name, message, rule.remedy) for rule, message in messages if message is not None]


def illegal(refusal: Refusal, pins: Iterable[str], field: str = "pins") -> IllegalConfigError:
    """The error of a refused configuration in which these knobs are pinned, by this field of the request."""
    read = {rule.name: rule.reads for rule in RULES}.get(refusal.rule, ())
    fields = (f"{field}.{name}" for name in pins if name in read)
    return IllegalConfigError(refusal.rule, refusal.message, refusal.remedy, fields)


def check_shapes(config: TrialConfig, model: Model, workload: Workload, world_size: int) -> list[Refusal]:
    """Like `check_config`, but only the rules of `SHAPES`: for an engine, which knows its ranks but not the cluster."""
    device = DeviceSpec(name="any", kind="cpu", memory_bytes=1, peak_flops={})
    cluster = ClusterSpec(
        name="any", nodes=1, devices_per_node=world_size, device=device, intra_node_bandwidth=1, inter_node_bandwidth=1,
        host_memory_bytes=1, cores_per_node=1,
    )  # fmt: skip
    context = SpaceContext(model=model, cluster=cluster, workload=workload, world_size=world_size)
    return [refusal for refusal in check_config(config, context) if refusal.rule in SHAPES]


def rules_of(capability: Capability | None) -> tuple[Rule, ...]:
    """RULES, and one rule for each combination that the engine refuses; None: any engine, so only RULES."""
    return RULES if capability is None else (*RULES, *map(_combination_rule, capability.combinations))


def _combination_rule(combination: Combination) -> Rule:
    def check(config: TrialConfig, context: SpaceContext) -> str | None:
        return combination.problem if combination.holds(config, context.world_size) else None

    return Rule(combination.rule, combination.reads, combination.remedy, check)
