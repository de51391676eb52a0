"""Compares what a script reports, and what it was given, with the work that the probes of its ranks observed."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from executor.engines.command.observed import FEWEST_STEPS
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import ACCUMULATION_PLACEHOLDERS, names_in
from search_spaces.trial import TrialRequest

Work = Mapping[str, Any]
"""What the probe of a rank observed, or of a process that the script started as a rank: `ObservedWork.summaries`."""
TOLERATED = 1.5
"""Factor by which reported and observed times may differ."""
TOLERATED_TOTAL = 0.15
"""Part by which the samples of all reports and of all steps may differ, where most reports agree."""


def ranks_with_own_samples(request: TrialRequest, works: Sequence[Work]) -> int:
    """Ranks whose samples add up to those of a step.

    Ranks count once if they have the same samples, and divide layers by tensor parallelism, or got more than a constant batch
    of their loaders, as without a distributed sampler. Random batches that a script makes itself count for each rank, unless
    they are the same and nothing shows that ranks train together.
    """
    inputs = [tuple(tuple(pair) for pair in work["inputs"]) for work in works]
    changing = all(len({checksum for _, checksum in rank}) > 1 for rank in inputs)
    common = set.intersection(*({number for number, _ in rank} for rank in inputs))
    count = len({tuple(pair for pair in rank if pair[0] in common) for rank in inputs})
    if _is_tensor_parallel(works) or (changing and all(work.get("loader") for work in works)):
        return count
    if changing and common and count == 1 and not any(work.get("together") or work.get("others") for work in works):
        return 1
    return max(request.config.data_parallel_size(len(works)), 1)


def training_ranks(works: Sequence[Work]) -> list[Work]:
    """The ranks that train: those with steps, and those that could not be observed. An actor or an evaluator takes no step."""
    return [work for work in works if work["steps"] or work["problem"]] or [*works]


def are_uneven(works: Sequence[Work]) -> bool:
    """Whether ranks, or their steps, have different numbers of samples, so that one rank's do not stand for all."""
    return len({work["samples"] for work in works}) > 1 or not all(work["steady"] for work in works)


def mean_samples_of_step(request: TrialRequest, works: Sequence[Work]) -> float:
    """Mean samples of a step over all of these ranks."""
    samples = [work["mean_samples"] for work in works if work["mean_samples"]]
    return statistics.fmean(samples) * ranks_with_own_samples(request, works) if samples else 0.0


def _is_tensor_parallel(works: Sequence[Work]) -> bool:
    """Whether ranks divide layers, by DTensors or Megatron's marks."""
    return all(work.get("tensor_parallel") for work in works)


def disagreement(request: TrialRequest, works: Sequence[Work], timed: Mapping[str, Any]) -> str:
    """Why the trial's rate would be wrong, with both numbers and the likely cause; empty: nothing disagrees.

    1. Ranks must train together.
    2. A step must have the micro-batches and samples that placeholders of the command ask for.
    3. Most reports must have the samples of the steps before them, and all of them together too.
    4. Reported and observed times may differ by `TOLERATED`.

    What is not known for certain is not judged. `timed`: facts of the rank whose reports are the rate.
    """
    stuck = max(works, key=lambda work: work["micro_batches_without_step"])
    count, accumulation = (
        stuck["micro_batches_without_step"],
        request.config.gradient_accumulation_steps(request.workload.global_batch_size, request.world_size),
    )
    if stuck["unchanged"] and count > 2 * accumulation:
        return f"no optimizer step was taken in {count} micro-batches, and parameters did not change: call optimizer.step()"
    known = [work for work in works if work["steps"] >= FEWEST_STEPS and not work["problem"] and work["processes"] == 1]
    if not known or not isinstance(request.model, CommandModel):
        return ""
    text = _apart(works)
    if text or len(known) < len(works):  # ranks that train together take the same steps
        return text
    if all(work["certain"] and work["steady"] for work in works):
        text = _other_batch(request, works)
    return text or _other_samples(request, works) or _other_time(request, works, timed)


