"""What each export consists of: the text and its notes, the knobs that a format has a place for, and how checkpoints load."""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autotune.errors import ExportRefusedError
from autotune.frameworks.best_config import Winner
from autotune.request.engines import CAPABILITIES
from executor.engines.capabilities import COMMAND
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import CLAMPED, HeadNorm, ModelSpec, NormPlace
from search_spaces.models.pipeline import marks_offloading, marks_recomputation
from search_spaces.trial_config import TrialConfig

OTHER_FORMATS = {
    "pipeline_parallel_size": "torch, torchtitan, megatron or deepspeed",
    "context_parallel_size": "accelerate-fsdp, torchtitan or megatron",
    "expert_parallel_size": "megatron",
}
"""Degree -> formats that have a place for it: `ExportTarget.refused` of targets without any of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """A format, and which knobs have a place in it."""

    format: str
    """As it is asked for."""
    name: str
    """As notes call it: `a DeepSpeed configuration`."""
    expressed: frozenset[str]
    """Knobs that have a place in it, or for which the exporter reports losses itself."""
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
    if winner.verified == "predicted":
        return "verified: no, predicted and not measured anywhere; measure it in this framework before you rely on it"
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


class Checkpoints(StrEnum):
    """The library that writes and reads the checkpoints."""

    DEEPSPEED = "deepspeed"
    """`engine.save_checkpoint`: a file for each rank's share of the optimizer state."""
    DISTRIBUTED = "distributed"
    """torch.distributed.checkpoint: shards by parameter name, resharded on loading."""
    TRAINER = "trainer"
    """Transformers' Trainer: the weights separately, the optimizer state as DeepSpeed or torch writes it."""
    MEGATRON = "megatron"
    """Megatron-LM's formats, `torch_dist` by default."""


LAYOUT = (
    "zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "virtual_stages", "pipeline_schedule", "pipeline_split",
    "expert_parallel_size", "expert_tensor_parallel_size", "hsdp_shard_size", "pipeline_layout",
)  # fmt: skip
"""Knobs that decide which rank holds which part of the model states."""


def checkpoint_note(winner: Winner, kind: Checkpoints) -> str:
    """One line: whether the checkpoints load unchanged, or which tool converts them."""
    before, after = winner.baseline, winner.config
    if before is None:
        return "checkpoints: no baseline was measured, so that it is not known whether its checkpoints load"
    changes = layout_changes(before, after, winner.world_size)
    if not changes:
        return "checkpoints: those of the baseline load unchanged, every rank holds what it held"
    return f"checkpoints: {', '.join(changes)}: {_HOW[kind](before, after)}"


def layout_changes(before: TrialConfig, after: TrialConfig, world_size: int) -> list[str]:
    """`zero_stage 0 -> 3` for each changed property that decides what a rank holds."""
    changes = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in LAYOUT
        # Of schedules, only the assignment of stages to ranks matters.
        if (_folded(before) != _folded(after) if name == "pipeline_schedule" else getattr(before, name) != getattr(after, name))
    ]
    ranks = before.zero_ranks(world_size), after.zero_ranks(world_size)
    sharded = max(before.zero_stage, after.zero_stage) > 0
    if sharded and ranks[0] != ranks[1]:
        changes.append(f"ranks that divide the states {ranks[0]} -> {ranks[1]}")
    return changes


def _folded(config: TrialConfig) -> bool:
    return config.pipeline_parallel_size > 1 and config.pipeline_schedule in ("zbv", "dualpipev")


def _distributed(before: TrialConfig, _: TrialConfig) -> str:
    loads = "torch.distributed.checkpoint loads them unchanged, it divides them anew by the names of the parameters"
    converts = "`python -m torch.distributed.checkpoint.format_utils torch_to_dcp FROM TO`"
    return f"{loads}; what torch.save wrote is converted by {converts}" if before.zero_stage == 0 else loads


def _deepspeed(before: TrialConfig, after: TrialConfig) -> str:
    if before.zero_stage == 0:
        return (
            "stage 0 keeps the optimizer state in one piece that no tool divides; load the weights of "
            "mp_rank_00_model_states.pt into the module before deepspeed.initialize, and begin with a new optimizer state"
        )
    if after.zero_stage == 0:
        return "`zero_to_fp32.py CHECKPOINT WEIGHTS` puts the weights together; the optimizer state begins anew"
    return (
        "convert them by `ds_to_universal.py --input_folder CHECKPOINT --output_folder UNIVERSAL` (deepspeed/checkpoint), "
        'and load them with "checkpoint": {"load_universal": true}'
    )


