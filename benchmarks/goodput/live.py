"""Goodput of real training with injected failures, against the closed form.

    python -m benchmarks.goodput.live [--failures 20] [--mean-seconds 8] [--markdown docs/results/goodput-live.md]

The native engine trains on four local ranks. Ranks are killed at the instants of a Poisson process. After each failure all
ranks start again, load the last checkpoint and repeat the work since then.

1. Calibration, without failures: seconds of a step and of a checkpoint. Then some kills: seconds until ranks train again, and
   to load.
2. The closed form advises an interval between checkpoints from these figures.
3. Training with failures at the advised interval, at half of it and at twice it. The three take turns, so that a drifting
   machine affects all of them, with the same gaps between failures.

Goodput: steps in the last checkpoint at the last failure, times the calibrated seconds of a step, over the time that has
passed.
"""

import json
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autotune.goodput.closed_form import best_interval, expected
from autotune.goodput.failures import DAY, FailureKind, FailureRates
from autotune.goodput.run import Checkpoint, Run
from benchmarks.common.gang import Gang, TaskError
from benchmarks.common.written_page import judge, page_parser
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

RANKS = 4
MODEL = ModelSpec(
    name="live", family="llama", num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    ffn_hidden_size=384, vocab_size=1024, sequence_length=64,
)  # fmt: skip
CONFIG = TrialConfig(precision="fp32", zero_stage=1, micro_batch_size=2)
WORKLOAD = Workload(global_batch_size=8, sequence_length=64)
KILLS = 4
"""Of the calibration."""
CALIBRATED_STEPS = 60
SAVED_EVERY = 5
"""Steps between checkpoints of the calibration."""
TURN = 5
"""Failures in a row at one interval."""
CLOSE = 0.10
"""Largest relative difference between measured and predicted goodput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the ranks do: train from the last checkpoint until they are killed, or until `last`."""

    folder: str
    """For checkpoints and the log."""
    interval: int
    """Steps between checkpoints."""
    last: int | None = None


def train(rank: int, task: Training) -> int:
    """The number of steps, if they end."""
    folder = Path(task.folder)
    context = RankContext(rank=rank, world_size=RANKS, device=torch.device("cpu"))
    session = NativeEngine().build(context, MODEL, CONFIG, WORKLOAD)
    step = durable_steps(folder)
    if step:
        seconds = session.load_checkpoint(folder / f"step-{step}")
        _log(rank, folder, "loaded", step, seconds)
    while task.last is None or step < task.last:
        began = time.monotonic()
        session.prepare(step)
        session.train_step()
        step += 1
        _log(rank, folder, "step", step, time.monotonic() - began)
        if step % task.interval == 0:
            _save(rank, folder, session, step)
    session.close()
    return step


def _save(rank: int, folder: Path, session: Any, step: int) -> None:
    began = time.monotonic()
    session.save_checkpoint(folder / f"step-{step}")
    dist.barrier()
    if rank == 0:
        before = durable_steps(folder)
        temporary = folder / "latest.new"
        temporary.write_text(str(step))
        temporary.rename(folder / "latest")
        if before:
            shutil.rmtree(folder / f"step-{before}")
    dist.barrier()
    _log(rank, folder, "saved", step, time.monotonic() - began)


def durable_steps(folder: Path) -> int:
    """Steps in the last whole checkpoint."""
    latest = folder / "latest"
    return int(latest.read_text()) if latest.exists() else 0


def _log(rank: int, folder: Path, event: str, step: int, seconds: float) -> None:
    if rank == 0:
        with (folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": step, "seconds": seconds, "at": time.time()}) + "\n")


def events(folder: Path, name: str, since: float = 0.0) -> list[dict[str, Any]]:
    """The log's lines of a kind, from an instant on."""
    lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in found if line["event"] == name and line["at"] >= since]


class Injector:
    """Kills a rank at an instant, or as soon as there are ranks after it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def at(self, instant: float) -> threading.Thread:
        """The thread that does it; `instant`: by the clock `time.time`."""
        thread = threading.Thread(target=self._kill, args=(instant,), daemon=True)
        thread.start()
        return thread

    def _kill(self, instant: float) -> None:
        time.sleep(max(instant - time.time(), 0.0))
        while not (alive := multiprocessing.active_children()):
            time.sleep(0.01)
        self._draw.choice(alive).kill()


def until_killed(gang: Gang, task: Training) -> None:
    """Run the task until a rank dies."""
    try:
        gang.run(task)
    except TaskError:
        return
    raise RuntimeError("the training ended before a failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured inputs of the prediction, in seconds."""

    step: float
    save: float
    load: float
    down: float
    """From a failure to the end of the first step after it, without the load and a step: the first step takes longer."""

    def run(self, mean_seconds: float) -> Run:
        """The same as the closed form takes it; a failure takes no node."""
        kind = FailureKind(name="killed", per_node_day=DAY / mean_seconds, takes_node=False)
        return Run(
            nodes=1, step_seconds=self.step, failures=FailureRates(name="injected", kinds=(kind,)),
            checkpoint=Checkpoint(blocking_seconds=self.save, durable_seconds=0.0, load_seconds=self.load),
            detection_seconds=0.0, restart_seconds=self.down,
        )  # fmt: skip


