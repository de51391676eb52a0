"""The contract of a strategy, and strategies by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from autotune.errors import RequestError
from search_spaces.refusal import Refusal
from search_spaces.trial_config import TrialConfig, Value
from storage.records import TrialRecord

if TYPE_CHECKING:
    from autotune.strategies.guided.described import Forecaster

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


class Strategy(ABC):
    """Chooses configurations.

    `propose` is a pure function of its arguments: another process that is given the same ones answers the same, so that a
    job is resumed from its rows alone. An implementation may keep what is dear to compute, never what it was asked before.
    """

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


def known_hashes(history: Sequence[TrialRecord], pending: Sequence[TrialConfig]) -> set[str]:
    """Hashes of the configurations that must not be proposed again."""
    return {trial.config_hash for trial in history} | {config.hash for config in pending}


def make_strategy(
    name: str,
    score: Score,
    forecaster: "Forecaster | None" = None,
    choices: Collection[str] = ("guided", "tpe", "random", "grid"),
) -> Strategy:
    """Return the strategy of that name.

    Args:
        name: which.
        score: what it makes the most of.
        forecaster: what predicts; those that do not predict leave it alone.
        choices: what a refusal lists.

    Raises:
        RequestError: there is none, or it predicts and nothing does.
    """
    # Each is imported where it is asked for: Optuna takes long to load, and only one of them needs it.
    if name == "guided":
        from autotune.strategies.guided.strategy import GuidedStrategy

        if forecaster is None:
            raise RequestError(
                "strategy", "guided has nothing to predict with", "use it on a cluster that is described, or use tpe"
            )
        return GuidedStrategy(score, forecaster)
    if name == "tpe":
        from autotune.strategies.tpe import TpeStrategy

        return TpeStrategy(score)
    if name == "random":
        from autotune.strategies.random import RandomStrategy

        return RandomStrategy()
    if name == "grid":
        from autotune.strategies.grid import GridStrategy

        return GridStrategy()
    raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(choices)}")
