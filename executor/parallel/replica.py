"""One part of a model on a rank, and the interface of a replica: how data-parallel ranks share a part."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from executor.parallel.initialization import FirstValues, Given


class Replica(ABC):
    """A module on this rank whose state data-parallel ranks keep consistent. Every rank makes the same calls in the same order.

    1. `begin_step`; then for each micro-batch forward, `begin_micro_batch`, backward, `end_micro_batch`; then `end_step`.
       In a pipeline, forwards of other micro-batches may run in between, and gradients may be written without autograd's
       hooks: `gradients_written` is then called before `end_micro_batch`.
    2. `finish_gradients`, after which `squared_norm` and `tied_gradient` are those of the mean gradient, and `update` or
       `skip_update`.

    Losses are scaled before backward, so that sums over micro-batches and ranks are means.
    """

    module: nn.Module
    sharded: bool
    """Whether `squared_norm` covers only this rank's share and must be summed over the sharding ranks."""
    reports_waits = False
    """Whether the clock of the groups (`ParallelGroups.clock`) counts every wait for other ranks."""

    def begin_step(self) -> None:  # noqa: B027  engines override only what they need
        """Call before a step's first micro-batch."""

    @abstractmethod
    def begin_micro_batch(self, last: bool) -> None:
        """Call before a micro-batch's backward (outside a pipeline, before its forward)."""

    def gradients_written(self) -> None:  # noqa: B027
        """Call if gradients were written to `parameter.grad` without hooks."""

    @abstractmethod
    def end_micro_batch(self) -> None:
        """Call after a micro-batch's backward."""

    def end_step(self) -> None:  # noqa: B027
        """Call after a step's last micro-batch."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait for the reductions in flight, and complete the gradients of which tensor-parallel ranks have summands."""

    @abstractmethod
    def tied_gradient(self) -> Tensor | None:
        """This rank's part of the gradient of the tied weight, flat, to be summed in place."""

    @abstractmethod
    def squared_norm(self, counts_tied: bool) -> Tensor:
        """Squared L2 norm of the gradients that no other tensor-parallel rank counts, in at least fp32.

        `counts_tied` off: the rank of the other copy counts the tied weight.
        """

    @abstractmethod
    def update(self, scale: Tensor | None) -> None:
        """Step the optimizer on the gradients, scaled; drop them; update the parameters."""

    @abstractmethod
    def skip_update(self) -> None:
        """Drop the gradients and change nothing else."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether lazily created state exists."""

    @abstractmethod
    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the replica that is live between steps, with its tag."""

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter by name, gathered over data-parallel ranks. Every rank must call it."""

    @abstractmethod
    def close(self) -> None:
        """Remove hooks and free resources. May be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    """A module, and the metadata that its class does not provide."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    """The blocks that are checkpointed, in order."""
    units: Sequence[nn.Module]
    """The modules that stage 3 gathers as units. Every rank calls them in the same order; branches that only some ranks take
    are inside units."""
    outside: frozenset[str] = frozenset()
    """Names of parameters of units that are read outside of them too, and so belong to the model as a whole."""
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
