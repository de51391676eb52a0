"""A request with everything resolved and checked: what a run of the job needs beside the database and a runner."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.engines import capability_of, require_usable
from autotune.errors import DoesNotFitError, NothingFeasibleError, RequestError
from autotune.intervals import CPU_SPREAD, Spread
from autotune.jobs.request import JobRequest, Objective, request_from_row
from autotune.jobs.shape import parse_shape, reshaped
from autotune.objective import Ranking
from autotune.strategies.fronts import FrontStrategy, at_share
from autotune.strategies.names import PREDICTING
from autotune.strategies.strategy import Guide, Strategy, make_strategy
from executor.detect import local_gpus
from search_spaces.capability import Capability
from search_spaces.cluster import ClusterSpec
from search_spaces.clusters import local_cluster, resolve_cluster
from search_spaces.command import CommandModel
from search_spaces.huggingface import is_factory_reference, resolve_model
from search_spaces.knobs import check_value
from search_spaces.model import MOST_LAYERS, FactoryModel, Model, ModelSpec, Position
from search_spaces.plain import from_plain, to_plain
from search_spaces.space import SearchSpace
from search_spaces.spaces import resolve_space
from search_spaces.states import states_lower_bound_bytes
from search_spaces.trial import TrialRequest
from search_spaces.trial_config import SCRIPT, TrialConfig, Value
from storage.records import JobRecord, Lease
from storage.store import Store

if TYPE_CHECKING:
    from autotune.extrapolation import Extrapolation
    from autotune.prediction.trial_history import Runs
    from autotune.strategies.guided.prior import Prior

DIVIDES_ALL = math.factorial(16)
"""Divided by every number of ranks of a tensor-parallel group that is of any use."""
GPU_SPREAD = 0.01
"""Relative standard deviation between repeats on a GPU of one's own, before a job has repeats of its own."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that a job's request names, resolved. The same in every process that opens the same row."""

    request: JobRequest
    """With its resolved fields filled in: what the job's row holds."""
    model: Model
    cluster: ClusterSpec
    space: SearchSpace
    baselines: tuple[TrialConfig, ...]
    """Trial 0, and what is tried in its place, in order, where it does not fit."""
    ranking: Ranking
    prior: Spread
    strategy: Strategy
    extrapolation: "Extrapolation | None" = None
    """To the cluster that the answer is for; None: that of the trials."""

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return self.space.world_size

    def trial_request(
        self,
        attempt: str,
        config: TrialConfig,
        reference_losses: tuple[float, ...],
        excluded_nodes: tuple[str, ...] = (),
    ) -> TrialRequest:
        """What a runner is asked for to measure `config` in full under this job's workload and limits."""
        request = self.request
        return TrialRequest(
            attempt=attempt,
            model=self.model,
            config=config,
            workload=request.workload,
            world_size=self.world_size,
            engine=request.engine,
            fidelity=dataclasses.replace(request.fidelity, most_micro_batches=None, most_layers=None),
            memory_limit_bytes=request.memory_limit_bytes,
            timeout_seconds=request.trial_timeout,
            reference_losses=reference_losses,
            peak_flops_per_device=self.cluster.device.peak_flops.get(config.precision),
            excluded_nodes=excluded_nodes,
            files=self._files(config),
        )

    def _files(self, config: TrialConfig) -> tuple[tuple[str, str], ...]:
        """What a user's command reads."""
        if not isinstance(self.model, CommandModel):
            return ()
        # What renders files reads best-config documents, whose module needs this one.
        from autotune.command import rendered_files

        return rendered_files(self, config)


