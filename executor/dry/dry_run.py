"""One rank of any world, built and stepped by its real engine on tensors without data."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.data import read_text
from executor.dry.backends import Backend, backend_of
from executor.dry.mode import DryMode
from executor.dry.result import DryRank, DryRun
from executor.engine import RankContext
from executor.engines.session import ParallelSession
from executor.errors import EngineRefusalError
from executor.trial import ENGINES
from search_spaces.mesh import DIMENSIONS, PIPELINE, make_mesh
from search_spaces.model import Model, ModelSpec
from search_spaces.pipeline import stages_of_rank
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


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

    Raises:
        EngineRefusalError: the engine refuses the combination.
        FactoryError, DataError: the user's module or text cannot be used.
    """
    chosen = ENGINES.get(engine)
    if chosen is None:
        raise EngineRefusalError("engine-known", f"there is no engine {engine!r}; use one of {', '.join(ENGINES)}")
    if isinstance(model, ModelSpec):
        read_text(workload.data_path)  # before tensors lose their data
    mode = DryMode(backend_of(backend), model if isinstance(model, ModelSpec) else None)
    with _world(rank, world_size), FakeTensorMode(allow_non_fake_inputs=True), mode.running():
        context = RankContext(rank=rank, world_size=world_size, device=torch.device("cpu"))
        session = chosen.build(context, model, config, workload)
        assert isinstance(session, ParallelSession)
        try:
            _tell_dimensions(session, mode)
            return _follow(session, mode)
        finally:
            session.close()


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
