"""Whether a configuration fits and how fast it is, by prediction or a dry run, and the smallest change that makes it fit."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from autotune.errors import AutotuneError, RequestError
from autotune.frameworks.check import legality, single_changes, undecided_settings, written
from autotune.frameworks.framework import LintCase, Settings
from autotune.prediction.equations.software import NATIVE_FRAMEWORK_CHECKPOINTING
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question, question_of
from executor.dry.result import DryRun
from executor.runners.one_process import dry_run_model
from search_spaces.errors import ModelFormatError, SearchSpaceError
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.models.model import ModelSpec
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

RULE = "memory"
UNLIKELY = 1 - PROBABILITY
"""Predicted probability below which a configuration counts as not fitting."""
LEAST: Mapping[str, Value] = {
    "micro_batch_size": 1, "activation_checkpointing": "full", "accumulation_dtype": "bf16", "precision": "bf16",
    "reduce_dtype": "bf16",
}  # fmt: skip
"""Values with which a configuration needs least memory, of knobs that a file may leave to the program that trains."""
GIB = 2**30
LEVERS = (
    "activation_checkpointing", "micro_batch_size", "zero_stage", "tensor_parallel_size", "pipeline_parallel_size",
    "context_parallel_size", "expert_parallel_size", "reshard_after_forward", "offload_optimizer",
)  # fmt: skip
"""Knobs that save memory."""
MOST_SINGLES = 120


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
        return dataclasses.replace(question, profile=NATIVE_FRAMEWORK_CHECKPOINTING)
    except (AutotuneError, ModelFormatError):
        return None


def unpredictable(case: LintCase) -> str:
    """Why the equations do not apply; empty: they do."""
    config, ranks, model = case.config, case.ranks, case.model
    if ranks is None or case.replicas is None or case.replicas < 1:
        return "the degrees do not divide the ranks"
    if model is not None and config.expert_parallel_size > 1 and model.num_experts % config.expert_parallel_size:
        return "the ranks do not divide the experts"
    if case.replicas % config.expert_parallel_size:
        return "expert groups take more than data-parallel ranks, which the equations do not know"
    if model is not None and config.pipeline_parallel_size * config.virtual_stages > model.num_layers:
        return "there are more stages than layers"
    if case.batch is not None and case.batch < config.micro_batch_size * case.replicas:
        return "the batch is smaller than one micro-batch of each replica"
    return ""


def as_predicted(case: LintCase) -> TrialConfig:
    """The configuration with the framework's kernels."""
    return case.config.replace(case.framework.predicted)


def fit(case: LintCase, estimate: StepEstimate) -> Iterator[Finding]:
    """The finding that the configuration does not fit; not an error if it may fit with other values of what is not stated."""
    if estimate.fit_probability >= UNLIKELY:
        return
    needed, limit = estimate.peak_memory_bytes.mean / GIB, estimate.memory_limit_bytes / GIB
    changes = smaller(case)
    chance = f"fits with probability {estimate.fit_probability:.2f}"
    problem = f"predicted {needed:.0f} GiB of {limit:.0f} GiB on the fullest device ({chance})"
    yield lacking(case, problem, changes)


def lacking(case: LintCase, problem: str, changes: Settings) -> Finding:
    """The finding that the configuration lacks memory, with the changes that make it fit; empty: there are none."""
    key, effect = next(iter(changes), case.key_of("micro_batch_size")), Effect.DOES_NOT_FIT
    more = "use more devices, or a smaller model" if case.config.zero_stage else "divide its states (ZeRO, FSDP) or the model"
    remedy = written(changes) or f"no change of one or two settings fits; {more}"
    if rests_on_assumptions(case):
        effect, problem = Effect.MAY_NOT_FIT, f"{problem} with {', '.join(assumptions(case))}, not stated in the file"
        remedy = f"state these, or {remedy}" if changes else "state these"
    return Finding(rule=RULE, key=key, effect=effect, problem=problem, remedy=remedy, fix=changes)


def assumptions(case: LintCase) -> list[str]:
    """What a prediction takes because neither the file nor the user states it, as `NAME=VALUE`, with what states it."""
    question = question_about(case)
    sizes = {} if question is None else {
        name: getattr(question, name)
        for name, stated_value in (("sequence_length", case.tokens), ("global_batch_size", case.batch)) if stated_value is None
    }  # fmt: skip
    lines, options = [], {"sequence_length": "--sequence-length", "global_batch_size": "--global-batch-size"}
    for name, value in {**case.assumed, **sizes}.items():
        by = options.get(name) or case.imported.keys.get(name) or next(iter(case.framework.write(case, name, value)), "")
        lines.append(f"{name}={value_text(value)}{f' ({by})' if by else ''}")
    return lines


def rests_on_assumptions(case: LintCase) -> bool:
    """Whether the configuration may fit with the values of what is not stated that need least memory."""
    if not assumptions(case):
        return False
    if any(name not in LEAST for name in case.assumed):
        return True
    least = {name: LEAST[name] for name in case.assumed}
    around = dataclasses.replace(case.around, sequence_length=case.tokens or 128)
    prediction = outlook(dataclasses.replace(case, imported=dataclasses.replace(case.imported, assumed=least), around=around))
    return isinstance(prediction, str) or prediction.fit_probability >= UNLIKELY


def smaller(case: LintCase) -> Settings:
    """The smallest change that fits: the fastest of the single changes, else of the pairs; empty: none fits."""
    rules_before = {finding.rule for finding in legality(case)}

    def legal(variant: LintCase) -> bool:
        return {finding.rule for finding in legality(variant)} <= rules_before

    singles = list(itertools.islice(single_changes(case, LEVERS), MOST_SINGLES))
    best = _fastest(case, [(changes, changed) for changes, changed in singles if legal(changed)])
    if best:
        return best
    pairs = []
    for changes, changed in singles:
        for further, changed_again in itertools.islice(single_changes(changed, LEVERS), MOST_SINGLES // 3):
            if not set(further) & set(changes) and legal(changed_again):
                pairs.append(({**changes, **further}, changed_again))
    return _fastest(case, pairs)


def _fastest(case: LintCase, changes: Sequence[tuple[Settings, LintCase]]) -> Settings:
    try:
        predictions = outlooks(case, [changed for _, changed in changes])
    except SearchSpaceError:
        return {}
    fitting = [
        (prediction.samples_per_second.mean, index)
        for index, prediction in enumerate(predictions)
        if prediction is not None and fits(prediction)
    ]
    return dict(changes[max(fitting)[1]][0]) if fitting else {}


TIMEOUT_SECONDS = 300.0


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
        timeout_seconds=TIMEOUT_SECONDS,
    )
    return dry_run_model(request, backend="gloo" if cluster.device.kind == "cpu" else "nccl", python_path=())


def exact(case: LintCase, run: DryRun) -> Iterator[Finding]:
    """The finding that the peak of the dry run exceeds the device's memory."""
    assert case.around.cluster is not None
    limit = case.around.cluster.device.memory_bytes
    if run.peak_memory_bytes <= limit:
        return
    changes = smaller(case)
    problem = f"a dry run needs {run.peak_memory_bytes / GIB:.1f} GiB of {limit / GIB:.1f} GiB on the fullest device"
    yield lacking(case, problem, changes)
