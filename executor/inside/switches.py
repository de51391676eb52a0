"""The knobs that a library can change between two optimizer steps, each with its setter. What cannot change is named."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

MICRO_BATCH_SIZE = "micro_batch_size"
CHECKPOINTING = "activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Switch:
    """One knob of a model or of what wraps it."""

    name: str
    values: tuple[Any, ...]
    current: Any
    apply: Callable[[Any], None]
    ordered: bool = False
    effect: float = 0.1
    trend: float = 0.0
    change_seconds: float = 0.0
    saving_value: Any = None


def unwrapped(model: Any) -> Any:
    """The user's module inside of DDP or of torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


def is_deepspeed(model: Any) -> bool:
    """Whether the model is DeepSpeed's engine."""
    return hasattr(model, "set_gradient_accumulation_boundary")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class: the layers of a transformer; empty: there is none with two."""
    lists = [
        [*module]
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len({type(each) for each in module}) == 1
    ]
    return max(lists, key=len, default=[])


def switches_of(model: Any, left_out: dict[str, str]) -> Iterator[Switch]:
    """The knobs of a model; `left_out` gets the others, each with the reason."""
    inner = unwrapped(model)
    yield from _checkpointing(inner, left_out)
    yield from _attention(inner, left_out)
    yield from _compilation(inner, left_out)
    yield from _ddp_buckets(model, left_out)
    yield from _deepspeed_buckets(model, left_out)
    yield from _fsdp2(inner)


def changes_with_batch(model: nn.Module) -> str | None:
    """Why the result of a step depends on its division into micro-batches; None: it does not."""
    batch_norms = (nn.modules.batchnorm._BatchNorm,)
    name = next((name for name, module in model.named_modules() if isinstance(module, batch_norms)), None)
    return f"{name} normalises over the samples of a micro-batch" if name is not None else None


def _checkpointing(model: nn.Module, left_out: dict[str, str]) -> Iterator[Switch]:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):

        def switch(value: str) -> None:
            if value == "full":
                enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()  # type: ignore[operator]

        current = "full" if getattr(model, "is_gradient_checkpointing", False) else "none"
    elif blocks := blocks_of(model):
        originals = [block.forward for block in blocks]

        def switch(value: str) -> None:
            for block, original in zip(blocks, originals, strict=True):
                block.forward = functools.partial(checkpoint, original, use_reentrant=False) if value == "full" else original

        current = "none"
    else:
        left_out[CHECKPOINTING] = "the model has no list of equal blocks"
        return
    # One more forward pass is a third of a forward and a backward pass: ln(4 / 3), less where communication waits.
    yield Switch(CHECKPOINTING, ("none", "full"), current, switch, effect=0.15, trend=0.25, saving_value="full")


def _attention(model: Any, left_out: dict[str, str]) -> Iterator[Switch]:
    setter, current = (
        getattr(model, "set_attn_implementation", None),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
    if setter is None or current not in ("eager", "sdpa"):
        left_out["attention_kernel"] = "the model cannot switch between eager and sdpa"
        return
    if not getattr(model, "_supports_sdpa", False):
        left_out["attention_kernel"] = "the model does not support sdpa"
        return
    yield Switch("attention_kernel", ("eager", "sdpa"), current, setter)


def _compilation(model: nn.Module, left_out: dict[str, str]) -> Iterator[Switch]:
    blocks = blocks_of(model)
    if not torch.cuda.is_available() or not blocks:
        left_out["compile_blocks"] = "no CUDA device" if blocks else "the model has no list of equal blocks"
        return
    compiled: dict[int, Any] = {}

    def switch(value: bool) -> None:
        for number, block in enumerate(blocks):
            if value and number not in compiled:
                block.compile()
                compiled[number] = block._compiled_call_impl
            block._compiled_call_impl = compiled[number] if value else None

    current = blocks[0]._compiled_call_impl is not None
    if current:
        compiled.update(enumerate(block._compiled_call_impl for block in blocks))
    yield Switch("compile_blocks", (False, True), current, switch, effect=0.15, change_seconds=0.0 if current else 30.0)


def _ddp_buckets(wrapper: Any, left_out: dict[str, str]) -> Iterator[Switch]:
    if not isinstance(wrapper, DistributedDataParallel):
        return
    model: Any = wrapper  # what follows is not declared
    if model.static_graph:
        left_out["ddp_bucket_mb"] = "static_graph=True: DDP records the graph once"
        return
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.requires_grad)
    current = model.bucket_bytes_cap / 2**20
    current = int(current) if current == int(current) else current
    values = sorted({value for value in (1, 5, 25, 100, 400) if value < 2 * size / 2**20} | {current})

    def switch(value: float) -> None:
        # As DDP does it itself after unpickling. Gradients may be views of the former reducer's buckets.
        for parameter in model.parameters():
            parameter.grad = None
        model.bucket_bytes_cap = int(value * 2**20)
        model.bucket_bytes_cap_default = False
        if hasattr(model, "_bucket_config"):  # torch 2.13 or newer
            made = type(model._bucket_config).create(value, None, use_python_reducer=False)
            model._bucket_config = dataclasses.replace(made, bucket_bytes_cap=model.bucket_bytes_cap)
        parameters, expect_sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        model.reducer = None
        model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)

    if len(values) > 1:
        yield Switch("ddp_bucket_mb", tuple(values), current, switch, ordered=True, effect=0.05)


def _deepspeed_buckets(engine: Any, left_out: dict[str, str]) -> Iterator[Switch]:
    if not is_deepspeed(engine):
        return
    if not hasattr(engine.optimizer, "setup_buckets"):
        left_out["reduce_bucket_size"] = f"DeepSpeed reads it once at ZeRO stage {engine.zero_optimization_stage()}"
        return
    # Stages 1 and 2 make the buffers of buckets anew for each backward pass.
    size = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    current = engine.optimizer.reduce_bucket_size
    values = sorted({value for value in (500_000, 5_000_000, 50_000_000, 500_000_000) if value < 2 * size} | {current})

    def switch(value: int) -> None:
        engine.optimizer.reduce_bucket_size = value

    if len(values) > 1:
        yield Switch("reduce_bucket_size", tuple(values), current, switch, ordered=True, effect=0.05)


def _fsdp2(model: Any) -> Iterator[Switch]:
    if not hasattr(model, "set_reshard_after_forward"):
        return
    units: list[Any] = [module for module in blocks_of(model) if hasattr(module, "set_reshard_after_forward")]

    def prefetch(depth: int) -> None:
        for number, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + depth])
            unit.set_modules_to_backward_prefetch(units[max(number - depth, 0) : number][::-1])

    def reshard(value: bool) -> None:
        for unit in units:
            unit.set_reshard_after_forward(value, recurse=False)

    if units:
        yield Switch("reshard_after_forward", (True, False), True, reshard, saving_value=True)
        yield Switch("fsdp_prefetch", (0, 1, 2), 0, prefetch, ordered=True, effect=0.05, saving_value=0)