def prepare(request: JobRequest, live: ClusterSpec | None = None) -> Session:
    """Resolve and check everything that a request names. Starts no trial and touches no database.

    Args:
        request: what was asked for.
        live: the cluster that was found, for `ray`.

    Raises:
        RequestError: a path does not exist, the engine is not known or its package not installed, the baseline is illegal, the
            cluster is not here, or the samples are longer than the text or than the model has positions for, or models of
            fewer layers are predicted to rank configurations otherwise.
        DoesNotFitError: the model's states exceed the host's memory in every configuration.
        NothingFeasibleError: they exceed the stated limit in every configuration.
        SearchSpaceError: model, cluster, space or a pin cannot be resolved.
        FactoryError: a factory does not keep the Protocol.
    """
    if request.data_path is not None:
        # Absolute, because a resume may come from another folder.
        request = dataclasses.replace(request, data_path=str(Path(request.data_path).expanduser().absolute()))
    if request.command is not None and not request.command.folder:
        request = dataclasses.replace(request, command=dataclasses.replace(request.command, folder=str(Path.cwd())))
    _require_text(request)
    session = _resolve(request, live)
    if live is None:
        _require_here(session.cluster)
        require_usable(request.engine)
    require_positions(session.model, request.sequence_length)
    _require_fit(session.space)
    if request.fidelity.most_layers is not None:
        # NumPy and the equations: loaded for those who ask for it alone.
        from autotune.depth import require_same_order

        require_same_order(session.space, request.fidelity.most_layers, request.engine)
    return session


def _resolve(request: JobRequest, live: ClusterSpec | None = None, most_steps: int | None = None) -> Session:
    """What the request names, whether or not this machine can run it now."""
    capability = capability_of(request.engine, request.command)
    cluster = request.resolved_cluster or _cluster(request, live)
    workload = request.workload
    if request.resolved_model is None and is_factory_reference(request.model):
        # What is refused whatever the module's size is told before a process is started to look at it.
        unseen = FactoryModel(
            reference=request.model, parameter_count=1, python_path=request.python_path, tensor_divisor=DIVIDES_ALL,
            pipeline_stages=MOST_LAYERS,
        )  # fmt: skip
        resolve_space(request.space, unseen, cluster, workload, capability, request.pins)
    model = request.resolved_model or _look_at(request)
    space = (
        _stored_space(request, model, cluster)
        if request.resolved_domains is not None
        else resolve_space(
            request.space, model, cluster, workload, capability, _pins(request, capability), most_steps=most_steps
        )
    )
    if space.is_empty():
        raise _nothing_legal(space)
    resolved = dataclasses.replace(
        request, resolved_model=model, resolved_cluster=cluster, resolved_domains=dict(space.domains), resolved_base=space.base
    )
    extrapolation = _extrapolation(request, space, model)
    ranking = _ranking(request, cluster, extrapolation)
    return Session(
        request=resolved,
        model=model,
        cluster=cluster,
        space=space,
        baselines=_baselines(request, space, extrapolation),
        ranking=ranking,
        prior=Spread(relative=CPU_SPREAD if cluster.device.kind == "cpu" else GPU_SPREAD),
        strategy=_strategy(request, space, model, ranking),
        extrapolation=extrapolation,
    )


def _pins(request: JobRequest, capability: Capability) -> dict[str, Any]:
    """The request's; and all that a user's script may be told of its own knobs."""
    if request.command is None:
        return request.pins
    from autotune.command import require_carried

    require_carried(request, capability)
    own = {SCRIPT: request.command.variants} if request.command.variants else {}
    return {**own, **request.pins}


def with_prior(session: Session, store: Store, lease: Lease) -> tuple[Session, str]:
    """The session with what is known before the job's first trial: learned when the job begins, then frozen. And in words."""
    if session.request.strategy not in PREDICTING:
        return session, ""
    from autotune.strategies.guided.prior import Prior, learn_prior

    kept = store.prior(lease.job_id)
    if kept is None:
        learned = learn_prior(store, session.cluster, session.request.engine, _earlier(session))
        kept = store.set_prior(lease, to_plain(learned))
    prior = from_plain(Prior, kept)
    strategy = _strategy(session.request, session.space, session.model, session.ranking, prior)
    return dataclasses.replace(session, strategy=strategy), prior.note


