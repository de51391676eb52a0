"""Compares a run of a recipe with its earlier runs: whether a step became slower, by how much, and in which part."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
is called slower."""
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

    def mean_parts(self) -> dict[str, float]:
        """Mean seconds by part."""
        return {part: fmean(parts[part] for parts in self.parts) for part in PARTS} if self.parts else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run against its earlier runs."""

    runs: int
    """Earlier runs that it is compared with."""
    slowdown: Interval | None = None
    """Seconds of a step relative to the earlier runs, less 1, with its 99 % interval. None: too few earlier runs."""
    of_calm_steps: bool = False
    """Whether it is that of the faster half of the steps, and not that of their mean: the one that is more certain."""
    detectable: float | None = None
    """The least slowdown that such a comparison finds with a probability of 95 %."""
    tolerance: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=dict)
    """By how many seconds of a step each part became slower; empty: not known."""
    part_probabilities: dict[str, float] = field(default_factory=dict)
    """Probability that the slowdown is in this part, if it is in one."""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Version or commit that changed since the last run -> before and now."""

    @property
    def is_regression(self) -> bool:
        """Whether the run is surely slower, and by more than is tolerated."""
        return self.slowdown is not None and self.slowdown.low > 0.0 and self.slowdown.mean > self.tolerance

    @property
    def part(self) -> str | None:
        """The part that became slower; None: it cannot be decided."""
        likely = max(self.part_probabilities, key=self.part_probabilities.__getitem__, default=None)
        return likely if likely is not None and self.part_probabilities[likely] >= CERTAIN else None

    def lines(self) -> list[str]:
        """The result for people."""
        if self.slowdown is None:
            return [f"nothing to compare with yet: {self.runs} of {FEWEST_RUNS} earlier runs of this recipe on this machine"]
        verdict = "REGRESSION" if self.is_regression else "no regression"
        change = "slower" if self.slowdown.mean >= 0 else "faster"
        steps = "the faster half of its steps" if self.of_calm_steps else "a step"
        text = f"{verdict}: {steps} is {abs(self.slowdown.mean):.1%} {change} than in {self.runs} earlier runs"
        lines = [f"{text} [{self.slowdown.low:+.1%}, {self.slowdown.high:+.1%}]"]
        if not self.is_regression and self.slowdown.low > 0.0:
            return [*lines, f"it is within the tolerance of {self.tolerance:.1%} (--tolerance)"]
        if not self.is_regression:
            return [*lines, f"a slowdown of {self.detectable:.1%} would have been found with 95 %"]
        if self.part is not None:
            lines.append(f"part: {self.part}, {self.part_seconds[self.part] * 1e3:+.2f} ms of a step")
        elif self.part_probabilities:
            shares = sorted(self.part_probabilities.items(), key=lambda item: -item[1])
            likely = " or ".join(f"{part} ({share:.0%})" for part, share in shares[:2])
            lines.append(f"part: not certain, {likely}")
        else:
            lines.append("part: unknown, since no step of these runs was profiled")
        return lines + [f"changed since the last run: {name} {before} -> {now}" for name, (before, now) in self.changed.items()]


