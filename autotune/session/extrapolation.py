"""What rates of trials say about the nodes that the answer is for: more replicas of a layout, and nodes that fail."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import RequestError
from autotune.goodput.choice import RunChoice, RunLayout, choices, rates_of
from autotune.goodput.failures import FailureRates
from autotune.goodput.run import SavedState
from autotune.goodput.terms import GoodputTerms, parse_terms
from autotune.prediction.fitting.residuals import projected
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.goodput_ranking import layout_of, saved_bytes
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question
from autotune.request.field_forms import reshaped, shape_text
from autotune.request.request import JobRequest
from search_spaces.errors import Refusal
from search_spaces.models.model import Model, ModelSpec
from search_spaces.plain import to_plain
from search_spaces.space import SearchSpace
from search_spaces.trial import CheckpointTimes, Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """Extrapolates from the cluster of the trials (small) to the cluster that the answer is for (large).

    Weak scaling: tensor, pipeline and context degrees, ZeRO settings, micro-batch and accumulation stay; the global batch grows
    with the replicas. What the equations got wrong of the small step they get wrong of the parts of the large one
    (`fitting.residuals.projected`).
    """

    small: SearchSpace
    """The space that trials are chosen from."""
    large: SearchSpace
    """The same space on the large cluster, with the larger batch."""
    model: ModelSpec
    engine: str
    _predictions: dict[str, tuple[StepEstimate, StepEstimate]] = field(default_factory=dict, repr=False)

    @property
    def growth(self) -> int:
        """Devices of the large cluster per device of the small one."""
        return self.large.world_size // self.small.world_size

    def efficiency(self, config: TrialConfig, measured: float) -> float:
        """Samples/s per device on the large cluster relative to the small one, where `measured` samples/s are reached."""
        return self._projected(config, measured)[0] / measured / self.growth

    def rate(self, config: TrialConfig, measured: Interval) -> Interval:
        """Samples/s on the large cluster, with a 95 % band that includes the errors of the measurement and the projection."""
        mean, deviation = self._projected(config, measured.mean)
        wide = 1.96 * deviation  # 95 %, the same level as measured intervals
        above = math.log(measured.high / measured.mean)
        below = math.log(measured.mean / measured.low) if measured.low > 0 else math.inf
        return Interval(mean=mean, low=mean * math.exp(-math.hypot(below, wide)), high=mean * math.exp(math.hypot(above, wide)))

    def _projected(self, config: TrialConfig, measured: float) -> tuple[float, float]:
        """Samples/s on the large cluster, and the standard deviation of their logarithm."""
        parts = (estimate.breakdown_seconds for estimate in self._predicted(config))
        seconds, deviation = projected(self.small.workload.global_batch_size / measured, *parts)
        return self.large.workload.global_batch_size / seconds, deviation

    def refusal(self, config: TrialConfig) -> Refusal | None:
        """Why a legal configuration of the small cluster cannot be the answer for the large one; None: it can."""
        large_shape = shape_text(self.large.cluster)
        for refused in self.large.check(config):
            return dataclasses.replace(refused, message=f"at {large_shape} {refused.message}")
        if changed := [name for name in config.differences(self.large.canonical(config)) if name in self.large.domains]:
            message = f"at {large_shape} it is equivalent to another configuration ({', '.join(changed)})"
            return Refusal(rule="answer-for", message=message, remedy="tune on more devices")
        small_estimate, large_estimate = self._predicted(config)
        # If it needs no more memory there than here, its trial here finds out whether it fits.
        if large_estimate.fit_probability < min(1 - PROBABILITY, small_estimate.fit_probability):
            message = f"at {large_shape} it is predicted to fit with a probability of {large_estimate.fit_probability:.1%}"
            return Refusal(rule="answer-for", message=message, remedy="search a space with higher ZeRO stages or less offload")
        return None

    def document(self, config: TrialConfig, measured: Interval) -> dict[str, Any]:
        """Return a best-config document's entry for its best configuration on the large cluster."""
        small_shape, large_shape = shape_text(self.small.cluster), shape_text(self.large.cluster)
        return {
            "world_size": self.large.world_size,
            "nodes": self.large.cluster.nodes,
            "global_batch_size": self.large.workload.global_batch_size,
            "samples_per_second": to_plain(self.rate(config, measured)),
            "verified": False,
            "how": (
                f"measured at {small_shape} and projected to {large_shape}: the same layout, micro-batch and accumulation in "
                f"{self.growth} times the replicas; the parts of a step there are predicted, with the errors that they have "
                "here; low and high hold the measurement's interval and what is left of these errors"
            ),
        }

    def _predicted(self, config: TrialConfig) -> tuple[StepEstimate, StepEstimate]:
        if config.hash not in self._predictions:
            small_estimate, large_estimate = (
                estimates(_question(space, self.model, self.engine), [config])[0] for space in (self.small, self.large)
            )
            self._predictions[config.hash] = (small_estimate, large_estimate)
        return self._predictions[config.hash]


