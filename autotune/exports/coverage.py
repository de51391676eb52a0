"""What a format and its target's built-in model can say of a configuration, and what to do about the rest."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from autotune.errors import ExportRefusedError
from autotune.exports.winner import Winner
from autotune.request.engines import CAPABILITIES
from executor.engines.capabilities import COMMAND
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import CLAMPED, HeadNorm, ModelSpec, NormPlace
from search_spaces.models.pipeline import marks_offloading, marks_recomputation
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """A format, and which knobs have a place in it."""

    format: str
    """As it is asked for."""
    name: str
    """As notes call it: `a DeepSpeed configuration`."""
    expressed: frozenset[str]
    """Knobs that have a place in it, or of which the exporter tells itself."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Knobs without a place -> what to do about them, where that is not as the knob's declaration says."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Degrees without which the ranks would do something else -> formats that have a place for them."""

    def require(self, config: TrialConfig) -> None:
        """Refuse a layout that the format cannot say at all.

        Raises:
            ExportRefusedError: a degree of `refused` is not 1.
        """
        for name, alternative in self.refused.items():
            value = getattr(config, name)
            if value != 1:
                problem = f"{self.format} has no place for {name}={value}, without which the ranks would do something else"
                raise ExportRefusedError("format", problem, f"use {alternative}")

    def unexpressed(self, config: TrialConfig) -> list[str]:
        """A line for each knob that is not at its default and has no place here."""
        lines = []
        for name, value in config.differences(TrialConfig()).items():
            if name not in self.expressed:
                remedy = self.elsewhere.get(name) or KNOBS[name].remedy or "it is left out"
                lines.append(f"{name}={value}: not part of {self.name}; {remedy}")
        return lines


def spelled(export: str) -> frozenset[str]:
    """Knobs whose declaration has the words that state them in this export."""
    return frozenset(knob.name for knob in KNOBS.values() if export in knob.exports)


def spelled_words(config: TrialConfig, export: str) -> list[str]:
    """The words of those that are not at their default."""
    changed = config.differences(TrialConfig())
    return [KNOBS[name].exports[export].format(value=value) for name, value in changed.items() if export in KNOBS[name].exports]


def unstated_note(winner: Winner, outcome: str, *names: str) -> list[str]:
    """A line for the hyperparameters that nobody stated, of those that a target has a place for.

    Args:
        winner: what is exported.
        outcome: what becomes of them there.
        names: the target's, as fields of a request.
    """
    missing = winner.hyperparameters.missing(*names)
    options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
    return [f"not stated: {', '.join(missing)}; {outcome} (a sweep takes {options})"] if missing else []


def unplaced_notes(winner: Winner, remedy: str, *names: str) -> list[str]:
    """A line for each stated hyperparameter, of those named, that a target has no place for. `Target.unexpressed` has the
    optimizer where it is not the knob's default."""
    unexpressed = {name for name in winner.config.differences(TrialConfig()) if name == "optimizer"}
    return [
        f"{name}={value}: {remedy}"
        for name, value in winner.hyperparameters.values().items()
        if name in names and name not in unexpressed
    ]


def marks_note(config: TrialConfig, target: str) -> list[str]:
    """What a target that lays out layers alone leaves out of a layout."""
    if not (marks_recomputation(config) or marks_offloading(config)):
        return []
    layout_text = f"pipeline_layout={config.pipeline_layout}: {target} takes its layers"
    return [f"{layout_text}, and computes again (f, s) and offloads (o) on every stage alike: nothing of it is switched on"]


def verified_note(winner: Winner, same: Collection[str]) -> str:
    """Whether the figures were measured in the framework of the export.

    Args:
        winner: what is exported.
        same: engines of ours that run this framework itself.
    """
    if winner.engine == COMMAND:
        return "verified: target, measured in your own script; measure it again in any other program"
    if winner.verified == "target" or winner.engine in same:
        return "verified: target, measured in this framework itself"
    return f"verified: native-only, measured by the engine {winner.engine}; measure it in this framework before you rely on it"


def specific_note(winner: Winner, same: Collection[str]) -> list[str]:
    """What of a configuration that another engine measured is to be tuned in the framework of the export."""
    engine = next((name for name in same if CAPABILITIES[name].specific), None)
    if engine is None or winner.verified == "target" or winner.engine in (*same, COMMAND):
        return []
    knob_list = ", ".join(sorted(CAPABILITIES[engine].specific))
    return [f"tune {knob_list} there: they carry over least (autotune sweep MODEL --from best-config.json --engine {engine})"]


PARTS: Mapping[str, Callable[[ModelSpec], bool]] = {
    "experts": lambda shape: shape.num_experts > 0,
    "a capacity of experts": lambda shape: shape.capacity_factor > 0,
    "a load-balance loss": lambda shape: shape.load_balance > 0,
    "tied embeddings": lambda shape: shape.tied_embeddings,
    "norms after the sub-layers": lambda shape: shape.norm_place is NormPlace.SUM,
    "parallel residuals": lambda shape: shape.parallel_residual,
    "norms of the sub-layers' outputs": lambda shape: shape.norm_place in (NormPlace.OUTPUT, NormPlace.BOTH),
    "norms that multiply by 1 + their weight": lambda shape: shape.zero_centered_norms,
    "norms of queries and keys": lambda shape: shape.head_norm is not HeadNorm.NONE,
    "limits of scores": lambda shape: max(shape.attention_softcap, shape.output_softcap) > 0,
    "sinks of attention": lambda shape: shape.attention_sinks,
    "a bias of the router": lambda shape: shape.router_bias,
    "a gate that is limited": lambda shape: shape.activation == CLAMPED,
    "factors of scores, embeddings, residuals or logits": lambda shape: (
        shape.attention_scale not in (0.0, shape.head_dim**-0.5)
        or not shape.embedding_scale == shape.residual_scale == shape.output_scale == 1
    ),
    "factors of queries by position": lambda shape: shape.query_temperature > 0,
    "layers without rotary positions": lambda shape: not all(shape.rotated_layers),
    "scaled rotary positions": lambda shape: shape.rope_scaling is not None,
    "router weights of which the sum is not 1": lambda shape: shape.num_experts > 0 and not shape.normalised_routing,
    "latent attention": lambda shape: shape.latent is not None,
    "shared experts": lambda shape: shape.shared_expert_size > 0,
    "dense layers beside those with experts": lambda shape: any(shape.dense_layers),
    "weights of experts that are sigmoids": lambda shape: shape.sigmoid_routing,
    "a bias of the choice of experts": lambda shape: shape.router_correction,
    "groups of experts": lambda shape: shape.router_groups > 1,
    "a factor of experts' weights": lambda shape: shape.routing_scale != 1,
    "experts whose weights multiply their inputs": lambda shape: shape.weighted_inputs,
    "a sliding window": lambda shape: shape.sliding_window > 0 and not shape.chunked_attention,
    "attention within chunks": lambda shape: shape.chunked_attention,
    "projected embeddings": lambda shape: shape.embedding_size > 0,
    "adapters": lambda shape: shape.adapts,
}
"""Name of the part in notes -> whether a model has it."""


def lacking(shape: ModelSpec, built_in: Collection[str]) -> list[str]:
    """The model's parts that the target's built-in model lacks."""
    return [part for part, has in PARTS.items() if part not in built_in and has(shape)]
