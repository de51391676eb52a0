"""One rank of any world, built and stepped by its real engine on tensors without data."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.data.batches import read_text
from executor.dry.backends import backend_of
from executor.dry.extrapolation import extrapolate
from executor.dry.mode import DryMode
from executor.dry.result import DryRank, DryRun
from executor.engine import Engine, RankContext, measured_config
from executor.engines.session import ParallelSession, refuse
from executor.errors import EngineRefusalError, FactoryError
from executor.trial.run import ENGINES
from search_spaces.fused_kernels import FUSED_KERNELS, NONE
from search_spaces.mesh import DIMENSIONS, PIPELINE, make_mesh
from search_spaces.model import Model, ModelSpec
from search_spaces.pipeline import stages_of_rank
from search_spaces.trial import Workload
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
    """One optimizer step of one rank: peak memory by tag, FLOPs, collectives. Needs a process without a process group.

    1. A process group that sends nothing stands for the world; its tensors have shapes and no data.
    2. The engine builds the rank and steps until lazily made state exists, as a trial does.
    3. One further step is followed: every storage that is made and released, every product, every collective.

    Without a pipeline every micro-batch between the first and the last does the same, so that a long step is extrapolated
    from steps of two and three. With one, every micro-batch is run: schedules have no such middle.

    Raises:
        EngineRefusalError: the engine refuses the combination.
        FactoryError, DataError: the user's module or text cannot be used, or the module asks for values.
    """
    chosen = ENGINES.get(engine)
    if chosen is None:
        raise EngineRefusalError("engine-known", f"there is no engine {engine!r}; use one of {', '.join(ENGINES)}")
    if engine != "native":
        problem = f"{engine} hands its collectives to torch's own wrappers, whose memory a dry run cannot follow"
        raise EngineRefusalError("dry-run-engine", f"{problem}; use engine=native")
    if "nvme" in (config.offload_optimizer, config.offload_param):
        problem = "states in files have no data that could be left out"
        raise EngineRefusalError("dry-run-nvme", f"{problem}; use cpu in its place: the device holds as much")
    if workload.document_lengths:
        problem = "how many tokens a step learns from is told by its data, which a dry run has not"
        raise EngineRefusalError("dry-run-documents", f"{problem}; leave document_lengths out, or measure it by a trial")
    if config.fused_kernels != NONE:
        problem = f"kernels of {config.fused_kernels} run on devices alone"
        raise EngineRefusalError("dry-run-kernels", f"{problem}; use {FUSED_KERNELS}={NONE}, which sends as much")
    if config.cuda_graphs:
        problem = "what graphs keep to themselves is made when a CUDA device captures them"
        raise EngineRefusalError("dry-run-graphs", f"{problem}; use cuda_graphs=false, or `autotune predict`")
    # What a batch size refuses is refused before it is changed.
    context = RankContext(rank=rank, world_size=world_size, device=torch.device("cpu"))
    refuse(chosen.capability, context, model, config, workload)
    if isinstance(model, ModelSpec):
        read_text(workload.data_path)  # before tensors lose their data

    def step_of(micro_batches: int) -> DryRank:
        samples = micro_batches * config.micro_batch_size * config.data_parallel_size(world_size)
        shorter = dataclasses.replace(workload, global_batch_size=samples)
        return _run(chosen, model, config, shorter, world_size, rank, backend)

    wanted = config.gradient_accumulation_steps(workload.global_batch_size, world_size)
    if wanted <= MOST_MICRO_BATCHES or config.pipeline_parallel_size > 1:
        return step_of(wanted)
    return extrapolate(step_of(MOST_MICRO_BATCHES - 1), step_of(MOST_MICRO_BATCHES), wanted)


def dry_run_places(
    model: Model,
    config: TrialConfig,
    workload: Workload,
    world_size: int,
    backend: str = "gloo",
    engine: str = "native",
    tell: Callable[[int], None] = lambda _: None,
) -> DryRun:
    """`dry_run` of the first rank at each place along the pipeline: ranks of one place differ in their data alone.

    (Context-parallel ranks see other keys, but head and tail of the sequence together as many; tensor rank 0 has the norms'
    share of the gradient norm.) `tell` is called with each rank before its turn.
    """
    began = time.monotonic()
    mesh = make_mesh(config, world_size)
    first: dict[int, int] = {}
    for rank in range(world_size):
        first.setdefault(mesh.coordinates(rank)[PIPELINE], rank)
    ranks = []
    for place in sorted(first):
        tell(first[place])
        ranks.append(dry_run(model, config, workload, world_size, first[place], backend, engine))
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
            try:
                _tell_dimensions(session, mode)
                return _follow(session, mode)
            finally:
                session.close()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise FactoryError(
                f"{model.name} asks for a tensor's value ({error.func}), which a dry run has not: measure it by a trial instead"
            ) from error


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
        mode.ledger.open(session.tagged_storages())
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


def _tell_dimensions(session: ParallelSession, mode: DryMode) -> None:
    """Which group serves which dimension. What spans the whole world shares one group: each gets one of its own here.

    A pipeline has handed its group to torch already, and keeps it.
    """
    names = mode.traffic.dimensions
    for dimension, group in session.groups.by_dimension():
        if group.group is dist.group.WORLD and group.group is not None and dimension != PIPELINE:
            names.setdefault(group.group.group_name, dimension)
            group.group = dist.new_group(list(range(session.context.world_size)))
        if group.group is not None:
            names[group.group.group_name] = dimension


@contextmanager
def _world(rank: int, world_size: int) -> Iterator[None]:
    """A process group of which this process is one rank, and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_collections() -> Iterator[None]:
    """As in the measurement: reference cycles would be freed at some random point of the step."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
