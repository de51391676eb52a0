"""Builds and steps one rank of any world with its real engine, on tensors without data; extrapolates long steps."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.batches import read_text
from executor.dry.ledger import backend_of
from executor.dry.mode import READS_VALUES, DryMode
from executor.engine import Engine, RankContext, measured_config
from executor.engines.session import ParallelSession, refuse
from executor.errors import EngineRefusalError, FactoryError
from executor.measurement.meter import Line
from executor.parallel.attention import SWITCHES
from executor.trial.run import ENGINES
from search_spaces.kernels import FUSED_KERNELS, NONE
from search_spaces.mesh import DIMENSIONS, PIPELINE, make_mesh
from search_spaces.models.model import Model, ModelSpec
from search_spaces.models.pipeline import stages_of_rank
from search_spaces.trial import DryRank, DryRun, Workload
from search_spaces.trial_config import TrialConfig

MOST_MICRO_BATCHES = 3
"""Without a pipeline, steps of more micro-batches than these are extrapolated from two shorter ones."""


def dry_run(
    model: Model,
    config: TrialConfig,
    workload: Workload,
    world_size: int,
    rank: int = 0,
    backend: str = "gloo",
    engine: str = "native",
) -> DryRank:
    """Predict one optimizer step of one rank: peak memory by tag, FLOPs, collectives. Needs a process without a process group.

    1. A process group that sends nothing stands for the world; its tensors have shapes but no data.
    2. The engine builds the rank and steps until lazily created state exists, as a trial does.
    3. One further step is recorded: every storage that is created and released, every product, every collective.

    Without a pipeline, all micro-batches between the first and the last are alike, so a long step is extrapolated from steps
    of two and three. With a pipeline, every micro-batch is run, because schedules have no such uniform middle.

    Raises:
        EngineRefusalError: the engine refuses the combination.
        FactoryError, DataError: the user's module or text cannot be used, or the module reads the value of a tensor.
    """
    chosen = ENGINES.get(engine)
    if chosen is None:
        raise EngineRefusalError("engine-known", f"there is no engine {engine!r}; use one of {', '.join(ENGINES)}")
    if engine != "native":
        problem = f"{engine} passes its collectives to torch's own wrappers, whose memory a dry run cannot track"
        raise EngineRefusalError("dry-run-engine", f"{problem}; use engine=native")
    if "nvme" in (config.offload_optimizer, config.offload_param):
        problem = "states in files cannot be replaced by tensors without data"
        raise EngineRefusalError("dry-run-nvme", f"{problem}; use cpu instead: the device memory is the same")
    if workload.document_lengths:
        problem = "the number of tokens in a step depends on its data, which a dry run does not have"
        raise EngineRefusalError("dry-run-documents", f"{problem}; leave document_lengths out, or measure it by a trial")
    if isinstance(model, ModelSpec) and model.expert_loads:
        problem = "ranks read how many rows their experts get, which differs from rank to rank"
        raise EngineRefusalError("dry-run-loads", f"{problem}; leave expert_loads out, or measure it by a trial")
    if config.fused_kernels != NONE:
        problem = f"kernels of {config.fused_kernels} run only on devices"
        raise EngineRefusalError("dry-run-kernels", f"{problem}; use {FUSED_KERNELS}={NONE}, which sends as much")
    if config.cuda_graphs:
        problem = "the private memory of CUDA graphs is allocated only when a CUDA device captures them"
        raise EngineRefusalError("dry-run-graphs", f"{problem}; use cuda_graphs=false, or `autotune predict`")
    # Check the rules before the batch size is changed, because some depend on it.
    context = RankContext(rank=rank, world_size=world_size, device=torch.device("cpu"))
    refuse(chosen.capability, context, model, config, workload)
    if isinstance(model, ModelSpec):
        read_text(workload.data_path)  # before tensors lose their data

    def step_of(micro_batches: int) -> DryRank:
        samples = micro_batches * config.micro_batch_size * config.data_parallel_size(world_size)
        shorter = dataclasses.replace(workload, global_batch_size=samples)
        return _run(chosen, model, config, shorter, world_size, rank, backend)

    micro_batch_count = config.gradient_accumulation_steps(workload.global_batch_size, world_size)
    if micro_batch_count <= MOST_MICRO_BATCHES or config.pipeline_parallel_size > 1:
        return step_of(micro_batch_count)
    return extrapolate(step_of(MOST_MICRO_BATCHES - 1), step_of(MOST_MICRO_BATCHES), micro_batch_count)


def dry_run_places(
    model: Model,
    config: TrialConfig,
    workload: Workload,
    world_size: int,
    backend: str = "gloo",
    engine: str = "native",
    on_rank: Callable[[int], None] = lambda _: None,
) -> DryRun:
    """Run `dry_run` for the first rank of each pipeline position: ranks of one position differ only in their data.

    (Context-parallel ranks attend to different keys, but equally many, as each has head and tail of the sequence. Tensor rank 0
    also computes the norm layers' part of the gradient norm.) `on_rank` is called with each rank before its run.
    """
    began = time.monotonic()
    mesh = make_mesh(config, world_size)
    first: dict[int, int] = {}
    for rank in range(world_size):
        first.setdefault(mesh.coordinates(rank)[PIPELINE], rank)
    ranks = []
    for stage in sorted(first):
        on_rank(first[stage])
        ranks.append(dry_run(model, config, workload, world_size, first[stage], backend, engine))
    return DryRun(ranks=tuple(ranks), backend=backend, seconds=time.monotonic() - began)


def _run(
    engine: Engine, model: Model, config: TrialConfig, workload: Workload, world_size: int, rank: int, backend: str
) -> DryRank:
    mode = DryMode(backend_of(backend), model if isinstance(model, ModelSpec) else None)
    with _world(rank, world_size), FakeTensorMode(allow_non_fake_inputs=True), mode.running():
        context = RankContext(rank=rank, world_size=world_size, device=torch.device("cpu"))
        try:
            session = engine.build(context, model, measured_config(config), workload)
            assert isinstance(session, ParallelSession)
            if config.attention_backend != "math":
                SWITCHES["flash"](True)  # a CPU has no other fused kernel; they keep the same tensors
            try:
                _register_dimensions(session, mode)
                return _follow(session, mode)
            finally:
                session.close()
        except READS_VALUES as error:
            reader = "it" if mode.reader is None else f"its {type(mode.reader).__name__}"
            problem = f"{reader} reads the value of a tensor ({error.func}), which a dry run does not have"
            raise FactoryError(f"{model.name}: {problem}; measure it by a trial") from None


def _follow(session: ParallelSession, mode: DryMode) -> DryRank:
    step = 0
    while not step or not session.settled():
        session.prepare(step)
        session.run_step()
        step += 1
    session.prepare(step)
    with _without_collections():
        mode.traffic.clear()
        mode.flops = 0
        mode.ledger.open(session.tagged_storages(), mode.backend.workspace_bytes)
        session.run_step()
        memory = mode.ledger.close()
    config, context = session.config, session.context
    coordinates = make_mesh(config, context.world_size).coordinates(context.rank)
    return DryRank(
        rank=context.rank,
        coordinates={dimension: coordinates[dimension] for dimension in DIMENSIONS},
        stages=tuple(stages_of_rank(config, coordinates[PIPELINE])),
        micro_batches=session.accumulation,
        peak_memory_bytes=memory.peak,
        memory_by_tag=memory.by_tag,
        tag_peak_bytes=memory.tag_peaks,
        host_memory_bytes=memory.host,
        flops_per_step=mode.flops,
        collectives=mode.traffic.counts(),
    )


def _register_dimensions(session: ParallelSession, mode: DryMode) -> None:
    """Record which group serves which dimension. Dimensions that span the whole world share a group; give each its own.

    A pipeline has already passed its group to torch and keeps it.
    """
    names = mode.traffic.dimensions
    for dimension, group in session.groups.by_dimension:
        if group.group is dist.group.WORLD and group.group is not None and dimension != PIPELINE:
            names.setdefault(group.group.group_name, dimension)
            group.group = dist.new_group(list(range(session.context.world_size)))
        if group.group is not None:
            names[group.group.group_name] = dimension


@contextmanager
def _world(rank: int, world_size: int) -> Iterator[None]:
    """Create a process group in which this process is one rank and the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection, as in the measurement: reference cycles would be freed at a random point of the step."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def extrapolate(fewer: DryRank, more: DryRank, micro_batches: int) -> DryRank:
    """Return the step of `micro_batches`, assuming that each further one adds the difference between `fewer` and `more`.

    Counts and FLOPs are sums over micro-batches, so this is exact for them. It is exact for memory too, as long as the peak
    stays at the same point of the step: a further micro-batch only adds its tokens and its loss to the live memory.
    """
    line = Line(first=fewer.micro_batches, second=more.micro_batches, full=micro_batches)
    flops = None
    if fewer.flops_per_step is not None and more.flops_per_step is not None:
        flops = line.whole_at_full(fewer.flops_per_step, more.flops_per_step)
    by_tag = line.tags_at_full(fewer.memory_by_tag, more.memory_by_tag)
    return dataclasses.replace(
        more,
        micro_batches=micro_batches,
        peak_memory_bytes=sum(by_tag.values()),
        memory_by_tag=by_tag,
        tag_peak_bytes=line.tags_at_full(fewer.tag_peak_bytes, more.tag_peak_bytes),
        flops_per_step=flops,
        collectives=line.collectives_at_full(fewer.collectives, more.collectives),
    )
