"""Runs the items of a part that have no result yet, while time is left. Survives GPU errors that break a process."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch

from benchmarks.gpu.bundle import ROOT
from benchmarks.gpu.lines import ANY, FINAL, Claim, Line, LineFile, State, commit_of, read_lines, results
from benchmarks.gpu.proof import Item, Proof, Setting
from executor.process_tree import descendants

MOST_STARTS = 3
"""Process ends inside one item before it is recorded as failed: the first ones may have been kills from outside."""
SMALL_SECONDS = 10.0
"""Estimated seconds of an item with small models, before one of its group has run."""
LONGEST = 6.0
HANGS_SECONDS = {"large": 60.0, "small": 600.0}
"""An item hangs when it exceeds `LONGEST` times its estimate plus these seconds: a CPU that runs tests may be very busy."""
GRACE_SECONDS = 45.0
"""How long an item may exceed the time of its run."""


class Ended(IntEnum):
    """How a run of a part ended: the exit status."""

    WHOLE = 0
    """Every item has a result, and none fails."""
    FAILS = 1
    """Every item has a result or lacks something that can be provided; some do not hold."""
    AGAIN = 75
    """Items are left. Start again with `--resume`."""


class Worker:
    """Runs one part on one device."""

    def __init__(self, part: str, setting: Setting, out: Path, resume: Sequence[Path], again: Sequence[State] = ()) -> None:
        """`resume`: files of earlier runs; `again`: results in these states are discarded."""
        self._part, self._setting, self._again = part, setting, frozenset(again)
        lines = [line for line in read_lines(dict.fromkeys(path.resolve() for path in (*resume, out))) if self._is_ours(line)]
        self._starts = Counter[str]()
        for line in lines:
            if line.part == part:
                self._starts[line.item] = self._starts[line.item] + 1 if line.state is State.BEGUN else 0
        self._known = results(lines)
        self._final = {key for key, line in self._known.items() if line.state in FINAL - self._again}
        setting.known = self._known
        self._file = LineFile(out)
        self._lock = threading.Lock()
        self._machine, self._commit = machine(setting), commit_of(ROOT)

    def run(self, items: Sequence[Item], seconds: float) -> Ended:
        """Run the missing items, by descending value; an item starts if its expected time is left."""
        until, ran = time.monotonic() + seconds, 0
        for item in sorted(items, key=lambda item: -item.value):
            if (self._part, item.name) in self._final:
                continue
            if item.skipped:
                self._add(item, State.SKIPPED, (Claim(state=State.SKIPPED, text=item.skipped),))
                continue
            if self._starts[item.name] >= MOST_STARTS:
                text = f"the process ended {MOST_STARTS} times inside this item"
                self._add(item, State.FAILS, (Claim(state=State.FAILS, text=text),))
                continue
            expected, left = self._expected(item, items), until - time.monotonic()
            if expected > left:
                if not ran:
                    text = f"it takes about {expected:.0f} s and {seconds:.0f} s were given; give more --seconds"
                    self._add(item, State.NOT_RUN, (Claim(state=State.NOT_RUN, text=text),))
                    continue
                print(f"{self._part}: {left:.0f} s are left, {item.name} takes about {expected:.0f}; continue with --resume")
                return Ended.AGAIN
            ran += 1
            deadline = item.deadline or LONGEST * expected + HANGS_SECONDS[self._setting.size]
            if not self._run(item, deadline, left + GRACE_SECONDS):
                return Ended.AGAIN
        states = [self._known[self._part, item.name].state for item in items]
        return Ended.FAILS if {State.FAILS, State.NOT_RUN} & {*states} else Ended.WHOLE

    def _run(self, item: Item, limit: float, hard: float) -> bool:
        """Run one item; False: this process can no longer use the device."""
        self._add(item, State.BEGUN)
        began, proof = time.monotonic(), Proof(self._setting)
        watch = threading.Timer(min(limit, hard), self._give_up, (item, limit < hard, limit))
        watch.daemon = True
        watch.start()
        try:
            item.show(proof)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            message = " ".join(str(error).split())[:300]
            proof.claim(False, f"it ended early: {type(error).__name__}: {message}")
        finally:
            watch.cancel()
        lost = self._has_lost_device()
        if lost:
            proof.record(State.MEASURED, "this process lost the device; a new process continues")
        self._add(item, proof.state, tuple(proof.claims), proof.values, time.monotonic() - began)
        return not lost

    def _give_up(self, item: Item, hangs: bool, limit: float) -> None:
        """Runs on its own thread, since the item's is blocked. Ends this process and its ranks."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if hangs:
            text = f"it hung: no end within {limit:.0f} s; the stacks are on standard error"
            self._add(item, State.FAILS, (Claim(state=State.FAILS, text=text),), seconds=limit)
        sys.stdout.flush()
        for process in descendants(os.getpid()):  # at once, so that the device is free when the next run begins
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(Ended.AGAIN)

    def _add(
        self, item: Item, state: State, claims: tuple[Claim, ...] = (), values: dict[str, object] | None = None,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        line = Line(
            part=self._part, item=item.name, state=state, claims=claims, values=values or {}, seconds=round(seconds, 3),
            device=self._setting.device.type if item.needs_device else ANY, size=self._setting.size, machine=self._machine,
            card=self._setting.card, commit=self._commit,
        )  # fmt: skip
        with self._lock:
            self._file.add(line)
        if state is not State.BEGUN:
            self._known[line.key] = line
            print(f"{self._part}/{item.name}: {state} ({seconds:.1f} s)", flush=True)
            for claim in claims:
                print(f"  {claim.state}: {claim.text}", flush=True)

    def _expected(self, item: Item, items: Sequence[Item]) -> float:
        """The longest time of an item in its group; before the first, the declared estimate."""
        alike = {other.name for other in items if item.group and other.group == item.group}
        took = [line.seconds for (part, name), line in self._known.items() if part == self._part and name in alike]
        return max(took, default=0.0) or (item.seconds if self._setting.size == "large" else SMALL_SECONDS)

    def _is_ours(self, line: Line) -> bool:
        here = line.device == self._setting.device.type and line.ran_on == self._setting.card
        return line.size == self._setting.size and (here or line.device == ANY)

    def _has_lost_device(self) -> bool:
        """Whether every call fails now: after some CUDA errors a process cannot recover."""
        if not self._setting.on_gpu:
            return False
        try:
            self._setting.free()
            torch.cuda.synchronize(self._setting.device)
        except RuntimeError:
            return True
        return False


def machine(setting: Setting) -> str:
    """Device and versions, for the page."""
    return f"{setting.card}, torch {torch.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}"
