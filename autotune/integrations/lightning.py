"""Callback for Lightning's Trainer: `Trainer(callbacks=[AutotuneCallback()])`."""

import os
import time
from typing import Any

from lightning.pytorch import Callback

from autotune.measured import VARIABLE, SampleCount, report


class AutotuneCallback(Callback):  # type: ignore[misc]
    """Reports every optimizer step: its samples over all ranks, the loss, and the seconds between batches.

    `samples_per_batch` is the number of samples of one rank in one batch; None: the loader's batch size.
    The callback does nothing if the program runs without autotune.
    """

    def __init__(self, samples_per_batch: int | None = None) -> None:
        self._samples = samples_per_batch
        self._on = bool(os.environ.get(VARIABLE))
        self._step = 0
        self._counted = SampleCount()
        self._waited = 0.0
        self._ended: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Count the time since the end of the last batch as waiting for data."""
        if self._ended is not None:
            self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report once per optimizer step."""
        self._counted.add(batch)
        if self._on and trainer.global_step > self._step:
            steps, self._step = trainer.global_step - self._step, trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            values = {} if loss is None else {"loss": float(loss.detach())}
            # Ranks of a tensor-parallel group share their samples.
            replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
            samples = self._counted.take(self._batch_size(trainer)) * replicas
            report(samples=samples, step=self._step, steps=steps, waited=self._waited, **values)
            self._waited = 0.0
        self._ended = time.perf_counter()

    def _batch_size(self, trainer: Any) -> int:
        if self._samples is not None:
            return self._samples
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("the loader has no batch_size; give AutotuneCallback(samples_per_batch=…)")
        return size
