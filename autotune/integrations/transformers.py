"""For the Trainer of Hugging Face: `trainer.add_callback(AutotuneCallback())`."""

import os
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from autotune.measured import VARIABLE, report, timed

LOGGED_STEPS = 3
"""First steps whose loss is asked for, so that one that is no number is seen whatever `logging_steps` says."""


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Reports every optimizer step: its samples over all ranks, the seconds that it waited for batches, and logged losses.

    Does nothing where the program runs without autotune.
    """

    def __init__(self) -> None:
        self._on = bool(os.environ.get(VARIABLE))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002  the Trainer's signature
        """Have the waiting for batches measured, and losses that are no number told as they are."""
        if not self._on:
            return
        args.logging_nan_inf_filter = False
        if (loader := kwargs.get("train_dataloader")) is not None:
            measure_waiting(loader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """One report."""
        if not self._on:
            return
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        report(samples=samples, step=state.global_step)
        if state.global_step <= LOGGED_STEPS:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """The loss, where one was logged. Rank 0 alone logs."""
        if self._on and logs and "loss" in logs:
            report(loss=float(logs["loss"]), step=state.global_step)


def measure_waiting(loader: Any) -> None:
    """Have every iteration over the loader measured. The Trainer holds the object itself, so it stays that object."""

    class Measured(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return timed(super().__iter__())

    Measured.__name__ = type(loader).__name__
    # Past the loaders of Accelerate, which answer with another loader's class and take none.
    vars(object)["__class__"].__set__(loader, Measured)
