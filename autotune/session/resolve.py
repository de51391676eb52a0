"""Resolve and check everything that a request names, its strategy included."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import JobNotResumableError, RequestError, UnstatedError
from autotune.goodput.terms import assumed_terms, parse_terms
from autotune.objective.intervals import CPU_SPREAD, Spread
from autotune.objective.ranking import Ranking
from autotune.prediction.planning.question import WORKLOAD, assumptions, default_workload, open_sizes, precisions_of
from autotune.prediction.planning.question_space import layouts_of, nothing_legal
from autotune.question.assumption import Assumption
from autotune.ray_cluster import address_of, cluster_of, found_cluster, require_here, require_text
from autotune.request.component_names import PREDICTING, require_installed
from autotune.request.engines import capability_of, require_carried, require_script, why_unusable
from autotune.request.field_forms import with_loads
from autotune.request.job_fields import Objective
from autotune.request.request import JobRequest
from autotune.request.rows import request_of
from autotune.session.baselines import baselines_of
from autotune.session.feasible import require_fit, require_folder, require_positions
from autotune.session.knowledge import learned_of, require_knowledge
from autotune.session.session import OPTIMIZER, Session, environments_of
from autotune.strategies import FrontStrategy, make_strategy
from autotune.strategies.strategy import Strategy
from search_spaces.capability import Capability
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import IllegalConfigError
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.models.huggingface import is_factory_reference, resolve_model
from search_spaces.models.model import MOST_LAYERS, FactoryModel, Model, ModelSpec
from search_spaces.models.module_profile import traced_precision
from search_spaces.plain import from_plain, to_plain
from search_spaces.space import SearchSpace
from search_spaces.spaces import device_defaults, resolve_space
from search_spaces.trial_config import SCRIPT, TrialConfig
from storage.records import JobRecord, Lease, TrialRecord

if TYPE_CHECKING:
    from autotune.prediction.fitting.trial_fit import Runs
    from autotune.session.extrapolation import Extrapolation, JobGoodput
    from autotune.strategies.guided.prior import Prior
    from storage.store import Store

GPU_SPREAD = 0.01
"""Relative standard deviation between repeats on an exclusive GPU, before a job has its own repeats."""


def prepare(request: JobRequest, live: ClusterSpec | None = None) -> Session:
    """Resolve and check everything that a request names. Starts no trial and touches no database.

    Args:
        request: the request.
        live: for `ray`, the cluster that was found; None: look for it.

    Raises:
        RunnerError: no Ray answers at the request's address.
        UnstatedError: see `require_workload`.
        RequestError: a path does not exist, the engine is unknown or its package not installed, the baseline is illegal, the
            cluster is not here, the samples are longer than the text or the model's positions, or models with fewer layers are
            predicted to rank configurations differently.
        DoesNotFitError: the model's states exceed the host's memory in every configuration.
        NothingFeasibleError: they exceed the stated limit in every configuration.
        SearchSpaceError: model, cluster, space or a pin cannot be resolved.
        FactoryError: a factory does not implement the Protocol.
        MissingPackageError: the library of a tracker is not installed.
    """
    if request.data_path is not None:
        # Absolute, because a resume may come from another folder.
        request = dataclasses.replace(request, data_path=str(Path(request.data_path).expanduser().absolute()))
    if request.nvme_path is not None:
        request = dataclasses.replace(request, nvme_path=str(Path(request.nvme_path).expanduser().absolute()))
    if request.command is not None and not request.command.folder:
        request = dataclasses.replace(request, command=dataclasses.replace(request.command, folder=str(Path.cwd())))
    require_text(request)
    require_installed(request.trackers)
    live = live or found_cluster(request)
    session = _resolve(request, live)
    require_workload(request, session)
    if live is None:
        require_here(session.cluster, address_of(request))
        require_folder(request)
        if (missing := why_unusable(request.engine)) is not None:
            raise RequestError(f"engine {request.engine}", missing.message, missing.remedy)
    require_positions(session.model, session.request.sequence_length)
    require_fit(session.space)
    if request.command is not None:
        require_script(request.command)
    if request.fidelity.most_layers is not None:
        # NumPy and the equations are loaded only for requests that need them.
        from autotune.prediction.planning.depth import require_same_order

        require_same_order(session.space, request.fidelity.most_layers, request.engine)
    return session


def _resolve(request: JobRequest, live: ClusterSpec | None = None, most_steps: int | None = None) -> Session:
    """Resolve the request, whether or not this machine can run it now."""
    capability = capability_of(request.engine, request.command)
    cluster = request.resolved_cluster or cluster_of(request, live)
    workload = request.workload
    if request.resolved_model is None and is_factory_reference(request.model):
        # Problems that do not depend on the module's size are reported before a process is started to inspect the module.
        # Every useful tensor-parallel size divides the factorial.
        placeholder = FactoryModel(
            reference=request.model, parameter_count=1, python_path=request.python_path, tensor_divisor=math.factorial(16),
            pipeline_stages=MOST_LAYERS,
        )  # fmt: skip
        resolve_space(request.space, placeholder, cluster, workload, capability, request.pins)
    model = with_loads(request.resolved_model or _resolve_model(request, cluster), request.expert_loads)
    if request.resolved_defaults and request.resolved_domains is None:
        batch, length = default_workload(model, cluster, request.pins)
        request = dataclasses.replace(
            request,
            global_batch_size=batch if "global_batch_size" in request.resolved_defaults else request.global_batch_size,
            sequence_length=length if "sequence_length" in request.resolved_defaults else request.sequence_length,
        )
        workload = request.workload
    if request.resolved_domains is None:  # what is stored was checked
        require_knowledge(request, model)
    if request.resolved_domains is not None:
        space = _stored_space(request, model, cluster)
    else:
        space = resolve_space(
            request.space, model, cluster, workload, capability, _pins(request, capability),
            base=_base(request, cluster, capability, model), most_steps=most_steps, layouts=layouts_of(request.engine),
        )  # fmt: skip
    if request.simple is not None and request.resolved_domains is None:
        # The exporters are loaded only for requests that need them.
        from autotune.frameworks.exporters import expressible

        space = expressible(space, request.simple, frozenset(request.pins))
    if space.is_empty():
        raise nothing_legal(space)
    extrapolation: Extrapolation | None = None
    goodput: JobGoodput | None = None
    if request.answer_for is not None or request.objective is Objective.GOODPUT:
        # NumPy and the equations are loaded only for requests that need them.
        from autotune.session.extrapolation import extrapolation_to, goodput_of

        if request.answer_for is not None:
            extrapolation = extrapolation_to(request.answer_for, space, model, request.engine)
        if request.objective is Objective.GOODPUT:
            goodput = goodput_of(request, space, model, extrapolation)
    ranking = _ranking(request, cluster, extrapolation, goodput)
    baselines = baselines_of(request.baseline, space, extrapolation)
    resolved = dataclasses.replace(
        request,
        resolved_model=model,
        resolved_cluster=cluster,
        resolved_domains=dict(space.domains),
        resolved_base=space.base,
        resolved_assumed=request.resolved_assumed
        if request.resolved_domains is not None
        else _assumed(request, model, cluster),
        resolved_environments=request.resolved_environments or environments_of(request, space, baselines),
    )
    return Session(
        request=resolved, model=model, cluster=cluster, space=space, baselines=baselines, ranking=ranking,
        prior=Spread(relative=CPU_SPREAD if cluster.device.kind == "cpu" else GPU_SPREAD),
        strategy=strategy_of(request, space, model, ranking), extrapolation=extrapolation,
    )  # fmt: skip


def _assumed(request: JobRequest, model: Model, cluster: ClusterSpec) -> tuple[Assumption, ...]:
    workload = {name: getattr(request, name) for name in WORKLOAD}
    terms = assumed_terms(parse_terms(request.goodput)) if request.objective is Objective.GOODPUT else ()
    return (*assumptions(model, cluster, request.resolved_defaults, workload), *terms)


def _base(request: JobRequest, cluster: ClusterSpec, capability: Capability, model: Model) -> TrialConfig:
    """The values of knobs that are not searched: the device's defaults, and the optimizer and environment of the user's
    configuration."""
    overrides = {**(request.baseline or {}), **_stated_optimizer(request, capability)}
    return device_defaults(cluster, capability, model).replace(
        {name: overrides[name] for name in (OPTIMIZER, ENVIRONMENT) if name in overrides}
    )


def _pins(request: JobRequest, capability: Capability) -> dict[str, Any]:
    """The request's pins, plus the variants of a user's script."""
    if request.command is None:
        return {**request.pins, **_stated_optimizer(request, capability)}
    require_carried(request, capability)
    script_pins = {SCRIPT: request.command.variants} if request.command.variants else {}
    return {**script_pins, **request.pins, **_stated_optimizer(request, capability)}


def _stated_optimizer(request: JobRequest, capability: Capability) -> dict[str, Value]:
    """The request's optimizer, if trials create it. A script creates its own, unless its command has a placeholder for it.

    Raises:
        RequestError: pins name another optimizer.
    """
    if request.optimizer is None or (request.command is not None and OPTIMIZER not in capability.knobs):
        return {}
    pinned = request.pins.get(OPTIMIZER, request.optimizer)
    if pinned not in (request.optimizer, [request.optimizer], (request.optimizer,)):
        problem = f"is {request.optimizer}, and pins name {value_text(pinned)}"
        raise RequestError(OPTIMIZER, problem, "leave one of them out")
    return {OPTIMIZER: request.optimizer}


def with_prior(session: Session, store: "Store", lease: Lease) -> tuple[Session, str]:
    """Return the session with the prior of the job, and a note on it. The prior is learned when the job begins, then frozen.

    It is also stored for strategies that do not predict, because predictions are shown next to the trials' results.
    """
    predicts = session.request.strategy in PREDICTING
    if not predicts and not isinstance(session.model, ModelSpec):
        return session, ""
    from autotune.strategies.guided.prior import Prior, learn_prior

    stored_prior = store.jobs.prior(lease.job_id)
    if stored_prior is None:
        request = session.request
        borrowed = learned_of(request.knowledge, store, session.cluster, request.engine, session.model)
        stored_prior = store.jobs.set_prior(
            lease, to_plain(learn_prior(store, session.cluster, session.request.engine, _earlier(session), borrowed))
        )
    if not predicts:
        return session, ""
    try:
        prior = from_plain(Prior, stored_prior)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"{lease.job_id} has a damaged prior ({error})"
        raise JobNotResumableError("job", problem, "see `autotune db check`, or clone it") from error
    strategy = strategy_of(session.request, session.space, session.model, session.ranking, prior)
    return dataclasses.replace(session, strategy=strategy), prior.note


def _earlier(session: Session) -> "list[Runs]":
    """Trials that were measured outside of the database."""
    from autotune.prediction.fitting.trial_fit import earlier_runs

    request, model = session.request, session.model
    if not isinstance(model, ModelSpec):
        return []
    return earlier_runs(request.resolved_history, model, request.workload, session.cluster, request.engine)


def session_of(job: JobRecord) -> Session:
    """Rebuild the session of a job from its row.

    Raises:
        JobNotResumableError: this version cannot read the row.
    """
    return _resolve(request_of(job))


def resolve(request: JobRequest, model: ModelSpec | None = None, most_steps: int | None = None) -> Session:
    """Resolve and check a request on a machine that may be unable to run it. Raises what `prepare` raises for names and, if the
    request uses the cluster at a Ray address, for that address.

    Args:
        request: the request.
        model: the model that `request.model` names, if that is not a preset.
        most_steps: most steps for counting the session's space; None: no limit.
    """
    model_request = dataclasses.replace(request, resolved_model=model) if model is not None else request
    try:
        session = _resolve(model_request, found_cluster(model_request), most_steps)
    except IllegalConfigError as error:
        if request.optimizer is not None:  # a pin of its own
            error.fields = tuple(OPTIMIZER if name == f"pins.{OPTIMIZER}" else name for name in error.fields)
        raise
    require_positions(session.model, session.request.sequence_length)
    return session


def require_workload(request: JobRequest, session: Session) -> None:
    """Refuse a new job on GPUs whose request states no sequence length or global batch: what is tuned for another workload
    than the user's is of no use.

    Args:
        request: as it was given.
        session: what it resolves to.

    Raises:
        UnstatedError: it lacks some of them.
    """
    model, meanings = session.model, dict[str, str]()
    if request.resolved_domains is not None or session.cluster.device.kind == "cpu":
        return
    unstated = open_sizes(model, request.resolved_defaults)
    if "sequence_length" in unstated:
        most = f", up to {model.sequence_length:,} for {model.name}" if isinstance(model, ModelSpec) else ""
        meanings["sequence_length"] = f"tokens per sample{most}"
    if "global_batch_size" in unstated:
        meanings["global_batch_size"] = "samples per optimizer step, over all ranks"
    if meanings:
        raise UnstatedError(meanings)


def require_startable(session: Session) -> None:
    """Refuse a job whose data or devices are not here, before its ranks are started.

    Raises:
        RequestError, RunnerError: see `prepare`.
    """
    require_text(session.request)
    require_here(session.cluster, address_of(session.request))


def _resolve_model(request: JobRequest, cluster: ClusterSpec) -> Model:
    if request.command is not None:
        return request.command
    if not is_factory_reference(request.model):
        return resolve_model(request.model)
    # Only factories need a rank process for inspection.
    from executor.runners.one_process import describe_factory

    precisions = dict.fromkeys(map(traced_precision, precisions_of(cluster, request.engine, request.pins)))
    return describe_factory(
        request.model, request.workload, request.python_path, tuple(precisions), device_kind=cluster.device.kind
    )


def _stored_space(request: JobRequest, model: Model, cluster: ClusterSpec) -> SearchSpace:
    return SearchSpace(
        model=model, cluster=cluster, workload=request.workload, world_size=cluster.world_size, name=request.space,
        domains=request.resolved_domains or {}, base=request.resolved_base or TrialConfig(),
        capability=capability_of(request.engine, request.command),
    )  # fmt: skip


def _ranking(
    request: JobRequest, cluster: ClusterSpec, extrapolation: "Extrapolation | None", goodput: "JobGoodput | None"
) -> Ranking:
    # On a CPU, no allocator enforces the device's share of main memory, so only a stated limit counts.
    memory_limit = request.memory_limit or (cluster.most_memory_bytes if cluster.device.kind == "cuda" else None)
    efficiency: Callable[[TrialRecord, float], float] | None = None
    if goodput is not None:
        efficiency = goodput.efficiency
    elif extrapolation is not None:
        efficiency = lambda trial, rate: extrapolation.efficiency(trial.config, rate)  # noqa: E731
    return Ranking(
        objective=request.objective, memory_limit_bytes=memory_limit, headroom=request.headroom, efficiency=efficiency,
        allow_unstable=request.allow_unstable, choices_of=goodput.choices_of if goodput else None,
    )  # fmt: skip


def strategy_of(
    request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None" = None
) -> Strategy:
    """Build the strategy that the request names. Predicting strategies use `prior`; None: the shipped coefficients."""
    if request.objective is Objective.PARETO:
        return FrontStrategy(
            lambda share: _one_strategy(request, space, model, dataclasses.replace(ranking, memory_share=share), prior)
        )
    return _one_strategy(request, space, model, ranking, prior)


def _one_strategy(request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None") -> Strategy:
    if request.strategy not in PREDICTING:
        return make_strategy(request.strategy, ranking.score)
    # NumPy and the equations are loaded only for strategies that predict.
    from autotune.strategies.guided.described import Guide
    from autotune.strategies.guided.prior import setting_of, shipped_prior
    from autotune.strategies.guided.space_forecaster import SpaceForecaster

    setting = setting_of(model, space, request.engine, ranking, request.fidelity)
    forecaster = SpaceForecaster(setting, prior or shipped_prior(space.cluster, request.engine))
    return make_strategy(request.strategy, ranking.score, Guide(forecaster=forecaster, value=ranking.value))
