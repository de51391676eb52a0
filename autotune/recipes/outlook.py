"""Whether a configuration fits and how fast it is, by prediction or a dry run."""

import dataclasses
from collections.abc import Sequence

from autotune.errors import AutotuneError, RequestError
from autotune.frameworks.check import undecided_settings
from autotune.frameworks.framework import LintCase
from autotune.prediction.equations.software import NATIVE_FRAMEWORK_CHECKPOINTING
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question, question_of
from executor.runners.one_process import dry_run_model
from search_spaces.errors import Effect, ModelFormatError
from search_spaces.models.model import ModelSpec
from search_spaces.trial import DryRun, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

GIB = 2**30
STOPS = (Effect.REFUSED, Effect.FAILS)
"""Effects with which a configuration does not run."""


def fits(estimate: StepEstimate) -> bool:
    """Whether the configuration fits with the probability that plans require."""
    return estimate.fit_probability >= PROBABILITY


def outlook(case: LintCase) -> StepEstimate | str:
    """The prediction; else why there is none, in one clause."""
    requirements = {"a model (--model)": case.model, "a cluster (--cluster)": case.around.cluster}
    missing = [requirement for requirement, value in requirements.items() if value is None]
    if missing:
        return f"not predicted without {' and '.join(missing)}"
    if case.imported.unreadable:
        return f"not predicted: {case.imported.unreadable}"
    if legal := unpredictable(case):
        return f"not predicted: {legal}"
    prediction = outlooks(case, [case])[0]
    return "not predicted: the equations do not know this layout" if prediction is None else prediction


def outlooks(case: LintCase, cases: Sequence[LintCase]) -> list[StepEstimate | None]:
    """The predictions of variants of one case; None: a variant cannot be predicted."""
    question = question_about(case)
    indices = [index for index, variant in enumerate(cases) if question is not None and not unpredictable(variant)]
    predictions: list[StepEstimate | None] = [None] * len(cases)
    if question is None or not indices:
        return predictions
    for index, estimate in zip(indices, estimates(question, [as_predicted(cases[index]) for index in indices]), strict=True):
        predictions[index] = estimate
    return predictions


def question_about(case: LintCase, model: ModelSpec | None = None, batch: int | None = None) -> Question | None:
    """What is predicted of a case; None: the model or the cluster is unknown.

    Args:
        case: the configuration.
        model: as the framework divides it; None: as it divides the case's own.
        batch: samples per optimizer step; None: the case's.
    """
    cluster = case.around.cluster
    if case.model is None or cluster is None:
        return None
    config = case.config
    replicas = case.replicas or 1
    batch = batch or case.batch or config.micro_batch_size * replicas * (config.pipeline_parallel_size if replicas else 1)
    try:
        model = model or case.framework.as_run(case.model, config)
        question = question_of(model, cluster, global_batch_size=batch, sequence_length=case.tokens)
        # Our engine's equations, with the frameworks' selective checkpointing, which keeps less than ours.
        states = case.framework.memory_arguments(case.imported.settings)
        return dataclasses.replace(question, profile=NATIVE_FRAMEWORK_CHECKPOINTING, stated_arguments=states)
    except (AutotuneError, ModelFormatError):
        return None


def unpredictable(case: LintCase) -> str:
    """Why the equations do not apply; empty: they do."""
    config, ranks, model = case.config, case.ranks, case.model
    if ranks is None or case.replicas is None or case.replicas < 1:
        return "the degrees do not divide the ranks"
    if model is not None and config.expert_parallel_size > 1 and model.num_experts % config.expert_parallel_size:
        return "the ranks do not divide the experts"
    # Megatron-LM's, whose memory is known.
    borrows = case.framework.experts_borrow and case.framework.memory_arguments(case.imported.settings) is not None
    ranks_of_experts = config.tensor_parallel_size * config.context_parallel_size // case.framework.expert_tensor(case)
    if case.replicas * (max(ranks_of_experts, 1) if borrows else 1) % config.expert_parallel_size:
        return "expert groups take more than data-parallel ranks, which the equations do not know"
    if model is not None and config.pipeline_parallel_size * config.virtual_stages > model.num_layers:
        return "there are more stages than layers"
    if case.batch is not None and case.batch < config.micro_batch_size * case.replicas:
        return "the batch is smaller than one micro-batch of each replica"
    return ""


def as_predicted(case: LintCase) -> TrialConfig:
    """The configuration with the framework's kernels."""
    return case.config.replace(case.framework.predicted)


def dry_run(case: LintCase) -> DryRun:
    """Run one rank of each pipeline stage on tensors without storage.

    Raises:
        RequestError: the model, the cluster or the batch is not known.
        ExecutorError: our engine does not run this configuration.
    """
    model, cluster, batch, tokens = case.model, case.around.cluster, case.batch, case.tokens
    if model is None or cluster is None:
        raise RequestError("dry_run", "needs a model and a cluster", "give --model and --cluster")
    if batch is None or tokens is None:
        raise RequestError(
            "dry_run", "needs the batch and the sequence length", "give --global-batch-size and --sequence-length"
        )
    if undecided := undecided_settings(case):
        problem = f"needs {', '.join(undecided)}, which the script decides when it runs"
        raise RequestError("dry_run", problem, "write the values into the script")
    kernels = {"fused_kernels": "none"}  # a dry run has torch's operators only
    request = TrialRequest(
        attempt="dry run",
        model=model,
        config=as_predicted(case).replace(kernels),
        workload=Workload(global_batch_size=batch, sequence_length=tokens),
        world_size=cluster.world_size,
        timeout_seconds=300.0,
    )
    return dry_run_model(request, backend="gloo" if cluster.device.kind == "cpu" else "nccl", python_path=())
