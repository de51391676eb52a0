"""The `full` space against the `3d` space: sweeps of as many trials on 4 real ranks with a slow network.

    python -m benchmarks.search.full_space [--seeds 3] [--trials 20] [--rounds 5] [--markdown docs/results/full-space.md]

A sweep takes about two minutes on two idle cores; a seed runs both spaces, in alternating order, and then measures both winners
again in interleaved rounds; only these are compared. Every seed is written to the folder of --out as soon as it ends; a restart
continues with the next seed. The network needs root and Linux.
"""

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from autotune.request.request import JobRequest
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.tuning import finish, open_job
from benchmarks.common.paired_statistics import Estimate, paired_gain
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.search.grid_design import MODEL, RATE_MBIT, WORKLOAD, Grid
from benchmarks.search.sweep_play import SHORT
from executor.runners.runner import Runner
from search_spaces.knob import Value
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import open_store

RANKS = 4
SPACES = ("3d", "full")
SOUND = {Outcome.OK, Outcome.PRUNED, Outcome.INFEASIBLE, Outcome.INVALID}
"""Valid outcomes of a trial: measured, pruned, too large, or refused by a named rule."""
INTRODUCTION = (
    "Written by `make bench` (`benchmarks/search/full_space.py`). Guided search sweeps both presets with equally many trials,",
    f"on the same {RANKS} ranks, joined by a switch of {RATE_MBIT} Mbit/s. The winners of a seed are measured again in",
    "interleaved rounds, and only these are compared: `full over 3d` is the mean ratio of their rates with its 95 % paired",
    "interval. The bound: no seed's interval, nor that over all seeds, lies below 1.",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One sweep."""

    space: str
    configurations: int
    """Number of configurations in the space."""
    winner: Mapping[str, Value]
    """Knobs that differ from the defaults."""
    outcomes: Mapping[str, int]
    """Outcome -> number of search trials; refused ones with the rule's name."""
    unsound: tuple[str, ...]
    """Messages of trials with an outcome that is not valid."""
    seconds: float
    gain: str
    """Speedup over the sweep's own baseline, with its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Both sweeps of a seed, and their winners measured again."""

    seed: int
    played: Mapping[str, Played]
    rates: Mapping[str, Sequence[float]]
    """Space -> samples/s of its winner, one for each round."""

    def lead(self) -> Estimate:
        """Lead of `full` over `3d`, as a difference of logarithms."""
        return paired_gain(self.rates["full"], self.rates["3d"])


def request_of(space: str, seed: int, trials: int, folder: str) -> JobRequest:
    """The request of one sweep; the seed also sets the data."""
    return JobRequest(
        model=MODEL, cluster="switch", space=space, seed=seed, trials=trials, ranks=RANKS, runner="local", nvme_path=folder,
        global_batch_size=WORKLOAD.global_batch_size, sequence_length=WORKLOAD.sequence_length, fidelity=SHORT,
        confirm_repeats=2, resolved_cluster=Grid(RANKS).cluster,
    )  # fmt: skip


def play(session: Session, runner: Runner) -> Played:
    """Run a job in its own database."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "sweep.db")) as store:
        job = open_job(store, session)
        found = finish(session, store, job.id, runner)
        trials = [trial for trial in store.trials.of(job.id) if trial.purpose is Purpose.SEARCH]
    if found.best is None:
        raise SystemExit(f"{session.request.space}, seed {session.request.seed}: no configuration may win ({found.message})")
    return Played(
        space=session.request.space, configurations=session.space.count(), seconds=round(time.monotonic() - began, 1),
        winner=found.best.differences(TrialConfig()), outcomes=dict(Counter(map(_ended, trials))),
        unsound=tuple(_trial_text(trial) for trial in trials if trial.outcome not in SOUND),
        gain=f"{found.gain.mean:.2f}x [{found.gain.low:.2f}, {found.gain.high:.2f}]" if found.gain else "",
    )  # fmt: skip


def _ended(trial: TrialRecord) -> str:
    outcome = trial.outcome.value if trial.outcome else "OPEN"
    rule = trial.result.rule if trial.result else None
    return f"{outcome} ({rule})" if rule else outcome


def _trial_text(trial: TrialRecord) -> str:
    knobs = " ".join(f"{name}={value}" for name, value in trial.config.differences(TrialConfig()).items())
    return f"{_ended(trial)}: {trial.result.message if trial.result else ''} [{knobs}]"


def play_seed(seed: int, trials: int, rounds: int, runner: Runner) -> Seed:
    """Run both spaces in turn, then measure both winners again."""
    with tempfile.TemporaryDirectory() as folder:
        order = SPACES if seed % 2 == 0 else SPACES[::-1]
        sessions = {space: prepare(request_of(space, seed, trials, folder)) for space in order}
        played = {}
        for space in order:
            played[space] = play(sessions[space], runner)
            print(f"seed {seed}, {space}: {played[space].seconds:.0f} s, {played[space].winner}", flush=True)
        rates: dict[str, list[float]] = {space: [] for space in SPACES}
        for number in range(rounds):
            for space in order if number % 2 == 0 else order[::-1]:
                config = TrialConfig().replace(played[space].winner)
                result = runner.run(trial_request(sessions[space], f"{space}-{number}", config, ()))
                if result.samples_per_second is None:
                    raise SystemExit(f"the winner of {space}, seed {seed}, measured again: {result.outcome}: {result.message}")
                rates[space].append(result.samples_per_second.mean)
    return Seed(seed=seed, played=played, rates=rates)


def read_seeds(path: Path) -> list[Seed]:
    """Seeds of earlier runs."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    plain = [json.loads(line) for line in lines]
    return [
        Seed(seed=one["seed"], rates=one["rates"], played={name: Played(**played) for name, played in one["played"].items()})
        for one in plain
    ]


def page(seeds: Sequence[Seed]) -> tuple[list[str], bool]:
    """Lines of markdown, and whether the bound holds and every trial has a valid outcome."""
    whole = paired_gain(
        [rate for each in seeds for rate in each.rates["full"]], [rate for each in seeds for rate in each.rates["3d"]]
    )
    unsound = [text for each in seeds for played in each.played.values() for text in played.unsound]
    holds = not unsound and all(lead.high >= 0.0 for lead in (whole, *(each.lead() for each in seeds)))
    verdict = f"**{'Holds' if holds else 'DOES NOT HOLD'}**: full over 3d {_ratio(whole)} over {len(seeds)} seeds"
    rows = [
        [str(each.seed), f"`{space}`", f"{played.configurations:,}", _outcomes(played), f"{played.seconds:.0f}", played.gain,
         f"{fmean(each.rates[space]):.1f}", _ratio(each.lead()) if space == "full" else "", _winner(played)]
        for each in seeds for space in SPACES for played in [each.played[space]]
    ]  # fmt: skip
    headings = [
        "seed", "space", "configurations", "search trials", "seconds a sweep", "gain over the baseline",
        "samples/s of the winner, again", "full over 3d", "winner",
    ]  # fmt: skip
    failures = ["", "Trials with an invalid outcome:", "", *(f"- {text}" for text in unsound)] if unsound else []
    return ["# The full space", "", *INTRODUCTION, "", f"{verdict}.", "", *table(headings, rows), *failures], holds


def _ratio(lead: Estimate) -> str:
    return f"{math.exp(lead.mean):.3f} [{math.exp(lead.low):.3f}, {math.exp(lead.high):.3f}]"


def _outcomes(played: Played) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in played.outcomes.items())


def _winner(played: Played) -> str:
    return " ".join(f"`{name}={value}`" for name, value in played.winner.items())


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/full-space"), help="folder of the results")
    arguments = parser.parse_args()
    if missing := why_not():
        print(f"nothing is measured: {missing}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"seeds-{arguments.trials}.jsonl"
    seeds = read_seeds(path)
    with ShapedNetwork(RANKS, f"{RATE_MBIT}mbit") as network, NetworkRunner(network) as runner:
        for seed in range(len(seeds), arguments.seeds):
            seeds.append(play_seed(seed, arguments.trials, arguments.rounds, runner))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(seeds[-1])) + "\n")
    lines, holds = page(seeds)
    give(lines, arguments.markdown)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
