"""When a trial can no longer win: its bound against the best rate so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, step_time, t_quantile
from search_spaces.data_schedule import useful_samples
from search_spaces.trial import Interval, TrialRequest

CONFIDENCE = 0.99
"""One-sided: of trials whose configuration is as fast as the best, at most one in a hundred may be ended early."""
PER_LOOK = 0.999
"""The same for the trial's own steps, which are looked at again after every step: many chances to be unlucky."""
LEAST_CORRELATION = 0.5
"""Of neighbouring steps. A handful of them tells too little of it, and a busy machine stays busy for more than one step."""
FEWEST_WARM_UP_STEPS = 4
"""Steps that must all be hopeless before a trial ends in warm-up."""
HOPELESS = 3.0
"""How many times too slow a step of warm-up must be. First steps take longer than others by what they set up, look up and
count; a step that even so is not within a factor of three of the best, four times in a row, is no matter of setting up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A trial against the best rate so far. Every rank sees the same step times, so that all come to the same answer."""

    samples: float
    """In one optimizer step, as rates count them (`useful_samples`)."""
    rate_to_beat: float
    spread: float
    """Relative standard deviation of the ratio of two configurations that are as fast, beyond the trial's own error."""
    degrees_of_freedom: int

    def interval(self, seconds: Sequence[float]) -> Interval:
        """The rate of the configuration as far as these steps tell, against the best's; `high` is the trial's bound.

        The bound is `rate * exp(h)`, h² = (t(0.999, n - 1) * within)² + (t(0.99, f) * spread)²: what the steps leave open, and
        what repeats of either configuration differ by. On the log scale, since it is a ratio that is asked for.
        """
        timing = step_time(seconds, LEAST_CORRELATION)
        own = t_quantile(PER_LOOK, timing.steps - 1) * timing.relative_error
        half = math.hypot(own, t_quantile(CONFIDENCE, self.degrees_of_freedom) * self.spread)
        rate = self.samples / timing.mean
        return Interval(mean=rate, low=rate * math.exp(-half), high=rate * math.exp(min(half, 700.0)))

    def is_lost(self, seconds: Sequence[float]) -> bool:
        """Whether the timed steps show that the trial cannot reach the best."""
        # A mean that is not positive comes of extrapolation from too few steps, and says nothing.
        known = len(seconds) >= MIN_STEPS_FOR_INTERVAL and sum(seconds) > 0.0
        return known and self.interval(seconds).high < self.rate_to_beat

    def is_hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether every step so far, all of warm-up, is so slow that no timing is needed."""
        return len(seconds) >= FEWEST_WARM_UP_STEPS and self.hopeless_interval(seconds).high < self.rate_to_beat

    def hopeless_interval(self, seconds: Sequence[float]) -> Interval:
        """The rate of the fastest step of warm-up, a factor either way."""
        rate = self.samples / min(seconds)
        return Interval(mean=rate, low=rate / HOPELESS, high=rate * HOPELESS)


def race_of(request: TrialRequest) -> Race | None:
    """The race that the request asks for; None: the trial runs to its end."""
    if request.rate_to_beat is None:
        return None
    return Race(
        samples=useful_samples(request.config, request.workload),
        rate_to_beat=request.rate_to_beat,
        spread=request.race_spread,
        degrees_of_freedom=request.race_degrees_of_freedom,
    )
