"""Any strategy as a search for the Pareto front of throughput and memory, by cycling through weights of the two."""

from collections.abc import Callable, Sequence

from autotune.strategies.strategy import Candidates, Strategy
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)
"""Shares of memory in the score, in the order of use: fastest, middle, smallest, then the values between."""


class FrontStrategy(Strategy):
    """Chooses each configuration by one weight of samples/s and memory, which depends on the number of trials so far.

    1. With n trials finished or running, the next one's share of memory is number n modulo 5 of `SHARES`.
    2. A strategy for that share proposes one configuration by the score (1 - share) log rate - share log peak
       (`Ranking.score`). All strategies learn from all trials.

    Cycling through weights follows ParEGO [Knowles 2006], which draws them and uses the Chebyshev norm. The sum of logarithms
    used here is linear: no trial's score depends on the range of the others, and predictions add up like scores. Such a sum
    never has its maximum in a concave part of the front (of logarithms); the best-config lists such points if measured.
    """

    def __init__(self, make_for_share: Callable[[float], Strategy]) -> None:
        """`make_for_share`: creates the strategy for a share; called once per share."""
        self._strategies = [make_for_share(share) for share in SHARES]

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
