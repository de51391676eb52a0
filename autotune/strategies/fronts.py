"""Any strategy as a search for the front of throughput and memory: the weights of the two take turns."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.objective.ranking import Ranking
from autotune.strategies.strategy import Candidates, Strategy
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)
"""Of memory in the score, in their order: the fastest, the middle, the smallest, and what lies between them."""


class FrontStrategy(Strategy):
    """Chooses each configuration by one weight of samples/s and memory, which follows from the number of trials so far.

    1. Of n trials tried or running the next one's share of memory is number n modulo 5 of `SHARES`.
    2. A strategy of that share proposes one configuration, by the score (1 - share) log rate - share log peak
       (`Ranking.score`): all trials teach every share.

    Cycling through weights is that of ParEGO [Knowles 2006], which draws them and uses the Chebyshev norm. Here the sum is of
    logarithms, linear, so that no trial's score depends on the range of the others, and predictions add up as scores do. Such a
    sum is never highest at a point in a dent of the front (of logarithms); the best-config names those that were met.
    """

    def __init__(self, of_share: Callable[[float], Strategy]) -> None:
        """`of_share`: makes the strategy of a share, called once for each."""
        self._strategies = [of_share(share) for share in SHARES]

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        chosen: list[TrialConfig] = []
        while len(chosen) < count:
            waiting = [*pending, *chosen]
            turn = (len(history) + len(waiting)) % len(self._strategies)
            proposed = self._strategies[turn].propose(candidates, history, waiting, 1, seed)
            if not proposed:
                break
            chosen += proposed
        return chosen


def at_share(ranking: Ranking, share: float) -> Ranking:
    """The ranking with its score at that share of memory."""
    return replace(ranking, memory_share=share)
