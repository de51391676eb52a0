"""The deepspeed engine: builds the module that DeepSpeed gets, trains with it, and counts what its collectives send."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from executor.batches import Data, FactoryData, map_tensors, rank_batches, tensors_of, text_data
from executor.engine import Engine, EngineSession, RankContext, StepReport
from executor.engines.deepspeed.capability import DEEPSPEED
from executor.engines.deepspeed.package import (
    Traces,
    bucket_tensors,
    follow_gathers,
    held_tensors,
    is_partitioned,
    load,
    quiet,
    some_group,
)
from executor.engines.session import RepeatableSteps, refuse
from executor.engines.sources import DTYPES, LoadedModule, load_user_module, require_one_dtype
from executor.errors import EngineRefusalError
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import accounting, mark
from executor.parallel.model import RankModel, Transformer, build_transformer, whole
from executor.user_module.survey import loss_from
from search_spaces.deepspeed import deepspeed_config, torch_optimizer
from search_spaces.mesh import DATA, DIMENSIONS, PIPELINE, Mesh, make_mesh
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.models.pipeline import split_layers
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TENSOR_PLAN: Mapping[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attention\.(query|key|value)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.(.*\.)?(gate|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.attention\.output\.weight$", r".*\.mlp\.(.*\.)?down\.weight$"], "partition_type": "row"},
        {"patterns": [r"head\.output\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}
"""AutoTP's `partition_config` for our Transformer, like DeepSpeed's for Llama. Embeddings and norms stay whole on each rank, as
does the output projection if it is tied to the embedding."""


def whole_module(
    model: Model, config: TrialConfig, workload: Workload, dtype: torch.dtype
) -> tuple[nn.Module, Data | LoadedModule]:
    """The whole model on the CPU and its data: the same weights and samples as on every other engine.

    Raises:
        EngineRefusalError: the model has adapters, or is a user's module that the configuration divides.
        FactoryError, DataError: the user's module or text is invalid.
    """
    if isinstance(model, ModelSpec):
        module = _transformer(model, config, workload, dtype, whole(model))
        return module, text_data(workload, model.vocab_size)
    assert isinstance(model, FactoryModel)  # the command engine runs a user's command
    if config.tensor_parallel_size > 1:
        # AutoTP silently accepts the plan of our Transformer, matches nothing, and every rank computes the whole module.
        raise EngineRefusalError(
            "factory-shape", "the plan of a module:factory is not AutoTP's; use tensor_parallel_size=1, or the native engine"
        )
    loaded = load_user_module(model, config, workload)
    require_one_dtype(loaded.user.module, "deepspeed")
    if loaded.blocks:
        checkpoint_blocks(loaded.blocks, config)
    users: Any = loaded.user.module
    # DeepSpeed's hooks find tensors only in tuples and dicts: with other objects, stage 3 would miss the start of a backward.
    users.forward = functools.partial(_loss_only, users.forward)
    return users, loaded


def pipeline_module(
    package: Any, spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, stage: int
) -> tuple[nn.Module, Data]:
    """A PipelineModule whose only real layer on this rank is the rank's stage, and its data.

    The head is the loss function of the last stage, because DeepSpeed passes the labels only to that. Being a module, it is
    still part of the PipelineModule.

    Raises:
        EngineRefusalError: the model has adapters or tied embeddings.
        DataError: the text is invalid.
    """
    if spec.tied_embeddings:
        problem = "the output projection is tied to the embedding, and they are on different ranks"
        raise EngineRefusalError(
            "deepspeed-tied-pipeline", f"{problem}; use a model without tied embeddings, or the native engine"
        )
    layers = split_layers(spec, config, workload.sequence_length)
    last = stage == len(layers) - 1
    part = dataclasses.replace(whole(spec), layers=layers[stage], first=stage == 0, last=last)
    mine = _transformer(spec, config, workload, dtype, part)
    head, mine.head = mine.head, None
    module: nn.Module = package.PipelineModule(
        # One layer per stage; only this rank's is ever used.
        layers=[mine if other == stage else nn.Identity() for other in range(len(layers))],
        num_stages=len(layers),
        loss_fn=head if last else _no_loss,
        partition_method="uniform",
    )
    for parameter in module.parameters():
        # Otherwise the gradient norm at stage 0 would include only the first pipeline stage.
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return module, text_data(workload, spec.vocab_size)


def _loss_only(call: Callable[..., object], *args: Any, **batch: Any) -> Tensor:
    return loss_from(call(*args, **batch))


def _no_loss(_outputs: Tensor, _labels: Tensor) -> Tensor:
    raise RuntimeError("a stage before the last has no loss")


def _transformer(spec: ModelSpec, config: TrialConfig, workload: Workload, dtype: torch.dtype, part: RankModel) -> Transformer:
    if spec.adapts:
        raise EngineRefusalError(
            "adapters", "this engine trains every parameter; leave adapters at 0, or give a module:factory"
        )
    module = build_transformer(spec, workload.sequence_length, workload.seed, dtype, config.loss_chunk_size, part)
    checkpoint_blocks(module.layers(), config, draws=False)
    return module


NEVER = 10**9
"""Steps between two prints on standard output."""


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine, with torch's AdamW, so that nothing is compiled while a trial runs.

    On a CUDA device an offloaded optimizer is DeepSpeed's, since torch's is many times slower on the host. It is compiled on
    first use, within that trial's time limit.
    """

    capability = DEEPSPEED

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> EngineSession:
        refuse(DEEPSPEED, context, model, config, workload)
        return DeepSpeedSession(load(context), context, model, config, workload)