def _earlier(session: Session) -> "list[Runs]":
    """What was measured outside of the database."""
    from autotune.prediction.trial_history import earlier_runs

    request, model = session.request, session.model
    if not isinstance(model, ModelSpec):
        return []
    return earlier_runs(request.resolved_history, model, request.workload, session.cluster, request.engine)


def session_of(job: JobRecord) -> Session:
    """The session of a job from its row alone.

    Raises:
        JobNotResumableError: this version cannot read the row.
    """
    return _resolve(request_from_row(job.request))


def resolve(request: JobRequest, model: ModelSpec | None = None, most_steps: int | None = None) -> Session:
    """Resolve and check a request on a machine that need not be able to run it. Raises what `prepare` raises of names.

    Args:
        request: what was asked for.
        model: what `request.model` names, where that is no preset.
        most_steps: what counting the session's space may take; None: no bound.
    """
    session = _resolve(
        dataclasses.replace(request, resolved_model=model) if model is not None else request, most_steps=most_steps
    )
    require_positions(session.model, request.sequence_length)
    return session


def with_budget_of(session: Session, job: JobRecord) -> Session:
    """The session with the budget that the job's row states now."""
    budget = {name: job.request.get(name, getattr(session.request, name)) for name in ("trials", "max_seconds")}
    if all(getattr(session.request, name) == value for name, value in budget.items()):
        return session
    return dataclasses.replace(session, request=dataclasses.replace(session.request, **budget))


def require_startable(session: Session) -> None:
    """Refuse, before ranks are started, a job whose data or devices are not here.

    Raises:
        RequestError: see `prepare`.
    """
    _require_text(session.request)
    _require_here(session.cluster)


def require_positions(model: Model, sequence_length: int) -> None:
    """Refuse samples longer than a table of learned positions. Rotary positions have no end: longer samples run as fast.

    Raises:
        RequestError: they are longer.
    """
    if isinstance(model, ModelSpec) and model.position is Position.LEARNED and sequence_length > model.sequence_length:
        problem = f"{sequence_length} tokens are beyond the {model.sequence_length} positions that {model.name} learns"
        raise RequestError("sequence_length", problem, f"give at most {model.sequence_length}")


def cluster_here(name: str, ranks: int | None = None) -> ClusterSpec:
    """The cluster of that name, which must be what is here.

    Raises:
        RequestError: this machine has not its devices.
        SearchSpaceError: there is no such cluster, or it cannot be described.
    """
    cluster = _cluster(JobRequest(model="any", cluster=name, ranks=ranks), None)
    _require_here(cluster)
    return cluster


