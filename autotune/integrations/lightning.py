"""For the Trainer of Lightning: `Trainer(callbacks=[AutotuneCallback()])`."""

import os
import time
from typing import Any

from lightning.pytorch import Callback

from autotune.measured import VARIABLE, report


class AutotuneCallback(Callback):  # type: ignore[misc]
    """Reports every optimizer step: its samples over all ranks, the loss, and the seconds between batches.

    `samples_per_batch` is what one rank trains on in one batch; None: the loader's batch size.
    Does nothing where the program runs without autotune.
    """

    def __init__(self, samples_per_batch: int | None = None) -> None:
        self._samples = samples_per_batch
        self._on = bool(os.environ.get(VARIABLE))
        self._step = 0
        self._batches = 0
        self._waited = 0.0
        self._ended: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """The next batch is here: what passed since the end of the last one was spent on getting it."""
        if self._ended is not None:
            self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """One report for each optimizer step."""
        self._batches += 1
        if self._on and trainer.global_step > self._step:
            steps, self._step = trainer.global_step - self._step, trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            told = {} if loss is None else {"loss": float(loss.detach())}
            samples = self._batch_size(trainer) * self._batches * trainer.world_size
            report(samples=samples, step=self._step, steps=steps, waited=self._waited, **told)
            self._batches, self._waited = 0, 0.0
        self._ended = time.perf_counter()

    def _batch_size(self, trainer: Any) -> int:
        if self._samples is not None:
            return self._samples
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("the loader does not tell its batch size; give AutotuneCallback(samples_per_batch=…)")
        return size
