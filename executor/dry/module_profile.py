"""Profiles a user's module: one micro-batch of it on tensors without data, with every operator recorded."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import register_multi_grad_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from executor.batches import FactoryData, map_tensors, read_text, tensors_of
from executor.dry.equal_blocks import StandIns, UnequalError, choices_of_stand_ins, completed
from executor.dry.ledger import backend_of
from executor.dry.mode import READS_VALUES, DryMode
from executor.dry.operators import ATTENTION, products_of
from executor.dry.recorded import (
    SIZES,
    RecordedMicroBatch,
    RecordedPart,
    affine,
    backward_flops,
    block_work,
    moments_of,
    with_levels,
)
from executor.engines.sources import DTYPES
from executor.errors import ExecutorError, FactoryError, one_line
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.pipeline import precise
from executor.user_module.calls import called_blocks
from executor.user_module.description import described
from executor.user_module.factory import load_factory
from executor.user_module.plan import UserModule
from executor.user_module.survey import Survey, first_tensor, loss_of
from search_spaces.models.huggingface import BUILT
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import OUTER, Affine, ModuleProfile, MomentKind, Trace, TrainedParameter
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

POLICIES = ("none", "selective", "full")


def profile_module(reference: str, workload: Workload, precisions: Sequence[str], device_kind: str = "cpu") -> FactoryModel:
    """Describe a module, with its profile, without memory for its parameters: run micro-batches of it without data.

    1. The factory runs on tensors without data, in each of the precisions of the profile.
    2. Forward and backward run under a dispatch mode that records every allocation, release, product and byte moved, with marks
       where blocks begin and end and where gradients are complete.
    3. This is done for micro-batches of two sizes, and with every kind of activation checkpointing: values are affine in the
       samples, and an engine may checkpoint any of the blocks.

    `device_kind`: of the devices that it is for. Workspaces of kernels are known of CPUs only.

    Raises:
        FactoryError: the factory violates the Protocol, or its module reads the value of a tensor or fails without data.
    """
    if reference.startswith(BUILT):
        read_text(workload.data_path)  # before tensors lose their data
    traces: dict[str, Trace] = {}
    mode = _Recorder(reference)
    mode.device_kind = device_kind
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, mode.running():
        user = _build(reference, workload)
        batches = {size: _batch(user, workload, size, fake) for size in SIZES}
        blocks = [user.module.get_submodule(name) for name in called_blocks(user, batches[SIZES[0]]).units]
        model, survey = described(user, batches[SIZES[0]])
        runs = _ModuleRuns(user, blocks, mode)
        # The first one does not convert the module.
        for precision in dict.fromkeys(
            (*filter(None, (model.default_precision,)), *sorted(precisions, key=model.precision.__ne__))
        ):
            if precision != model.precision:
                user.module.to(DTYPES[precision])
                convert = functools.partial(_floating_to, DTYPES[precision])
                batches = {size: map_tensors(batch, convert) for size, batch in batches.items()}
            try:
                traces[precision] = runs.trace(batches)
            except FactoryError:
                if not traces:  # else the module runs, but not in this precision
                    raise
    names = {id(inner): name for name, inner in user.module.named_modules()}
    parameters = _held(user.module, blocks, survey)
    frozen = [parameter_info for parameter, parameter_info in parameters if not parameter.requires_grad]
    profile = ModuleProfile(
        trained=tuple(parameter_info for parameter, parameter_info in parameters if parameter.requires_grad),
        frozen=sum(parameter_info.elements for parameter_info in frozen),
        frozen_parts=(
            *(
                sum(parameter_info.elements for parameter_info in frozen if parameter_info.block == index)
                for index in range(len(blocks))
            ),
            sum(parameter_info.elements for parameter_info in frozen if parameter_info.first),
            sum(parameter_info.elements for parameter_info in frozen if parameter_info.last),
        ),
        block_names=tuple(names[id(block)] for block in blocks),
        starts=() if survey is None else survey.starts,
        traces=traces,
        sequence_length=workload.sequence_length if reference.startswith(BUILT) else 0,
        uncounted=tuple(mode.uncounted),
        is_recurrent=mode.is_recurrent,
    )
    return dataclasses.replace(model, flops_per_sample=profile.flops_per_sample(SIZES[0]), profile=profile)


def _floating_to(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _held(module: nn.Module, blocks: Sequence[nn.Module], survey: Survey | None) -> list[tuple[nn.Parameter, TrainedParameter]]:
    """Every parameter, and the block or the ends of a pipeline that hold it."""
    holders: dict[int, int] = {}
    for index, block in reversed([*enumerate(blocks)]):
        holders |= {id(parameter): index for parameter in block.parameters()}
    before, after = (frozenset[str](), frozenset[str]()) if survey is None else (survey.before, survey.after)
    return [
        (parameter, TrainedParameter(
            elements=parameter.numel(), block=holders.get(id(parameter), OUTER), first=name in before, last=name in after,
        ))
        for name, parameter in module.named_parameters()
    ]  # fmt: skip


def with_profile(model: FactoryModel, workload: Workload, precisions: Sequence[str], device_kind: str = "cpu") -> FactoryModel:
    """The described module with its profile, or with the reason why there is none."""
    try:
        profiled = profile_module(model.reference, workload, precisions, device_kind)
    except ExecutorError as error:
        return dataclasses.replace(model, no_profile=str(error))
    return dataclasses.replace(model, profile=profiled.profile)


def _build(reference: str, workload: Workload) -> UserModule:
    """The module with parameters without data: made without data, or if its factory fails then, on the meta device.

    Raises:
        FactoryError: it fails on both.
    """
    try:
        return load_factory(reference, workload)
    except FactoryError as error:
        if error.__cause__ is None:
            raise
        first = error
    try:
        with unset_fake_temporarily(), _OnMeta():
            user = load_factory(reference, workload)
    except FactoryError as error:
        if error.__cause__ is None or str(error) == str(first):
            raise
        problem = f"cannot be built without memory for its parameters ({one_line(error.__cause__)})"
        raise FactoryError(f"{reference} {problem}; measure it by trials (`autotune sweep`)") from None
    replacements: dict[int, Tensor] = {}

    def without_data(value: Tensor) -> Tensor:
        if id(value) not in replacements:
            empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            replacements[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
        return replacements[id(value)]

    for inner in user.module.modules():
        for store in (inner._parameters, inner._buffers):
            for name, value in store.items():
                if value is not None:
                    store[name] = without_data(value)  # type: ignore[assignment]
    return user


class _OnMeta(TorchFunctionMode):
    """Makes what modules initialise on the meta device, but constants, from which a factory may compute sizes, with data."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.rand, torch.randn) and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _batch(user: UserModule, workload: Workload, size: int, fake: FakeTensorMode) -> dict[str, Any]:
    """A micro-batch; drawn with data if the factory's function can."""
    data = FactoryData(batch=user.batch, seed=workload.seed)
    try:
        with unset_fake_temporarily():
            drawn = data.micro_batch(0, 0, size)
    except ExecutorError:
        raise
    except Exception:  # it uses tensors that the factory made, which have no data
        drawn = data.micro_batch(0, 0, size)
    without_data: dict[str, Any] = map_tensors(
        drawn, lambda value: value if isinstance(value, FakeTensor) else fake.from_tensor(value)
    )
    return without_data