def read_baseline(path: Path) -> dict[str, Value]:
    """The knob values of a user's file: a JSON object {knob: value}, or a best-config.json, whose best is taken.

    Raises:
        RequestError: the file cannot be read, or names an unknown knob.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError("baseline", f"{path} cannot be read as JSON ({error})", "give {knob: value}") from error
    if isinstance(content, Mapping) and isinstance(content.get("best"), Mapping):
        content = content["best"].get("config")
    if not isinstance(content, Mapping):
        raise RequestError("baseline", f"{path} holds no object", "give {knob: value}, or a best-config.json")
    return {str(name): check_value(str(name), value) for name, value in content.items()}


def smallest_bound_bytes(space: SearchSpace) -> int:
    """The least that the states of any configuration need on a rank: every axis of the domains at its most sparing value."""
    sparing = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "offload_optimizer")
    config = space.base

    def bound(option: TrialConfig) -> int:
        return states_lower_bound_bytes(option, space.model, space.world_size, space.capability)

    for name in (*sparing, "offload_param", "offload_ratio", "precision"):
        values = space.domains.get(name, ())
        options: Sequence[TrialConfig] = [config.replace({name: value}) for value in values] or [config]
        config = min(options, key=bound)
    return bound(config)


def _cluster(request: JobRequest, live: ClusterSpec | None) -> ClusterSpec:
    local = request.cluster == "local" and live is None
    ranks = _ranks_of_shape(request.tune_on) if local and request.tune_on is not None else request.ranks
    gpus = local_gpus() if local else None
    if gpus is not None:
        return local_cluster(ranks, request.memory_limit_bytes, gpus.name, gpus.count, gpus.memory_bytes)
    cluster = resolve_cluster(request.cluster, ranks, request.memory_limit_bytes, live)
    return cluster if local or request.tune_on is None else reshaped(cluster, "tune_on", request.tune_on)


def _ranks_of_shape(shape: str) -> int:
    """Ranks of so much of this machine: each has its share of memory and cores, so that none is cut out of something larger."""
    nodes, devices = parse_shape("tune_on", shape)
    if nodes > 1:
        raise RequestError("tune_on", f"{shape} has {nodes} nodes, and local is one", f"write 1x{devices}, or name a cluster")
    return devices


def _extrapolation(request: JobRequest, space: SearchSpace, model: Model) -> "Extrapolation | None":
    if request.answer_for is None:
        return None
    # NumPy and the equations: loaded for those who predict alone.
    from autotune.extrapolation import extrapolation_to

    return extrapolation_to(request.answer_for, space, model, request.engine)


def _require_fit(space: SearchSpace) -> None:
    least, room = smallest_bound_bytes(space), space.cluster.device.memory_bytes
    host = space.cluster.host_memory_bytes // min(space.cluster.devices_per_node, space.world_size)
    if space.cluster.device.kind == "cpu" and least > host:
        needs = f"the states of {space.model.name} need at least {_gib(least)} on each of {space.world_size} ranks"
        problem = f"{needs}, and the host has {_gib(host)} for each"
        raise DoesNotFitError("model", problem, "choose a smaller model, a larger cluster, or a space with higher ZeRO stages")
    if least > room:
        problem = f"every configuration of {space.model.name} needs at least {least:,} bytes on a rank, over {room:,}"
        raise NothingFeasibleError("memory_limit_bytes", problem, "raise the limit, add ranks, or choose a smaller model")


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _nothing_legal(space: SearchSpace) -> RequestError:
    """Why the space is empty: the rule that refuses most, on an example."""
    rule = next(iter(space.census().refused), "")
    example = space.refused_example(rule)
    found = [refusal for refusal in space.check(example) if refusal.rule == rule] if example else []
    why = f": {found[0].message}" if found else ""
    remedy = f"{found[0].remedy}; `autotune space` tells what refuses each" if found else "give it other values"
    return RequestError("space", f"{space.name} has no legal configuration{why}", remedy)


def _require_here(cluster: ClusterSpec) -> None:
    """Trials run on this machine: what is measured on it must not be told as another cluster's."""
    if cluster.device.kind == "cpu":
        local_cluster(cluster.world_size)
        return
    gpus = local_gpus()
    if cluster.nodes > 1 or gpus is None or gpus.count < cluster.devices_per_node:
        problem = f"{cluster.name} has {cluster.world_size} GPUs, and this machine has {gpus.count if gpus else 'none'}"
        raise RequestError("cluster", problem, "use local, or run it there; `autotune space` counts for any cluster")


def _require_text(request: JobRequest) -> None:
    """Refuse data that is missing, or too short for one sample; the same bounds as the ranks have (executor.data)."""
    if request.data_path is None or is_factory_reference(request.model):
        return
    root = Path(request.data_path)
    if not root.exists():
        raise RequestError("data_path", f"{root} does not exist", "give a file or a folder of text")
    files = [root] if root.is_file() else (path for path in root.glob("**/*") if path.is_file())
    found, least = 0, request.sequence_length + 2
    for path in files:
        found += path.stat().st_size
        if found >= least:
            return
    problem = f"{root} holds {found:,} bytes, fewer than one sample of {request.sequence_length} tokens"
    raise RequestError("data_path", problem, "give more text, or a smaller sequence_length (--seq-len)")