def _apart(works: Sequence[Work]) -> str:
    """Whether each rank trains by itself."""
    ranks = len(works)
    if ranks == 1 or any(work.get("others") or work.get("exchanges") for work in works):
        return ""
    wrapped = {name for work in works if work.get("together") and work["group"] > 1 for name in work["together"]}
    if wrapped - {"DistributedDataParallel"}:
        return ""
    if not any(work["steps"] >= FEWEST_STEPS for work in works):
        return ""
    parameters, inputs = [dict(work["parameters"]) for work in works], [dict(work["inputs"]) for work in works]
    compared = set.intersection(*map(set, parameters))
    differ = compared and all(len({rank[step] for rank in parameters}) == ranks for step in compared)
    other_inputs = len({tuple(sorted(rank.items())) for rank in inputs}) > 1
    if wrapped and len(compared) > 1 and differ and other_inputs:
        return (
            "DistributedDataParallel is built, but its forward is not called: parameters of ranks differ after "
            f"{max(compared)} steps; call the wrapped model, not its module"
        )
    if wrapped or (compared and other_inputs and not differ):
        return ""  # their gradients are combined in some other way
    if any(work.get("group", ranks) <= 1 for work in works):
        return (
            f"each of the {ranks} ranks trains by itself: the script starts no process group of {ranks} ranks; call "
            "torch.distributed.init_process_group and wrap the model (a Trainer on CPUs: --use_cpu true)"
        )
    if len(compared) > 1 and differ and other_inputs:
        return (
            f"each of the {ranks} ranks trains by itself: their parameters differ after {max(compared)} steps; wrap the model "
            "in DistributedDataParallel, or combine the gradients"
        )
    return ""


def _other_batch(request: TrialRequest, works: Sequence[Work]) -> str:
    """Whether a step has another batch than the command was given."""
    command, config, ranks = request.model, request.config, len(works)
    assert isinstance(command, CommandModel)
    used = set(names_in(command))
    replicas = ranks_with_own_samples(request, works)
    micro_batches = works[0]["micro_batches"]
    total = sum(work["samples"] for work in works)
    micro, step = total / sum(work["micro_batches"] for work in works), total * replicas / ranks
    batch = request.workload.global_batch_size
    accumulation = config.gradient_accumulation_steps(batch, request.world_size)
    asked_micro = config.micro_batch_size if used & {"micro_batch_size", "config"} else None
    if used & ACCUMULATION_PLACEHOLDERS:
        are_explained = _is_tensor_parallel(works) and step * config.data_parallel_size(ranks) == batch * replicas
        if step == batch or are_explained:  # a size of tensor parallelism that the command does not carry
            return ""
        text = f"a step has {step:g} samples, {micro_batches} times {micro:g} on {ranks} ranks, not {batch}"
        if replicas < config.data_parallel_size(ranks):
            return (
                f"{text}: ranks train on the same samples, without a DistributedSampler, each by itself with the same seed, or "
                "by tensor parallelism that is not torch's (pass its size as {tensor_parallel_size})"
            )
        if asked_micro in (None, micro) and micro_batches * ranks == accumulation:
            ignores = ", or ignores it" if micro_batches == 1 else ""
            remedy = "pass it {total_gradient_accumulation_steps}"
            return f"{text}: the script divides its accumulation of {accumulation} by the ranks ({remedy}){ignores}"
        if asked_micro in (None, micro) and micro_batches == 1 < accumulation:
            return f"{text}: the script ignores the accumulation of {accumulation} that it was given"
    elif asked_micro is None or micro == asked_micro:
        return ""
    else:
        text = f"a micro-batch has {micro:g} samples, not the {asked_micro} that the script was given"
    if asked_micro is None or micro == asked_micro:
        return f"{text}: pass the batch as the script reads it"
    halvings = math.log2(asked_micro / micro)
    divides = ["divides the batch by the ranks"] if micro * ranks == asked_micro else []
    halves = ["made it smaller by itself (auto_find_batch_size)"] if halvings > 0 and halvings.is_integer() else []
    return f"{text}: it {', or '.join((*divides, *halves, 'ignores the batch size that it was given'))}"


