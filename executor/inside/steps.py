"""The optimizer steps of a run that tunes itself: their micro-batches, when gradients are combined, what a failure undoes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from executor.inside.agreement import Agreement
from executor.inside.batches import Count, Part, parts_of, piece, rows_of
from executor.inside.recovery import Snapshot, device_bytes, is_out_of_memory, reduce_gradients, release
from executor.inside.switches import is_deepspeed, unwrapped

_OUTSIDE = Part(None, 1.0, is_last=True)
_WHOLE = Part(None, 1.0, is_last=True, is_first=True)


class _StepFailedError(Exception):
    """Another rank ran out of memory: this rank leaves the step too."""


class TunedSteps:
    """Trains optimizer steps on parts of batches, each again from its beginning after it ran out of memory.

    The first step of a setting is a proof: gradients are combined over ranks only when every rank has computed its own, and
    the update is undone on all ranks if it fails on one. So no rank waits in a collective for one that ran out of memory. This
    holds for one rank and for DistributedDataParallel. FSDP2 communicates inside of forward passes, so with
    several ranks nothing is proven (`can_recover`), nor with DeepSpeed's engine, which keeps state of a step's middle.
    """

    def __init__(self, model: Any, optimizer: Any, agreement: Agreement, count: Count) -> None:
        self.model, self.agreement, self.count = model, agreement, count
        inner = unwrapped(model)
        self.is_fsdp = hasattr(inner, "set_requires_gradient_sync")
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.is_deepspeed = is_deepspeed(model)
        self.optimizer: Any = None if self.is_deepspeed else optimizer
        """None: DeepSpeed's engine updates at the end of a step by itself."""
        self.part = _OUTSIDE
        self.is_proof = False
        """Whether the step must show that its setting fits."""
        self.guarded = False
        """Whether the body of the user's loop is in a `with` block, which a failed step can leave."""
        self.failure: BaseException | None = None
        self.is_running = False
        self.retries_update = False
        """Whether a failed update is run again at once, with its gradients: in a loop that is not the user's own."""
        self._synchronizes: bool | None = None
        """Whether the wrapper combines gradients at present; None: unknown."""
        self.update_failed = False
        """Whether the update of the present step had to be run again."""
        self._has_backward = self._has_updated = self._is_evaluating = False
        self.open()

    @property
    def communicates(self) -> bool:
        """Whether ranks communicate inside of forward and backward passes, so that all must run equally many."""
        return self.is_deepspeed or (self.agreement.world_size > 1 and not self.is_ddp)

    @property
    def can_recover(self) -> bool:
        """Whether a step that runs out of memory is trained again."""
        return self.guarded and not self.communicates

    def run(self, batches: Sequence[Any], micro_batch_size: int) -> Iterator[Any]:
        """Yield the micro-batches of one step. `failure` says afterwards why it must be trained again."""
        self._start()
        try:
            for part in parts_of(batches, micro_batch_size, self.count):
                self.part = part
                self._synchronize(part.is_last and not self._defers)
                yield part.batch
                if self.failure is not None:
                    break
        finally:
            self.end()

    def begin_whole(self) -> None:
        """Begin a step of a single micro-batch that is no proof, which `run` would yield; `end` ends it."""
        self._start()
        self.part = _WHOLE
        self._synchronize(True)

    def _start(self) -> None:
        self.failure, self.is_running, self._has_backward, self._has_updated = None, True, False, False

    def end(self) -> None:
        """The step has ended, whole or not."""
        self.is_running, self.part = False, _OUTSIDE

    @property
    def _defers(self) -> bool:
        return self.is_proof and self.can_recover and self.agreement.world_size > 1

    def _synchronize(self, is_last: bool) -> None:
        """Have the wrapper combine gradients in this micro-batch's backward pass, or not."""
        if is_last is self._synchronizes:
            return
        self._synchronizes = is_last
        if self.is_ddp:
            self.model.require_backward_grad_sync = is_last
        elif self.is_fsdp:
            inner = unwrapped(self.model)
            inner.set_requires_gradient_sync(is_last)
            inner.set_is_last_backward(is_last)
        elif self.is_deepspeed:
            self.model.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, call: Callable[[torch.Tensor], Any] | None = None) -> None:
        """The backward pass of a micro-batch with its weight in the step."""
        weight = self.part.weight
        scaled = loss if weight == 1.0 else loss * weight
        if call is not None:
            call(scaled)
        elif self.is_deepspeed:
            self.model.backward(scaled, scale_wrt_gas=False)
        else:
            scaled.backward()  # type: ignore[no-untyped-call]
        self.note_backward()

    def note_backward(self) -> None:
        """A backward pass of the present micro-batch has ended."""
        self._has_backward = True
        if self.part.is_last:
            self.combine()

    def combine(self) -> None:
        """After the last backward pass of a proof: combine the gradients, if no rank has failed."""
        if self._defers:
            self._require_all(None)
            reduce_gradients(self.model.parameters(), self.model.process_group)

    def _require_all(self, error: BaseException | None) -> None:
        """Raise on every rank if one has failed."""
        if not all(self.agreement.gathered(error is None)):
            raise error or _StepFailedError

    def guard(self, error: BaseException, trace: TracebackType | None) -> bool:
        """At the end of a `with` block: note a failure that can be undone, and suppress it."""
        if self._is_evaluating:
            if is_out_of_memory(error):
                self.failure = error.with_traceback(None)
                error.__context__ = error.__cause__ = None
                release(trace)
            return self.failure is not None
        # An update that has taken place cannot be trained again.
        if self._has_updated or not self.can_recover or not (isinstance(error, _StepFailedError) or is_out_of_memory(error)):
            return False
        if self.agreement.world_size > 1:
            if not self.is_proof:
                return False
            if not isinstance(error, _StepFailedError) and not getattr(error, "is_known", False):
                # The other ranks meet this one in `combine`.
                self.agreement.gathered(False)
        self.failure = error.with_traceback(None)
        error.__context__ = error.__cause__ = None
        self.drop()
        release(trace)
        return True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """While an evaluation runs, a failure concerns only its batch."""
        part, running = self.part, self.is_running
        self.is_running, self._is_evaluating, self.failure = False, True, None
        try:
            yield
        finally:
            self.part, self.is_running, self._is_evaluating, self.failure = part, running, False, None

    def halves(self, batch: Any) -> Iterator[Any]:
        """Yield a batch of an evaluation; if it runs out of memory, its halves.

        Raises:
            MemoryError: a single sample runs out of memory.
        """
        yield batch
        if self.failure is None:
            return
        self.failure = None
        rows = rows_of(batch)
        if rows < 2:
            raise MemoryError("a single sample of the evaluation is out of memory")
        for start, end in ((0, rows // 2), (rows // 2, rows)):
            yield from self.halves(piece(batch, start, end, rows))

    def drop(self) -> None:
        """Forget the gradients of a failed step."""
        for parameter in self.model.parameters():
            parameter.grad = None

    # The optimizer's methods, which the user's loop calls after each micro-batch.

    def _step(self, *arguments: Any, **keywords: Any) -> Any:
        if not self.is_running:
            return self._update(*arguments, **keywords)
        if not self._has_backward:
            raise RuntimeError("the optimizer steps without a backward pass of the tuner; call tuner.backward(loss)")
        if not self.part.is_last or self.failure is not None:
            return None
        if not (self.is_proof and self.can_recover):
            # Nothing could undo an update that stops in the middle, so its error must reach the user.
            self._has_updated = True
            return self._update(*arguments, **keywords)
        result = self._proven_update(arguments, keywords)
        self._has_updated = True
        return result

    def _proven_update(self, arguments: Any, keywords: Any) -> Any:
        """The update, undone on all ranks if it fails on one."""
        snapshot: Snapshot | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            snapshot = Snapshot(self.optimizer)
            result = self._update(*arguments, **keywords)
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            error = problem
        try:
            self._require_all(error)
        except BaseException as problem:
            if snapshot is not None:
                snapshot.restore()
            if not self.retries_update:
                problem.is_known = True  # type: ignore[attr-defined]
                raise
            snapshot, problem.__context__ = None, None
            release(problem.__traceback__)
            self.update_failed = True
            return self._update(*arguments, **keywords)
        return result

    def _zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        # Before the step's first backward pass or after its update: some loops clear first, others last.
        if not self.is_running or self._has_updated or not self._has_backward:
            self._clear(*arguments, **keywords)

    def open(self) -> None:
        """Have the optimizer's methods act at the end of a step only."""
        if self.optimizer is not None:
            self._update, self._clear = self.optimizer.step, self.optimizer.zero_grad
            # With the marks that schedulers of the learning rate look for.
            self.optimizer.step = functools.update_wrapper(functools.partial(self._step), self._update)
            self.optimizer.zero_grad = self._zero_grad

    def close(self) -> None:
        """Give the optimizer its own methods back."""
        if self.optimizer is not None:
            for name in ("step", "zero_grad"):
                self.optimizer.__dict__.pop(name, None)


def synchronized() -> None:
    """Wait for the device, so that the time of a step is that of its work."""
    if device_bytes() is not None:
        torch.cuda.synchronize()


@functools.cache
def device_name() -> str:
    """What the run's figures belong to."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu x{torch.get_num_threads()}"


def zero_loss(device: Any) -> torch.Tensor:
    """The loss of a micro-step whose batch is trained later."""
    return torch.zeros((), device=device)
