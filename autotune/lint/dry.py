"""The exact memory of a configuration: a dry run of its ranks in our engine, without devices."""

from collections.abc import Iterator

from autotune.errors import RequestError
from autotune.lint.case import LintCase
from autotune.lint.legality import undecided_settings
from autotune.lint.memory import GIB, as_predicted, lacking, smaller
from executor.dry.result import DryRun
from executor.runners.one_process import dry_run_model
from search_spaces.finding import Finding
from search_spaces.trial import TrialRequest, Workload

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
