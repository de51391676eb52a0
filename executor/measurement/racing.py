"""Decides when a trial can no longer win, by comparing its upper bound with the best rate so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, step_time, t_quantile
from search_spaces.training.data_schedule import useful_samples
from search_spaces.trial import Interval, TrialRequest

CONFIDENCE = 0.99
"""One-sided: of trials whose configuration is as fast as the best, at most one in a hundred may be ended early."""
PER_LOOK = 0.999
"""The same for the trial's own steps. It is stricter because they are tested again after every step."""
LEAST_CORRELATION = 0.5
"""Lower bound for the correlation of neighbouring steps. A few steps do not suffice to estimate it, and a busy machine stays
busy for more than one step."""
FEWEST_WARM_UP_STEPS = 4
"""Steps that must all be hopeless before a trial ends in warm-up."""
HOPELESS = 3.0
"""Factor by which a warm-up step must be too slow. First steps take longer because of set-up, look-ups and counting, but
set-up does not explain four steps in a row that are all more than three times slower than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Compares a trial with the best rate so far. All ranks see the same step times, so all decide alike."""

    samples: float
    """Samples of one optimizer step, as rates count them (`useful_samples`)."""
    rate_to_beat: float
    spread: float
    """Relative standard deviation of the measured ratio of two equally fast configurations, beyond the trial's own error."""
    degrees_of_freedom: int
    warmup_steps: int | None = 0
    """Warm-up steps that are ignored; None: all."""

    def interval(self, seconds: Sequence[float]) -> Interval:
        """Estimate the configuration's rate from these steps, for comparison with the best rate; `high` is the upper bound.

        The bound is `rate * exp(h)`, h² = (t(0.999, n - 1) * within)² + (t(0.99, f) * spread)²: the error of the steps, and the
        difference between repetitions of either configuration. It is on the log scale because a ratio is estimated.
        """
        timing = step_time(seconds, LEAST_CORRELATION)
        own = t_quantile(PER_LOOK, timing.steps - 1) * timing.relative_error
        half = math.hypot(own, t_quantile(CONFIDENCE, self.degrees_of_freedom) * self.spread)
        rate = self.samples / timing.mean
        return Interval(mean=rate, low=rate * math.exp(-half), high=rate * math.exp(min(half, 700.0)))

    def is_lost(self, seconds: Sequence[float]) -> bool:
        """Whether the timed steps show that the trial cannot reach the best."""
        # A mean that is not positive results from extrapolating too few steps and is meaningless.
        known = len(seconds) >= MIN_STEPS_FOR_INTERVAL and sum(seconds) > 0.0
        return known and self.interval(seconds).high < self.rate_to_beat

    def is_hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether every warm-up step that counts is so slow that no timing is needed."""
        if self.warmup_steps is None or len(seconds) - self.warmup_steps < FEWEST_WARM_UP_STEPS:
            return False
        return self.hopeless_interval(seconds).high < self.rate_to_beat

    def hopeless_interval(self, seconds: Sequence[float]) -> Interval:
        """Return the rate of the fastest warm-up step that counts, with a factor `HOPELESS` in both directions."""
        rate = self.samples / min(seconds[self.warmup_steps or 0 :])
        return Interval(mean=rate, low=rate / HOPELESS, high=rate * HOPELESS)


def race_of(request: TrialRequest) -> Race | None:
    """Return the race of the request; None: the trial runs to its end."""
    if request.rate_to_beat is None:
        return None
    return Race(
        samples=useful_samples(request.config, request.workload),
        rate_to_beat=request.rate_to_beat,
        spread=request.race_spread,
        degrees_of_freedom=request.race_degrees_of_freedom,
        warmup_steps=request.race_warmup_steps,
    )
