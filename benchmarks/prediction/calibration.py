"""Does calibration help? Step times and peaks of real trials against predictions, before and after.

python -m benchmarks.prediction.calibration [--rounds 3] [--seconds 20] [--draws 12] [--markdown docs/results/calibration.md]
"""

import argparse
import dataclasses
import random
import statistics
import tempfile
from pathlib import Path

import numpy as np

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.fitting.trial_fit import Runs, fit_runs, trial_history
from autotune.prediction.planning.depth import spearman
from autotune.request.rows import request_from_fields, request_from_row, request_to_row
from autotune.session.calibrate import CalibrationRequest, measure_cluster, prepare_calibration
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from benchmarks.common.written_page import give
from executor.runners.local import LocalRunner
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import CalibrationRecord
from storage.store import Store, open_store

RANKS = 2
KNOWN = 4
FIDELITY = {"max_warmup_steps": 4, "min_steps": 4, "max_seconds": 1.5}
CONFIGS: dict[str, list[dict[str, int | str]]] = {
    "llama-tiny": [
        {"zero_stage": 0, "micro_batch_size": 1}, {"zero_stage": 0, "micro_batch_size": 4},
        {"zero_stage": 1, "micro_batch_size": 2}, {"zero_stage": 2, "micro_batch_size": 1},
        {"zero_stage": 2, "micro_batch_size": 4}, {"zero_stage": 3, "micro_batch_size": 1},
        {"zero_stage": 3, "micro_batch_size": 4}, {"tensor_parallel_size": 2, "micro_batch_size": 2},
        {"tensor_parallel_size": 2, "micro_batch_size": 8},
        {"tensor_parallel_size": 2, "micro_batch_size": 4, "sequence_parallel": True},
    ],
    "llama-mini": [
        {"zero_stage": 0, "micro_batch_size": 2}, {"zero_stage": 1, "micro_batch_size": 4},
        {"zero_stage": 2, "micro_batch_size": 2}, {"zero_stage": 3, "micro_batch_size": 2},
        {"zero_stage": 3, "micro_batch_size": 4}, {"zero_stage": 0, "micro_batch_size": 4, "activation_checkpointing": "full"},
        {"zero_stage": 2, "micro_batch_size": 4},
    ],
}  # fmt: skip


def run_trials(store: Store, rounds: int) -> None:
    """Run every configuration `rounds` times, in a new random order each round, and store the trials in the database."""
    fields = {"ranks": RANKS, "space": "zero", "runner": "local", "fidelity": FIDELITY}
    sessions = {name: prepare(request_from_fields({**fields, "model": name})) for name in CONFIGS}
    leases = {
        name: store.jobs.acquire(store.jobs.create(request_to_row(session.request)).id, current_owner(), 3600.0)
        for name, session in sessions.items()
    }
    planned = [(name, TrialConfig().replace(values)) for name, many in CONFIGS.items() for values in many]
    with LocalRunner(RANKS, device="cpu") as runner:
        for number in range(rounds):
            for name, config in random.Random(number).sample(planned, len(planned)):
                trial = store.trials.add(leases[name], config, Purpose.SEARCH, repeat=number)
                token = store.attempts.start(leases[name], trial.number).token
                result = run_one(runner, sessions[name], token, config)
                store.attempts.finish(leases[name], dataclasses.replace(result, unstable=False))
    for lease in leases.values():
        store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")


def run_one(runner: LocalRunner, session: Session, token: str, config: TrialConfig) -> TrialResult:
    result = runner.run(trial_request(session, token, config, ()))
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"a trial ended {result.outcome}: {result.message}\n{result.traceback}")
    return result


def chosen(history: list[Runs], places: set[int]) -> list[Runs]:
    """The configurations at these indices of the whole history."""
    found, begin = [], 0
    for runs in history:
        at = np.array([place for place in range(len(runs.keys)) if begin + place in places], dtype=int)
        begin += len(runs.keys)
        if len(at):
            taken = {name: getattr(runs, name)[at] for name in ("seconds", "peaks", "repeats", "noise")}
            keys = tuple(runs.keys[place] for place in at)
            found.append(Runs(cases=runs.cases.take(at), keys=keys, **taken))
    return found


TEXT = """\
Written by `python -m benchmarks.prediction.calibration`. {count} configurations of {models} on {ranks} CPU ranks with gloo
(ZeRO stages 0 to 3, micro-batches 1 to 8, tensor parallelism 1 and 2, recomputation), each run up to {rounds} times in random
order, after one micro-benchmark. Errors are of configurations that the coefficients were not fitted to: the {known} known ones
are drawn {draws} times, and the table has the median over the draws.
"""
SHARED = """\
The machine was shared with other work: two runs of one configuration differ by {noise} (median), which limits how good a
prediction can be. Steps took {spans}."""
QUIET = """\
The same with less disturbance from other work: the 10th percentile of a configuration's step times, and the lower quartile of
the micro-benchmark's rows. Steps took {spans}."""
TABLE_HEAD = (
    "| coefficients | median error of step time (10 % – 90 %) | rank correlation | in the 90 % band | error of peak |",
    "|---|---|---|---|---|",
)


