"""The contract of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

from search_spaces.refusal import Refusal
from search_spaces.trial_config import TrialConfig, Value
from storage.records import TrialRecord

Score = Callable[[TrialRecord], float | None]
"""How good a finished trial is, more being better; None: it cannot win."""


class Candidates(Protocol):
    """What is chosen from: a `SearchSpace`, or the configurations of a table of measurements."""

    @property
    def hash(self) -> str:
        """The same in every process for the same candidates."""
        ...

    @property
    def domains(self) -> Mapping[str, tuple[Value, ...]]:
        """Knob -> the values that it may have; other knobs stand at the base's."""
        ...

    @property
    def base(self) -> TrialConfig:
        """Where knobs that are not searched stand."""
        ...

    def count(self) -> int:
        """How many legal configurations there are."""
        ...

    def enumerate(self) -> Iterator[TrialConfig]:
        """Every legal configuration once, in a fixed order."""
        ...

    def sample(self, rng: Random) -> TrialConfig:
        """A legal configuration, each with the same probability."""
        ...

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        """The legal configurations that are one move away."""
        ...

    def check(self, config: TrialConfig) -> list[Refusal]:
        """What refuses it; empty: it is legal."""
        ...

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The nearest canonical configuration of the domains, legal or not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The candidate that is predicted to be nearest to fitting."""

    config: TrialConfig
    needed: float
    """Bytes of its fullest rank."""
    room: float
    """Bytes that there are for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a strategy that predicts expects of further trials."""

    expected_gain: float
    """Of the best next trial, as a share of the best so far."""
    chance_of_more: float
    """Probability that anything that was not tried is faster than the best by more than `margin`."""
    margin: float
    trial_seconds: float
    """Of the best next trial, as predicted."""


class Strategy(ABC):
    """Chooses configurations.

    `propose` is a pure function of its arguments: another process that is given the same ones answers the same, so that a
    job is resumed from its rows alone. An implementation may keep what is dear to compute, never what it was asked before.
    """

    seeded: ClassVar[bool] = True
    """Whether the seed may change what is proposed."""
    slow: ClassVar[bool] = False
    """Whether a decision takes seconds."""

    @abstractmethod
    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        """Return up to `count` canonical configurations, none of them in `history` or `pending`; none: all were tried.

        Args:
            candidates: the legal configurations.
            history: search trials that have an outcome, by number, refused ones included.
            pending: configurations that are wanted or running.
            count: how many are wanted, at least 1.
            seed: of the job.
        """

    def least_memory(self, candidates: Candidates) -> LeastMemory | None:  # noqa: ARG002  most strategies predict nothing
        """The most sparing of the candidates; None: it cannot tell."""
        return None

    def outlook(
        self,
        candidates: Candidates,  # noqa: ARG002  most strategies have no idea of what they did not try
        history: Sequence[TrialRecord],  # noqa: ARG002
        pending: Sequence[TrialConfig],  # noqa: ARG002
        margin: float,  # noqa: ARG002
    ) -> Outlook | None:
        """What further trials may bring; None: it cannot tell.

        Args:
            candidates: the legal configurations.
            history: as for `propose`.
            pending: as for `propose`; they count as tried.
            margin: share of the best by which something else must be faster to count.
        """
        return None


def known_hashes(history: Sequence[TrialRecord], pending: Sequence[TrialConfig]) -> set[str]:
    """Hashes of the configurations that must not be proposed again."""
    return {trial.config_hash for trial in history} | {config.hash for config in pending}
