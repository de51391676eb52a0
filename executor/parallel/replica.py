"""How data-parallel ranks share one part of the model: the piece in which sharding engines differ."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn


class Replica(ABC):
    """A module on this rank whose states data-parallel ranks keep in step. Every rank makes the same calls in the same order.

    1. `begin_step`; then for each micro-batch forward, `begin_micro_batch`, backward, `end_micro_batch`; then `end_step`.
       In a pipeline, forwards of other micro-batches come in between, and gradients may have been written without autograd's
       hooks: `gradients_written` is then called before `end_micro_batch`.
    2. `finish_gradients`, whereupon `squared_norm` and `tied_gradient` see the mean gradient, and `update` or `skip_update`.

    Losses are scaled before backward, so that sums over micro-batches and ranks are means.
    """

    module: nn.Module
    sharded: bool
    """Whether `squared_norm` is of this rank's share alone, so that it is to be summed over the ranks that share."""
    tells_waits = False
    """Whether every wait for other ranks is on the clock of the groups (`ParallelGroups.clock`)."""

    def begin_step(self) -> None:  # noqa: B027  what an engine does not need it leaves as it is
        """Call before a step's first micro-batch."""

    @abstractmethod
    def begin_micro_batch(self, last: bool) -> None:
        """Call before a micro-batch's backward (outside of a pipeline, before its forward)."""

    def gradients_written(self) -> None:  # noqa: B027
        """Call where gradients stand in `parameter.grad` that no hook has seen."""

    @abstractmethod
    def end_micro_batch(self) -> None:
        """Call after a micro-batch's backward."""

    def end_step(self) -> None:  # noqa: B027
        """Call after a step's last micro-batch."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait for what is on the way, and complete gradients of which tensor-parallel ranks have summands."""

    @abstractmethod
    def tied_gradient(self) -> Tensor | None:
        """This rank's part of the gradient of the weight that the model has twice, flat, to be summed in place."""

    @abstractmethod
    def squared_norm(self, counts_tied: bool) -> Tensor:
        """Squared L2 norm of the gradients that no other tensor-parallel rank counts, in at least fp32.

        `counts_tied` off: the tied weight is counted where its other copy is.
        """

    @abstractmethod
    def update(self, scale: Tensor | None) -> None:
        """Step the optimizer on the gradients, scaled; forget them; bring the parameters up to date."""

    @abstractmethod
    def skip_update(self) -> None:
        """Forget the gradients and leave everything as it is."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether lazily made state exists."""

    @abstractmethod
    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of it that is live between steps, with its tag."""

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter, not sharded over data-parallel ranks, by name. Every rank must call it."""

    @abstractmethod
    def close(self) -> None:
        """Remove hooks and free what can be freed. May be called twice."""