@dataclasses.dataclass
class Score:
    """Figures of one way to predict, one for each draw, on the configurations that were not used."""

    error: list[float] = dataclasses.field(default_factory=list)
    rank: list[float] = dataclasses.field(default_factory=list)
    covered: list[float] = dataclasses.field(default_factory=list)
    memory_error: list[float] = dataclasses.field(default_factory=list)

    def add(self, unseen: list[Runs], rates: Coefficients) -> None:
        found = [predict(runs.cases, rates) for runs in unseen]
        pairs = [(np.broadcast_to(own.seconds, len(runs.keys)), runs.seconds) for own, runs in zip(found, unseen, strict=True)]
        ratio = np.concatenate([predicted / measured for predicted, measured in pairs])
        self.error.append(float(np.median(np.abs(ratio - 1))))
        ranks = [spearman(one, other) or 0.0 for one, other in pairs if len(other) >= 4]
        self.rank.append(float(np.mean(ranks)))
        reach = np.concatenate(
            [np.broadcast_to(own.time_reach, len(runs.keys)) for own, runs in zip(found, unseen, strict=True)]
        )
        self.covered.append(float(np.mean(np.abs(np.log(ratio)) <= reach)))
        peaks = [np.broadcast_to(memory(runs.cases, rates).allocated, len(runs.keys)) / runs.peaks for runs in unseen]
        self.memory_error.append(float(np.median(np.abs(np.concatenate(peaks) - 1))))

    def cells(self) -> str:
        low, middle, high = np.quantile(self.error, [0.1, 0.5, 0.9])
        spread = f" ({low:.0%} – {high:.0%})"
        figures = (np.median(self.rank), np.median(self.covered), np.median(self.memory_error))
        return f"{middle:.0%}{spread} | {figures[0]:.2f} | {figures[1]:.0%} | {figures[2]:.0%}"


def compare(history: list[Runs], shipped: Coefficients, benchmark: Coefficients, draws: int) -> dict[str, Score]:
    scores = {
        name: Score()
        for name in ("shipped", f"shipped + {KNOWN} trials", "micro-benchmark", f"micro-benchmark + {KNOWN} trials")
    }
    count = sum(len(runs.keys) for runs in history)
    for number in range(draws):
        known = set(random.Random(number).sample(range(count), KNOWN))
        used, unseen = chosen(history, known), chosen(history, set(range(count)) - known)
        candidates = (shipped, fit_runs(used, shipped)[0], benchmark, fit_runs(used, benchmark)[0])
        for score, rates in zip(scores.values(), candidates, strict=True):
            score.add(unseen, rates)
    return scores


def noise_of(store: Store) -> float:
    """Median difference between the slowest and the fastest repeat of a configuration."""
    rates: dict[tuple[str, str], list[float]] = {}
    for job in store.jobs.newest():
        for trial in store.trials.figures_of(job.id):
            if trial.result is not None and trial.result.samples_per_second is not None:
                rates.setdefault((job.id, trial.config_hash), []).append(trial.result.samples_per_second.mean)
    return statistics.median(max(same) / min(same) - 1 for same in rates.values())


def undisturbed(store: Store, history: list[Runs]) -> list[Runs]:
    """The same configurations with the 10th percentile of their step times."""
    steps: dict[tuple[int, str], list[float]] = {}
    for job in store.jobs.newest():
        for trial in store.trials.of(job.id):
            if trial.result is not None:
                model = int(request_from_row(job.request).resolved_model.num_layers)  # type: ignore[union-attr]
                steps.setdefault((model, trial.config_hash), []).extend(trial.result.step_seconds)
    return [
        dataclasses.replace(
            runs, seconds=np.array([np.quantile(steps[int(runs.cases.shapes.layers[0]), key], 0.1) for key in runs.keys])
        )
        for runs in history
    ]


def undisturbed_rows(record: CalibrationRecord) -> CalibrationRecord:
    """The micro-benchmark with the lower quartile of each row."""
    return dataclasses.replace(record, rows=tuple(dataclasses.replace(row, seconds=row.low) for row in record.rows))


def table(scores: dict[str, Score]) -> list[str]:
    return ["", *TABLE_HEAD, *(f"| {name} | {score.cells()} |" for name, score in scores.items())]


def spans(history: list[Runs]) -> str:
    return " and ".join(f"{min(runs.seconds) * 1e3:.0f} to {max(runs.seconds) * 1e3:.0f} ms" for runs in history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--markdown", type=Path, help="The page to write.")
    parser.add_argument("--db", help="Store the measurements here; existing ones are reused.")
    arguments = parser.parse_args()
    shipped = Coefficients()
    with tempfile.TemporaryDirectory() as folder, open_store(arguments.db or f"{folder}/calibration.db") as store:
        request = CalibrationRequest(ranks=RANKS, runner="local", seconds=arguments.seconds)
        cluster, found, reason = prepare_calibration(store, request)
        found = found or measure_cluster(store, request, cluster, reason)
        if not store.jobs.newest():
            run_trials(store, arguments.rounds)
        history, noise = trial_history(store, cluster, "native"), noise_of(store)
        quiet = undisturbed(store, history)
    rates = coefficients_from_benchmark(found.record, cluster, "native", shipped)
    quiet_rates = coefficients_from_benchmark(undisturbed_rows(found.record), cluster, "native", shipped)
    figures = {
        "count": sum(len(runs.keys) for runs in history), "models": " and ".join(CONFIGS), "ranks": RANKS, "known": KNOWN,
        "rounds": int(max(np.max(runs.repeats) for runs in history)), "draws": arguments.draws,
    }  # fmt: skip
    lines = [
        "# Does calibration help?", "", *TEXT.format(**figures).splitlines(), "",
        *SHARED.format(noise=f"{noise:.0%}", spans=spans(history)).splitlines(),
        *table(compare(history, shipped, rates, arguments.draws)), "",
        *QUIET.format(spans=spans(quiet)).splitlines(),
        *table(compare(quiet, shipped, quiet_rates, arguments.draws)),
    ]  # fmt: skip
    give(lines, arguments.markdown)


if __name__ == "__main__":
    main()
