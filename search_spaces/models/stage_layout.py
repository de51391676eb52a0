"""The syntax of `pipeline_layout`: the layers of every stage, and what a stage recomputes and offloads."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from search_spaces.errors import KnobValueError
from search_spaces.knob import Config

KNOB = "pipeline_layout"
SEPARATOR = "-"
"""Between stages. Not a comma, because that separates the values of a pin."""
MARKS = {"s": "selective", "f": "full"}
"""Letter after a stage's layers -> `activation_checkpointing` of its first layers; their number may follow, default all."""
OFFLOADED = "o"
"""Letter of a stage whose whole optimizer state is stored and updated in host memory."""
FORM = "a count of layers for each stage, such as 6-7f3-7s-4o: f recomputes layers fully, s selectively, o offloads"
_STAGE = re.compile(r"([1-9]\d{0,5})(?:([sf])([1-9]\d{0,5})?)?(o)?")
_LETTERS = {policy: letter for letter, policy in MARKS.items()}


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
        mark = _LETTERS.get(self.recompute, "")
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
    own = parse_layout(config.pipeline_layout)[stage]
    return own.recompute, range(own.recomputed)


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
    found = _STAGE.fullmatch(part)
    if found is None:
        raise KnobValueError(KNOB, f"{part!r} in {text!r} is not a stage", f"write {FORM}")
    layers, mark, count, offloaded = found.groups()
    recomputed = int(count or layers) if mark else 0
    if recomputed > int(layers):
        problem = f"{part!r} in {text!r} recomputes {recomputed} layers and has {layers}"
        raise KnobValueError(KNOB, problem, "give at most the stage's layers after f or s")
    return Stage(
        layers=int(layers), recompute=MARKS[mark] if mark else "none", recomputed=recomputed, offloads=offloaded is not None
    )
