"""The work of one rank's script as its probe (`probe.py`) counted it, and what the ranks did together."""

import itertools
import os
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.engines.command import probe
from executor.engines.command.readings import ReportFile
from executor.measurement.timeline import step_profile
from search_spaces.trial import StepProfile

PROBE_FOLDER = "probe"
"""Folder of the probe and of its files, in that of the rank's trial."""
FEWEST_STEPS = 5
"""Steps from which counts and times are judged."""
MOST_INTERVALS = 400
"""Reports, and steps, that are compared at most."""


def install_probe(folder: Path, python_path: str | None, linked: Path | None, profiled_steps: int = 0) -> dict[str, str]:
    """Copy the probe into `PROBE_FOLDER` of a folder; return the variables with which every Python of a script runs it.

    Args:
        folder: a temporary folder of the trial.
        python_path: the script's own PYTHONPATH, before which the probe's folder comes.
        linked: a folder in which links stand for files that the script must not change; None: there is none.
        profiled_steps: as in `TrialRequest`.
    """
    probe_folder = folder / PROBE_FOLDER
    probe_folder.mkdir()
    shutil.copyfile(str(probe.__file__), probe_folder / "sitecustomize.py")
    return {
        probe.VARIABLE: str(probe_folder),
        **({} if linked is None else {probe.LINKED: str(linked)}),
        **({probe.PROFILED: str(profiled_steps)} if profiled_steps else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(probe_folder), python_path))),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """One optimizer step of one rank."""

    clock: float
    """When the script called it [s]."""
    device_clock: float | None
    """When the device had computed it [s]; None: the script uses no CUDA."""
    micro_batches: int
    samples: int | None
    """Rows of all its micro-batches; None: its inputs were not seen."""
    other_counts: tuple[int, ...]
    """What else its samples may be: rows of all forward passes, or the second dimension of time-first inputs."""
    certain: bool
    """Whether `samples` is known to be the number of samples."""
    apart: float
    """Seconds of evaluation, checkpoints and compilation since the last step."""


