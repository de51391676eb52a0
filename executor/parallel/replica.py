"""The interface of a replica: how data-parallel ranks share one part of the model. Sharding engines differ in it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn


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