def _look_at(request: JobRequest) -> Model:
    if request.command is not None:
        return request.command
    if not is_factory_reference(request.model):
        return resolve_model(request.model)
    # Only factories need a rank process to be looked at.
    from executor.runners.probe import describe_factory

    return describe_factory(request.model, request.workload, request.python_path)


def _strategy(
    request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None" = None
) -> Strategy:
    """The strategy that the request names; those that predict do it by what is shipped where nothing else is known."""
    if request.objective is Objective.PARETO:
        return FrontStrategy(lambda share: _one_strategy(request, space, model, at_share(ranking, share), prior))
    return _one_strategy(request, space, model, ranking, prior)


def _one_strategy(request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None") -> Strategy:
    if request.strategy not in PREDICTING:
        return make_strategy(request.strategy, ranking.score)
    # NumPy and the equations: loaded for those who predict alone.
    from autotune.strategies.guided.prior import shipped_prior
    from autotune.strategies.guided.setting import setting_of
    from autotune.strategies.guided.space_forecaster import SpaceForecaster

    setting = setting_of(model, space, request.engine, ranking, request.fidelity)
    forecaster = SpaceForecaster(setting, prior or shipped_prior(space.cluster, request.engine))
    return make_strategy(request.strategy, ranking.score, Guide(forecaster=forecaster, value=ranking.value))


def _stored_space(request: JobRequest, model: Model, cluster: ClusterSpec) -> SearchSpace:
    return SearchSpace(
        model=model,
        cluster=cluster,
        workload=request.workload,
        world_size=cluster.world_size,
        domains=request.resolved_domains or {},
        base=request.resolved_base or TrialConfig(),
        capability=capability_of(request.engine, request.command),
        name=request.space,
    )


def _ranking(request: JobRequest, cluster: ClusterSpec, extrapolation: "Extrapolation | None") -> Ranking:
    # On a CPU the device's share of main memory is no limit that an allocator keeps, so that only a stated one counts.
    known = request.memory_limit_bytes or (cluster.device.memory_bytes if cluster.device.kind == "cuda" else None)
    return Ranking(
        objective=request.objective,
        memory_limit_bytes=known,
        headroom=request.headroom,
        allow_unstable=request.allow_unstable,
        efficiency=extrapolation.efficiency if extrapolation else None,
    )


def _baselines(request: JobRequest, space: SearchSpace, extrapolation: "Extrapolation | None") -> tuple[TrialConfig, ...]:
    """The user's configuration, then the defaults at each ZeRO stage of the space from the lowest whose states fit."""
    users, defaults = _users_baseline(request.baseline, space), _default_baselines(space)
    if extrapolation is not None:
        for refused in filter(None, map(extrapolation.refusal, users)):
            raise RequestError("baseline", f"is refused by {refused.rule}: {refused.message}", refused.remedy)
        defaults = [config for config in defaults if extrapolation.refusal(config) is None]
    chain = [*users, *defaults]
    return tuple({config.hash: config for config in chain}.values())


def _users_baseline(values: Mapping[str, Any] | None, space: SearchSpace) -> list[TrialConfig]:
    if values is None:
        return []
    config = space.canonical(space.base.replace(values))
    if refusals := space.check(config):
        raise RequestError("baseline", f"is refused by {refusals[0].rule}: {refusals[0].message}", refusals[0].remedy)
    return [config]


def _default_baselines(space: SearchSpace) -> list[TrialConfig]:
    stages = sorted(int(stage) for stage in space.domains.get("zero_stage", (space.base.zero_stage,)))
    configs = [space.admitted(space.base.replace({"zero_stage": stage})) for stage in stages]
    legal = [config for config in configs if not space.check(config)]
    room = space.cluster.device.memory_bytes
    fitting = [c for c in legal if states_lower_bound_bytes(c, space.model, space.world_size, space.capability) <= room]
    return fitting or legal[-1:]
