"""Derives equal blocks of a user's module once: most of them pass their input on, and take over what one of them did.

1. Blocks are equal if their classes, attributes, parameters and buffers are. Of the equal ones the first, the second and the
   last compute as usual; the others stand in.
2. A stand-in must be called as its representative was; it returns its input in the form of the representative's output.
3. In the recorded micro-batch the moments and the work of the representative take the place of a stand-in's.

This is right if every equal block adds the same memory and work. To find out, the caller compares two runs with different
representatives; it lets all blocks compute if they differ.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from executor.dry.recorded import RecordedMicroBatch, RecordedPart
from executor.user_module.survey import first_tensor
from search_spaces.models.module_profile import MomentKind

FEWEST = 6
"""Equal blocks from which some of them stand in."""
_PLAIN = (int, float, str, bool, type(None))
_OWN = frozenset(vars(nn.Module())) | {"training"}
"""Attributes that every module has."""


class UnequalError(Exception):
    """Equal blocks are called in other ways, or do other things."""


@dataclass(frozen=True, slots=True)
class _RepresentativeCall:
    """How a representative was called and what it returned; without tensors, whose lives it must not prolong."""

    inputs: tuple[object, ...]
    output: Any
    """The structure of its output."""
    leaves: tuple[object, ...]
    """Of the output: `_HIDDEN`, the place of an input, or a value that is no tensor."""


@dataclass(frozen=True, slots=True)
class _ReturnedInput:
    """An output that is one of the inputs."""

    index: int


_HIDDEN = object()


@dataclass(slots=True)
class StandIns:
    """The blocks of one run that do not compute."""

    blocks: Sequence[nn.Module]
    representative: Mapping[int, int]
    """Block that stands in -> the block whose moments and work it takes over."""
    _calls: dict[int, _RepresentativeCall] = field(default_factory=dict)

    def forwards(self) -> Iterator[tuple[int, Callable[..., Any]]]:
        """The forward of each block that stands in, in a new run."""
        self._calls.clear()
        for index, other in self.representative.items():
            yield index, _PassOn(self, other)

    def note(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """Note how a representative was called."""
        if index not in self.representative.values() or index in self._calls:
            return
        inputs = tree_leaves((args, dict(kwargs)))
        places = {id(value): position for position, value in enumerate(inputs) if isinstance(value, Tensor)}
        leaves, structure = tree_flatten(output)
        hidden = next((position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        entry = _hidden_input(args, inputs)
        if hidden is None or entry is None or (entry.shape, entry.dtype) != (leaves[hidden].shape, leaves[hidden].dtype):
            return  # it is no link of a chain, such as one of many tables
        template: list[object] = []
        for position, leaf in enumerate(leaves):
            if position == hidden:
                template.append(_HIDDEN)
            elif isinstance(leaf, Tensor):
                if id(leaf) not in places:
                    return  # a result of its own, which a stand-in cannot make
                template.append(_ReturnedInput(places[id(leaf)]))
            else:
                template.append(leaf)
        self._calls[index] = _RepresentativeCall(_described(inputs), structure, tuple(template))

    def call(self, index: int) -> _RepresentativeCall:
        """How the representative was called.

        Raises:
            UnequalError: it was not, or a stand-in cannot return what it did.
        """
        if index not in self._calls:
            raise UnequalError
        return self._calls[index]


@dataclass(frozen=True, slots=True)
class _PassOn:
    """The forward of a block that stands in."""

    stand_ins: StandIns
    representative: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.stand_ins.call(self.representative)
        inputs = tree_leaves((args, kwargs))
        hidden = _hidden_input(args, inputs)
        if hidden is None or _described(inputs) != call.inputs:
            raise UnequalError
        returned = [
            hidden.view_as(hidden) if leaf is _HIDDEN else inputs[leaf.index] if isinstance(leaf, _ReturnedInput) else leaf
            for leaf in call.leaves
        ]
        return tree_unflatten(returned, call.output)


def _hidden_input(args: tuple[Any, ...], inputs: Sequence[object]) -> Tensor | None:
    """The input of a block that the previous one returned: its first one, or without positional arguments the first tensor."""
    return first_tensor(args) if args else next((value for value in inputs if isinstance(value, Tensor)), None)


def _described(inputs: Sequence[object]) -> tuple[object, ...]:
    return tuple(
        (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor)
        else value if isinstance(value, _PLAIN) else type(value)
        for value in inputs
    )  # fmt: skip


def choices_of_stand_ins(module: nn.Module, blocks: Sequence[nn.Module]) -> list[StandIns]:
    """All but three blocks of each kind; then, as a check, with representatives in the middle. One without any if none can."""
    names = {inner: name for name, inner in module.named_modules()}
    holders = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    groups: dict[object, list[int]] = {}
    for index, block in enumerate(blocks):
        key = _key(block, names[block].rpartition(".")[2])
        if key is not None and all(holders[id(value)] == 1 for value in block.parameters()):
            groups.setdefault(key, []).append(index)
    many = [group for group in groups.values() if len(group) >= FEWEST]
    if not many:
        return [StandIns(blocks, {})]
    return [_stand_ins(blocks, many, 1), _stand_ins(blocks, many, FEWEST // 2)]


def _stand_ins(blocks: Sequence[nn.Module], groups: Sequence[Sequence[int]], position: int) -> StandIns:
    """The block at `position` of each group is the representative of those after it."""
    return StandIns(blocks, {index: group[position] for group in groups for index in group[position + 1 : -1]})


def _key(block: nn.Module, block_index: str) -> object:
    """Equal for equal blocks; None: a block with hooks, which may do anything."""
    parts: list[object] = []
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, inner in block.named_modules():
        if any(getattr(inner, kind) for kind in hooks):
            return None
        parts.append((name, type(inner), tuple(_attributes(inner, block_index))))
    values = [*block.named_parameters(), *block.named_buffers()]
    return tuple(parts), tuple((name, value.shape, value.dtype, value.requires_grad) for name, value in values)


def _attributes(module: nn.Module, block_index: str) -> Iterator[tuple[str, object]]:
    """A module's own attributes; the index of its block is the same for all. Other objects must be one object."""
    for name, value in sorted(vars(module).items()):
        if name in _OWN:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and str(value) == block_index:
            yield name, "index"
        elif isinstance(value, _PLAIN):
            yield name, value
        elif isinstance(value, list | tuple | dict | set) and all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
            yield name, repr(value)
        else:
            yield name, id(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockMoments:
    """What a representative adds to the moments of its own forward and backward, relative to where they begin, in bytes."""

    forward: tuple[int, int]
    """Peak and level as its forward ends."""
    after: tuple[int, int]
    """Peak and level as the next block's forward begins, when the caller has dropped its input."""
    gradients: tuple[tuple[int, int, int], ...]
    """Trained parameter, peak and level as its gradient is complete, in order."""
    end: tuple[int, int]
    """Peak and level as the next block's backward begins."""

    @classmethod
    def of(cls, micro: RecordedMicroBatch, index: int, trained: int) -> "_BlockMoments":
        """The piece of a block with `trained` trained parameters.

        Raises:
            UnequalError: its forward or backward is interleaved with another block's.
        """
        begins, end_of_forward = (_only(micro, mark, index) for mark in (MomentKind.FORWARD, MomentKind.LEFT))
        if begins is None or end_of_forward != begins + 1:
            raise UnequalError
        first = micro.levels[begins]
        forward, after = (
            (micro.peaks[moment] - first, micro.levels[moment] - first) for moment in (end_of_forward, end_of_forward + 1)
        )
        backward = _only(micro, MomentKind.BACKWARD, index)
        if backward is None:
            if trained:
                raise UnequalError
            return cls(forward=forward, after=after, gradients=(), end=(0, 0))
        end = backward + 1
        while micro.marks[end][0] is MomentKind.GRADIENT:
            end += 1
        if end - backward - 1 != trained:
            raise UnequalError
        first = micro.levels[backward]
        gradients = tuple(
            (micro.marks[moment][1], micro.peaks[moment] - first, micro.levels[moment] - first)
            for moment in range(backward + 1, end)
        )
        return cls(forward=forward, after=after, gradients=gradients, end=(micro.peaks[end] - first, micro.levels[end] - first))


def _only(micro: RecordedMicroBatch, mark: MomentKind, index: int) -> int | None:
    places = [moment for moment, recorded_mark in enumerate(micro.marks) if recorded_mark == (mark, index)]
    if len(places) > 1:
        raise UnequalError  # it runs several times
    return places[0] if places else None


def completed(micro: RecordedMicroBatch, stand_ins: StandIns, slots: Mapping[int, int]) -> RecordedMicroBatch:
    """The micro-batch with the moments and the work of all blocks.

    Args:
        micro: as recorded.
        stand_ins: those of its run.
        slots: id of a trained parameter -> its index.

    Raises:
        UnequalError: the moments of a representative cannot be cut out.
    """
    if not stand_ins.representative:
        return micro
    block_slots = {index: [slots[id(value)] for value in block.parameters() if id(value) in slots]
           for index, block in enumerate(stand_ins.blocks)}  # fmt: skip
    pieces = {index: _BlockMoments.of(micro, index, len(block_slots[index])) for index in {*stand_ins.representative.values()}}
    completed_batch = RecordedMicroBatch(parts=dict(micro.parts), hidden_bytes=micro.hidden_bytes)
    shift = begun = 0
    last: tuple[MomentKind, int] | None = None
    """The mark of a stand-in, if that was the last one."""
    for (mark, index), peak, level in zip(micro.marks, micro.peaks, micro.levels, strict=True):
        if mark is MomentKind.LEFT and index in stand_ins.representative:
            begun = completed_batch.levels[-1]
            peak_of, level_of = pieces[stand_ins.representative[index]].forward
            completed_batch.add(mark, index, begun + peak_of, begun + level_of)
        elif last is not None:
            other = stand_ins.representative[last[1]]
            if last[0] is MomentKind.BACKWARD:
                begun = completed_batch.levels[-1]
                renamed = dict(zip(block_slots[other], block_slots[last[1]], strict=True))
                for slot, peak_of, level_of in pieces[other].gradients:
                    completed_batch.add(MomentKind.GRADIENT, renamed[slot], begun + peak_of, begun + level_of)
            peak_of, level_of = pieces[other].end if last[0] is MomentKind.BACKWARD else pieces[other].after
            completed_batch.add(mark, index, begun + peak_of, begun + level_of)
        else:
            completed_batch.add(mark, index, peak + shift, level + shift)
        shift = completed_batch.levels[-1] - level
        stands_in = mark in (MomentKind.LEFT, MomentKind.BACKWARD) and index in stand_ins.representative
        last = (mark, index) if stands_in else None
    for index, other in stand_ins.representative.items():
        for phase in ("forward", "backward"):
            completed_batch.parts[phase, index] = micro.parts.get((phase, other), RecordedPart())
    return completed_batch
