"""Which layers a pipeline stage holds, on which rank a stage is, and the syntax of `pipeline_layout`."""

import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from search_spaces.errors import KnobValueError
from search_spaces.knob import Config
from search_spaces.models.model import FactoryModel, Model, ModelSpec

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
"""Schedules with one stage per rank."""
LOOPED_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
"""Schedules that assign stage i to rank i modulo the number of ranks."""
FOLDED_SCHEDULES = ("zbv", "dualpipev")
"""Schedules that fold the stages into a V, so that the first rank holds the first and the last stage."""
ZERO_BUBBLE_SCHEDULES = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that compute input gradients and weight gradients separately."""


Trained = TypeVar("Trained", bound=Model)


def predicting(model: Trained, config: Config) -> Trained:
    """The model with the configuration's modules for multi-token prediction; unchanged if it has none."""
    if not config.mtp_layers or not isinstance(model, ModelSpec):
        return model
    return dataclasses.replace(model, mtp_layers=config.mtp_layers, mtp_loss_weight=config.mtp_loss_weight)


def losses_wait(config: Config) -> bool:
    """Whether the last stage computes losses of further micro-batches before the backward of the first completes."""
    return config.pipeline_parallel_size > 1 and config.pipeline_schedule not in ("1f1b", "interleaved_1f1b")


def stages_of_rank(config: Config, pipeline_rank: int) -> tuple[int, ...]:
    """The stages on a pipeline rank, in order."""
    ranks, stages = config.pipeline_parallel_size, config.pipeline_parallel_size * config.virtual_stages
    if config.pipeline_schedule in FOLDED_SCHEDULES:
        return (pipeline_rank, stages - 1 - pipeline_rank)
    return tuple(range(pipeline_rank, stages, ranks))


def rank_of_stage(config: Config, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    return next(rank for rank in range(config.pipeline_parallel_size) if stage in stages_of_rank(config, rank))


def split_layers(spec: ModelSpec, config: Config, sequence_length: int) -> tuple[range, ...]:
    """The layers of every stage, at least one each: from `pipeline_layout`, else divided as `pipeline_split` says.

    `pipeline_split` even: as equal as possible, later stages take the remainder. balanced: as equal as possible in FLOPs,
    including the output projection and the modules for multi-token prediction, which are on the last stage in any case.
    Embedding lookups need almost no FLOPs.
    """
    if config.pipeline_layout and config.pipeline_parallel_size > 1:
        return _ranges([stage.layers for stage in parse_layout(config.pipeline_layout)])
    stages = config.pipeline_parallel_size * config.virtual_stages
    costs = [0.0] * stages
    if config.pipeline_split == "balanced":
        costs[-1] = head_in_layers(predicting(spec, config), sequence_length)
    return _ranges(fill(costs, spec.num_layers))


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True))


def split_blocks(config: Config, blocks: int, starts: Sequence[int]) -> tuple[range, ...]:
    """The blocks of every stage of a module with unknown block costs: as equal as the `starts` of stages allow.

    `starts`: blocks before which a stage may begin, ascending, 0 first; at least as many as stages.
    """
    stages = config.pipeline_parallel_size * config.virtual_stages
    cuts = [0]
    for stage in range(1, stages):
        # The start nearest to the even cut, among those that leave at least one for each later stage.
        open_starts = [start for start in starts if start > cuts[-1]]
        reachable = open_starts[: len(open_starts) - (stages - stage - 1)]
        even = blocks * stage / stages
        cuts.append(min((abs(start - even), start) for start in reachable)[1])
    return tuple(range(first, end) for first, end in itertools.pairwise([*cuts, blocks]))


def stages_of_model(model: ModelSpec | FactoryModel, config: Config, sequence_length: int) -> tuple[range, ...]:
    """The layers of every stage of our model, or the blocks of a user's module, which has a profile."""
    if isinstance(model, ModelSpec):
        return split_layers(model, config, sequence_length)
    if model.profile is None:
        raise ValueError(f"{model.name} has no profile, and so no known blocks")
    blocks = len(model.profile.block_names)
    return split_blocks(config, blocks, model.profile.starts or range(blocks))


def head_in_layers(spec: ModelSpec, sequence_length: int) -> float:
    """FLOPs of what follows the layers as a multiple of a layer's [Chowdhery et al. 2022, PaLM, appendix B]: of the output
    projection, and of modules for multi-token prediction."""
    modules = spec.mtp_flops_per_token(sequence_length)
    spec = dataclasses.replace(spec, mtp_layers=0)
    idle = spec.parameter_count - spec.active_parameter_count
    layer = 6.0 * (spec.layer_parameters - idle / spec.num_layers)
    layer += 12.0 * spec.num_attention_heads * spec.head_dim * sequence_length
    return (6.0 * spec.vocab_size * (spec.embedding_size or spec.hidden_size) + modules) / layer


def fill(costs: Sequence[float], layers: int) -> list[int]:
    """Layers of each stage: one each, then each further layer to the stage with the least cost. Optimal for equal layers."""
    heap = [(cost + 1.0, -stage) for stage, cost in enumerate(costs)]
    heapq.heapify(heap)
    counts = [1] * len(costs)
    for _ in range(layers - len(costs)):
        cost, stage = heapq.heappop(heap)
        counts[-stage] += 1
        heapq.heappush(heap, (cost + 1.0, stage))
    return counts