def calibrate(gang: Gang, folder: Path) -> Calibration:
    """Train without failures, then with some kills."""
    folder.mkdir()
    gang.run(Training(folder=str(folder), interval=SAVED_EVERY, last=CALIBRATED_STEPS))
    steps = [line["seconds"] for line in events(folder, "step")]
    injector, downs = Injector(0), []
    for _ in range(KILLS):
        killed = time.time() + 3.0
        injector.at(killed)
        until_killed(gang, Training(folder=str(folder), interval=SAVED_EVERY))
        ended = durable_steps(folder) + SAVED_EVERY
        gang.run(Training(folder=str(folder), interval=SAVED_EVERY, last=ended))
        first, loaded = events(folder, "step", killed + 0.01), events(folder, "loaded", killed)
        ended_at = next(line["at"] for line in first if line["at"] > loaded[0]["at"])
        downs.append(ended_at - killed - loaded[0]["seconds"])
    step = statistics.fmean(steps[5:])
    saves, loads = (statistics.fmean(line["seconds"] for line in events(folder, name)) for name in ("saved", "loaded"))
    return Calibration(step=step, save=saves, load=loads, down=statistics.fmean(downs) - step)


@dataclass(slots=True, kw_only=True)
class Course:
    """Training at one interval."""

    name: str
    interval: int
    folder: Path
    elapsed: float = 0.0
    failures: int = 0

    @property
    def steps(self) -> int:
        """Kept steps."""
        return durable_steps(self.folder)

    def effective(self, step_seconds: float) -> float:
        """Measured goodput."""
        return self.steps * step_seconds / self.elapsed


def play(gang: Gang, course: Course, gaps: Sequence[float], seed: int) -> None:
    """Train through some failures, the first after `gaps[0]` seconds of training."""
    task, injector = Training(folder=str(course.folder), interval=course.interval), Injector(seed)
    started = threading.Event()
    seen = len(events(course.folder, "step"))
    instants: list[float] = []

    def begin() -> None:
        # The clock starts with the first step: the ranks' first start is not a recovery.
        while len(events(course.folder, "step")) == seen:
            time.sleep(0.02)
        at = time.time()
        instants.append(at)
        for gap in gaps:
            at += gap
            instants.append(at)
        started.set()
        for instant in instants[1:]:
            injector.at(instant).join()

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    while not started.is_set() or time.time() < instants[-1]:
        until_killed(gang, task)
    thread.join()
    course.elapsed += instants[-1] - instants[0]
    course.failures += len(gaps)


def gaps_of(failures: int, mean: float, seed: int) -> list[float]:
    """Exponential gaps, scaled to their mean."""
    draw = random.Random(seed)
    found = [draw.expovariate(1.0) for _ in range(failures)]
    return [gap * mean * failures / sum(found) for gap in found]


def page(calibration: Calibration, mean: float, run: Run, courses: Sequence[Course]) -> str:
    """The figures as Markdown."""
    lines = [
        "# Goodput of real training with injected failures",
        "",
        "Written by `python -m benchmarks.goodput.live`. The native engine (`zero_stage=1`) trains a small transformer on four",
        f"local ranks. A rank is killed every {mean:g} s on average, by a Poisson process; then all start again from the last",
        "checkpoint. The three intervals take turns and meet the same failures. Predicted: the closed form of",
        "[goodput](goodput.md), from seconds that were measured before.",
        "",
        f"Measured before: a step {calibration.step:.3f} s, a checkpoint {calibration.save:.3f} s, loading one",
        f"{calibration.load:.3f} s, from a failure to the next step {calibration.down:.2f} s.",
        "",
        "| interval | steps | failures | minutes | kept steps | goodput | predicted | difference |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for course in courses:
        predicted, found = expected(run, course.interval * run.step).effective, course.effective(calibration.step)
        lines.append(
            f"| {course.name} | {course.interval} | {course.failures} | {course.elapsed / 60:.1f} | {course.steps} "
            f"| {found:.1%} | {predicted:.1%} | {found / predicted - 1:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def problems(calibration: Calibration, run: Run, courses: Sequence[Course]) -> list[str]:
    """What misses the targets."""
    advised, *others = courses
    predicted, found = expected(run, advised.interval * run.step).effective, advised.effective(calibration.step)
    wrong = []
    if abs(found / predicted - 1) > CLOSE:
        wrong.append(f"goodput at the advised interval is {found:.3f}, {predicted:.3f} was predicted")
    wrong += [
        f"the interval of {other.interval} steps has a higher goodput than the advised one"
        for other in others
        if other.effective(calibration.step) > found
    ]
    return wrong


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--failures", type=int, default=20, help="at each interval")
    parser.add_argument("--mean-seconds", type=float, default=8.0, help="mean time between failures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, Gang(RANKS, train, seconds_limit=3600.0) as gang:
        calibration = calibrate(gang, Path(place) / "calibration")
        print(calibration, file=sys.stderr, flush=True)
        run = calibration.run(arguments.mean_seconds)
        advised = max(round(best_interval(run) / run.step), 2)
        named = {"advised": advised, "half": max(advised // 2, 1), "twice": 2 * advised}
        courses = [Course(name=name, interval=steps, folder=Path(place) / name) for name, steps in named.items()]
        for course in courses:
            course.folder.mkdir()
        gaps = gaps_of(arguments.failures, arguments.mean_seconds, seed=1)
        for first in range(0, len(gaps), TURN):
            for course in courses:
                play(gang, course, gaps[first : first + TURN], seed=first)
                progress = f"{course.name}: {course.failures} failures, {course.effective(calibration.step):.3f}"
                print(progress, file=sys.stderr, flush=True)
        text, wrong = page(calibration, arguments.mean_seconds, run, courses), problems(calibration, run, courses)
    return judge(text, wrong, arguments.markdown)


if __name__ == "__main__":
    raise SystemExit(main())
