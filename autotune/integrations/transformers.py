"""Callback for the Trainer of Hugging Face: `trainer.add_callback(AutotuneCallback())`."""

import os
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from autotune.measured import VARIABLE, report, timed


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Reports the seconds spent waiting for batches, and logged losses. The Trainer's steps and samples are counted without it.

    The callback does nothing if the program runs without autotune.
    """

    def __init__(self) -> None:
        self._on = bool(os.environ.get(VARIABLE))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002  the Trainer's signature
        """Start measuring the wait for batches, and have NaN and infinite losses logged unfiltered."""
        if not self._on:
            return
        args.logging_nan_inf_filter = False
        if (loader := kwargs.get("train_dataloader")) is not None:
            measure(loader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the wait, and have the first losses logged for every value of `logging_steps`."""
        if self._on:
            report()
            control.should_log = control.should_log or state.global_step <= 3

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the loss if one was logged. Only rank 0 logs."""
        if self._on and logs and "loss" in logs:
            report(loss=float(logs["loss"]), step=state.global_step)


def measure(loader: Any) -> None:
    """Measure the wait for batches in every iteration over the loader.

    The Trainer holds the object, so its class is replaced in place.
    """

    class Measured(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return timed(super().__iter__())

    Measured.__name__ = type(loader).__name__
    # Set it through `object`: Accelerate's loaders report another loader's class, and refuse an assignment.
    vars(object)["__class__"].__set__(loader, Measured)