def _question(space: SearchSpace, model: ModelSpec, engine: str) -> Question:
    """What is asked of the equations about a space."""
    work = space.workload
    return Question(
        model=model, cluster=space.cluster, engine=engine, global_batch_size=work.global_batch_size,
        sequence_length=work.sequence_length, training_steps=work.training_steps,
        document_lengths=work.document_lengths,
    )  # fmt: skip


def extrapolation_to(shape: str, small: SearchSpace, model: Model, engine: str) -> Extrapolation:
    """Build the extrapolation from a space to NODESxDEVICES of its cluster.

    Raises:
        RequestError: the model's shape is unknown, the devices are not a multiple, or no configuration is legal there.
    """
    if not isinstance(model, ModelSpec):
        raise RequestError("answer_for", "a factory has no shape to predict from", "give a preset or a config.json")
    cluster = reshaped(small.cluster, "answer_for", shape)
    if cluster.world_size % small.world_size or cluster.world_size == small.world_size:
        problem = f"{shape} is not a multiple of the {small.world_size} devices of a trial"
        raise RequestError("answer_for", problem, "give 2, 3, 4 or more times as many")
    growth = cluster.world_size // small.world_size
    work = dataclasses.replace(small.workload, global_batch_size=small.workload.global_batch_size * growth)
    large = dataclasses.replace(small, cluster=cluster, workload=work, world_size=cluster.world_size)
    if large.is_empty():
        raise RequestError("answer_for", f"{small.name} has no legal configuration at {shape}", "search a larger space")
    return Extrapolation(small=small, large=large, model=model, engine=engine)


@dataclass(frozen=True, kw_only=True)
class JobGoodput:
    """Closed form on measured samples/s, and on the bytes of a checkpoint by the layout."""

    terms: GoodputTerms
    rates: FailureRates
    question: Question
    """The model, the batch and the cluster that the answer is for."""
    extrapolation: Extrapolation | None = None
    _choices: dict[tuple[str, float, CheckpointTimes | None], tuple[RunChoice, ...]] = field(default_factory=dict, repr=False)
    _bytes: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    def choices_of(self, trial: TrialRecord, rate: float) -> Sequence[RunChoice]:
        """The best way to run the configuration with each recovery that it allows, most tokens kept per device-hour first.

        Args:
            trial: a search trial of the configuration, perhaps with a measured checkpoint.
            rate: its samples/s as measured on the cluster of the trials.
        """
        config, timed = trial.config, trial.result.checkpoint if trial.result is not None else None
        key = (config.hash, rate, timed)
        if key not in self._choices:
            answer_rate = (
                rate * self.extrapolation.efficiency(config, rate) * self.extrapolation.growth if self.extrapolation else rate
            )
            if config.hash not in self._bytes:
                self._bytes[config.hash] = saved_bytes(self.question, [config])[0]
            seconds = self.question.global_batch_size / answer_rate
            layout = layout_of(self.question, config, seconds, self._bytes[config.hash])
            layout, terms = (layout, self.terms) if timed is None else self._as_measured(layout, timed)
            self._choices[key] = tuple(choices(layout, terms, self.rates))
        return self._choices[key]

    def _as_measured(self, layout: RunLayout, timed: CheckpointTimes) -> tuple[RunLayout, GoodputTerms]:
        """The layout with the bytes of a checkpoint that a trial saved; on the cluster of the trials, its rates are the terms'
        bandwidths of the file system."""
        state = layout.state
        ratio = timed.bytes / state.total_bytes
        measured = SavedState(
            total_bytes=timed.bytes,
            saved_bytes_per_device=state.saved_bytes_per_device * ratio,
            loaded_bytes_per_device=state.loaded_bytes_per_device * ratio,
        )
        terms = self.terms
        if self.extrapolation is None:
            written, read = timed.bytes / timed.save_seconds, timed.bytes / timed.load_seconds
            terms = dataclasses.replace(terms, write_bandwidth=written, read_bandwidth=read)
        return dataclasses.replace(layout, state=measured), terms

    def efficiency(self, trial: TrialRecord, rate: float) -> float:
        """Tokens kept per device-hour on the cluster of the answer, over the tokens per device-hour that were measured here."""
        device_count = self.extrapolation.small.world_size if self.extrapolation else self.question.cluster.world_size
        run_choices = self.choices_of(trial, rate)
        tokens = rate * self.question.sequence_length * 3600 / device_count
        # If the layout allows no recovery of the terms: it never wins, and its logarithm exists.
        return run_choices[0].tokens_kept_per_device_hour / tokens if run_choices else 1e-9


def goodput_of(request: JobRequest, space: SearchSpace, model: Model, extrapolation: Extrapolation | None) -> JobGoodput:
    """The goodput of a job.

    Raises:
        RequestError: the model's shape is unknown, or the failure rates cannot be read.
    """
    if not isinstance(model, ModelSpec):
        problem = "goodput needs the bytes of a checkpoint, which are known for models with a shape only"
        raise RequestError("objective", problem, "give a preset or a config.json, or use the objective throughput")
    large = extrapolation.large if extrapolation else space
    terms = parse_terms(request.goodput)
    return JobGoodput(
        terms=terms, rates=rates_of(terms, large.cluster.nodes), question=_question(large, model, request.engine),
        extrapolation=extrapolation,
    )  # fmt: skip
