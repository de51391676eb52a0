"""Callback for Lightning's Trainer: `Trainer(callbacks=[AutotuneCallback()])`."""

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from autotune.errors import RequestError
from autotune.integrations.library_steps import LibrarySteps
from autotune.measured import report


class AutotuneCallback(Callback):  # type: ignore[misc]
    """Reports the loss of every optimizer step, and the seconds between batches. Its steps and samples are counted without it.

    With `tune=True` the run tunes itself (`autotune.InRunTuner`): the micro-batches of each step, recomputation, and what wraps
    the model. Without it the callback does nothing if the program runs without autotune.
    """

    def __init__(self, tune: bool = False, **options: Any) -> None:
        """`options`: those of `InRunTuner` except the model, the optimizer and the number of steps."""
        self._step = 0
        self._waited = 0.0
        self._ended: float | None = None
        self._tunes, self._options = tune, options
        self._was_interrupted = False
        self.run: TunedStrategy | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  Lightning's signature
        """Start to tune."""
        if self._tunes:
            self.run = TunedStrategy(trainer, self._options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Count the time since the end of the last batch as waiting for data."""
        if self._ended is not None:
            self._waited += time.perf_counter() - self._ended
        if self.run is not None and self._was_interrupted:
            self.run.tuner.restart_clock()
        self._was_interrupted = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report once per optimizer step."""
        if self.run is not None:
            self.run.end_step()
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            report(waited=self._waited, **({} if loss is None else {"loss": loss.detach()}))
            self._waited = 0.0
        self._ended = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The time of an evaluation is not that of a step."""
        self._was_interrupted = True

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """Nor is that of a checkpoint."""
        self._was_interrupted = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The search is over with the run."""
        if self.run is not None:
            self.run.close()
            self.run = None


class TunedStrategy(LibrarySteps):
    """The steps of Lightning's automatic optimization under an `InRunTuner`. Lightning calls the optimizer with a closure, so
    an update that runs out of memory ends the run.

    Raises:
        RequestError: the module optimizes by hand, or the strategy is neither one device nor DDP.
    """

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        from autotune.inside.tuner import InRunTuner

        strategy = self._strategy = trainer.strategy
        if not trainer.lightning_module.automatic_optimization:
            problem = "the module optimizes by hand, and its steps cannot be divided from outside"
            raise RequestError("tune", problem, "use autotune.InRunTuner in its training_step")
        if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
            remedy = "use one device or DDP, or sweep the script without tune=True"
            raise RequestError("tune", f"{type(strategy).__name__} steps by itself", remedy)
        self._trainer, self._train, self._backward = trainer, strategy.training_step, strategy.backward
        steps = trainer.estimated_stepping_batches
        (self._optimizer,) = trainer.optimizers  # automatic optimization has one
        super().__init__(InRunTuner(strategy.model, self._optimizer, steps=steps if math.isfinite(steps) else None, **options))
        strategy.training_step, strategy.backward = self.training_step, lambda loss, *_, **__: loss

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Keep the batch of a micro-step, or train the step; return what `training_step` of the module returns."""
        from executor.inside.steps import zero_loss

        outputs: Any = None

        def train_part(part: Any) -> Any:
            nonlocal outputs
            outputs = self._train(part, *rest)
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            if loss is None:
                raise RequestError("training_step", "returned no loss", "return one, or leave tune=True out")
            self.tuner.backward(loss, lambda scaled: self._backward(scaled, self._optimizer))
            return loss.detach() * self.tuner.weight

        is_last = not self._trainer.fit_loop._should_accumulate()
        if is_last:
            self._optimizer.zero_grad()  # Lightning's own comes after the module's step
        total = sum(self.train(batch, is_last, train_part), zero_loss(self._strategy.root_device))
        return {**outputs, "loss": total} if isinstance(outputs, Mapping) else total

    def close(self) -> None:
        """Give the strategy its own methods back."""
        self.tuner.close()
        del self._strategy.training_step, self._strategy.backward
