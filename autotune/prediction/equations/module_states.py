"""Memory that the native engine adds to a module's activations at each moment of a micro-batch, in bytes.

The engine's own steps are followed, without tensors: `executor.engines.native.buckets` (gradients) and
`executor.engines.native.prefetch` (parameters of stage 3). Predictions import no torch, so that the steps are repeated here, in
bytes; `tests/autotune/prediction/test_module_plans.py` compares the two.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.prediction.equations.cases import Array
from search_spaces.communication import IN_FLIGHT, PIECE_ELEMENTS, cut
from search_spaces.models.module_profile import OUTER, MomentKind, TrainedParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKnobs:
    """What decides how states are sharded and sent. Sizes in elements, widths in bytes."""

    zero_stage: int
    ranks: int
    """Ranks over which states are sharded: 1 at stage 0."""
    width: float
    """Of a parameter in computation, and of a gradient as backward makes it."""
    master_width: float
    reduce_width: float
    sum_width: float
    """Of an element of gradients that are summed over micro-batches."""
    accumulates: bool
    """Whether a step has several micro-batches."""
    overlaps: bool
    defers: bool
    """Whether stage 2 reduces once per step."""
    reshards: bool
    bucket: float
    prefetch: float
    persistence: float
    max_live: float
    copies: bool
    """Whether the backend copies the messages of gathers and of reduce-scatters, as gloo does."""
    shard_beside_master: bool = False
    """Whether stage 3 keeps a share of the parameters on the device besides the (offloaded) master."""
    pipelined: bool = False
    """Whether reductions of a micro-batch stay in flight when it ends, as in a pipeline."""
    shard_on_host: bool = False
    """Whether stage 3 reads its share of the parameters from the host."""


StateBytes = tuple[float, float, float]
"""Bytes of parameters, gradients and buffers."""
PARAMETERS, GRADIENTS, BUFFERS = range(3)
Marks = tuple[tuple[MomentKind, int], ...]
"""The moments of a micro-batch: mark and index."""
STEPS = IN_FLIGHT + 2
"""Micro-batches whose states differ: the first ones until as many reductions are in flight as can be, and the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What the states of a stage depend on: equal stages share one. Compared by identity."""

    trained: tuple[TrainedParameter, ...]
    """Elements and blocks, counted from the stage's first one."""
    marks: Marks
    elements: int
    """Of all parameters."""


@lru_cache(maxsize=1024)
def shape_of(trained: tuple[TrainedParameter, ...], marks: Marks) -> Shape:
    """The one shape with these values."""
    return Shape(trained=trained, marks=marks, elements=sum(parameter.elements for parameter in trained))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageStates:
    """The states of stages of one shape in the micro-batches of a step that differ: the first ones, and the last."""

    moments: Array
    """(`STEPS`, 2, moments, 3): while the module computes what ends with a moment, and the most while the engine acts at it."""
    end: Array
    """(3): after the last micro-batch."""
    gathers: Sequence[tuple[int, float]]
    """(`STEPS`): gathers of parameters (stage 3), and the bytes of their messages."""

    @property
    def begun(self) -> Array:
        """(`STEPS`, 3): as each micro-batch begins."""
        return self.moments[:, 0, 0]

    def gathered(self, count: float) -> tuple[float, float]:
        """Gathers of a step of `count` micro-batches and the bytes of their messages: all but the last are like the first."""
        (times, size), (last_times, last_size) = self.gathers[0], self.gathers[-1]
        return (count - 1) * times + last_times, (count - 1) * size + last_size


@lru_cache(maxsize=1 << 14)
def follow(shape: Shape, knobs: StateKnobs) -> StageStates:
    """The states; sizes beyond the shape's count as one."""
    within = {name: min(getattr(knobs, name), float(shape.elements)) for name in ("bucket", "prefetch", "max_live")}
    return _followed(shape, dataclasses.replace(knobs, **within))


@lru_cache(maxsize=4096)
def _followed(shape: Shape, knobs: StateKnobs) -> StageStates:
    engine = _Engine(shape.trained, shape.marks, knobs)
    steps = [engine.run(last=not knobs.accumulates)]
    gathers = [engine.gathers]
    if knobs.accumulates:
        # Without a pipeline, reductions end with their micro-batch, and all between the first and the last are like these.
        between = IN_FLIGHT if knobs.pipelined else 0
        for index in range(between + 1):
            steps.append(engine.run(last=index == between))
            gathers.append(engine.gathers)
    while engine.sent:
        engine.land()
    repeated = STEPS - len(steps)
    return StageStates(
        moments=np.array([*steps, *[steps[-1]] * repeated]), end=np.array(engine.now()),
        gathers=[*gathers, *[gathers[-1]] * repeated],
    )  # fmt: skip


