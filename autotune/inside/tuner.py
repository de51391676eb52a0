"""`autotune.InRunTuner`: finds the fastest setting in the steps of a training run itself."""

import atexit
import dataclasses
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import RequestError
from autotune.inside.memory import Remembered, RunIdentity, RunMemory, RunRecord, VisitedSetting
from autotune.inside.schedule import SHARE, Schedule, StepRecord, require_share
from autotune.inside.space import RunKnob, RunSpace, Setting
from executor.inside.agreement import Agreement
from executor.inside.batches import Count, are_alike, counted, rows_of
from executor.inside.recovery import device_bytes, device_peak, release, reset_peak, standing_bytes
from executor.inside.steps import TunedSteps, device_name, synchronized
from executor.inside.switches import MICRO_BATCH_SIZE, Switch, changes_with_batch, is_deepspeed, switches_of, unwrapped
from search_spaces.knob import Value

_log = logging.getLogger(__name__)
MEETING_SECONDS = 5.0
"""Seconds between two looks of all ranks at whether the search starts again."""
MOST_QUIET = 256
"""Steps whose times the schedule gets at once when nothing is tuned: its code is then cold only once for all of them."""


class InRunTuner:
    """Tunes a run from inside, in its own optimizer steps: every trial trains the model.

        tuner = autotune.InRunTuner(model, optimizer, global_batch_size=256, steps=10_000, remember="run.json")
        for batch in tuner.batches(loader):          # micro-batches: parts of the loader's batches, in order
            with tuner:                              # a step that runs out of memory is trained again
                tuner.backward(loss_of(model(batch)))
                optimizer.step()                     # acts after the last micro-batch of a step
                optimizer.zero_grad()
            if tuner.step_ends:
                scheduler.step()

    The loss is a mean over samples, or over the tokens of `labels` (`count` says otherwise). Losses and weights are those of a
    loop that trains on each batch of the loader with the loss divided by the number of batches in a step. Dropout draws other
    random numbers for other micro-batches. Ranks agree through the store of torch's process group.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        global_batch_size: int | None = None,
        knobs: Iterable[str] | Mapping[str, Sequence[Value]] | None = None,
        steps: int | None = None,
        share: float = SHARE,
        headroom: float = 0.1,
        remember: str | Path | None = None,
        count: Count = counted,
        script: str | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Start to tune.

        Args:
            model: the model as the loop calls it, wrapped and on its device; DeepSpeed's engine, whose `step` the loop calls.
            optimizer: whose `step` and `zero_grad` the loop calls; None with DeepSpeed's engine.
            global_batch_size: samples of an optimizer step over all ranks; None: each batch of the loader is a step.
            knobs: names of the knobs to change, or their values; None: all that can change. `left_out` has the others.
            steps: optimizer steps of the whole run; None: unknown.
            share: part of the run's time that the search may cost.
            headroom: part of a device's memory that a larger setting must leave free according to its prediction.
            remember: file in which the answer is kept for the next run; a database's URL or path (`.db`) makes it a job.
            count: what the mean of the loss of a batch is over.
            script: name under which the run is remembered; None: the program's.
            report: gets a line for each decision on rank 0; None: they are logged.

        Raises:
            RequestError: an option is wrong.
        """
        require_share(share)
        if is_deepspeed(model) and hasattr(model, "train_batch"):
            raise RequestError("model", "is DeepSpeed's pipeline, which divides its own steps", "sweep the script")
        self.agreement = Agreement()
        self._steps = TunedSteps(model, optimizer, self.agreement, count)
        self.left_out = {"num_workers": "other workers would draw other random augmentations"}
        """Knob -> why it does not change in this run."""
        self.paused_seconds = 0.0
        self._model, self._count, self._total_steps, self._share, self._headroom = model, count, steps, share, headroom
        self._report = report or _log.info
        self._wanted, self._script = knobs, script or Path(sys.argv[0]).name
        world = self.agreement.world_size
        if global_batch_size is not None and global_batch_size % world:
            remedy = f"give a multiple of {world}"
            raise RequestError("global_batch_size", f"{global_batch_size} does not divide by {world} ranks", remedy)
        self._rows = None if global_batch_size is None else global_batch_size // world
        self._remember = str(remember) if remember is not None else None
        self.schedule: Schedule | None = None
        """On rank 0, from the first step on: the search and its journal."""
        self.setting: dict[str, Value] = {}
        """Knob -> the present value."""
        self._switches: dict[str, Switch] = {}
        self._proven: set[Setting] = set()
        self._boundary: float | None = None
        self._is_meeting, self._until_meeting = True, 0
        self._changed_seconds = 0.0
        self._quiet: list[float] = []
        """Seconds of steps that the schedule does not know yet."""
        self._told = 0
        self._standing: int | None = None

    # The loop.

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of a pass over the loader. Batches that make no whole step at its end are a smaller step."""
        pending: list[Any] = []
        rows = 0
        steps = self._steps
        for batch in loader:
            if not (self._is_meeting or pending) and self._is_whole(batch):
                steps.begin_whole()
                try:
                    yield batch
                finally:
                    steps.end()
                if steps.failure is None:
                    self._end_quietly()
                    continue
                self._fail(0.0)
            pending.append(batch)
            rows += rows_of(batch)
            if self._rows is None or rows >= self._rows:
                yield from self.step(pending)
                pending, rows = [], 0
        if pending:
            yield from self.step(pending)

    def _is_whole(self, batch: Any) -> bool:
        """Whether a batch is the only micro-batch of its step."""
        rows, wanted = rows_of(batch), self._rows
        return (wanted is None or rows >= wanted) and rows <= self.setting[MICRO_BATCH_SIZE]  # type: ignore[operator]

    def _end_quietly(self) -> None:
        """Note the time of a step when nothing is tuned; the schedule gets several at once."""
        now, before, quiet = time.perf_counter(), self._boundary, self._quiet
        if before is not None:
            quiet.append(now - before - self.paused_seconds)
        self._boundary, self.paused_seconds = now, 0.0
        if len(quiet) >= min(MOST_QUIET, self._until_meeting):
            self._note_quiet_steps()

    def _note_quiet_steps(self) -> None:
        schedule, count = self.schedule, len(self._quiet)
        if schedule is not None and count and not self._wakes:
            first, *more = (max(seconds, 1e-9) for seconds in self._quiet)
            schedule.record(StepRecord(first, more=more))
            self._wakes = not schedule.is_over
        self._quiet.clear()
        if self._wakes:
            self._tell()
        self._until_meeting -= count
        if self._until_meeting <= 0:
            self._is_meeting, self._wakes = True, False

    def step(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Yield the micro-batches of one optimizer step, again after it ran out of memory."""
        if not self._switches:
            self._begin(batches)
        while True:
            if self._is_meeting:
                self._meet()
            failed_from = time.perf_counter()
            yield from self._steps.run(batches, int(self.setting[MICRO_BATCH_SIZE]))
            if self._steps.failure is None:
                break
            self._fail(time.perf_counter() - failed_from)
        self._end()

    def backward(self, loss: Any, call: Callable[[Any], Any] | None = None) -> None:
        """The backward pass of a micro-batch, with its weight in the step; `call`: instead of `loss.backward()`.

        Raises:
            RequestError: the call would step DeepSpeed's engine.
        """
        if call is not None:
            if self._steps.is_deepspeed:
                remedy = "call tuner.backward(loss) and engine.step() with the engine of deepspeed.initialize"
                raise RequestError("model", "is DeepSpeed's engine, which the other library steps in backward passes", remedy)
            loss = loss * _divisor(call)
        self._steps.backward(loss, call)

    def in_library_loop(self) -> None:
        """The loop is a library's: an update that fails is run again at once, because its samples cannot come again."""
        self._steps.retries_update = True

    def note_backward(self) -> None:
        """A backward pass has taken place whose loss had its weight already."""
        self._steps.note_backward()

    def restart_clock(self) -> None:
        """The time since the last step is not part of the next one: an evaluation, a checkpoint."""
        self._boundary = time.perf_counter()

    @property
    def step_ends(self) -> bool:
        """Whether the present micro-batch is the last of its optimizer step."""
        return self._steps.part.is_last

    @property
    def is_first_part(self) -> bool:
        """Whether the present micro-batch is the first of its optimizer step, or of another attempt at it."""
        return self._steps.part.is_first

    @property
    def has_failed(self) -> bool:
        """Whether the present step ran out of memory, and will be trained again."""
        return self._steps.failure is not None

    @property
    def weight(self) -> float:
        """Factor of the present micro-batch's mean loss in that of the step."""
        return self._steps.part.weight

    def __enter__(self) -> "InRunTuner":
        self._steps.guarded = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return error is not None and self._steps.guard(error, trace)

    def evaluation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an evaluation; one that ran out of memory in a `with tuner` block comes again in halves.

        Its time is not part of a step. Write results inside of the block only when they are complete.
        """
        began, steps = time.perf_counter(), self._steps
        with steps.evaluating():
            for batch in loader:
                yield from steps.halves(batch)
        release()
        self.paused_seconds += time.perf_counter() - began

    # Boundaries between steps.

    def _begin(self, batches: Sequence[Any]) -> None:
        """Find the knobs, and what an earlier run has found."""
        rows = sum(map(rows_of, batches))
        present = max(map(rows_of, batches))
        # Ranks whose batches differ in counts would join different ones, and where passes communicate all must have as many.
        joins = are_alike(batches, self._count) and not self._steps.communicates
        largest = min(self.agreement.gathered(rows if joins else present))
        values = sorted({value for value in _halvings(largest) if value >= largest / 64} | {present})
        reason = changes_with_batch(unwrapped(self._model))
        if self._rows is None and self.agreement.world_size > 1:
            rows *= self.agreement.world_size
        switches = [
            # A doubling is assumed to save 10 % of a step, give or take 20, until steps show it.
            Switch(MICRO_BATCH_SIZE, tuple(values) if reason is None else (present,), present, lambda _: None, True, 0.2, -0.1),
            *switches_of(self._model, self.left_out),
        ]
        if reason is not None:
            self.left_out[MICRO_BATCH_SIZE] = reason
        self._switches = {switch.name: switch for switch in map(self._narrowed, switches)}
        self.setting = {name: switch.current for name, switch in self._switches.items()}
        self._space = RunSpace(tuple(
            RunKnob(
                name=switch.name, values=switch.values, ordered=switch.ordered, effect=switch.effect, trend=switch.trend,
                change_seconds=switch.change_seconds, saving_value=switch.saving_value, grows=switch.name == MICRO_BATCH_SIZE,
            )
            for switch in self._switches.values()
        ))  # fmt: skip
        self._identity = RunIdentity(
            script=self._script,
            parameters=sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self._model.parameters()),
            model=type(unwrapped(self._model)).__name__,
            global_batch_size=rows if self._rows is None else self._rows * self.agreement.world_size,
            world_size=self.agreement.world_size,
            device=device_name(),
        )
        self._memory = RunMemory(self._file())
        if self.agreement.rank == 0:
            self.schedule = self._new_schedule()
        reset_peak()

    def _file(self) -> Path | None:
        return Path(self._remember) if self._remember and not self._is_database() else None

    def _is_database(self) -> bool:
        return self._remember is not None and ("://" in self._remember or self._remember.endswith(".db"))

    def _narrowed(self, switch: Switch) -> Switch:
        """The switch with the values that the user wants."""
        if self._wanted is None or switch.name in self._wanted:
            chosen = self._wanted.get(switch.name) if isinstance(self._wanted, Mapping) else None
            values = switch.values if chosen is None else (*dict.fromkeys([*chosen, switch.current]),)
            if switch.ordered:
                values = (*sorted(values),)
        else:
            values = (switch.current,)
        saving_value = switch.saving_value if switch.saving_value in values else None
        return dataclasses.replace(switch, values=values, saving_value=saving_value)

    def _new_schedule(self) -> Schedule:
        start = self._space.setting(self.setting)
        assert start is not None
        if self._is_database():
            from autotune.inside.job import recorded_runs

            answers = [run.answer for run in recorded_runs(str(self._remember)) if run.run.key == self._identity.key]
            remembered = answers[-1] if answers else None
            atexit.register(self.close)
        else:
            remembered = self._memory.read(self._identity)
        seconds = None
        if remembered is not None and (setting := self._space.setting(remembered.setting)) is not None:
            start, seconds = setting, remembered.step_seconds
            too_large = (self._space.setting(values) for values in remembered.too_large)
            self._space.too_large.update(setting for setting in too_large if setting is not None)
            self._report(f"starts with the setting of an earlier run: {_text(remembered.setting)}")
        return Schedule(self._space, start, share=self._share, steps=self._total_steps, remembered_seconds=seconds)

    def _meet(self) -> None:
        """All ranks apply the setting that rank 0 has decided."""
        schedule = self.schedule
        decision: list[Any] = []
        if schedule is not None:
            wanted = self._admitted(schedule)
            quiet, is_proof = 0, wanted not in self._proven
            if schedule.is_over and not is_proof:
                quiet = math.ceil(min(max(MEETING_SECONDS / max(schedule.level, 1e-6), 16), 100_000))
            decision = [list(wanted), is_proof, quiet]
        values, is_proof, quiet = self.agreement.decided(decision)
        began = time.perf_counter()
        for (name, switch), value in zip(self._switches.items(), values, strict=True):
            value = next(each for each in switch.values if each == value)
            if value != self.setting[name]:
                switch.apply(value)
                self.setting[name] = value
        self._changed_seconds += time.perf_counter() - began
        # A smaller setting than a proven one fits too, but only this one's steps show it.
        self._steps.is_proof = is_proof
        self._is_meeting, self._until_meeting = quiet == 0, quiet

    def _admitted(self, schedule: Schedule) -> Setting:
        """The schedule's setting, unless it is larger than what a step may try here."""
        while schedule.setting not in self._proven and self._proven and not self._may_try(schedule.setting):
            self._space.too_large.add(schedule.setting)
            schedule.record(StepRecord(None))
        return schedule.setting

    def _may_try(self, setting: Setting) -> bool:
        """Whether a larger setting is safe to try: its memory is predicted to fit, or a failure can be undone."""
        present = self._space.named(setting)
        largest = max(int(self._space.named(other)[MICRO_BATCH_SIZE]) for other in self._proven)
        if (total := device_bytes()) is not None and self._standing is not None and self._row_bytes:
            return self._standing + self._row_bytes * int(present[MICRO_BATCH_SIZE]) <= (1.0 - self._headroom) * total
        return self._steps.can_recover or int(present[MICRO_BATCH_SIZE]) <= largest

    _row_bytes: float = 0.0

    def _fail(self, seconds: float) -> None:
        """A step ran out of memory on some rank, and its gradients are gone on all."""
        failure = self._steps.failure
        setting = self._space.setting(self.setting)
        assert setting is not None
        if self.schedule is not None:
            is_first = not self._proven or setting in self._proven
            self._space.too_large.add(setting)
            self.schedule.record(StepRecord(None, seconds))
            if is_first:
                self._retreat(self.schedule, setting)
            self._tell()
        del failure
        self._is_meeting = True

    def _retreat(self, schedule: Schedule, setting: Setting) -> None:
        """The run's own setting does not fit: the next one that takes less memory is the incumbent.

        Raises:
            MemoryError: there is none.
        """
        for index, knob in enumerate(self._space.knobs):
            smaller = knob.values.index(setting[index]) - 1
            value = knob.values[smaller] if knob.grows and smaller >= 0 else knob.saving_value
            if value is not None and value != setting[index]:
                schedule.incumbent = schedule.setting = (*setting[:index], value, *setting[index + 1 :])
                schedule.restart(f"the setting of the run is out of memory: {knob.name}={value}")
                return
        raise MemoryError("the smallest setting of this run is out of memory")

    def _end(self) -> None:
        """Note the time of a step, and have the schedule decide about the next one."""
        if self._steps.update_failed and self.schedule is not None:
            # The update fitted only after everything else was freed: the setting leaves too little.
            self._space.too_large.add(self._space.setting(self.setting) or ())
        self._steps.update_failed = False
        is_tuning = self._is_meeting
        if is_tuning:
            synchronized()
        now = time.perf_counter()
        seconds = None if self._boundary is None else now - self._boundary - self.paused_seconds - self._changed_seconds
        self._boundary, self.paused_seconds = now, 0.0
        if self._steps.is_proof:
            self._prove()
        schedule = self.schedule
        if not is_tuning:
            self._quiet.append(now if seconds is None else seconds)
            self._note_quiet_steps()
        elif schedule is not None:
            was_over = schedule.is_over
            if seconds is None:
                schedule.skip()
            else:
                schedule.record(StepRecord(max(seconds, 1e-9), self._changed_seconds))
            if schedule.is_over and not was_over:
                self._keep()
            self._tell()
        # Deciding takes time too, which the search costs and no setting does.
        self._changed_seconds = time.perf_counter() - now if is_tuning else 0.0

    _wakes = False
    """Whether the search starts again at the next meeting."""

    def _prove(self) -> None:
        setting = self._space.setting(self.setting)
        assert setting is not None
        self._proven.add(setting)
        peak, standing = device_peak(), standing_bytes()
        if peak is not None and standing is not None:
            rows = self.agreement.gathered([peak, standing])
            peak, standing = max(row[0] for row in rows), max(row[1] for row in rows)
            self._standing = standing
            self._row_bytes = (peak - standing) / int(self.setting[MICRO_BATCH_SIZE])
        reset_peak()

    def _tell(self) -> None:
        assert self.schedule is not None
        for decision in self.schedule.journal[self._told :]:
            self._report(f"step {decision.step}: {decision.text}")
        self._told = len(self.schedule.journal)

    def _keep(self) -> None:
        """Keep the answer for the next run."""
        schedule = self.schedule
        assert schedule is not None
        record = RunRecord(
            run=self._identity,
            answer=Remembered(
                setting=self._space.named(schedule.incumbent),
                step_seconds=schedule.level,
                too_large=tuple(map(self._space.named, sorted(self._space.too_large, key=str))),
            ),
            visited=tuple(
                VisitedSetting(values=self._space.named(setting), step_seconds=tuple(seconds))
                for setting, seconds in schedule.visited().items()
            ),
            journal="\n".join(f"step {decision.step}: {decision.text}" for decision in schedule.journal),
        )
        self._memory.write(record)
        if self._is_database():
            from autotune.inside.job import start_recording  # a run with a file needs torch alone

            self._collect()
            self._recording = start_recording(str(self._remember), record)

    _recording: subprocess.Popen[str] | None = None
    job_id: str | None = None
    """The job of the run's newest search, once the tuner is closed."""

    def _collect(self) -> None:
        """Wait for the record of an earlier search."""
        if self._recording is not None:
            output, errors = self._recording.communicate()
            self.job_id, self._recording = output.strip() or None, None
            problem = errors.strip().rsplit("\n", 1)[-1]
            self._report(f"recorded as job {self.job_id}" if self.job_id else f"the run is not recorded as a job: {problem}")

    def close(self) -> None:
        """End the search with the run: wait for the record of its job, and give the optimizer its own methods back.

        The end of the process calls it otherwise.
        """
        self._steps.close()
        atexit.unregister(self.close)
        self._collect()


def _divisor(call: Callable[[Any], Any]) -> int:
    """What a library's backward divides the loss by: Accelerate's, by its accumulation."""
    library, accelerate = getattr(call, "__self__", None), sys.modules.get("accelerate")
    is_accelerator = accelerate is not None and isinstance(library, accelerate.Accelerator)
    return library.gradient_accumulation_steps if is_accelerator else 1  # type: ignore[union-attr]


def _halvings(rows: int) -> Iterator[int]:
    value = rows
    while value >= 1:
        yield value
        value //= 2


def _text(values: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