@dataclass(slots=True)
class ProcessWork:
    """Reads the probe's file of one process."""

    file: ReportFile | None
    """None: no process trained yet."""
    micro_batch_size: int | None
    """What the script was given; None: it gets none. It decides which dimension of an input has the samples."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of each time that the script leaves out (`Readings.pauses`)."""
    steps: list[ObservedStep] = field(default_factory=list)
    problem: str = ""
    """Why nothing more is observed; empty: it is."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the probe found out about the script: `group`, `together`, `others`, `tensor_parallel`, `exchanges`, and `loader`:
    batch sizes of torch's data loaders in use, 0 for one without."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Number of a micro-batch -> checksum of its inputs."""
    parameters: dict[int, int] = field(default_factory=dict)
    """Number of a step -> checksum of parameters after it."""
    before_first_step: dict[int, int] = field(default_factory=dict)
    """Number of a micro-batch -> checksum of parameters before it, while there was no step."""
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Peaks of the device's allocator, by the names of a report."""

    def read(self) -> None:
        """Take the rows since the last call."""
        for row in self.file.rows() if self.file is not None else ():
            self._take(row)

    def _take(self, row: Mapping[str, Any]) -> None:
        if "problem" in row:
            self.problem = str(row["problem"])
        elif "inputs" in row:
            self.inputs[row["inputs"]] = row["checksum"]
        elif "before_first_step" in row:
            self.before_first_step[row["before_first_step"]] = row["checksum"]
        elif "parameters" in row:
            self.parameters[row["parameters"]] = row["checksum"]
        elif "micro_batches" in row:
            names = ("group", "together", "loader", "others", "tensor_parallel", "exchanges")
            self.facts |= {name: row[name] for name in names if name in row}
            self.device_bytes |= {name: row[name] for name in ("device_bytes", "reserved_bytes") if name in row}
            self.steps.append(self._step(row))

    def _step(self, row: Mapping[str, Any]) -> ObservedStep:
        counted = [
            (count, *_counts(passes, rows, shapes, self.micro_batch_size, self.facts.get("loader", ())))
            for count, passes, rows, shapes in row["micro_batches"]
        ]
        seen = bool(counted) and all(counts for _, counts, _ in counted)
        combine = max if row["alternating"] else sum  # networks that train in turn share their samples
        totals = [combine(count * counts[n] for count, counts, _ in counted) for n in range(3)] if seen else [0]
        return ObservedStep(
            clock=row["clock"],
            device_clock=row.get("device_clock"),
            micro_batches=sum(count for count, _, _ in counted),
            samples=totals[0] if seen else None,
            other_counts=tuple(totals[1:]),
            certain=seen and not row["alternating"] and all(certain for _, _, certain in counted),
            apart=sum(row.get(kind, 0.0) for kind in ("evaluation", "checkpoint", "compilation", "profile")),
        )

    def seconds(self, first: int = 0) -> Iterator[tuple[float, ObservedStep]]:
        """The time between steps without pauses [s], with the later step, from the step with index `first` on."""
        for before, step in itertools.pairwise(self.steps[first:]):
            seconds = step.clock - before.clock
            if before.device_clock is not None and step.device_clock is not None:
                seconds = step.device_clock - before.device_clock
            yield max(seconds - sum(pause for end, pause in self.pauses if before.clock < end <= step.clock), 1e-9), step

    def samples_of_step(self) -> float | None:
        """Samples of a step on this rank, the most frequent number; None: not known for certain."""
        certain = Counter(step.samples for step in self.steps[-MOST_INTERVALS:] if step.certain)
        return next((samples for samples, _ in certain.most_common(1)), None)

    def summary(self, reports: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """What the other ranks need to know, as plain data. `reports`: time and samples of each report."""
        steps = [step for step in self.steps if step.samples is not None]
        counts = Counter((step.samples, step.micro_batches) for step in steps).most_common(1)
        (samples, micro_batches), majority = counts[0] if counts else ((None, 0), 0)
        intervals = [seconds for seconds, _ in self.seconds()]
        calm = [seconds for seconds, step in self.seconds() if not step.apart] or intervals
        return {
            "steps": len(self.steps),
            "samples": samples,
            "micro_batches": micro_batches,
            "steady": 3 * majority > 2 * len(steps) >= 2 * FEWEST_STEPS,
            "certain": bool(steps) and sum(step.certain for step in steps) > len(steps) / 2,
            "seconds": statistics.median(calm) if calm else None,
            "mean_samples": statistics.fmean(step.samples for step in steps if step.samples) if steps else None,
            "mean_seconds": statistics.fmean(intervals[len(intervals) // 4 :]) if intervals else None,
            "reported": list(self._between(reports))[-MOST_INTERVALS:],
            "inputs": sorted(self.inputs.items()),
            "parameters": sorted(self.parameters.items()),
            "micro_batches_without_step": max(self.before_first_step, default=0) if not self.steps else 0,
            "unchanged": len(set(self.before_first_step.values())) == 1 < len(self.before_first_step),
            "problem": self.problem,
            **self.facts,
        }

    def _between(self, reports: Sequence[tuple[float, float]]) -> Iterator[tuple[float, int, tuple[int, ...]]]:
        """Of each interval between two reports: samples of the later report, steps, and samples that they may have had."""
        at = 0
        for (before, _), (clock, samples) in itertools.pairwise(reports):
            while at < len(self.steps) and self.steps[at].clock <= before:
                at += 1
            first = at
            while at < len(self.steps) and self.steps[at].clock <= clock:
                at += 1
            steps = self.steps[first:at]
            if all(step.certain for step in steps):
                counts = [(step.samples or 0, *step.other_counts) for step in steps]
                yield samples, len(steps), tuple(map(sum, zip(*counts, strict=True))) if counts else (0,)


@dataclass(slots=True)
class ObservedWork:
    """What the probes of one rank's processes observed: the one that trains, or those that the script started as ranks."""

    folder: Path
    micro_batch_size: int | None
    """As of `ProcessWork`."""
    ranks: int = 1
    """Ranks of the trial."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """As of `ProcessWork`."""
    processes: dict[Path, ProcessWork] = field(default_factory=dict)

    def read(self) -> list[ObservedStep]:
        """Read what the processes wrote since the last call; return new steps."""
        count = len(self.timed.steps)
        for path in sorted(self.folder.glob("steps-*.jsonl")):
            if path not in self.processes:
                self.processes[path] = ProcessWork(ReportFile(path), self.micro_batch_size, self.pauses)
        for work in self.processes.values():
            work.read()
        return self.timed.steps[count:]

    @property
    def timed(self) -> ProcessWork:
        """The first process that took a step: its steps are those of the rank."""
        none = ProcessWork(None, self.micro_batch_size, self.pauses)
        return next((work for work in self.processes.values() if work.steps), next(iter(self.processes.values()), none))

    @property
    def are_ranks(self) -> bool:
        """Whether the processes are ranks that the script started itself, as many on every rank of the trial."""
        return {work.facts.get("group") for work in self.processes.values()} == {len(self.processes) * self.ranks}

    @property
    def started_ranks(self) -> int:
        """Processes whose samples add up to those of a step: those that are ranks, else the one that is timed."""
        return len(self.processes) if self.are_ranks else 1

    def samples_of_step(self) -> float | None:
        """Samples of a step in all processes that are ranks; None: not known for certain."""
        samples = self.timed.samples_of_step()
        return None if samples is None else samples * self.started_ranks

    def step_profile(self, steps: int) -> StepProfile | None:
        """What a profiled step consists of, of the process that waits least for others; None: none was profiled."""
        profiles = [step_profile(path, steps) for path in self.folder.glob("profile-*.json")]
        return min(profiles, key=lambda profile: profile.seconds["communication"], default=None)

    def summaries(self, reports: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
        """`ProcessWork.summary` of each process that is a rank; else of the first that took a step."""
        works = [*self.processes.values()] if self.are_ranks else [self.timed]
        processes = 1 if self.are_ranks else max(len(self.processes), 1)
        return [{**work.summary(reports), "processes": processes} for work in works]


def _counts(
    passes: int, rows: int, shapes: Sequence[str], asked: int | None, loaded: Sequence[int]
) -> tuple[tuple[int, ...], bool]:
    """Of a micro-batch: its likely samples and two other counts that they may be; whether they are known for certain.

    `passes`, `rows`: forward passes of its first module, and their rows in all. `shapes`: the inputs of the first of them.
    `loaded`: batch sizes of data loaders. A sample may have several rows of the model (an answer that is chosen and one that
    is rejected, several views of an image): a multiple of what was asked for and loaded is that many samples. Several passes
    with as many rows each are parts of a sample (pairs), or micro-batches whose losses are added up.
    """
    tensors = [shape for shape in shapes if shape[0] != "#"]
    sizes = [[int(size) for size in shape.rstrip("i").split("x")] for shape in tensors]
    lengths = [int(shape[1:]) for shape in shapes if shape[0] == "#"]
    if not sizes:
        return (), False
    first, second = sizes[0][0], sizes[0][1] if len(sizes[0]) in (2, 3) else sizes[0][0]
    others = (rows, second)
    for likely in (first, *others, *(size[0] for size in sizes), *lengths):
        if likely == asked:
            is_sum, may_be_features = passes > 1 and likely != rows == passes * first, likely == 1 < first
            return (first if may_be_features else likely, *others), not (is_sum or may_be_features)
    if asked and asked in loaded and first % asked == 0:
        return (asked, *others), True
    are_divided = first not in loaded and any(size and first % size == 0 for size in loaded)
    packed = first == 1 and (asked or 2) > 1 and tensors[0].endswith("i")  # samples may follow each other in one row
    listed = bool(lengths) and len({len(size) for size in sizes}) == 1  # tensors of a list may be samples
    is_clear = passes == 1 and not packed and not listed and not are_divided
    return (first, *others), is_clear and len({size[0] for size in sizes}) == 1