class DeepSpeedSession(EngineSession):
    """A model held by DeepSpeed. The session marks the last micro-batch explicitly, so that a step may have fewer of them."""

    def __init__(self, package: Any, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> None:
        self.package, self.context, self.config, self.workload = package, context, config, workload
        mesh = make_mesh(config, context.world_size)
        coordinates = mesh.coordinates(context.rank)
        self._replicas, self._replica = mesh.data, coordinates[DATA]
        self.accumulation = config.gradient_accumulation_steps(workload.global_batch_size, context.world_size)
        self._prepared = self.accumulation
        self._dtype = DTYPES[config.precision]
        self._input_dtype: torch.dtype | None = self._dtype
        self._batches: list[dict[str, Any]] = []
        self._steps = 0
        self.engine: Any = None
        self._hooks: list[RemovableHandle] = []
        self._repeatable = RepeatableSteps([], workload, self._replica, self._replicas)
        self._traces: Traces | None = Traces()
        self._account = Account(mesh)
        try:
            module, data = self._make_module(model, coordinates[PIPELINE])
            self.data: Data | FactoryData
            if isinstance(data, LoadedModule):
                self.data, self._input_dtype = data.data, data.input_dtype
                self._repeatable = RepeatableSteps([module], workload, self._replica, self._replicas, data.trains_only)
            else:
                self.data = data
            # Before DeepSpeed adds its own hooks, which reduce and free gradients.
            trained: list[Any] = [value for value in module.parameters() if value.requires_grad]
            self._hooks = [value.register_post_accumulate_grad_hook(self._mark_gradient) for value in trained]
            with quiet():
                self.engine = package.initialize(model=module, config=self._settings(model), dist_init_required=False)[0]
        except BaseException:
            self.close()
            raise
        if config.zero_stage == 3:
            self._hooks += follow_gathers(module, self._mark_parameter)
        _keep_norm(self.engine)
        self._account.attach(importlib.import_module("deepspeed.comm.comm").cdb)

    def prepare(self, step: int, micro_batches: int | None = None) -> None:
        self._prepared = micro_batches or self.accumulation
        self._repeatable.begin(step, self._prepared)
        mine = rank_batches(
            self.data if isinstance(self.data, FactoryData) else self.data.global_batch(step),
            step,
            rank=self._replica,
            ranks=self._replicas,
            size=self.config.micro_batch_size,
            count=self._prepared,
        )
        self._batches = [map_tensors(batch, self._to_device) for batch in mine]
        # DeepSpeed derives the number of micro-batches from it and divides losses by that number.
        self.engine.set_train_batch_size(self._prepared * self.config.micro_batch_size * self._replicas)

    def train_step(self) -> StepReport:
        self._renew_parameters()
        if self.config.pipeline_parallel_size > 1:
            # The mean over all replicas' micro-batches, the same on every rank.
            loss = self.engine.train_batch(iter([(batch["tokens"], batch["labels"]) for batch in self._batches]))
        else:
            loss = self._accumulate()
        self._steps += 1
        norm = self.engine.get_global_grad_norm() if self.workload.gradient_clipping else None
        return StepReport(loss=float(loss), gradient_norm=None if norm is None else float(norm))

    def settled(self) -> bool:
        # The first step creates optimizer state, and stage 3 records its trace in it and follows that from the second on.
        return self._steps >= 2

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        yield from held_tensors(self.engine, self.config, self.context.device)
        for batch in self._batches:
            yield from (("activations", value) for value in tensors_of(batch))

    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        return self._account.sent

    def full_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by name, gathered over data-parallel ranks. Every rank must call it."""
        parameters = dict(self.engine.module.named_parameters())
        if self.config.zero_stage < 3:
            return {name: value.detach().clone() for name, value in parameters.items()}
        with self.package.zero.GatheredParameters(list(parameters.values())):
            return {name: value.detach().clone() for name, value in parameters.items()}

    def close(self) -> None:
        traces, self._traces = self._traces, None
        if traces is None:
            return
        self._account.detach()
        while self._hooks:
            self._hooks.pop().remove()
        self._repeatable.close()
        engine, self.engine, self._batches = self.engine, None, []
        with quiet():
            try:
                if engine is not None:
                    with some_group():
                        engine.destroy()
            finally:
                traces.remove(self.package)

    def _make_module(self, model: Model, stage: int) -> tuple[nn.Module, Data | LoadedModule]:
        if self.config.pipeline_parallel_size == 1:
            return whole_module(model, self.config, self.workload, self._dtype)
        if not isinstance(model, ModelSpec):
            problem = "a module:factory cannot be cut into the stages of a PipelineModule"
            raise EngineRefusalError("factory-shape", f"{problem}; use pipeline_parallel_size=1, or the native engine")
        with quiet():
            return pipeline_module(self.package, model, self.config, self.workload, self._dtype, stage)

    def _settings(self, model: Model) -> dict[str, Any]:
        settings = deepspeed_config(self.config, self.workload, self.context.world_size, model.parameter_count)
        if self.context.device.type == "cpu" or self.config.offload_optimizer == "none":
            settings["optimizer"] = torch_optimizer(self.config, self.workload)
        if self.config.tensor_parallel_size > 1:
            settings["tensor_parallel"] = {
                "autotp_size": self.config.tensor_parallel_size,
                "partition_config": dict(TENSOR_PLAN),
            }
        return {**settings, "steps_per_print": NEVER}

    def _accumulate(self) -> Tensor:
        """Forward and backward of every micro-batch, then the update. Returns the mean loss."""
        losses = []
        for index, batch in enumerate(self._batches):
            self.engine.set_gradient_accumulation_boundary(index == len(self._batches) - 1)
            loss: Tensor = self.engine(**batch)
            self.engine.backward(loss)
            self._mark_gradients()
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _renew_parameters(self) -> None:
        """While memory is accounted for, reallocate the parameters that stage 3 keeps whole, since a step also frees them."""
        for parameter in self.engine.module.parameters() if accounting() else ():
            if is_partitioned(parameter) and parameter.numel():
                parameter.data = parameter.data.clone()
                self._mark_parameter(parameter)

    def _mark_parameter(self, parameter: Tensor) -> None:
        if accounting() and parameter.numel():
            mark("parameters", parameter.data)

    def _mark_gradient(self, parameter: Tensor) -> None:
        if accounting() and parameter.grad is not None:
            mark("gradients", parameter.grad)
            for value in bucket_tensors(self.engine):
                mark("gradients", value)

    def _mark_gradients(self) -> None:
        """Mark the gradients that a backward's reductions leave, and the second copy of parameters that hpZ gathers from."""
        if accounting():
            for tag, value in held_tensors(self.engine, self.config, self.context.device):
                if tag in ("gradients", "parameters"):
                    mark(tag, value)

    def _to_device(self, value: Tensor) -> Tensor:
        """Copy to the device, floating inputs in the model's dtype, so that no micro-batch keeps the whole batch alive."""
        dtype = self._input_dtype if value.is_floating_point() else None
        return value.to(device=self.context.device, dtype=dtype, copy=True)


def _keep_norm(engine: Any) -> None:
    """At stage 0 in fp32 DeepSpeed discards the gradient norm after clipping: store it where the other stages do."""
    clip = importlib.import_module("deepspeed.runtime.engine").clip_grad_norm_

    def clip_and_keep_norm() -> None:
        parameters, max_norm = engine.module.parameters(), engine.gradient_clipping()
        engine._global_grad_norm = clip(parameters=parameters, max_norm=max_norm, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip_and_keep_norm


WORLD = "world"
"""The dimension of a group whose ranks differ along more than one mesh dimension."""

# Method of DeepSpeed's backend -> its name here, keyword and index of the full message, and index of the group.
_CALLS: Mapping[str, tuple[str, str, int, int]] = {
    "all_reduce": ("all_reduce", "tensor", 0, 2),
    "inference_all_reduce": ("all_reduce", "tensor", 0, 2),
    "all_reduce_coalesced": ("all_reduce", "tensors", 0, 2),
    "reduce": ("reduce", "tensor", 0, 3),
    "reduce_scatter": ("reduce_scatter", "input_list", 1, 3),
    "reduce_scatter_tensor": ("reduce_scatter", "input_tensor", 1, 3),
    "all_gather": ("all_gather", "tensor_list", 0, 2),
    "all_gather_into_tensor": ("all_gather", "output_tensor", 0, 2),
    "all_gather_coalesced": ("all_gather", "output_tensors", 0, 2),
    "all_to_all_single": ("all_to_all", "input", 1, 4),
    "broadcast": ("broadcast", "tensor", 0, 2),
}
_SENDS = ("send", "isend")


class Account:
    """Counts what a backend of DeepSpeed sends, from `attach` to `detach`."""

    def __init__(self, mesh: Mesh) -> None:
        self._coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
        self._dimensions: dict[int, str | None] = {}
        self._backend: Any = None
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        """(operation, mesh dimension) -> (count, bytes of the full messages) so far."""

    def attach(self, backend: Any) -> None:
        """Wrap the methods of `backend`."""
        self._backend = backend
        for method, (operation, message, index, group) in _CALLS.items():
            if hasattr(backend, method):
                setattr(backend, method, self._counted(method, getattr(backend, method), operation, message, index, group))
        for method in _SENDS:
            setattr(backend, method, self._counted_send(getattr(backend, method)))

    def detach(self) -> None:
        """Restore the backend's methods. May be called twice."""
        backend, self._backend = self._backend, None
        for method in (*_CALLS, *_SENDS) if backend is not None else ():
            backend.__dict__.pop(method, None)

    def _counted(
        self, method: str, call: Callable[..., Any], operation: str, message: str, index: int, group: int
    ) -> Callable[..., Any]:
        per_tensor = method == "all_gather_coalesced"  # sends every tensor of its list in its own message

        def counted(*args: Any, **kwargs: Any) -> Any:
            value = kwargs[message] if message in kwargs else args[index]
            process_group = kwargs["group"] if "group" in kwargs else args[group] if len(args) > group else None
            parts = [value] if isinstance(value, Tensor) else list(value)
            self._record(operation, self._dimension(process_group), len(parts) if per_tensor else 1, parts)
            return call(*args, **kwargs)

        return counted

    def _counted_send(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
            self._record("send", PIPELINE, 1, [tensor])
            return call(tensor, dst, *args, **kwargs)

        return counted

    def _record(self, operation: str, dimension: str | None, count: int, messages: Iterable[Tensor]) -> None:
        if dimension is None:
            return
        before, size = self.sent.get((operation, dimension), (0, 0))
        self.sent[operation, dimension] = (before + count, size + sum(message.nbytes for message in messages))

    def _dimension(self, group: Any) -> str | None:
        """The mesh dimension along which the group's ranks differ; None: it has one rank, so nothing is sent."""
        if id(group) not in self._dimensions:
            self._dimensions[id(group)] = self._of_ranks(dist.get_process_group_ranks(group))
        return self._dimensions[id(group)]

    def _of_ranks(self, ranks: Iterable[int]) -> str | None:
        coordinates = [self._coordinates[rank] for rank in ranks]
        differing = [name for name in DIMENSIONS if len({coordinate[name] for coordinate in coordinates}) > 1]
        if not differing:
            return None
        return differing[0] if len(differing) == 1 else WORLD
