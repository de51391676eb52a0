"""The objective goodput of a job: what a measured configuration keeps on the nodes that the answer is for, which fail."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.goodput.choice import GoodputTerms, RunChoice, RunLayout, choices, parse_terms, rates_of
from autotune.goodput.failures import FailureRates
from autotune.goodput.run import SavedState
from autotune.prediction.planning.goodput_ranking import layout_of, saved_bytes
from autotune.prediction.planning.question import Question
from autotune.request.request import JobRequest
from search_spaces.models.model import Model, ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.trial import CheckpointTimes
from storage.records import TrialRecord

if TYPE_CHECKING:
    from autotune.session.extrapolation import Extrapolation

LEAST = 1e-9
"""Efficiency of a layout that allows no recovery of the terms: it never wins, and its logarithm exists."""


@dataclass(frozen=True, kw_only=True)
class JobGoodput:
    """Closed form on measured samples/s, and on the bytes of a checkpoint by the layout."""

    terms: GoodputTerms
    rates: FailureRates
    question: Question
    """The model, the batch and the cluster that the answer is for."""
    extrapolation: "Extrapolation | None" = None
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
                rate * self.extrapolation.efficiency(config) * self.extrapolation.growth if self.extrapolation else rate
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
        return run_choices[0].tokens_kept_per_device_hour / tokens if run_choices else LEAST


def goodput_of(request: JobRequest, space: SearchSpace, model: Model, extrapolation: "Extrapolation | None") -> JobGoodput:
    """The goodput of a job.

    Raises:
        RequestError: the model's shape is unknown, or the failure rates cannot be read.
    """
    if not isinstance(model, ModelSpec):
        problem = "goodput needs the bytes of a checkpoint, which are known for models with a shape only"
        raise RequestError("objective", problem, "give a preset or a config.json, or use the objective throughput")
    large = extrapolation.large if extrapolation else space
    work, terms = large.workload, parse_terms(request.goodput)
    question = Question(
        model=model, cluster=large.cluster, engine=request.engine, global_batch_size=work.global_batch_size,
        sequence_length=work.sequence_length, training_steps=work.training_steps,
        document_lengths=work.document_lengths,
    )  # fmt: skip
    return JobGoodput(
        terms=terms, rates=rates_of(terms, large.cluster.nodes), question=question, extrapolation=extrapolation
    )  # fmt: skip
