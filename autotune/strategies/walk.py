"""A fixed sequence of configurations, walked again and again past those that are known."""

from collections.abc import Callable, Iterator, Set
from itertools import islice

from search_spaces.trial_config import TrialConfig


class Walk:
    """Makes the sequence as far as it is looked at, once. Of what was passed the hashes are kept.

    What it answers follows from the sequence and the argument alone: passing over 100,000 known configurations takes
    milliseconds, and going back to one that was passed makes the sequence anew up to there.
    """

    def __init__(self, make: Callable[[], Iterator[TrialConfig]]) -> None:
        """`make` begins the sequence, which may repeat itself."""
        self._make = make
        self._rest = make()
        self._passed: list[str] = []

    def unknown(self, known: Set[str], count: int) -> list[TrialConfig]:
        """The first `count` configurations of the sequence that are not known, each once."""
        places: dict[str, int] = {}
        for place, name in enumerate(self._passed):
            if name not in known and name not in places:
                places[name] = place
                if len(places) == count:
                    break
        chosen = [next(islice(self._make(), place, None)) for place in places.values()]
        while len(chosen) < count and (config := next(self._rest, None)) is not None:
            name = config.hash
            self._passed.append(name)
            if name not in known and name not in places:
                places[name] = len(self._passed) - 1
                chosen.append(config)
        return chosen