def _trainer(before: TrialConfig, after: TrialConfig) -> str:
    weights = "the weights (model.safetensors) load under any layout"
    if before.zero_stage == 0 or after.zero_stage == 0:
        return f"{weights}; the optimizer state begins anew"
    return f"{weights}; for the optimizer state {_deepspeed(before, after)}"


def _megatron(before: TrialConfig, after: TrialConfig) -> str:
    tp, pp = after.tensor_parallel_size, after.pipeline_parallel_size
    if (before.zero_stage >= 2) != (after.zero_stage >= 2):
        return "Megatron-FSDP has a format of its own, fsdp_dtensor: convert them by tools/checkpoint/checkpoint_inspector.py"
    return (
        "--ckpt-format torch_dist loads them unchanged, the optimizer state where --dist-ckpt-optim-fully-reshardable saved "
        "it; those of --ckpt-format torch are converted by `tools/checkpoint/convert.py --model-type GPT --loader core "
        f"--saver core --target-tensor-parallel-size {tp} --target-pipeline-parallel-size {pp}`"
    )


_HOW = {
    Checkpoints.DISTRIBUTED: _distributed,
    Checkpoints.DEEPSPEED: _deepspeed,
    Checkpoints.TRAINER: _trainer,
    Checkpoints.MEGATRON: _megatron,
}


STARTED_BY = "start it by: "
"""Begins the note with the command, in which FILE stands for the export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration in another framework's format."""

    text: str
    """The file's content."""
    notes: tuple[str, ...] = ()
    """One line each: what the format cannot express or its framework does not do, then how checkpoints load, then whether the
    figures were measured in that framework."""

    def named(self, path: Path | None) -> "Export":
        """With the file's own name in the command that starts it; None: it is written to no file."""
        if path is None:
            return self

        def named(text: str) -> str:
            return re.sub(f"({STARTED_BY}.*?) FILE\\b", lambda found: f"{found[1]} {shlex.quote(str(path))}", text)

        return Export(text=named(self.text), notes=tuple(map(named, self.notes)))


def remarks(
    winner: Winner, notes: Iterable[str], checkpoints: Checkpoints | None, same: Collection[str] = ()
) -> tuple[str, ...]:
    """Assemble the notes of an export.

    Args:
        winner: the exported configuration.
        notes: what the format cannot express.
        checkpoints: the library that writes them; None: the export does not affect checkpoints.
        same: our engines that run the export's framework itself.
    """
    checkpoint_notes = [] if checkpoints is None else [checkpoint_note(winner, checkpoints)]
    size_notes = [] if winner.answer_for is None else [
        f"written for the {winner.world_size} ranks that were measured; the answer for {winner.answer_for} is extrapolated"
    ]  # fmt: skip
    return (*notes, *size_notes, *checkpoint_notes, *specific_note(winner, same), verified_note(winner, same))


def header(winner: Winner, title: str, notes: Sequence[str]) -> str:
    """The comment lines at the top of a file: its kind, its job, and the notes."""
    of = f" (job {winner.job})" if winner.job else ""
    lines = [f"{title}: the best configuration that Autotune found{of}.", *notes]
    return "".join(f"# {line}\n" for line in lines)


def python_text(value: object, indent: str = "") -> str:
    """The value as an expression: mappings on several lines, text in double quotes."""
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = indent + "    "
        lines = "".join(f"{inner}{python_text(name)}: {python_text(item, inner)},\n" for name, item in value.items())
        return f"{{\n{lines}{indent}}}"
    if isinstance(value, tuple) and value:
        return f"({', '.join(python_text(item) for item in value)}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def yaml_text(content: Mapping[str, object]) -> str:
    """The tables as YAML, keys in their order."""
    return "".join(_lines(content, ""))


def _lines(content: Mapping[str, object], indent: str) -> list[str]:
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:\n", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return lines


def _scalar(value: object) -> str:
    # Words that YAML does not read as text.
    special = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in special:
        return value
    text = json.dumps(value)
    # YAML 1.1, as PyYAML reads it, has no number `2e-05`.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text
