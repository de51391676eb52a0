"""Callback for Lightning's Trainer: `Trainer(callbacks=[AutotuneCallback()])`."""

import time
from typing import Any

from lightning.pytorch import Callback

from autotune.measured import report


class AutotuneCallback(Callback):  # type: ignore[misc]
    """Reports the loss of every optimizer step, and the seconds between batches. Its steps and samples are counted without it.

    The callback does nothing if the program runs without autotune.
    """

    def __init__(self) -> None:
        self._step = 0
        self._waited = 0.0
        self._ended: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Count the time since the end of the last batch as waiting for data."""
        if self._ended is not None:
            self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report once per optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            report(waited=self._waited, **({} if loss is None else {"loss": loss.detach()}))
            self._waited = 0.0
        self._ended = time.perf_counter()
