"""The optimizer steps of a library whose loop stays as it is: how its micro-steps become the micro-batches of a tuner."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.inside.tuner import InRunTuner


class LibrarySteps:
    """In all micro-steps of an optimizer step but the last, the batch is only kept; in the last one all are trained, divided as
    the setting says. The update follows in the library's loop.
    """

    def __init__(self, tuner: "InRunTuner") -> None:
        self.tuner = tuner
        self._batches: list[Any] = []
        self._parts: Iterator[Any] | None = None

    def train(self, batch: Any, is_last: bool, train_part: Callable[[Any], Any]) -> list[Any]:
        """Keep the batch, or train the step; return what `train_part` returned of each micro-batch, nothing if it is kept."""
        self._batches.append(batch)
        results: list[Any] = []
        if not is_last:
            return results
        tuner, batches, self._batches = self.tuner, self._batches, []
        self._parts = tuner.step(batches)
        for part in self._parts:
            if tuner.is_first_part:
                results.clear()
            with tuner:
                results.append(train_part(part))
            if tuner.step_ends and not tuner.has_failed:
                break
        return results

    def end_step(self) -> None:
        """After the update."""
        if self._parts is not None:
            next(self._parts, None)
            self._parts = None
