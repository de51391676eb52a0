"""Compares a run of a recipe with its earlier runs, or with one in another folder that ran in turn with it: whether a step
became slower, by how much, and in which part."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from autotune.errors import RequestError
from autotune.output import write_whole
from executor.measurement.timeline import PARTS
from executor.measurement.timing import t_quantile
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Interval, TrialResult

CONFIDENCE = 0.995
"""One-sided, for each of two measures of a step, so that of runs that are as fast as the earlier ones, at most one in a hundred
is called slower by the step as a whole."""
PART_CONFIDENCE = 0.9995
"""One-sided, for the seconds of each part of a step. Their distributions have long tails: on replays of recorded runs
(docs/results/guard.md), this and `CONFIDENCE` together call one unchanged run in a hundred slower."""
MOST_CALLS = 5
"""Calls whose number changed that are shown."""
POWER = 0.95
FEWEST_RUNS = 4
"""Earlier runs from which the difference between runs can be judged at all."""
CERTAIN = 0.9
"""Probability from which a part is named alone. It was checked on replays (docs/results/guard.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRun:
    """One run of a recipe: several trials of one configuration in a row."""

    recipe: str
    """Hash of what was run: configuration, model, workload, engine, ranks."""
    machine: str
    """Devices and cores. Runs of different machines are never compared."""
    versions: dict[str, str]
    commit: str | None
    time: str
    seconds: tuple[float, ...]
    """Mean seconds of a step of each trial."""
    calm_seconds: tuple[float, ...]
    """Mean of the faster half of each trial's steps, which other work on the machine hardly disturbs."""
    parts: tuple[dict[str, float], ...] = ()
    """Seconds of a profiled step by part, of each trial: of the rank that waited least. Empty: not known."""
    calls: dict[str, tuple[tuple[float, ...], float]] = field(default_factory=dict)
    """What ranks call (`StepProfile.calls`) -> how often in a step, on average, of each trial; and mean seconds of a call."""

    def mean_parts(self) -> dict[str, float]:
        """Mean seconds by part."""
        return {part: fmean(parts[part] for parts in self.parts) for part in PARTS} if self.parts else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run against others."""

    runs: int
    """Earlier runs that it is compared with, or pairs of trials."""
    folder: str = ""
    """The folder whose trials ran in turn with these; empty: it is compared with earlier runs."""
    slowdown: Interval | None = None
    """Seconds of a step relative to the others, less 1, with its 99 % interval. None: too few earlier runs."""
    in_part: str = ""
    """The part that is surely slower by the spread of its own seconds, or surely calls more, where the step as a whole is not
    surely slower; `slowdown` is then its seconds relative to the step. Empty: `slowdown` is that of the step."""
    by_calls: bool = False
    """Whether these seconds are those of more calls, at what a call takes, if nothing overlaps it."""
    of_calm_steps: bool = False
    """Whether it is that of the faster half of the steps, and not that of their mean: the one that is more certain."""
    detectable: float | None = None
    """The least slowdown that such a comparison finds with a probability of 95 %."""
    tolerance: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=dict)
    """By how many seconds of a step each part became slower; empty: not known."""
    part_probabilities: dict[str, float] = field(default_factory=dict)
    """Probability that the slowdown is in this part, if it is in one."""
    changed_calls: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Part, operator, kernel or collective -> calls in a step before and now, where they differ: at most `MOST_CALLS`, those
    that take longest."""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Version or commit that changed since the last run -> before and now."""

    @property
    def is_regression(self) -> bool:
        """Whether the run is surely slower, and by more than is tolerated."""
        return self.slowdown is not None and self.slowdown.low > 0.0 and self.slowdown.mean > self.tolerance

    @property
    def part(self) -> str | None:
        """The part that became slower; None: it cannot be decided."""
        if self.in_part:
            return self.in_part
        likely = max(self.part_probabilities, key=self.part_probabilities.__getitem__, default=None)
        return likely if likely is not None and self.part_probabilities[likely] >= CERTAIN else None

    def lines(self) -> list[str]:
        """The result for people."""
        if self.slowdown is None:
            return [f"nothing to compare with yet: {self.runs} of {FEWEST_RUNS} earlier runs of this recipe on this machine"]
        verdict = "REGRESSION" if self.is_regression else "no regression"
        change = "slower" if self.slowdown.mean >= 0 else "faster"
        steps = "the faster half of its steps" if self.of_calm_steps else "a step"
        if self.in_part:
            steps = f"by {'more calls in ' * self.by_calls}its {self.in_part}, a step"
        others = f"{self.folder} ({self.runs} pairs of trials in turn)" if self.folder else f"{self.runs} earlier runs"
        text = f"{verdict}: {steps} is {abs(self.slowdown.mean):.1%} {change} than in {others}"
        lines = [f"{text} [{self.slowdown.low:+.1%}, {self.slowdown.high:+.1%}]"]
        if self.by_calls:
            lines.append(
                "this is what the calls take in profiled steps, if nothing overlaps them; the time of a step is too uncertain"
            )
        if not self.is_regression and self.slowdown.low > 0.0:
            return [*lines, f"it is within the tolerance of {self.tolerance:.1%} (--tolerance)", *self._changes()]
        if not self.is_regression:
            return [*lines, f"a slowdown of {self.detectable:.1%} would have been found with 95 %", *self._changes()]
        if self.part is not None:
            lines.append(f"part: {self.part}, {self.part_seconds[self.part] * 1e3:+.2f} ms of a step")
        elif self.part_probabilities:
            shares = sorted(self.part_probabilities.items(), key=lambda item: -item[1])
            likely = " or ".join(f"{part} ({share:.0%})" for part, share in shares[:2])
            lines.append(f"part: not certain, {likely}")
        else:
            lines.append("part: unknown, since no step of these runs was profiled")
        versions = (f"changed since the last run: {name} {before} -> {now}" for name, (before, now) in self.changed.items())
        return [*lines, *self._changes(), *versions]

    def _changes(self) -> list[str]:
        return [f"calls in a step: {name}: {before:.4g} -> {now:.4g}" for name, (before, now) in self.changed_calls.items()]


def run_of(results: Sequence[TrialResult], **facts: Any) -> RecipeRun:
    """The run that consists of these measured trials; `facts`: the fields that they do not decide."""
    environment = results[0].environment
    names = ("python", "torch", "cuda", "nccl", "variables")
    per_trial = [[rank.profile for rank in result.ranks if rank.profile] for result in results]
    if not all(per_trial):
        per_trial = []
    return RecipeRun(
        machine=f"{len(results[0].ranks)} x {environment.get('device', '')}, {environment.get('cores', '')} cores",
        versions={name: environment[name] for name in names if name in environment},
        seconds=tuple(fmean(result.step_seconds) for result in results),
        calm_seconds=tuple(
            fmean(sorted(result.step_seconds)[: (len(result.step_seconds) + 1) // 2]) for result in results
        ),
        parts=tuple(min((rank.seconds for rank in ranks), key=itemgetter("communication")) for ranks in per_trial),
        calls={
            name: _priced([[rank.calls.get(name, (0.0, 0.0)) for rank in ranks] for ranks in per_trial])
            for name in sorted({name for ranks in per_trial for rank in ranks for name in rank.calls})
        },
        **facts,
    )  # fmt: skip


def _priced(trials: Sequence[Sequence[tuple[float, float]]]) -> tuple[tuple[float, ...], float]:
    """Mean calls of a rank in each trial, and mean seconds of one of them."""
    every = [call for ranks in trials for call in ranks]
    seconds = sum(count * seconds for count, seconds in every) / sum(count for count, _ in every)
    return tuple(fmean(count for count, _ in ranks) for ranks in trials), seconds


def compare(now: RecipeRun, history: Sequence[RecipeRun], tolerance: float) -> RunComparison:
    """Compare a run with those of its recipe and machine, in the order of time.

    The difference of the mean logarithms has Student's distribution with as many degrees of freedom as the earlier runs' spread
    has: a prediction interval for one more run [Hahn and Meeker, Statistical Intervals, 1991, section 4.8].
    """
    earlier = [run for run in history if (run.recipe, run.machine) == (now.recipe, now.machine)]
    if len(earlier) < FEWEST_RUNS:
        return RunComparison(runs=len(earlier), tolerance=tolerance)
    before = earlier[-1]
    facts = {name: (before.versions.get(name, ""), version) for name, version in now.versions.items()}
    facts["commit"] = (before.commit or "", now.commit or "")
    changed = {name: values for name, values in facts.items() if values[0] != values[1]}
    return _compared(now, earlier, _difference, RunComparison(runs=len(earlier), tolerance=tolerance, changed=changed))


def compare_in_turn(now: RecipeRun, other: RecipeRun, folder: str, tolerance: float) -> RunComparison:
    """Compare trials with those of another folder, each with the one that ran beside it: a change of the machine's speed in
    between is in both. The mean of the differences has Student's distribution.
    """
    about = RunComparison(runs=len(now.seconds), folder=folder, tolerance=tolerance)
    return _compared(now, [other], _difference_in_turn, about)


Difference = tuple[float, float]
"""A difference to others, and its standard error."""
Differs = Callable[[Sequence[float], Sequence[Sequence[float]]], Difference]
"""The difference of the values of this run's trials to those of each of the others."""


def _difference(now: Sequence[float], earlier: Sequence[Sequence[float]]) -> Difference:
    """To the mean of earlier runs, of one more of them."""
    means = [*map(fmean, earlier)]
    # Equal figures are known to the clock's resolution.
    return fmean(now) - fmean(means), max(math.sqrt(variance(means) * (1.0 + 1.0 / len(means))), 1e-9)


def _difference_in_turn(now: Sequence[float], others: Sequence[Sequence[float]]) -> Difference:
    differences = [mine - theirs for mine, theirs in zip(now, others[0], strict=True)]
    return fmean(differences), max(math.sqrt(variance(differences) / len(differences)), 1e-9)


def _compared(now: RecipeRun, others: Sequence[RecipeRun], difference: Differs, about: RunComparison) -> RunComparison:
    """The verdict; `about`: what is compared."""
    changes = [
        difference([*map(math.log, mine)], [[*map(math.log, each)] for each in theirs])
        for mine, theirs in (
            (now.seconds, [run.seconds for run in others]), (now.calm_seconds, [run.calm_seconds for run in others])
        )
    ]  # fmt: skip
    calm = max((False, True), key=lambda name: changes[name][0] / changes[name][1])
    change, error = changes[calm]
    half = t_quantile(CONFIDENCE, about.runs - 1) * error
    whole = Interval(mean=math.expm1(change), low=math.expm1(change - half), high=math.expm1(change + half))
    profiled = _if_enough([run for run in others if run.parts], others) if now.parts else []
    parts = {
        part: difference([each[part] for each in now.parts], [[each[part] for each in run.parts] for run in profiled])
        for part in PARTS if profiled
    }  # fmt: skip
    usual = fmean(fmean(run.seconds) for run in others)
    errors = {}
    for part in parts:
        seconds = fmean(run.mean_parts()[part] for run in profiled)
        errors[part] = parts[part][1] / seconds if seconds else error  # nobody knows more of a part that never took any
    work, changed_calls = _work(now, _if_enough([run for run in profiled if run.calls], others), errors, difference)
    judged = dataclasses.replace(
        about, of_calm_steps=calm, slowdown=whole,
        detectable=math.expm1(half + t_quantile(POWER, about.runs - 1) * min(error for _, error in changes)),
        part_seconds={part: by for part, (by, _) in parts.items()},
        part_probabilities=_probabilities(parts, (usual * math.expm1(change), usual * error)) if parts else {},
        changed_calls=changed_calls,
    )  # fmt: skip
    if judged.is_regression:
        return judged
    sure = t_quantile(PART_CONFIDENCE, about.runs - 1)
    for seconds_of, by_calls in ((work, True), (parts, False)):
        if not seconds_of:
            continue
        bounds = {name: (by - sure * error, by, by + sure * error) for name, (by, error) in seconds_of.items()}
        part = max(bounds, key=bounds.__getitem__)
        low, mean, high = (value / usual for value in bounds[part])
        in_part = dataclasses.replace(
            judged, in_part=part, by_calls=by_calls, of_calm_steps=False, slowdown=Interval(mean=mean, low=low, high=high),
            part_seconds={**judged.part_seconds, part: seconds_of[part][0]},
        )  # fmt: skip
        # Seconds that went from one part to another make no step slower.
        if in_part.is_regression and mean < whole.high:
            return in_part
    return judged


def _if_enough(runs: Sequence[RecipeRun], others: Sequence[RecipeRun]) -> Sequence[RecipeRun]:
    """Those of the others that can be compared with in some respect, or none if their differences cannot be judged."""
    return runs if len(runs) >= min(FEWEST_RUNS, len(others)) else []


def _work(
    now: RecipeRun, others: Sequence[RecipeRun], errors: Mapping[str, float], difference: Differs
) -> tuple[dict[str, Difference], dict[str, tuple[float, float]]]:
    """By how many seconds of a step the calls of each part differ from others', at equal seconds of a call in all runs; and
    `RunComparison.changed_calls`. The number of calls hardly varies where their time does.

    Args:
        now: the run.
        others: the others; none: not known.
        errors: relative error of the seconds of each part, which that of a call's seconds is too.
        difference: as in `_compared`.
    """
    work: dict[str, Difference] = {}
    if not (now.calls and others):
        return work, {}
    runs = [now, *others]
    seconds = {
        name: fmean(run.calls[name][1] for run in runs if name in run.calls) for name in {*chain(*(run.calls for run in runs))}
    }
    none = [(0.0,) * len(run.seconds) for run in runs]
    counts = {
        name: [run.calls[name][0] if name in run.calls else none[number] for number, run in enumerate(runs)] for name in seconds
    }
    added = {name: difference(its[0], its[1:]) for name, its in counts.items()}
    for part, error in errors.items():
        own = [name for name in seconds if name.startswith(f"{part} ")]
        mine, *theirs = (
            [sum(seconds[name] * counts[name][run][trial] for name in own) for trial in range(len(none[run]))]
            for run in range(len(runs))
        )
        by, spread = difference(mine, theirs)
        work[part] = by, math.hypot(spread, error * sum(seconds[name] * abs(added[name][0]) for name in own))
    sure = t_quantile(PART_CONFIDENCE, max(len(others), len(now.seconds)) - 1)
    changed = [name for name, (by, error) in added.items() if abs(by) > sure * error]
    changed.sort(key=lambda name: -seconds[name] * abs(added[name][0]))
    return work, {name: (fmean(map(fmean, counts[name][1:])), fmean(counts[name][0])) for name in changed[:MOST_CALLS]}


def _probabilities(parts: Mapping[str, Difference], whole: Difference) -> dict[str, float]:
    """The probability of each part that the whole change lies in it, if it lies in one.

    If all of the change, which is known with its own error, is in part p, then p's difference is distributed about it with both
    errors, and those of the others about 0. A priori, the parts are equally likely.
    """
    weights = {}
    for part, (added, error) in parts.items():
        both = math.hypot(error, whole[1])
        weights[part] = (added / error) ** 2 / 2 - ((added - whole[0]) / both) ** 2 / 2 - math.log(both / error)
    largest = max(weights.values())
    likelihoods = {part: math.exp(weight - largest) for part, weight in weights.items()}
    return {part: value / sum(likelihoods.values()) for part, value in likelihoods.items()}


def read_history(path: Path) -> list[RecipeRun]:
    """The runs of a file, one JSON object in a line; none if there is no file.

    Raises:
        RequestError: a line is no such run.
    """
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], start=1):
        try:
            runs.append(from_plain(RecipeRun, json.loads(line)))
        except (ValueError, TypeError, KeyError):
            problem = f"line {number} of {path} is no run that guard has recorded"
            raise RequestError("against", problem, "remove it, or name another file") from None
    return runs


