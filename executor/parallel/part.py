"""One part of a model on a rank, as engines and pipelines use it: of our Transformer or of a user's module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from executor.parallel.initialization import FirstValues, Given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    """A module, and the metadata that its class does not provide."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    """The blocks that are checkpointed, in order."""
    units: Sequence[nn.Module]
    """The modules that stage 3 gathers as units. Every rank calls them in the same order; branches that only some ranks take
    are inside units."""
    values: Mapping[str, FirstValues] = field(default_factory=dict)
    """Initial values of the parameters that are on the meta device, by name: the replica that shards the module allocates and
    fills only what it keeps. Parameters of a user's module are whole, on the CPU, with the values that its code set."""
    split: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> the dimension that is sliced over tensor-parallel ranks (those of `experts` over the ranks that divide each
    expert); omitted parameters are whole on each rank."""
    summands: frozenset[str] = frozenset()
    """Parameters that are whole on each of these ranks, but get only a summand of their gradient there."""
    experts: frozenset[str] = frozenset()
    """Parameters of experts, if experts are divided over other ranks than the rest of the model."""
    tied: frozenset[str] = frozenset()
    """Names of the weight of which another stage holds a copy; empty: none."""
    reads_in_units: bool = False
    """Whether each parameter is read only inside its unit. Then stage 3 also shards frozen ones, and a unit needs only its own
    parameters to be up to date."""
    enters: str = ""
    """Entry of a batch that the first stage of a pipeline gets as positional argument."""
    reads: tuple[str, ...] = ()
    """Entries of a batch that this stage gets as keyword arguments."""
    stage: int = 0
    """Stage of the pipeline."""
    entry: Tensor | None = None
    """The batch entry `enters` of one micro-batch, on the meta device. None: not in a pipeline."""
    hidden: Tensor | None = None
    """The output of a stage for one micro-batch, on the meta device."""

    def values_of(self, name: str, parameter: Tensor) -> FirstValues:
        """The initial values of this rank's slice of a parameter, flat."""
        return self.values[name] if name in self.values else Given(parameter)

    def of_length(self, length: int, whole: int) -> "ModelPart":
        """The part in a pipeline whose samples have `length` tokens instead of `whole` (curriculum)."""
        if length == whole or self.entry is None or self.hidden is None:
            return self
        tokens = self.entry.shape[1] * length // whole, self.hidden.shape[1] * length // whole
        entry = self.entry[:, : tokens[0]].contiguous()
        hidden = self.hidden.detach()[:, : tokens[1]].contiguous().requires_grad_()
        return replace(self, entry=entry, hidden=hidden)
