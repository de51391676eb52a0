"""The configurations that are held beside each other: best, baseline, runner-up."""

from dataclasses import dataclass
from functools import cached_property

from autotune.explain.explanation.evidence import Evidence
from autotune.outcome.standings import with_whole_result
from search_spaces.trial import Interval, RankMeasurement
from storage.records import TrialRecord


@dataclass(frozen=True)
class Contender:
    """One of them."""

    name: str
    """best, baseline or runner-up; `best, baseline` where the baseline won."""
    trial: TrialRecord
    """Its search trial."""
    evidence: Evidence

    @cached_property
    def rate(self) -> Interval:
        """Samples/s, measured."""
        return self.evidence.rate_of(self.trial)

    @property
    def step_seconds(self) -> float:
        """Of a measured step."""
        return self.evidence.session.request.global_batch_size / self.rate.mean

    @cached_property
    def ranks(self) -> tuple[RankMeasurement, ...]:
        """What the ranks measured; empty: nothing is told of them."""
        whole = with_whole_result(self.evidence.book, self.trial)
        return whole.result.ranks if whole.result is not None else ()


def contenders(evidence: Evidence) -> list[Contender]:
    """Those that there are, the best first; a trial that is several of them is there once."""
    verdict = evidence.verdict
    roles = {"best": verdict.best, "baseline": verdict.baseline, "runner-up": verdict.runner_up}
    names: dict[int, list[str]] = {}
    for name, trial in roles.items():
        if trial is not None:
            names.setdefault(trial.number, []).append(name)
    return [Contender(", ".join(own), evidence.book.trial(number), evidence) for number, own in names.items()]