def add_run(path: Path, run: RecipeRun) -> None:
    """Add a run to a file, which is then replaced as a whole.

    Raises:
        OutputError: it cannot be written.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, f"{before}{json.dumps(to_plain(run), sort_keys=True)}\n")


def junit(name: str, comparison: RunComparison, seconds: float) -> str:
    """The result as one test case in JUnit's XML."""
    from xml.etree import ElementTree  # only needed here

    failures = int(comparison.is_regression)
    suite = ElementTree.Element("testsuite", name="autotune guard", tests="1", failures=str(failures), errors="0")
    case = ElementTree.SubElement(suite, "testcase", classname="autotune.guard", name=name, time=f"{seconds:.1f}")
    first, *rest = comparison.lines()
    if failures:
        ElementTree.SubElement(case, "failure", message=first, type="regression").text = "\n".join(rest)
    else:
        ElementTree.SubElement(case, "system-out").text = "\n".join([first, *rest])
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def document(comparison: RunComparison, now: RecipeRun, other: RecipeRun | None) -> Mapping[str, Any]:
    """The result as JSON; `other`: the run in another folder."""
    plain: dict[str, Any] = to_plain(comparison)
    runs = {"now": to_plain(now), "other": to_plain(other)}
    return {"regression": comparison.is_regression, "part": comparison.part, **plain, **runs}
