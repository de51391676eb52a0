"""The grid: configurations of one model in one warm process, each predicted before it is measured."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from benchmarks.gpu.design import POINTS, cluster_for, label_of, screening, space_of
from benchmarks.gpu.lines import Line
from benchmarks.gpu.models import BACKEND, model_of, workload_of
from benchmarks.gpu.proof import Item, Proof, Setting, request, why
from executor.dry.dry_run import dry_run
from executor.errors import EngineRefusalError
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig

PART = "grid"
DRY, PREDICTED, MEASURED, REFERENCE = "dry run: ", "predicted: ", "measured: ", "reference again, "
REFERENCE_EVERY = 10
FIDELITY = {
    "large": Fidelity(max_warmup_steps=8, min_steps=4, max_steps=30, max_seconds=2.5),
    "small": Fidelity(max_warmup_steps=3, min_steps=2, max_steps=3, max_seconds=0.5),
}


def items(setting: Setting) -> list[Item]:
    """For every point: dry run, prediction, measurement; at intervals the first point again, to detect drift."""
    size, found = setting.size, list[Item]()
    points = screening(space_of(size), POINTS[size])
    for number, config in enumerate(points):
        label = label_of(config, size)
        slow = config.optimizer != "adamw"
        found += [
            Item(
                name=DRY + label, show=partial(run_dry, config=config), seconds=40.0 if slow else 10.0,
                group=f"dry run, {config.optimizer}, {config.micro_batch_size}", needs_device=False,
                skipped="a dry run does not cover graphs" if config.cuda_graphs else "",
            ),
            Item(name=PREDICTED + label, show=partial(predict, config=config), seconds=3.0, group="predicted"),
            Item(
                name=MEASURED + label, show=partial(measure, config=config), seconds=60.0 if config.compile_blocks else 25.0,
                group=f"measured, {'compiled' if config.compile_blocks else 'eager'}",
            ),
        ]  # fmt: skip
        if number % REFERENCE_EVERY == REFERENCE_EVERY - 1 or number == len(points) - 1:
            show = partial(measure, config=points[0])
            found.append(Item(name=f"{REFERENCE}after {number + 1}", show=show, seconds=25.0, group="measured, eager"))
    return found


def run_dry(proof: Proof, config: TrialConfig) -> None:
    """The dry run's peak."""
    size = proof.setting.size
    try:
        peak = dry_run(model_of(size), config, workload_of(size), 1, backend=BACKEND[size]).peak_memory_bytes
    except EngineRefusalError as error:
        proof.measured(f"no dry run: {error}")
        return
    proof.measured(f"{peak:,} bytes", peak=peak)


def question_of(size: str) -> Question:
    """The question that predictions answer."""
    workload = workload_of(size)
    return Question(
        model=model_of(size), cluster=cluster_for(size), global_batch_size=workload.global_batch_size,
        sequence_length=workload.sequence_length,
    )  # fmt: skip


def predict(proof: Proof, config: TrialConfig) -> None:
    """Predict time and memory from the equations with shipped coefficients, without measurements of this machine."""
    proof.values |= prediction(question_of(proof.setting.size), [config])[0]
    seconds, peak = proof.values["seconds"], proof.values["peak"]
    proof.measured(
        f"a step {seconds['mean']:.3f} s [{seconds['low']:.3f}, {seconds['high']:.3f}], peak {peak['mean'] / 2**20:,.1f} MiB, "
        f"fits with probability {proof.values['fit_probability']:.2f}"
    )


def prediction(question: Question, configs: list[TrialConfig]) -> list[dict[str, Any]]:
    """For each configuration: step seconds and peak bytes with their 90 % bands, and the probability that it fits."""
    return [
        {
            "seconds": to_plain(each.step_seconds),
            "peak": to_plain(each.peak_memory_bytes),
            "fit_probability": each.fit_probability,
        }
        for each in estimates(question, configs)
    ]


def measure(proof: Proof, config: TrialConfig) -> None:
    """Run one trial on the warm rank."""
    size = proof.setting.size
    trial_request = request(label_of(config, size), model_of(size), workload_of(size), 1, FIDELITY[size], **config.values())
    result = proof.setting.ranks(1).run(trial_request)
    proof.values |= {"config": config.values(), "outcome": result.outcome.value, "warm": result.warm}
    if result.outcome is Outcome.INFEASIBLE:
        proof.measured(f"out of memory: {result.message[:200]}")
        return
    if result.outcome is not Outcome.OK or result.samples_per_second is None:
        proof.claim(False, f"it ran: {why(result)}")
        return
    rank, rate = result.ranks[0], result.samples_per_second
    share = "" if result.mfu is None else f", {result.mfu:.1%} of the peak FLOP/s"
    reserved = "" if rank.reserved_bytes is None else f", {rank.reserved_bytes / 2**20:,.1f} reserved"
    proof.measured(
        f"{rate.mean:.3f} samples/s [{rate.low:.3f}, {rate.high:.3f}]{share}, peak {rank.peak_memory_bytes / 2**20:,.1f} MiB"
        f"{reserved}{', unstable' if result.unstable else ''}",
        rate=to_plain(rate), seconds=workload_of(size).global_batch_size / rate.mean, peak=rank.peak_memory_bytes,
        reserved=rank.reserved_bytes, outside=rank.non_torch_bytes, mfu=result.mfu, unstable=result.unstable,
        retries=rank.allocation_retries, clock=rank.sm_clock_mhz, phases=result.phase_seconds,
    )  # fmt: skip


def measured_rates(known: Mapping[tuple[str, str], Line]) -> dict[str, tuple[TrialConfig, float]]:
    """Label -> configuration and samples/s, of the points that ran, fastest first."""
    found = {}
    for (part, item), line in known.items():
        if part == PART and item.startswith(MEASURED) and "rate" in line.values:
            config = TrialConfig().replace(line.values["config"])
            found[item.removeprefix(MEASURED)] = config, float(line.values["rate"]["mean"])
    return dict(sorted(found.items(), key=lambda entry: -entry[1][1] if math.isfinite(entry[1][1]) else 0.0))