class _ReadsValueError(FactoryError):
    """The module reads the value of a tensor."""


@contextmanager
def _unpacked() -> Iterator[None]:
    """Hide from Hugging Face's models that tensors have no data, and let them find that samples are not packed."""
    with ExitStack() as stack:
        for module, name, answer in (
            ("transformers.utils.import_utils", "is_fake_tensor", False),
            ("transformers.masking_utils", "find_packed_sequence_indices", None),
        ):
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(patch.object(sys.modules[module], name, functools.partial(_found, answer)))
        yield


def _found(value: object, *_: object, **__: object) -> Any:
    return value


class _Recorder(DryMode):  # type: ignore[no-untyped-call]
    """A dry run's mode that also attributes work to the part of the micro-batch that runs."""

    def __init__(self, reference: str) -> None:
        super().__init__(backend_of("gloo"))
        self.reference = reference
        self.part: RecordedPart | None = None
        self.uncounted: dict[str, None] = {}
        """Operators whose FLOPs are unknown."""
        self.is_recurrent = False
        """Whether a recurrent layer is one operator."""
        self._views: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.flops = 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if (
            self.part is not None
            and result is not NotImplemented
            and getattr(func, "namespace", "prim") not in ("prim", "profiler")
        ):
            self._record(self.part, func, args, kwargs or {}, result)
        return result

    def _record(self, part: RecordedPart, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func not in self._views:
            returned = [item.alias_info for item in func._schema.returns]
            views = bool(returned) and all(info is not None and not info.is_write for info in returned)
            without_traffic = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
            self._views[func] = views or func._schema.name.removeprefix("aten::") in without_traffic
        if self._views[func]:
            return
        part.operators += 1
        flops = self.flops
        if flops is None:
            self.uncounted[str(func)] = None
        self.is_recurrent = self.is_recurrent or func is torch.ops.aten.mkldnn_rnn_layer.default
        if flops:
            part.flops += flops
            if ATTENTION in func._schema.name:
                part.attention_flops += flops
            else:
                part.products += products_of(func._overloadpacket, args, flops)
            return
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        part.moved_bytes += sum(value.numel() * value.element_size() for value in tensors.values())


class _ModuleRuns:
    """Runs micro-batches of one module."""

    def __init__(self, user: UserModule, blocks: Sequence[nn.Module], mode: _Recorder) -> None:
        self.user, self.blocks, self.mode = user, blocks, mode
        self.trained = [parameter for parameter in user.module.parameters() if parameter.requires_grad]
        self._slots = {id(parameter): index for index, parameter in enumerate(self.trained)}
        self._stand_ins, *self._others = choices_of_stand_ins(user.module, blocks)
        self._micro = RecordedMicroBatch()
        self._positions: list[int] = []

    def trace(self, batches: Mapping[int, Mapping[str, Any]]) -> Trace:
        """The trace in the precision that the module has now.

        Hugging Face's models make a mask of all pairs of tokens if they find themselves traced, because they cannot read
        whether samples are packed. A trial reads that they are not, so that this is assumed first.
        """
        try:
            with _unpacked():
                return self._shortest(batches)
        except _ReadsValueError:
            return self._shortest(batches)

    def _shortest(self, batches: Mapping[int, Mapping[str, Any]]) -> Trace:
        """With stand-ins for equal blocks if another choice of them gives the same micro-batch; else every block computes."""
        chosen = self._stand_ins
        try:
            trace = self._trace(batches)
            for other in self._others:
                self._stand_ins = other
                if self._run(batches[SIZES[0]], POLICIES[0]) != self._first:
                    raise UnequalError
            self._stand_ins, self._others = chosen, []
        except UnequalError:
            self._stand_ins, self._others = StandIns(self.blocks, {}), []
            trace = self._trace(batches)
        return trace

    def _trace(self, batches: Mapping[int, Mapping[str, Any]]) -> Trace:
        micro_batches = {
            policy: tuple(self._run(batches[size], policy) for size in SIZES)
            for policy in (POLICIES if self.blocks else POLICIES[:1])
        }
        none = micro_batches[POLICIES[0]]
        self._first = none[0]
        blocks = range(len(self.blocks))
        again = {
            policy: tuple(_again(pair, none, index) for index in blocks)
            for policy, pair in micro_batches.items()
            if policy != POLICIES[0]
        }
        parameters = list(self.user.module.parameters())
        return Trace(
            moments={policy: moments_of(self.user.reference, *pair) for policy, pair in micro_batches.items()},
            outer=block_work(none, OUTER),
            blocks=tuple(block_work(none, index) for index in blocks),
            again=again,
            batch_bytes=affine(*(_bytes(tensors_of(batches[size])) for size in SIZES)),
            buffer_bytes=_bytes(self.user.module.buffers()),
            frozen_bytes=_bytes(parameter for parameter in parameters if not parameter.requires_grad),
            hidden_bytes=affine(*(micro.hidden_bytes for micro in none)),
        )

    def _run(self, batch: Mapping[str, Any], policy: str) -> RecordedMicroBatch:
        self._micro, self._positions = RecordedMicroBatch(), []
        mode, module = self.mode, self.user.module
        for parameter in module.parameters():
            parameter.grad = None
            mode.ledger.track(parameter.data)
        for value in (*module.buffers(), *tensors_of(batch)):
            mode.ledger.track(value)
        with self._policy(policy), self._watched():
            mode.ledger.open(())
            self._mark(MomentKind.FORWARD, OUTER)
            try:
                loss = loss_of(module(**batch))
                if loss is None:
                    raise FactoryError(
                        f"{self.user.reference}: its call must return the loss (one number) or an object with .loss"
                    )
                self._mark(MomentKind.LOSS, OUTER)
                (precise(loss) * 1.0).backward()  # type: ignore[no-untyped-call]
            except (ExecutorError, UnequalError):
                raise
            except READS_VALUES as error:
                raise self._reads_value(error) from None
            except Exception as error:
                if self._stand_ins.representative:
                    raise UnequalError from error
                raise self._failed(error) from None
            self._mark(MomentKind.END, OUTER)
            mode.part = None
            del loss
        changes = mode.ledger.changes
        mode.ledger.close()
        return completed(with_levels(self._micro, self._positions, changes), self._stand_ins, self._slots)

    @contextmanager
    def _policy(self, policy: str) -> Iterator[None]:
        """With every block checkpointed, and stand-ins."""
        forwards = {block: vars(block).get("forward") for block in self.blocks}
        checkpoint_blocks(self.blocks, TrialConfig(activation_checkpointing=policy))
        for index, passed_on in self._stand_ins.forwards():
            self.blocks[index].forward = passed_on
        try:
            yield
        finally:
            for block, forward in forwards.items():
                if forward is not None:
                    block.forward = forward
                else:
                    vars(block).pop("forward", None)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """With hooks that mark the moments."""
        self.mode.running_modules.clear()
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                before = block.register_forward_pre_hook(lambda *_, index=index: self._mark(MomentKind.FORWARD, index))
                after = block.register_forward_hook(functools.partial(self._ends, index), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            for index, parameter in enumerate(self.trained):
                handle = parameter.register_post_accumulate_grad_hook(self._done(index))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            yield

    def _ends(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        self._mark(MomentKind.LEFT, index)
        self._stand_ins.note(index, args, kwargs, output)
        hidden = first_tensor(output)
        if not index and hidden is not None:
            self._micro.hidden_bytes = hidden.numel() * hidden.element_size()
        leaves = tree_leaves(output if not hasattr(output, "__dict__") or isinstance(output, Tensor) else vars(output))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self._mark(MomentKind.BACKWARD, index), mode="any")

    def _done(self, index: int) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            parameter.grad = None
            self._mark(MomentKind.GRADIENT, index)

        return accumulated

    def _mark(self, mark: MomentKind, index: int) -> None:
        self._micro.marks.append((mark, index))
        self._positions.append(self.mode.ledger.position())
        match mark:
            case MomentKind.FORWARD:
                part = ("forward", index)
            case MomentKind.LEFT:
                part = ("forward", OUTER)
            case MomentKind.LOSS:
                part = ("backward", OUTER)
            case MomentKind.BACKWARD:
                part = ("backward", index)
            case _:
                return
        self.mode.part = self._micro.parts.setdefault(part, RecordedPart())

    def _where(self) -> str:
        names = {inner: name for name, inner in self.user.module.named_modules()}
        at = self.mode.reader or (self.mode.running_modules[-1] if self.mode.running_modules else None)
        if at is None or not names.get(at):
            return "it"
        return f"its module {names[at]} ({type(at).__name__})"

    def _reads_value(self, error: Exception) -> "_ReadsValueError":
        operator = str(getattr(error, "func", "")) or type(error).__name__
        return _ReadsValueError(
            f"{self.user.reference}: {self._where()} reads the value of a tensor ({operator}), which shapes do not determine; "
            "measure it by trials (`autotune sweep`), or compute without reading values"
        )

    def _failed(self, error: Exception) -> FactoryError:
        first = (str(error).strip().splitlines() or [""])[0]
        return FactoryError(
            f"{self.user.reference}: {self._where()} does not run on tensors without data ({type(error).__name__}: {first}); "
            "measure it by trials (`autotune sweep`)"
        )


def _again(pair: tuple[RecordedMicroBatch, ...], none: tuple[RecordedMicroBatch, ...], index: int) -> Affine:
    """FLOPs that a block computes again; `none`: without checkpointing."""
    return affine(
        *(
            backward_flops(checkpointed, index) - backward_flops(plain, index)
            for checkpointed, plain in zip(pair, none, strict=True)
        )
    )


def _bytes(values: Any) -> int:
    unique = {value.untyped_storage()._cdata: value for value in values}
    return sum(value.untyped_storage().size() for value in unique.values())