def _other_samples(request: TrialRequest, works: Sequence[Work]) -> str:
    """Whether reports state other samples than the steps before them had."""
    ranks, replicas = len(works), ranks_with_own_samples(request, works)
    for work in works:
        intervals = work["reported"]
        if len(intervals) < 3 or not work["mean_samples"]:
            continue
        steps = sum(count for _, count, _ in intervals)
        all_samples = mean_samples_of_step(request, works) / work["mean_samples"] if are_uneven(works) else replicas
        reported, observed = sum(row[0] for row in intervals), sum(row[2][0] for row in intervals) * all_samples
        agreeing = sum(any(samples == count * replicas for count in counts) for samples, _, counts in intervals)
        has_more_reports = len(intervals) > 1.3 * steps  # such as one for each micro-batch
        if has_more_reports or 2 * agreeing >= len(intervals) or are_uneven(works):
            # The first and the last step may be reported in part.
            if steps >= FEWEST_STEPS and abs(reported - observed) > TOLERATED_TOTAL * observed + observed / steps:
                text = f"its reports have {reported:g} samples in {steps} steps, and the steps had {observed:g}"
                if are_uneven(works) and 0.8 < reported / observed * ranks < 1.25:
                    return f"{text}: it reports the samples of one rank; report those of all"
                return f"{text}: it counts batches as full that were shorter (as the last of an epoch), or skipped"
            continue
        (samples, count, counts), _ = Counter((row[0], row[1], tuple(row[2])) for row in intervals).most_common(1)[0]
        true = counts[0] * replicas
        cause = _cause(request, samples / true if true else 0.0, {
            "it reports the samples of one rank; report those of all": 1 / ranks,
            "it counts its ranks twice, or ranks that share their samples": ranks,
            "it reports the samples of one micro-batch of a step": 1 / work["micro_batches"],
            f"it reports one of {count} steps; report the samples since the last report": 1 / count if count else 0.0,
            "it reports tokens as samples": request.workload.sequence_length,
        })  # fmt: skip
        interval = "the step" if count == 1 else f"the {count} steps"
        return f"a report has {samples:g} samples, and {interval} before it had {true:g}: {cause}"
    return ""


def _other_time(request: TrialRequest, works: Sequence[Work], timed: Mapping[str, Any]) -> str:
    """Whether the reported time of a step is another than the observed one."""
    work, reported, batch = timed["works"][0], timed["reported_seconds"], request.workload.global_batch_size
    if len(reported) < 2 * FEWEST_STEPS or not work["certain"] or not work["seconds"]:
        return ""
    quarter = len(reported) // 4
    seconds, drift = statistics.median(reported), statistics.median(reported[:quarter]) / statistics.median(reported[-quarter:])
    scale = batch / mean_samples_of_step(request, works)
    # Like with like: other programs, which slow some steps, make both means longer. Evaluation between reports counts or not.
    observed = work["seconds"] * scale
    ratios = [seconds / observed, statistics.fmean(reported[quarter:]) / (work["mean_seconds"] * scale)]
    falling = sum(later <= earlier for earlier, later in itertools.pairwise(reported))
    falls = drift > TOLERATED and 4 * falling > 3 * len(reported)  # as the mean time since a slow start, too long at first
    if (min(ratios) <= TOLERATED or falls) and max(ratios) >= 1 / TOLERATED:
        return ""
    ratio, ranks = ratios[0], len(works)
    cause = _cause(request, ratio, {
        "it is the time of a micro-batch, not of a step": 1 / work["micro_batches"],
        "it counts the samples of one rank": ranks,
        "it counts the samples of all ranks twice": 1 / ranks,
        "it counts tokens as samples": 1 / request.workload.sequence_length,
        "it counts one micro-batch of a step": work["micro_batches"],
        "its unit is seconds, not milliseconds": 1e-3,
        "its unit is milliseconds, not seconds": 1e3,
    })  # fmt: skip
    return f"it reports {batch / seconds:.4g} samples/s, and its steps had {batch / observed:.4g}: {cause}"


