"""Stage 3: gathers the parameters of a unit for its use, prefetches along a recorded trace, and releases them afterwards."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from executor.engines.native.parameter_shard import Loaded, NearCopies, ParameterShard, Slot, fill, ranges
from executor.engines.native.quantised_communication import GatherFormat
from executor.parallel.adapters import Prompt
from executor.parallel.collectives import InFlight, ProcessGroup, mark
from executor.parallel.tensor import VocabularyEmbedding
from executor.user_module.calls import output_tensors
from search_spaces.trial_config import TrialConfig

TABLES = (nn.Embedding, VocabularyEmbedding, Prompt)


@dataclass(slots=True, eq=False)
class GatherUnit:
    """Parameters that are gathered together: those of one module that every rank calls."""

    module: nn.Module
    slots: tuple[Slot, ...]
    encloses: bool = False
    """Whether other units run inside it, so that backward needs its parameters until the end."""
    reads_in_backward: bool = True
    """Whether backward reads the parameters; that of an embedding lookup does not."""


@dataclass(slots=True)
class _GatherInFlight:
    """A gather in flight; its tensors must live until it has ended."""

    work: InFlight
    slots: tuple[Slot, ...]
    rows: Tensor
    """[ranks, each rank's shares of `slots`]"""
    loaded: Loaded
    from_near_group: bool
    """Whether it reads from the near copies."""
    done: bool = field(default=False)


class ParameterGatherer:
    """Keeps whole only the parameters of the units in use.

    1. Before a unit runs forward, and before the gradient of its output runs backward, its missing parameters are gathered in
       one collective (those that are neither present nor in flight), quantised ones in a separate one.
    2. The first window records the order of uses. Afterwards, each use prefetches the units of later uses in that order, in
       one collective, while the prefetched but unused parameters have at most `prefetch_bucket_size` elements, and at most
       `max_live_parameters` elements are whole in total. A unit that exceeds the first limit is still prefetched, whole, if
       less than half of its size is ahead of it: the uses before it would hide too little of its gather. One that exceeds the
       second limit is prefetched in part. The gather for the first use starts before forward. The trace covers a window: a
       micro-batch, or a step if there is a pipeline, in which several micro-batches run at once, or if parameters are kept.
    3. After forward a unit's parameters are released, unless `reshard_after_forward` is off or, according to the trace, the
       unit is used again before `prefetch_bucket_size` other elements are. In backward a parameter's memory is freed when its
       gradient is done. For the account that decides what to gather next, a unit ends when the next one begins, because that
       is the same on every rank even if only some ranks used a branch.
       With `reshard_after_forward` off they stay whole from their first use in a step to the last micro-batch's backward.
    4. A parameter of at most `param_persistence_threshold` elements stays whole until the optimizer changes it; a frozen one
       stays whole permanently.
    5. A frozen parameter has no gradient whose completion shows that backward is done with it; it is released with its unit.
    6. With `near_copies`, the result of a gather over all ranks is also kept there, sharded over few ranks; later gathers read
       these copies until the next update.

    Sizes are in elements (in bytes for quantised parameters), with the meanings of DeepSpeed's stage 3 [Rajbhandari et al.
    2021, ZeRO-Infinity].
    """

    def __init__(
        self,
        units: Sequence[GatherUnit],
        parameters: ParameterShard,
        group: ProcessGroup,
        config: TrialConfig,
        declare_ready: Callable[[Iterable[Slot]], None],
        near_copies: NearCopies | None = None,
    ) -> None:
        self.units, self.parameters, self.group = tuple(units), parameters, group
        self.near_copies = near_copies
        self.format = GatherFormat(config, group)
        self.declare_ready = declare_ready
        self.prefetch_elements = config.prefetch_bucket_size
        self.max_live = config.max_live_parameters
        self.overlap = config.overlap_comm
        self.reshard = config.reshard_after_forward
        self.holds = not self.reshard
        self.persistence_threshold = config.param_persistence_threshold
        self.trace: list[GatherUnit] = []
        self.recording = True
        self._position = -1
        self._live: set[Slot] = set()
        self._live_elements = 0
        self._pending: dict[Slot, _GatherInFlight] = {}
        self._ahead: set[Slot] = set()
        """Prefetched and not used yet, whether in flight or present."""
        self._in_backward: GatherUnit | None = None
        self._gradients_come = False
        self._units_left: Counter[Slot] = Counter()
        self._all = tuple(dict.fromkeys(slot for unit in units for slot in unit.slots))
        for slot in self._all:
            slot.parameter.data.untyped_storage().resize_(0)
        self._hooks = [hook for unit in units for hook in self._attach(unit)]

    def _attach(self, unit: GatherUnit) -> list[torch.utils.hooks.RemovableHandle]:
        before = unit.module.register_forward_pre_hook(lambda *_: self._use(unit))
        after = unit.module.register_forward_hook(lambda _module, _inputs, output: self._after_forward(unit, output))
        return [before, after]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_backward(self, last: bool) -> None:
        """Call before a micro-batch: reset the count of remaining units of each parameter, and prefetch for the first use."""
        self.holds = not self.reshard and not last
        self._units_left = Counter(slot for unit in self.units for slot in unit.slots)
        self._gradients_come = True
        if self.trace and not self.recording and self._position < 0 and self.prefetch_elements > 0:
            self._prefetch_first(self.trace[0])

    @torch.no_grad()
    def _prefetch_first(self, unit: GatherUnit) -> None:
        """Prefetch the first unit of a window, and those after it as when it is used: in a collective of their own if its
        computation hides it."""
        missing = tuple(slot for slot in unit.slots if slot not in self._live and slot not in self._pending)
        prefetched = self._prefetch_candidates(missing)
        if self.overlap and unit.reads_in_backward:
            self._issue(missing)
            self._issue(prefetched)
        else:
            gathers = self._issue((*missing, *prefetched))
            if not self.overlap:
                self._finish(*gathers)

    def end_backward(self) -> None:
        """Call after a micro-batch's backward: release the last unit and the enclosing units."""
        last, self._in_backward = self._in_backward, None
        self._gradients_come = False
        for unit in self.units:
            if not self.holds and (unit is last or unit.encloses):
                for slot in unit.slots:
                    self._release(slot)

    def gradient_done(self, slot: Slot) -> None:
        """Free the parameter's memory, since autograd no longer needs it in this micro-batch."""
        if slot.elements > self.persistence_threshold and not self.holds:
            slot.parameter.data.untyped_storage().resize_(0)

    def end_window(self) -> None:
        """Release all remaining parameters and go back to the start of the trace."""
        self.holds = not self.reshard
        for slot in self._all:
            if slot in self._pending:
                self._finish(self._pending[slot])
            self._release(slot)
        self._ahead.clear()
        self.recording = False
        self._position = -1

    def parameters_changed(self) -> None:
        """Invalidate persistent trained parameters after the optimizer has changed the master."""
        self._live = {slot for slot in self._live if not slot.parameter.requires_grad}
        self._live_elements = sum(slot.elements for slot in self._live)
        if self.near_copies is not None:
            self.near_copies.parameters_changed()

    @torch.no_grad()
    def _use(self, unit: GatherUnit) -> None:
        if self.recording:
            self.trace.append(unit)
        else:
            self._advance(unit)
        ahead = not self.recording and self.prefetch_elements > 0
        self._fetch(unit, ahead and not (self.overlap and unit.reads_in_backward))
        if ahead and (prefetched := self._prefetch_candidates()):
            gathers = self._issue(prefetched)
            if not self.overlap:
                self._finish(*gathers)
        if not self.recording and self.parameters.reads_ahead:
            self._expect()

    def _expect(self) -> None:
        """Start to load what the gathers after those in flight will read, such as from files."""
        present = {*self._live, *self._pending}
        expected = 0
        for unit in self.trace[self._position + 1 :]:
            missing = [slot for slot in unit.slots if slot not in present and not self._is_near(slot)]
            if missing:
                present.update(missing)
                self.parameters.expect(ranges(sorted(missing, key=lambda slot: slot.offset)))
                expected += 1
            if expected == self.parameters.reads_ahead:
                return

    def _use_backward(self, unit: GatherUnit) -> None:
        if not unit.encloses:  # an enclosing unit does not end the inner ones, even if its output is the last one's
            previous, self._in_backward = self._in_backward, unit
            if previous is not None:
                self._leave_backward(previous, unit)
        if unit.reads_in_backward:
            self._use(unit)

    def _leave_backward(self, unit: GatherUnit, entered: GatherUnit) -> None:
        for slot in unit.slots:
            if slot not in entered.slots and not self.holds:
                self._release(slot)
        if self._gradients_come:
            self._units_left.subtract(unit.slots)
            self.declare_ready(slot for slot in unit.slots if self._units_left[slot] == 0)

    def _after_forward(self, unit: GatherUnit, output: object) -> None:
        outputs = [tensor for tensor in output_tensors(output) if tensor.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, lambda _gradient: self._use_backward(unit), mode="any")
        if self.reshard and not self._used_soon(unit):
            for slot in unit.slots:
                self._release(slot)

    def _used_soon(self, unit: GatherUnit) -> bool:
        """Whether the next use in the trace is so near that the parameters would be prefetched again immediately."""
        now = None if self.recording else self._find(unit, max(self._position, 0))
        later = None if now is None else self._find(unit, now + 1)
        if now is None or later is None:
            return False
        other_slots = {slot for other in self.trace[now + 1 : later] for slot in other.slots} - set(unit.slots)
        elements = sum(slot.elements for slot in other_slots)
        missing = sum(slot.elements for slot in other_slots - self._live)
        return elements <= self.prefetch_elements and (not missing or self._live_elements + missing <= self.max_live)

    def _advance(self, unit: GatherUnit) -> None:
        """Move to this use in the trace; a use that is not in the trace leaves the position unchanged.

        Slots that are used or skipped no longer count as prefetched.
        """
        position = self._find(unit, self._position + 1)
        reached = self._position if position is None else position
        for passed in (unit, *self.trace[self._position + 1 : reached]):
            self._ahead.difference_update(passed.slots)
        self._position = reached

    def _find(self, unit: GatherUnit, start: int) -> int | None:
        return next((index for index in range(start, len(self.trace)) if self.trace[index] is unit), None)

    def _fetch(self, unit: GatherUnit, with_next: bool) -> None:
        """Return when a unit's parameters are present.

        `with_next`: prefetch in the same collective, because no computation would hide a second one: communication does not
        overlap, or the unit is only a lookup.
        """
        missing = tuple(slot for slot in unit.slots if slot not in self._live and slot not in self._pending)
        if missing:
            self._issue((*missing, *(self._prefetch_candidates(missing) if with_next else ())))
        self._finish(*[self._pending[slot] for slot in unit.slots if slot in self._pending])

    def _prefetch_candidates(self, fetched: Sequence[Slot] = ()) -> tuple[Slot, ...]:
        """What to prefetch now in addition to `fetched`, in the order of the trace, up to the two limits.

        A parameter that would exceed `max_live_parameters` is not prefetched, as in DeepSpeed.
        """
        present = {*fetched, *self._live, *self._pending}
        live = self._live_elements + sum(slot.elements for slot in {*fetched, *self._pending})
        ahead = sum(slot.elements for slot in self._ahead)
        prefetched: list[Slot] = []
        for unit in self.trace[self._position + 1 :]:
            missing = [slot for slot in unit.slots if slot not in present]
            size = sum(slot.elements for slot in missing)
            if ahead + size > self.prefetch_elements and 2 * ahead >= size > 0:
                break
            for slot in missing:
                if live + slot.elements > self.max_live:
                    self._ahead.update(prefetched)
                    return tuple(prefetched)
                prefetched.append(slot)
                present.add(slot)
                ahead += slot.elements
                live += slot.elements
        self._ahead.update(prefetched)
        return tuple(prefetched)

    def _issue(self, slots: tuple[Slot, ...]) -> list[_GatherInFlight]:
        """Start one collective for each dtype and each group that is gathered from."""
        kinds = {slot: (self._is_near(slot), str(slot.parameter.dtype)) for slot in slots}
        ordered = sorted(slots, key=lambda slot: (kinds[slot][0], slot.offset))
        return [self._gather(tuple(alike), kind[0]) for kind, alike in groupby(ordered, key=kinds.__getitem__)]

    def _is_near(self, slot: Slot) -> bool:
        return self.near_copies is not None and slot in self.near_copies

    def _gather(self, slots: tuple[Slot, ...], in_near_group: bool) -> _GatherInFlight:
        if in_near_group and self.near_copies is not None:
            group, loaded = self.near_copies.group, Loaded(self.near_copies.read(slots))
        else:
            group, loaded = self.group, self._read(slots)
        shard = loaded.values
        rows = torch.empty(group.size, shard.numel(), dtype=shard.dtype, device=shard.device)
        mark("buffers", rows)
        if group.size == 1:  # instead of a collective, a copy on the current stream reads the values directly
            loaded.wait()
        with loaded.before() if group.size > 1 else nullcontext():
            work = group.all_gather(rows, shard)
        # Each rank of the near group holds the rows of several ranks, in order.
        gather = _GatherInFlight(work, slots, rows.view(self.group.size, -1), loaded, in_near_group)
        self._pending.update(dict.fromkeys(slots, gather))
        return gather

    def _read(self, slots: tuple[Slot, ...]) -> Loaded:
        """This rank's input to a gather over all ranks."""
        loaded = self.parameters.read(ranges(slots))
        if not self.format.packs(slots[0]):
            return loaded
        loaded.wait()
        packed = self.format.packed(loaded.values, slots)
        mark("buffers", packed)
        return Loaded(packed)

    def _finish(self, *gathers: _GatherInFlight) -> None:
        for gather in gathers:
            if not gather.done:
                self._land(gather)

    def _land(self, gather: _GatherInFlight) -> None:
        gather.work.wait()
        gather.done = True
        if self.near_copies is not None and not gather.from_near_group:
            self._keep_near(self.near_copies, gather)
        for slot in gather.slots:
            data = slot.parameter.data
            storage = data.untyped_storage()
            if storage.size() == 0:
                storage.resize_(slot.elements * data.element_size())
                mark("parameters", data)
        # Through `.data`, so that autograd does not see saved weights as modified.
        if self.format.packs(gather.slots[0]):
            for slot, flat in self.format.unpacked(gather.rows, gather.slots):
                slot.parameter.data.view(-1).copy_(flat)
        else:
            fill(gather.slots, gather.rows)
        for slot in gather.slots:
            del self._pending[slot]
            self._live.add(slot)
            self._live_elements += slot.elements

    def _keep_near(self, copies: NearCopies, gather: _GatherInFlight) -> None:
        """Keep the gathered rows, except of persistent parameters, which are not gathered again before they change."""
        column = 0
        for slot in gather.slots:
            width = self.format.width(slot)
            if slot.elements > self.persistence_threshold:
                copies.keep(slot, gather.rows[:, column : column + width])
            column += width

    def _release(self, slot: Slot) -> None:
        if slot in self._live and slot.elements > self.persistence_threshold:
            slot.parameter.data.untyped_storage().resize_(0)
            self._live.remove(slot)
            self._live_elements -= slot.elements


def find_units(
    model: nn.Module, modules: Sequence[nn.Module], slots: Sequence[Slot], outside: Collection[str] = ()
) -> list[GatherUnit]:
    """One unit for the parameters of each of `modules`; the remaining ones, and those named in `outside`, form a unit of the
    whole model."""
    by_parameter = {id(slot.parameter): slot for slot in slots if slot.name not in outside}
    units = []
    for module in modules:
        inside = tuple(by_parameter[id(parameter)] for parameter in module.parameters() if id(parameter) in by_parameter)
        owners = [inner for inner in module.modules() if any(True for _ in inner.parameters(recurse=False))]
        if inside:
            units.append(GatherUnit(module, inside, reads_in_backward=any(type(inner) not in TABLES for inner in owners)))
    covered = {slot for unit in units for slot in unit.slots}
    uncovered = tuple(slot for slot in slots if slot not in covered)
    if uncovered:
        units.insert(0, GatherUnit(model, uncovered, encloses=bool(units)))
    return units
