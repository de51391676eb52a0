"""Callback for the Trainer of Hugging Face: `trainer.add_callback(AutotuneCallback())`."""

import functools
import os
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from autotune.errors import RequestError
from autotune.integrations.library_steps import LibrarySteps
from autotune.measured import VARIABLE, report, timed


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Reports the seconds spent waiting for batches, and logged losses. The Trainer's steps and samples are counted without it.

    With `tune=True` the run tunes itself (`autotune.InRunTuner`): the micro-batches of each step, recomputation, attention and
    what wraps the model. Without it the callback does nothing if the program runs without autotune.
    """

    def __init__(self, tune: bool = False, **options: Any) -> None:
        """`options`: those of `InRunTuner` except the model, the optimizer and the number of steps."""
        self._on = bool(os.environ.get(VARIABLE))
        self.tunes, self.options = tune, options
        self.run: TunedTrainer | None = None
        if tune:
            tune_trainers()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002  the Trainer's signature
        """Start measuring the wait for batches, and have NaN and infinite losses logged unfiltered."""
        if not self._on:
            return
        args.logging_nan_inf_filter = False
        if (loader := kwargs.get("train_dataloader")) is not None:
            measure(loader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the wait, and have the first losses logged for every value of `logging_steps`."""
        if self.run is not None:
            self.run.end_step()
        if self._on:
            report()
            control.should_log = control.should_log or state.global_step <= 3

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the loss if one was logged. Only rank 0 logs."""
        if self._on and logs and "loss" in logs:
            report(loss=float(logs["loss"]), step=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The time of an evaluation is not that of a step."""
        if self.run is not None:
            self.run.tuner.restart_clock()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The search is over with the run."""
        if self.run is not None:
            self.run.tuner.close()
            self.run = None


class TunedTrainer(LibrarySteps):
    """The steps of a Trainer under an `InRunTuner`.

    Raises:
        RequestError: Accelerate runs DeepSpeed, whose steps it makes in backward passes.
    """

    def __init__(self, trainer: Any, model: Any, original: Any, options: dict[str, Any]) -> None:
        from autotune.inside.tuner import InRunTuner

        if trainer.is_deepspeed_enabled:
            raise RequestError("tune", "Accelerate steps DeepSpeed by itself", "sweep the script without tune=True")
        self._trainer, self._original = trainer, original
        super().__init__(InRunTuner(model, trainer.optimizer, steps=trainer.state.max_steps, **options))
        self.tuner.in_library_loop()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Keep the batch of a micro-step, or train the step; return the loss that the Trainer adds up."""
        from executor.inside.steps import zero_loss

        trainer, tuner = self._trainer, self.tuner
        steps = trainer.current_gradient_accumulation_steps

        def train_part(part: Any) -> Any:
            # A mean is divided by this number; a sum over the items of the whole step is not.
            trainer.current_gradient_accumulation_steps = 1.0 / tuner.weight if tuner.weight else float("inf")
            loss = self._original(trainer, model, part, num_items_in_batch)
            tuner.note_backward()
            return loss

        losses = self.train(trainer._prepare_inputs(inputs), trainer.accelerator.sync_gradients, train_part)
        trainer.current_gradient_accumulation_steps = steps
        return sum(losses) if losses else zero_loss(trainer.args.device)


@functools.cache
def tune_trainers() -> None:
    """Have Trainers with an `AutotuneCallback(tune=True)`, or all if AUTOTUNE_INSIDE is set, tune themselves."""
    from transformers import Trainer

    original, predict = Trainer.training_step, Trainer.prediction_step

    @functools.wraps(original)
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        callback = _callback_of(self)
        if callback is None:
            return original(self, model, inputs, num_items_in_batch)
        if callback.run is None:
            callback.run = TunedTrainer(self, model, original, callback.options)
        return callback.run.training_step(model, inputs, num_items_in_batch)

    @functools.wraps(predict)
    def prediction_step(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if _callback_of(self) is None:
            return predict(self, model, inputs, prediction_loss_only, ignore_keys)
        return predicted_in_parts(functools.partial(predict, self, model), inputs, prediction_loss_only, ignore_keys)

    Trainer.training_step, Trainer.prediction_step = training_step, prediction_step


def predicted_in_parts(predict: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any) -> tuple[Any, Any, Any]:
    """`Trainer.prediction_step`, on halves of a batch that runs out of memory. The loss is the mean over samples."""
    from transformers.trainer_pt_utils import nested_concat

    from executor.inside.batches import piece, rows_of
    from executor.inside.recovery import is_out_of_memory, release

    try:
        result: tuple[Any, Any, Any] = predict(inputs, prediction_loss_only, ignore_keys)
        return result
    except Exception as error:
        rows = rows_of(inputs)
        if not is_out_of_memory(error) or rows < 2:
            raise
        release(error.__traceback__)
    half = rows // 2
    first, second = (
        predicted_in_parts(predict, piece(inputs, start, end, rows), prediction_loss_only, ignore_keys)
        for start, end in ((0, half), (half, rows))
    )
    loss = None if first[0] is None else (first[0] * half + second[0] * (rows - half)) / rows
    logits, labels = (None if a is None else nested_concat(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    return loss, logits, labels


def _callback_of(trainer: Any) -> AutotuneCallback | None:
    """The callback that tunes this Trainer; None: it is not tuned."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, AutotuneCallback) and callback.tunes:
            return callback
    if (settings := os.environ.get("AUTOTUNE_INSIDE")) and str(
        trainer.accelerator.distributed_type
    ) != "DistributedType.DEEPSPEED":
        share = float(os.environ["AUTOTUNE_INSIDE_SHARE"])
        callback = AutotuneCallback(tune=True, remember=settings, share=share, report=print)
        trainer.add_callback(callback)
        return callback
    return None


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
