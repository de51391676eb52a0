"""The interface of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from search_spaces.errors import Refusal
from search_spaces.knob import Value
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Score = Callable[[TrialRecord], float | None]
"""Returns how good a finished trial is, higher is better; None: it cannot win."""


UNINFORMATIVE = frozenset({Outcome.CANCELLED, Outcome.LOST, Outcome.PREEMPTED})
"""Outcomes that carry no information about the configuration."""


class Candidates(Protocol):
    """The configurations to choose from: a `SearchSpace`, or those of a table of measurements."""

    @property
    def hash(self) -> str:
        """The same in every process for the same candidates."""
        ...

    @property
    def domains(self) -> Mapping[str, tuple[Value, ...]]:
        """Knob -> its possible values; other knobs have the base's value."""
        ...

    @property
    def base(self) -> TrialConfig:
        """The values of knobs that are not searched."""
        ...

    def count(self) -> int:
        """The number of legal configurations."""
        ...

    def enumerate(self) -> Iterator[TrialConfig]:
        """Every legal configuration once, in a fixed order."""
        ...

    def sample(self, rng: Random) -> TrialConfig:
        """A legal configuration, drawn uniformly."""
        ...

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        """The legal configurations one move away."""
        ...

    def check(self, config: TrialConfig) -> list[Refusal]:
        """Return the violated constraints; empty: legal."""
        ...

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The nearest canonical configuration of the domains, legal or not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The candidate predicted to be closest to fitting in memory."""

    config: TrialConfig
    needed: float
    """Bytes of the fullest rank."""
    room: float
    """Available bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a predicting strategy expects of further trials."""

    expected_gain: float
    """Of the best next trial, as a share of the best result so far."""
    chance_of_more: float
    """Probability that any untried candidate is faster than the best by more than `margin`."""
    margin: float
    trial_seconds: float
    """Predicted duration of the best next trial."""


class Strategy(ABC):
    """Chooses configurations.

    `propose` is a pure function of its arguments: another process with the same arguments returns the same, so that a job is
    resumed only from its rows. An implementation may cache expensive computations, but not keep state of earlier calls.
    """

    @abstractmethod
    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        """Return up to `count` canonical configurations, none in `history` or `pending`; an empty list: all were tried.

        Args:
            candidates: the legal configurations.
            history: search trials with an outcome, ordered by number, refused ones included.
            pending: planned or running configurations.
            count: number of configurations wanted, at least 1.
            seed: of the job.
        """

    def least_memory(self, candidates: Candidates) -> LeastMemory | None:  # noqa: ARG002  most strategies predict nothing
        """The candidate with the lowest ratio of predicted to available memory; None: the strategy predicts nothing."""
        return None

    def outlook(
        self,
        candidates: Candidates,  # noqa: ARG002  most strategies have no model of untried candidates
        history: Sequence[TrialRecord],  # noqa: ARG002
        pending: Sequence[TrialConfig],  # noqa: ARG002
        margin: float,  # noqa: ARG002
    ) -> Outlook | None:
        """What further trials may gain; None: the strategy predicts nothing.

        Args:
            candidates: the legal configurations.
            history: as for `propose`.
            pending: as for `propose`; they count as tried.
            margin: share of the best by which another candidate must be faster to count.
        """
        return None


def known_hashes(history: Sequence[TrialRecord], pending: Sequence[TrialConfig]) -> set[str]:
    """Hashes of the configurations that must not be proposed again."""
    return {trial.config_hash for trial in history} | {config.hash for config in pending}
