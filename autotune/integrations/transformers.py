"""Callback for the Trainer of Hugging Face: `trainer.add_callback(AutotuneCallback())`."""

import math
import os
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from autotune.measured import VARIABLE, SampleCount, report, timed


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Reports every optimizer step: its samples over all ranks, the seconds spent waiting for batches, and logged losses.

    The callback does nothing if the program runs without autotune.
    """

    def __init__(self) -> None:
        self._on = bool(os.environ.get(VARIABLE))
        self._counted = SampleCount()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002  the Trainer's signature
        """Start measuring the wait for batches, and have NaN and infinite losses logged unfiltered."""
        if not self._on:
            return
        args.logging_nan_inf_filter = False
        self._counted = SampleCount()  # with `auto_find_batch_size` training begins again after it ran out of memory
        if (loader := kwargs.get("train_dataloader")) is not None:
            measure(loader, self._counted)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the step."""
        if not self._on:
            return
        full, replicas = _batch_size(args, state), _replicas(args)
        # Nothing is counted where the Trainer has replaced its loader, as when it skips the batches of a resumed run.
        samples = self._counted.take(full) or full * args.gradient_accumulation_steps
        report(samples=samples * replicas, step=state.global_step)
        if state.global_step <= 3:  # so that a NaN loss is seen for every value of `logging_steps`
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the loss if one was logged. Only rank 0 logs."""
        if self._on and logs and "loss" in logs:
            report(loss=float(logs["loss"]), step=state.global_step)


def _batch_size(args: Any, state: Any) -> int:
    """Samples of one rank in one full batch. Only the state has the size that `auto_find_batch_size` found."""
    size = int(state.train_batch_size or args.train_batch_size)
    split = getattr(getattr(args, "accelerator_config", None), "split_batches", False)
    return max(size // args.world_size, 1) if split else size


def _replicas(args: Any) -> int:
    """Ranks that train on samples of their own: those of tensor, context and sequence parallelism share theirs."""
    layout = getattr(args, "parallelism_config", None)
    sizes = [getattr(layout, f"{dimension}_size", 1) or 1 for dimension in ("tp", "cp", "sp")]
    return max(int(args.world_size) // math.prod(sizes), 1)


def measure(loader: Any, counted: SampleCount) -> None:
    """Measure every iteration over the loader: the wait for batches, and their samples.

    The Trainer holds the object, so its class is replaced in place.
    """

    class Measured(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for batch in timed(super().__iter__()):
                counted.add(batch)
                yield batch

    Measured.__name__ = type(loader).__name__
    # Set it through `object`: Accelerate's loaders report another loader's class, and refuse an assignment.
    vars(object)["__class__"].__set__(loader, Measured)