@dataclass(slots=True)
class _SentStates:
    bucket: int
    rows: float
    """Bytes of the rows, of the backend's copy and of an output of its own: freed when it has landed."""


class _Engine:
    """Gradients and, at stage 3, gathered parameters of one rank."""

    def __init__(self, trained: Sequence[TrainedParameter], marks: Marks, knobs: StateKnobs) -> None:
        self.knobs, self.marks = knobs, marks
        self.held = [0.0, 0.0, 0.0]
        self.total = self.highest = 0.0
        self.most: StateBytes = (0.0, 0.0, 0.0)
        """The fullest since the last moment, of `highest` bytes in total."""
        self.elements = [parameter.elements for parameter in trained]
        self.shares = [-(-elements // knobs.ranks) for elements in self.elements]
        order = list(reversed(range(len(self.elements))))
        self.buckets = [*cut(order, self.elements.__getitem__, knobs.bucket)]
        self.bucket_of = {slot: index for index, bucket in enumerate(self.buckets) for slot in bucket}
        most = min(PIECE_ELEMENTS, max(self.elements, default=0))
        self.pieces = [piece for bucket in self.buckets for piece in cut(bucket, self.elements.__getitem__, most)]
        self.piece_of = {slot: index for index, piece in enumerate(self.pieces) for slot in piece}
        self.every = knobs.zero_stage == 3 or (knobs.zero_stage == 2 and not knobs.defers)
        self.rows_width = knobs.sum_width if knobs.accumulates and not self.every else knobs.reduce_width
        self.in_share = knobs.ranks == 1 and not self.every and knobs.reduce_width == self.rows_width == knobs.master_width
        self.columns = [sum(self.shares[slot] for slot in bucket) for bucket in self.buckets]
        self.rows: dict[int, float] = {}
        self.share: dict[int, float] = {}
        self.waiting: dict[int, set[int]] = {}
        self.filled: set[int] = set()
        self.sent: deque[_SentStates] = deque()
        self.next, self.ready, self.reduces, self.last = 0, set[int](), True, True
        self.missing: list[int] = []
        self.tag = GRADIENTS if self.in_share or not self.every else BUFFERS
        """Of full gradients."""
        self.gatherer = _Gatherer(trained, marks, self) if knobs.zero_stage == 3 else None

    @property
    def gathers(self) -> tuple[int, float]:
        """Gathers of the last micro-batch, and the bytes of their messages."""
        return (0, 0.0) if self.gatherer is None else (self.gatherer.gathers, self.gatherer.gathered_bytes)

    def run(self, last: bool) -> tuple[list[StateBytes], list[StateBytes]]:
        """One micro-batch: what is held while the module computes, and the most while the engine acts, at each moment."""
        self.last, self.reduces = last, last or self.every
        self.next = 0
        self.ready.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        if self.gatherer is not None:
            self.gatherer.begin(last)
        during, acting = [], []
        for mark, index in self.marks:
            self.most, self.highest = self.now(), self.total
            during.append(self.most)
            self._act(mark, index)
            acting.append(self.most)
        return during, acting

    def now(self) -> StateBytes:
        """What is held."""
        parameters, gradients, buffers = self.held
        return parameters, gradients, buffers

    def add(self, tag: int, size: float) -> None:
        """Allocate (or free) bytes, and note the most."""
        self.held[tag] += size
        self.total += size
        if self.total > self.highest:
            self.most, self.highest = self.now(), self.total

    def pass_by(self, size: float) -> None:
        """Allocate and free buffers."""
        if size and self.total + size > self.highest:
            parameters, gradients, buffers = self.held
            self.most, self.highest = (parameters, gradients, buffers + size), self.total + size

    def declare_ready(self, slots: Iterable[int]) -> None:
        """See `GradientReducer.declare_ready`."""
        for slot in slots:
            if slot not in self.ready:
                self.ready.add(slot)
                self.missing[self.bucket_of[slot]] -= 1
        while self.reduces and self.next < len(self.buckets) and not self.missing[self.next]:
            self._send_next()

    def _act(self, mark: MomentKind, index: int) -> None:
        gatherer = self.gatherer
        match mark:
            case MomentKind.GRADIENT:
                self._take(index)
                if gatherer is None:
                    self.declare_ready((index,))
                else:
                    gatherer.gradient_done(index)
            case MomentKind.END:
                while self.reduces and self.next < len(self.buckets):
                    self._send_next()
                while self.sent and not self.knobs.pipelined:
                    self.land()
                if gatherer is not None:
                    gatherer.end()
            case MomentKind.FORWARD if gatherer is not None:
                gatherer.use(index)
            case MomentKind.LEFT if gatherer is not None:
                gatherer.left(index)
            case MomentKind.LOSS if gatherer is not None:
                gatherer.use_backward(OUTER)
            case MomentKind.BACKWARD if gatherer is not None:
                gatherer.use_backward(index)

    def _take(self, slot: int) -> None:
        width = self.knobs.width
        self.add(GRADIENTS, self.elements[slot] * width)
        index = self.piece_of[slot]
        waiting = self.waiting.setdefault(index, set())
        waiting.add(slot)
        if len(waiting) == len(self.pieces[index]):
            self._collect(index)

    def _collect(self, index: int) -> None:
        slots = self.waiting.pop(index, set())
        if not slots:
            return
        bucket, knobs = self.bucket_of[next(iter(slots))], self.knobs
        tag = self.tag
        if bucket not in self.rows:
            self.rows[bucket] = self.columns[bucket] * knobs.ranks * self.rows_width
            if not (self.in_share and bucket in self.share):
                self.add(tag, self.rows[bucket])
            if self.in_share:
                self.share[bucket] = self.rows[bucket]
        adds = bool(self.filled & slots)
        elements = sum(self.elements[slot] for slot in slots)
        padded = elements if knobs.ranks == 1 else sum(self.shares[slot] for slot in slots) * knobs.ranks
        if len(slots) == 1:
            extra = padded * knobs.width if padded != elements else 0.0
        elif knobs.ranks == 1 and (not adds or knobs.width == self.rows_width):
            extra = 0.0
        else:
            whole = len(slots) == len(self.buckets[bucket]) or knobs.ranks == 1
            direct = not adds and whole and knobs.width <= self.rows_width
            extra = 0.0 if direct else padded * knobs.width
        self.pass_by(extra)
        self.add(GRADIENTS, -elements * knobs.width)
        self.filled |= slots

    def _send_next(self) -> None:
        bucket, knobs = self.next, self.knobs
        self.next += 1
        for index in [index for index in self.waiting if self.bucket_of[self.pieces[index][0]] == bucket]:
            self._collect(index)
        if bucket not in self.rows:  # no parameter of it had a gradient
            self.rows[bucket] = self.columns[bucket] * knobs.ranks * self.rows_width
            self.add(self.tag, self.rows[bucket])
        self.filled.difference_update(self.buckets[bucket])
        rows, tag = self.rows.pop(bucket), self.tag
        if self.rows_width != knobs.reduce_width:
            cast = rows / self.rows_width * knobs.reduce_width
            becomes_share = knobs.ranks == 1 and knobs.reduce_width == knobs.master_width
            other = GRADIENTS if becomes_share else BUFFERS
            self.add(other, cast)
            self.add(tag, -rows)
            rows, tag = cast, other
            if becomes_share:
                self.share[bucket] = cast
        columns = self.columns[bucket]
        if knobs.ranks == 1:
            if bucket in self.share:  # reduced in place
                self.sent.append(_SentStates(bucket, 0.0))
            else:
                self._move(tag, rows)
                self.sent.append(_SentStates(bucket, rows))
        else:
            while any(sent.bucket == bucket for sent in self.sent):
                self.land()  # of an earlier micro-batch
            copy = rows if knobs.copies else 0.0
            self._move(tag, rows)
            output = 0.0
            if knobs.reduce_width == self._share_width(bucket):
                self._make_share(bucket)
            else:
                output = columns * knobs.reduce_width
            self.add(BUFFERS, copy + output)
            self.sent.append(_SentStates(bucket, rows + copy + output))
        while len(self.sent) > (IN_FLIGHT if knobs.overlaps else 0):
            self.land()

    def _move(self, tag: int, size: float) -> None:
        """Rows that are sent count as buffers."""
        if tag != BUFFERS:
            self.held[GRADIENTS] -= size
            self.held[BUFFERS] += size

    def _share_width(self, bucket: int) -> float:
        if bucket in self.share:
            return self.share[bucket] / max(self.columns[bucket], 1)
        return self.knobs.master_width if self.last or not self.every else self.knobs.sum_width

    def _make_share(self, bucket: int) -> None:
        if bucket not in self.share:
            self.share[bucket] = self.columns[bucket] * self._share_width(bucket)
            self.add(GRADIENTS, self.share[bucket])

    def land(self) -> None:
        """Wait for the oldest reduction in flight."""
        sent, knobs = self.sent.popleft(), self.knobs
        self._make_share(sent.bucket)
        if self.last and self.share[sent.bucket] != self.columns[sent.bucket] * knobs.master_width:
            master = self.columns[sent.bucket] * knobs.master_width
            self.add(GRADIENTS, master)
            self.add(GRADIENTS, -self.share[sent.bucket])
            self.share[sent.bucket] = master
        self.add(BUFFERS, -sent.rows)


@dataclass(slots=True, eq=False)
class _Gather:
    slots: tuple[int, ...]
    rows: float
    copy: float


class _Gatherer:
    """Parameters of stage 3, after the trace of uses has been recorded: `ParameterGatherer`."""

    def __init__(self, trained: Sequence[TrainedParameter], marks: Marks, engine: _Engine) -> None:
        self.engine, self.knobs = engine, engine.knobs
        self.slots: dict[int, list[int]] = {}
        """Unit -> its slots: the blocks, and what is outside of them."""
        for slot, parameter in enumerate(trained):
            self.slots.setdefault(parameter.block, []).append(slot)
        self.encloses = len(self.slots) > 1
        """Whether the unit outside of the blocks encloses others."""
        uses = (MomentKind.FORWARD, MomentKind.LOSS, MomentKind.BACKWARD)
        used = (OUTER if mark is MomentKind.LOSS else index for mark, index in marks if mark in uses)
        self.trace = [unit for unit in used if unit in self.slots]
        self.offset = {slot: position for position, slot in enumerate(reversed(range(len(engine.elements))))}
        self.live: set[int] = set()
        self.live_elements = 0.0
        self.pending: dict[int, _Gather] = {}
        self.ahead: set[int] = set()
        self.allocated = {slot for slot, elements in enumerate(engine.elements) if elements <= self.knobs.persistence}
        self.position = -1
        self.gathers, self.gathered_bytes = 0, 0.0
        self.in_backward: int | None = None
        self.holds = not self.knobs.reshards
        self.between: dict[tuple[int, int], tuple[set[int], int]] = {}
        """Positions of a use of a unit and its next one in the trace -> other slots used in between, and their elements."""
        engine.add(PARAMETERS, sum(engine.elements[slot] for slot in self.allocated) * self.knobs.width)

    def begin(self, last: bool) -> None:
        """See `ParameterGatherer.begin_backward`."""
        self.gathers, self.gathered_bytes = 0, 0.0
        self.holds = not self.knobs.reshards and not last
        if self.position < 0 and self.trace and self.knobs.prefetch > 0:
            first = tuple(slot for slot in self.slots[self.trace[0]] if slot not in self.live and slot not in self.pending)
            candidates = self._candidates(first)
            groups = (first, candidates) if self.knobs.overlaps else ((*first, *candidates),)
            gathers = [self._issue(slots) for slots in groups if slots]
            if not self.knobs.overlaps:
                for gather in gathers:
                    self._finish(gather)

    def left(self, unit: int) -> None:
        """After a unit's forward."""
        if unit in self.slots and self.knobs.reshards and not self._used_soon(unit):
            for slot in self.slots[unit]:
                self._release(slot)

    def use_backward(self, unit: int) -> None:
        """Before a unit's backward."""
        if unit == OUTER:
            # The hook of the module's forward has run by now.
            self.left(OUTER)
        if unit not in self.slots:
            return
        if not (unit == OUTER and self.encloses):
            previous, self.in_backward = self.in_backward, unit
            if previous is not None:
                for slot in self.slots[previous]:
                    if slot not in self.slots[unit] and not self.holds:
                        self._release(slot)
                self.engine.declare_ready(self.slots[previous])
        self.use(unit)

    def gradient_done(self, slot: int) -> None:
        """See `ParameterGatherer.gradient_done`."""
        if self.engine.elements[slot] > self.knobs.persistence and not self.holds:
            self._free(slot)

    def end(self) -> None:
        """After backward."""
        for gather in dict.fromkeys(self.pending.values()):
            self._finish(gather)
        if not self.holds:
            for slot in [*self.live]:
                self._release(slot)
        if self.engine.last:
            self.live.clear()
            self.live_elements = 0.0
        self.in_backward = None
        self.ahead.clear()
        if self.knobs.reshards or self.engine.last:
            self.position = -1

    def use(self, unit: int) -> None:
        """Before a unit runs."""
        if unit not in self.slots:
            return
        position = self._find(unit, self.position + 1)
        reached = self.position if position is None else position
        for passed in (unit, *self.trace[self.position + 1 : reached]):
            self.ahead.difference_update(self.slots[passed])
        self.position = reached
        missing = tuple(slot for slot in self.slots[unit] if slot not in self.live and slot not in self.pending)
        prefetches = self.knobs.prefetch > 0
        if missing:
            self._issue((*missing, *(self._candidates(missing) if prefetches and not self.knobs.overlaps else ())))
        for gather in dict.fromkeys(self.pending[slot] for slot in self.slots[unit] if slot in self.pending):
            self._finish(gather)
        if prefetches and (ahead := self._candidates(())):
            gather = self._issue(ahead)
            if not self.knobs.overlaps:
                self._finish(gather)

    def _find(self, unit: int, start: int) -> int | None:
        return next((index for index in range(start, len(self.trace)) if self.trace[index] == unit), None)

    def _candidates(self, fetched: Sequence[int]) -> tuple[int, ...]:
        elements, knobs = self.engine.elements, self.knobs
        ahead = sum(elements[slot] for slot in self.ahead)
        present = {*fetched, *self.live, *self.pending}
        if len(present) == len(elements):
            return ()
        live = self.live_elements + sum(elements[slot] for slot in {*fetched, *self.pending})
        candidates: list[int] = []
        for unit in self.trace[self.position + 1 :]:
            missing = [slot for slot in self.slots[unit] if slot not in present]
            size = sum(elements[slot] for slot in missing)
            if ahead + size > knobs.prefetch and 2 * ahead >= size > 0:
                break
            for slot in missing:
                if live + elements[slot] > knobs.max_live:
                    self.ahead.update(candidates)
                    return tuple(candidates)
                candidates.append(slot)
                present.add(slot)
                ahead += elements[slot]
                live += elements[slot]
        self.ahead.update(candidates)
        return tuple(candidates)

    def _issue(self, slots: tuple[int, ...]) -> _Gather:
        engine, knobs = self.engine, self.knobs
        ordered = sorted(slots, key=self.offset.__getitem__)
        columns = sum(engine.shares[slot] for slot in ordered)
        places = [self.offset[slot] for slot in ordered]
        joined = any(second != first + 1 for first, second in itertools.pairwise(places))
        casts = knobs.width < knobs.master_width and not (knobs.shard_beside_master or knobs.shard_on_host)
        shard = columns * knobs.width if joined or casts or knobs.shard_on_host else 0.0
        if joined and casts:
            engine.pass_by(columns * knobs.master_width + shard)
        rows = columns * knobs.ranks * knobs.width
        copy = rows if knobs.copies and knobs.ranks > 1 else 0.0
        gather = _Gather(tuple(ordered), rows + shard, copy)
        engine.add(BUFFERS, rows + shard + copy)
        self.gathers, self.gathered_bytes = self.gathers + 1, self.gathered_bytes + rows
        self.pending.update(dict.fromkeys(slots, gather))
        return gather

    def _finish(self, gather: _Gather) -> None:
        engine = self.engine
        engine.add(BUFFERS, -gather.copy)
        for slot in gather.slots:
            if slot not in self.allocated:
                self.allocated.add(slot)
                engine.add(PARAMETERS, engine.elements[slot] * self.knobs.width)
            self.pending.pop(slot, None)
            self.live.add(slot)
            self.live_elements += engine.elements[slot]
        engine.add(BUFFERS, -gather.rows)

    def _release(self, slot: int) -> None:
        if slot in self.live and self.engine.elements[slot] > self.knobs.persistence:
            self._free(slot)
            self.live.remove(slot)
            self.live_elements -= self.engine.elements[slot]

    def _free(self, slot: int) -> None:
        if slot in self.allocated:
            self.allocated.remove(slot)
            self.engine.add(PARAMETERS, -self.engine.elements[slot] * self.knobs.width)

    def _used_soon(self, unit: int) -> bool:
        now = self._find(unit, max(self.position, 0))
        later = None if now is None else self._find(unit, now + 1)
        if now is None or later is None:
            return False
        key = (now, later)
        if key not in self.between:
            between = {slot for other in self.trace[now + 1 : later] for slot in self.slots[other]} - {*self.slots[unit]}
            self.between[key] = between, sum(self.engine.elements[slot] for slot in between)
        other_slots, elements = self.between[key]
        if elements > self.knobs.prefetch:
            return False
        missing = sum(self.engine.elements[slot] for slot in other_slots - self.live)
        return not missing or self.live_elements + missing <= self.knobs.max_live