def run_of(results: Sequence[TrialResult], **facts: Any) -> RecipeRun:
    """The run that consists of these measured trials; `facts`: the fields that they do not decide."""
    environment = results[0].environment
    names = ("python", "torch", "cuda", "nccl", "variables")
    per_trial = [[rank.part_seconds for rank in result.ranks if rank.part_seconds] for result in results]
    parts = [min(ranks, key=lambda parts: parts["communication"]) for ranks in per_trial if ranks]
    return RecipeRun(
        machine=f"{len(results[0].ranks)} x {environment.get('device', '')}, {environment.get('cores', '')} cores",
        versions={name: environment[name] for name in names if name in environment},
        seconds=tuple(fmean(result.step_seconds) for result in results),
        calm_seconds=tuple(
            fmean(sorted(result.step_seconds)[: (len(result.step_seconds) + 1) // 2]) for result in results
        ),
        parts=tuple(parts) if len(parts) == len(results) else (),
        **facts,
    )  # fmt: skip


def compare(now: RecipeRun, history: Sequence[RecipeRun], tolerance: float) -> RunComparison:
    """Compare a run with those of its recipe and machine, in the order of time.

    The difference of the mean logarithms has Student's distribution with as many degrees of freedom as the earlier runs' spread
    has: a prediction interval for one more run [Hahn and Meeker, Statistical Intervals, 1991, section 4.8].
    """
    earlier = [run for run in history if (run.recipe, run.machine) == (now.recipe, now.machine)]
    if len(earlier) < FEWEST_RUNS:
        return RunComparison(runs=len(earlier), tolerance=tolerance)
    measures = {calm: _change(now, earlier, calm) for calm in (False, True)}
    calm = max(measures, key=lambda name: measures[name][0] / measures[name][1])
    change, error = measures[calm]
    half = t_quantile(CONFIDENCE, len(earlier) - 1) * error
    added, probabilities = _parts(now, earlier, change)
    before = earlier[-1]
    facts = {name: (before.versions.get(name, ""), version) for name, version in now.versions.items()}
    facts["commit"] = (before.commit or "", now.commit or "")
    return RunComparison(
        runs=len(earlier), tolerance=tolerance, of_calm_steps=calm,
        slowdown=Interval(mean=math.expm1(change), low=math.expm1(change - half), high=math.expm1(change + half)),
        detectable=math.expm1(half + t_quantile(POWER, len(earlier) - 1) * min(error for _, error in measures.values())),
        part_seconds=added, part_probabilities=probabilities,
        changed={name: values for name, values in facts.items() if values[0] != values[1]},
    )  # fmt: skip


def _change(now: RecipeRun, earlier: Sequence[RecipeRun], calm: bool) -> tuple[float, float]:
    """The difference of the mean logarithm of a step's seconds to that of earlier runs, and its standard error."""
    of_run = [fmean(map(math.log, run.calm_seconds if calm else run.seconds)) for run in (now, *earlier)]
    return _difference(of_run[0], of_run[1:])


def _difference(now: float, earlier: Sequence[float]) -> tuple[float, float]:
    """The difference to the mean of earlier runs, and its standard error."""
    # Equal figures are known to the clock's resolution.
    return now - fmean(earlier), max(math.sqrt(variance(earlier) * (1.0 + 1.0 / len(earlier))), 1e-9)


def _parts(now: RecipeRun, earlier: Sequence[RecipeRun], change: float) -> tuple[dict[str, float], dict[str, float]]:
    """By how many seconds each part became slower, and the probability that it is the one in which the whole change lies.

    If all of the change D is in part p, then its difference is distributed about D, and those of the others about 0. The errors
    are those of the earlier runs' parts. A priori, the parts are equally likely.
    """
    runs = [run.mean_parts() for run in earlier if run.parts]
    if not now.parts or len(runs) < FEWEST_RUNS:
        return {}, {}
    whole = fmean(fmean(run.seconds) for run in earlier) * math.expm1(change)
    added, weights = {}, {}
    for part, seconds in now.mean_parts().items():
        difference, error = _difference(seconds, [run[part] for run in runs])
        added[part] = difference
        weights[part] = (2 * difference * whole - whole**2) / (2 * error**2)
    largest = max(weights.values())
    likelihoods = {part: math.exp(weight - largest) for part, weight in weights.items()}
    return added, {part: value / sum(likelihoods.values()) for part, value in likelihoods.items()}


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


def document(comparison: RunComparison, now: RecipeRun) -> Mapping[str, Any]:
    """The result as JSON."""
    plain: dict[str, Any] = to_plain(comparison)
    return {"regression": comparison.is_regression, "part": comparison.part, **plain, "now": to_plain(now)}
