"""The configurations that figures compare: best, baseline, runner-up."""

from dataclasses import dataclass
from functools import cached_property

from autotune.explain.explanation.evidence import ExplanationEvidence
from autotune.outcome.standings import with_whole_result
from search_spaces.trial import Interval, RankMeasurement
from storage.records import TrialRecord


@dataclass(frozen=True)
class Contender:
    """One of the compared configurations."""

    name: str
    """best, baseline or runner-up; `best, baseline` if the baseline won."""
    trial: TrialRecord
    """The configuration's search trial."""
    evidence: ExplanationEvidence

    @cached_property
    def rate(self) -> Interval:
        """Measured samples/s."""
        return self.evidence.rate_of(self.trial)

    @property
    def step_seconds(self) -> float:
        """Measured seconds per step."""
        return self.evidence.session.request.global_batch_size / self.rate.mean

    @cached_property
    def ranks(self) -> tuple[RankMeasurement, ...]:
        """The measurements of the ranks; empty: they reported none."""
        whole = with_whole_result(self.evidence.snapshot, self.trial)
        return whole.result.ranks if whole.result is not None else ()


def contenders(evidence: ExplanationEvidence) -> list[Contender]:
    """The available contenders, the best first. A trial with several roles appears once."""
    verdict = evidence.verdict
    roles = {"best": verdict.best, "baseline": verdict.baseline, "runner-up": verdict.runner_up}
    names: dict[int, list[str]] = {}
    for name, trial in roles.items():
        if trial is not None:
            names.setdefault(trial.number, []).append(name)
    return [
        Contender(", ".join(trial_roles), evidence.snapshot.trial(number), evidence) for number, trial_roles in names.items()
    ]