def is_split(layout: str, config: Config, model: Any, sequence_length: int) -> bool:
    """Whether a layout without marks has the same layers in every stage as the configuration's `pipeline_split`."""
    if not isinstance(model, ModelSpec):
        return False
    stages = parse_layout(layout)
    if len(stages) != config.pipeline_parallel_size * config.virtual_stages or len(stages) > model.num_layers:
        return False
    return layout == layout_text(Stage(layers=len(layers)) for layers in split_layers(model, config, sequence_length))


SEPARATOR = "-"
"""Between stages. Not a comma, because that separates the values of a pin."""
MARKS = {"s": "selective", "f": "full"}
"""Letter after a stage's layers -> `activation_checkpointing` of its first layers; their number may follow, default all."""
OFFLOADED = "o"
"""Letter of a stage whose whole optimizer state is stored and updated in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline."""

    layers: int
    recompute: str = "none"
    """`activation_checkpointing` of its first `recomputed` layers."""
    recomputed: int = 0
    """Number of recomputed layers; 0 if and only if nothing is recomputed."""
    offloads: bool = False
    """Whether its optimizer state is in host memory."""

    @property
    def text(self) -> str:
        """Text form, as in the knob."""
        mark = {policy: letter for letter, policy in MARKS.items()}.get(self.recompute, "")
        count = str(self.recomputed) if 0 < self.recomputed < self.layers else ""
        return f"{self.layers}{mark}{count}{OFFLOADED if self.offloads else ''}"


def layout_text(stages: Iterable[Stage]) -> str:
    """The canonical text of a layout, as in the knob."""
    return SEPARATOR.join(stage.text for stage in stages)


@lru_cache(maxsize=4096)
def parse_layout(text: str) -> tuple[Stage, ...]:
    """The stages of a layout, first to last; none if the text is empty.

    Raises:
        KnobValueError: it is not a layout, or a stage recomputes more layers than it has.
    """
    return tuple(_stage(part, text) for part in text.split(SEPARATOR)) if text else ()


def marks_recomputation(config: Config) -> bool:
    """Whether the layout has marks for recomputation: stages without a mark then store all activations."""
    return any(stage.recomputed for stage in parse_layout(config.pipeline_layout))


def marks_offloading(config: Config) -> bool:
    """Whether the layout has marks for offloading optimizer state."""
    return any(stage.offloads for stage in parse_layout(config.pipeline_layout))


def policies(config: Config) -> frozenset[str]:
    """All recomputation policies of the stages: the knob's, or those marked in the layout."""
    if not marks_recomputation(config):
        return frozenset({config.activation_checkpointing})
    return frozenset(stage.recompute for stage in parse_layout(config.pipeline_layout))


def recomputed_layers(config: Config, stage: int, layers: int) -> tuple[str, range]:
    """The policy of a stage with `layers` layers, and its recomputed layers, counted from its first."""
    if not marks_recomputation(config):
        kind = config.activation_checkpointing
        return kind, range(0, 0 if kind == "none" else layers, config.checkpoint_every_k)
    stage_layout = parse_layout(config.pipeline_layout)[stage]
    return stage_layout.recompute, range(stage_layout.recomputed)


def stage_config(config: Config, stage: int) -> Config:
    """The configuration of one stage's optimizer state."""
    if not marks_offloading(config):
        return config
    offloads = parse_layout(config.pipeline_layout)[stage].offloads
    return config.replace({"offload_optimizer": "cpu" if offloads else "none", "offload_ratio": 1.0})


def redundancy(stages: Sequence[Stage]) -> str | None:
    """What all stages do alike, so that another knob expresses it; None: nothing."""
    if len({stage.recompute for stage in stages}) == 1 and all(stage.recomputed == stage.layers for stage in stages):
        return f"recomputes all of its layers (same as activation_checkpointing={stages[0].recompute})"
    if all(stage.offloads for stage in stages):
        return "offloads its optimizer state (same as offload_optimizer=cpu)"
    return None


def _stage(part: str, text: str) -> Stage:
    match = re.fullmatch(r"([1-9]\d{0,5})(?:([sf])([1-9]\d{0,5})?)?(o)?", part)
    knob = "pipeline_layout"
    form = "a count of layers for each stage, such as 6-7f3-7s-4o: f recomputes layers fully, s selectively, o offloads"
    if match is None:
        raise KnobValueError(knob, f"{part!r} in {text!r} is not a stage", f"write {form}")
    layers, mark, count, offloaded = match.groups()
    recomputed = int(count or layers) if mark else 0
    if recomputed > int(layers):
        problem = f"{part!r} in {text!r} recomputes {recomputed} layers and has {layers}"
        raise KnobValueError(knob, problem, "give at most the stage's layers after f or s")
    return Stage(
        layers=int(layers), recompute=MARKS[mark] if mark else "none", recomputed=recomputed, offloads=offloaded is not None
    )
