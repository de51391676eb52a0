"""A walk answers by its sequence alone, whatever it was asked before."""

import random
from collections.abc import Iterator

from autotune.strategies.walks import Walk
from search_spaces.trial_config import TrialConfig

CONFIGS = [TrialConfig(micro_batch_size=1 + number % 13) for number in range(30)]


def expected(known: set[str], count: int) -> list[TrialConfig]:
    unknown = {config.hash: config for config in CONFIGS if config.hash not in known}
    return list(unknown.values())[:count]


def test_it_answers_as_a_walk_from_the_start() -> None:
    rng = random.Random(0)
    walk = Walk(lambda: iter(CONFIGS))
    for _ in range(200):
        known = {config.hash for config in rng.sample(CONFIGS, rng.randrange(30))}
        count = rng.randrange(1, 6)
        assert walk.unknown(known, count) == expected(known, count)


def test_what_is_known_is_passed_once() -> None:
    made: list[int] = []

    def sequence() -> Iterator[TrialConfig]:
        for number, config in enumerate(CONFIGS):
            made.append(number)
            yield config

    walk, known = Walk(sequence), set[str]()
    while found := walk.unknown(known, 1):
        known.add(found[0].hash)
    assert made == list(range(30))
