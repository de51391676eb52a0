"""Random changes of the setting in every step: losses and final weights against an untuned loop, and the order of samples.

`python -m benchmarks.inside.random_changes SCHEDULES WRAPPER` on each rank; `benchmarks.inside.page` runs it on one and two.
"""

import copy
import json
import sys
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from autotune.inside.schedule import StepRecord
from autotune.inside.space import RunSpace, Setting
from autotune.inside.tuner import InRunTuner
from benchmarks.inside.models import Language, full_weights, make_batches, plain_loop, rank_number, start_ranks, wrapped


class RandomSchedule:
    """Another setting in every step."""

    def __init__(self, space: RunSpace, start: Setting, seed: int) -> None:
        self.space, self.incumbent, self.setting, self.random = space, start, start, Random(seed)
        self.is_over, self.level = False, 1.0
        self.journal: list[Any] = []
        self.used: set[Setting] = set()

    def skip(self) -> None:
        """The first step."""
        self.record(StepRecord(1.0))

    def record(self, _: StepRecord) -> None:
        """Draw the next setting."""
        self.used.add(self.setting)
        while True:
            self.setting = tuple(self.random.choice(knob.values) for knob in self.space.knobs)
            if self.space.fits(self.setting):
                return

    def restart(self, _: str) -> None:
        """The run's own setting was out of memory."""


class RandomlyTuned(InRunTuner):
    """A tuner with a random schedule."""

    seed = 0

    def _new_schedule(self) -> Any:
        start = self._space.setting(self.setting)
        assert start is not None
        return RandomSchedule(self._space, start, self.seed)


def compare(seed: int, wrapper: str) -> dict[str, Any]:
    """One schedule: the largest differences of losses and weights, and whether each sample was trained once and in order."""
    draw = Random(seed)
    rows, per_step, ragged = draw.choice((1, 2, 3, 4, 6, 8)), draw.choice((1, 1, 2, 4)), draw.random() < 0.5
    batches = make_batches(draw.randrange(6, 14) * per_step, rows, 1000 * seed + rank_number(), ragged)
    torch.manual_seed(seed)
    reference = Language()
    tuned = copy.deepcopy(reference)
    losses: tuple[list[float], list[float]] = ([], [])
    reference = wrapped(reference, wrapper)
    plain_loop(reference, torch.optim.AdamW(reference.parameters(), 1e-3), batches, per_step, losses[0].append)
    model = wrapped(tuned, wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tuner = RandomlyTuned(model, optimizer, global_batch_size=rows * per_step * world, headroom=0.0)
    tuner.seed = seed
    clears_first, trained, total = draw.random() < 0.5, [], 0.0
    for batch in tuner.batches(batches):
        with tuner:
            trained += batch["ids"].tolist()
            if clears_first:
                optimizer.zero_grad()
            loss = model(batch["input_ids"], batch["labels"])
            total += float(loss.detach()) * tuner.weight
            tuner.backward(loss)
            optimizer.step()
            if not clears_first:
                optimizer.zero_grad()
        if tuner.step_ends:
            losses[1].append(total)
            total = 0.0
    pairs = zip(full_weights(reference), full_weights(model), strict=True)
    return {
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "in_order": trained == [number for batch in batches for number in batch["ids"].tolist()],
        "settings": len(tuner.schedule.used) if tuner.schedule is not None else 0,
    }


if __name__ == "__main__":
    start_ranks()
    print(json.dumps([compare(seed, sys.argv[2]) for seed in range(int(sys.argv[1]))]))
    if dist.is_initialized():
        dist.destroy_process_group()
