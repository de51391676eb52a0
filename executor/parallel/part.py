"""One part of a model on a rank, as engines and pipelines see it: ours or the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from executor.parallel.initialization import FirstValues, Given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    """The module, and what its own class does not tell."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    """In order: what is checkpointed."""
    units: Sequence[nn.Module]
    """What every rank calls in the same order and stage 3 gathers together. Branches that only some ranks take lie inside."""
    values: Mapping[str, FirstValues] = field(default_factory=dict)
    """Of the parameters that are on the meta device, by name: who shards the module gives memory to what it keeps alone, and
    fills that. Parameters of a user's own module are whole, on the CPU, and have the values that its code gave them."""
    split: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> the dimension of which tensor-parallel ranks hold slices; one that is not here is whole on each."""
    summands: frozenset[str] = frozenset()
    """Parameters that are whole on each tensor-parallel rank, but get only a summand of their gradient there."""
    experts: frozenset[str] = frozenset()
    """Parameters of experts of which other ranks hold others (`expert_parallel_size`)."""
    tied: frozenset[str] = frozenset()
    """Names of the weight that another stage holds too; empty: none."""
    reads_in_units: bool = False
    """Whether each parameter is read inside of its unit alone, so that stage 3 shards frozen ones, too, and units need no other
    parameters than their own up to date."""
    enters: str = ""
    """Entry of a batch that the first stage of a pipeline gets by position."""
    reads: tuple[str, ...] = ()
    """Entries of a batch that this stage gets by name."""
    stage: int = 0
    """Of the pipeline."""
    entry: Tensor | None = None
    """On the meta device: what `enters` names, for one micro-batch. None: not in a pipeline."""
    hidden: Tensor | None = None
    """On the meta device: what a stage hands to the next, for one micro-batch."""

    def values_of(self, name: str, parameter: Tensor) -> FirstValues:
        """The first values of this rank's slice of a parameter, flat."""
        return self.values[name] if name in self.values else Given(parameter)

    def of_length(self, length: int, whole: int) -> "ModelPart":
        """The part in a pipeline whose samples have `length` tokens in place of `whole` (curriculum)."""
        if length == whole or self.entry is None or self.hidden is None:
            return self
        tokens = self.entry.shape[1] * length // whole, self.hidden.shape[1] * length // whole
        entry = self.entry[:, : tokens[0]].contiguous()
        hidden = self.hidden.detach()[:, : tokens[1]].contiguous().requires_grad_()
        return replace(self, entry=entry, hidden=hidden)