def _cause(request: TrialRequest, ratio: float, causes: Mapping[str, float]) -> str:
    """The first cause with about this ratio of the reported to the observed number."""
    command, default = request.model, "report what was trained"
    if isinstance(command, CommandModel) and command.pattern and "(?P<tokens" in command.pattern:
        length = request.workload.sequence_length
        default = f"samples have other lengths than the assumed {length} tokens: state --sequence-length, or read samples"
    near = (cause for cause, expected in causes.items() if expected not in (0.0, 1.0) and 0.8 < ratio / expected < 1.25)
    return next(near, default)


def batch_text(request: TrialRequest, works: Sequence[Work]) -> str:
    """A remark where a step has neither the job's samples nor a micro-batch of each rank; empty: it has, or is not known to."""
    used = set(names_in(request.model)) if isinstance(request.model, CommandModel) else set()
    if (
        "micro_batch_size" not in used
        or used & ACCUMULATION_PLACEHOLDERS
        or not all(w["certain"] and w["steady"] for w in works)
    ):
        return ""
    replicas, batch = ranks_with_own_samples(request, works), request.workload.global_batch_size
    samples = sum(work["samples"] for work in works) * replicas / len(works)
    if samples in (batch, request.config.micro_batch_size * replicas):
        return ""
    return (
        f"a step has {samples:g} samples, and the job searches micro-batches for {batch}: state --global-batch-size {samples:g}"
    )


def unseen_text(works: Sequence[Work]) -> str:
    """Why the script's work could not be checked; empty: it was."""
    problem = next((work["problem"] for work in works if work["problem"]), "")
    if not problem and any(work["processes"] > 1 for work in works):
        problem = "several processes of a rank train"
    if not problem and all(not work["steps"] for work in works):
        passes = max(work["micro_batches_without_step"] for work in works)
        problem = (
            "its optimizer is not torch's, or is compiled" if passes else "no training with torch was seen in its processes"
        )
    return problem and f"its work is not checked: {problem}"


def work_text(request: TrialRequest, works: Sequence[Work]) -> str:
    """The step as it was observed, in one line; empty: nothing was observed."""
    ranks, works = len(works), training_ranks(works)
    work = max(works, key=lambda item: item["steps"])
    if work["problem"] or not work["steps"]:
        return ""
    step = "samples of a step unknown"
    if work["samples"] is not None:
        total = work["samples"] * ranks_with_own_samples(request, works)
        if len({item["samples"] for item in works}) > 1:
            total = mean_samples_of_step(request, works)
        counted = (
            f"{total:.5g} samples a step" if work["certain"] else f"about {total:.5g} rows a step, not known to be its samples,"
        )
        step = f"{counted} in {work['micro_batches']} micro-batch{'es' * (work['micro_batches'] != 1)}"
    are_together = len(works) > 1 and all(item["steps"] for item in works) and not _apart(works)
    how = "train together"
    if _is_tensor_parallel(works) and ranks_with_own_samples(request, works) == 1:
        how = "train together by tensor parallelism"
    elif ranks_with_own_samples(request, works) == 1 and not any(item.get("together") or item.get("others") for item in works):
        how = "train on the same samples"
    trained = f" on {len(works)} of {ranks} ranks" if len(works) < ranks else ""
    together = f" on {len(works)} ranks that {how}" if are_together else trained
    seconds = f"; {work['seconds'] * 1e3:.4g} ms" if work["seconds"] else ""
    return f"{step}{together}{seconds}"
