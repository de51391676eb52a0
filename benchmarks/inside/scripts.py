"""Runs of eight libraries' loops on two ranks that tune themselves, against every setting measured, and against the best.

    python -m benchmarks.inside.scripts LOOP MODE SEED STEPS [SETTING]     on each rank; `benchmarks.inside.page` runs it

MODE is `offline` (each setting of the run in turn, several steps at a time, in rounds), `pair` (the same for two settings, a
JSON list), `best` (SETTING, a JSON object, from the first step on) or `tuned`. Prints seconds, the setting at the end, and for
`offline` and `pair` the median seconds of a step of each setting.
"""

import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autotune.inside.schedule import Schedule, StepRecord
from autotune.inside.space import RunSpace, Setting
from autotune.inside.tuner import InRunTuner
from benchmarks.inside.loops import LOOPS, WORLD, Run, collect_tuners, micro_batches, model_of

ROWS, PER_STEP, LENGTH, WIDTH, LAYERS = 2, 4, 32, 96, 3
BLOCK, ROUNDS, PAIR_ROUNDS, FIRST = 8, 4, 24, 2
"""Steps of a setting at a time, how often each has its turn, and each of a pair, and steps of a turn that do not count."""


class EachInTurn:
    """A schedule that measures settings, in rounds."""

    def __init__(self, space: RunSpace, start: Setting, order: Sequence[Setting]) -> None:
        self.space, self.incumbent, self.setting, self.is_over, self.level = space, start, start, False, 1.0
        self.journal: list[Any] = []
        self.seconds: dict[Setting, list[float]] = defaultdict(list)
        self._order = [*order]
        self._steps = 0

    def skip(self) -> None:
        """The first step."""

    def record(self, step: StepRecord) -> None:
        """Note a step, and go on to the next setting after a block."""
        self._steps += 1
        if step.seconds is not None and self._steps > FIRST:
            self.seconds[self.setting].append(step.seconds)
        if self._steps == BLOCK and self._order:
            self._steps, self.setting = 0, self._order.pop(0)


class Fixed(EachInTurn):
    """A schedule that keeps one setting, and so is over from the first step on."""

    def __init__(self, space: RunSpace, start: Setting) -> None:
        super().__init__(space, start, ())
        self.is_over, self.level = True, 0.01

    def record(self, _: StepRecord) -> None:
        """Nothing is decided."""


def steps_of(turns: int) -> int:
    """Optimizer steps that measure settings in so many turns."""
    return 1 + BLOCK * (1 + turns)


def every_setting(space: RunSpace) -> list[Setting]:
    """All settings, in the order of the knobs."""
    return [*itertools.product(*(knob.values for knob in space.knobs))]


def run(loop: str, mode: str, seed: int, steps: int, chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run; `chosen`: the setting, or both of a pair."""

    class Timed(InRunTuner):
        began = ended = 0.0

        def _begin(self, batches: Any) -> None:
            self.began = time.perf_counter()
            super()._begin(batches)

        def _end(self) -> None:
            super()._end()
            self.ended = time.perf_counter()

        def _end_quietly(self) -> None:
            super()._end_quietly()
            self.ended = time.perf_counter()

        def _new_schedule(self) -> Any:
            if mode == "tuned":
                return super()._new_schedule()
            settings = [s for values in chosen or [{}] if (s := self._space.setting({**self.setting, **values})) is not None]
            if mode == "best":
                return Fixed(self._space, settings[0])
            order = ROUNDS * every_setting(self._space) if mode == "offline" else PAIR_ROUNDS * settings
            return EachInTurn(self._space, settings[0], order)

    tuners = collect_tuners(Timed)
    batches = micro_batches(steps * PER_STEP, ROWS, 100 * seed, ragged=False, length=LENGTH)
    LOOPS[loop](Run(model_of(loop, WIDTH, LAYERS, LENGTH), batches, PER_STEP, is_tuned=True))
    (tuner,) = tuners
    result: dict[str, Any] = {"seconds": tuner.ended - tuner.began, "setting": tuner.setting}
    if tuner.schedule is not None:
        result["count"] = len(every_setting(tuner.schedule.space))
    if isinstance(tuner.schedule, EachInTurn) and mode != "best":
        result["settings"] = [
            (tuner.schedule.space.named(setting), statistics.median(times)) for setting, times in tuner.schedule.seconds.items()
        ]
    if isinstance(tuner.schedule, Schedule):
        result["lost"], result["over_at"] = tuner.schedule.spent_seconds, tuner.schedule.journal[-1].step
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    loop, mode, seed, steps, *chosen = sys.argv[1:]
    settings = json.loads(chosen[0]) if chosen else []
    print(json.dumps([run(loop, mode, int(seed), int(steps), settings if isinstance(settings, list) else [settings])]))
    if dist.is_initialized():
        dist.destroy_process_group()
