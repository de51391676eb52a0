"""How soon the devices are reusable after a hang, and how soon a dead rank ends its trial.

python -m benchmarks.trials.hang_and_death [--repeats 10] [--markdown docs/results/hang-and-death.md]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.common.written_page import give, page_parser
from benchmarks.trials.hang_rank import DIES, ENDS, FOLDER, HANGS
from executor.runners.gang_runner import GangsRunner
from executor.runners.local import LocalRunner
from executor.runners.ray import RayRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
LIMIT_SECONDS = 2.0
"""Time limit of the trials that hang."""
HANG_BOUND_SECONDS = 5.0
DEATH_BOUND_SECONDS = 3.0
GONE_SECONDS = 60.0
"""After this time remaining processes are reported as an error."""

METHOD = (
    f"Written by `make bench`. {RANKS} ranks, {{repeats}} hangs and {{repeats}} deaths on each runner, in turn, each after a "
    "successful trial. Rank 1 sleeps, or is killed by SIGKILL, while the other waits for it in a gloo collective; every rank "
    f"has started a child process. The limit of the trials that hang is {LIMIT_SECONDS:g} s, counted from the time when the "
    "ranks are ready; reusable: no process of the trial is left."
)
WAITS = (
    "After a hang the ranks have half a second to print their threads' stacks; after a death the runner listens to the others "
    "for half a second, because the cause may arrive after its consequences."
)


@dataclass(kw_only=True)
class Figures:
    """Seconds of each repeat on one runner."""

    hang: list[float] = field(default_factory=list)
    """From the limit to the result of a hanging trial."""
    reusable: list[float] = field(default_factory=list)
    """From the limit until no process of the trial is left."""
    death: list[float] = field(default_factory=list)
    """From the death of a rank to the result of its trial."""


def measure(make_runner: Callable[[dict[str, str]], GangsRunner], repeats: int) -> Figures:
    """Measure a hang and a death in turn, each on ranks warmed up by a successful trial."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with make_runner({"PYTHONPATH": str(Path(__file__).resolve().parents[2]), FOLDER: name}) as runner:
            for number in range(repeats):
                _ends(runner, number)
                _hang(runner, number, folder, figures)
                _ends(runner, number)
                _death(runner, number, folder, figures)
    return figures


def _ends(runner: GangsRunner, number: int) -> None:
    result = runner.run(_request(ENDS, number))
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"a trial after one that stopped ended {result.outcome}: {result.message}")


def _hang(runner: GangsRunner, number: int, folder: Path, figures: Figures) -> None:
    began = time.monotonic()
    result = _stopped(runner, HANGS, number, Outcome.TIMEOUT)
    limit = began + result.phase_seconds["setup"] + LIMIT_SECONDS
    figures.hang.append(time.monotonic() - limit)
    _await_gone(folder)
    figures.reusable.append(time.monotonic() - limit)


def _death(runner: GangsRunner, number: int, folder: Path, figures: Figures) -> None:
    _stopped(runner, DIES, number, Outcome.LOST)
    figures.death.append(time.monotonic() - float((folder / "died").read_text()))
    _await_gone(folder)


def _stopped(runner: GangsRunner, how: str, number: int, outcome: Outcome) -> TrialResult:
    result = runner.run(_request(how, number))
    if result.outcome is not outcome:
        raise SystemExit(f"a rank that {how} ended its trial {result.outcome}, not {outcome}: {result.message}")
    return result


def _request(how: str, number: int) -> TrialRequest:
    return TrialRequest(
        attempt=f"{how}-{number}-{time.monotonic_ns()}",
        model=resolve_model("llama-tiny"),
        config=TrialConfig(),
        workload=Workload(global_batch_size=2, sequence_length=8),
        world_size=RANKS,
        engine=how,
        timeout_seconds=LIMIT_SECONDS if how == HANGS else 60.0,
    )


def _await_gone(folder: Path) -> None:
    """Wait until the ranks and their child processes are gone."""
    pids = [int(pid) for path in folder.glob("pids-*") for pid in path.read_text().split()]
    limit = time.monotonic() + GONE_SECONDS
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > limit:
            raise SystemExit(f"processes {left} remain {GONE_SECONDS:g} s after their trial")
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    trial = {"device": "cpu", "trial_function": "benchmarks.trials.hang_rank:run_trial"}
    runners: dict[str, Callable[[dict[str, str]], GangsRunner]] = {
        "local": lambda environment: LocalRunner(RANKS, environment=environment, **trial),
        "ray": lambda environment: RayRunner(RANKS, environment=environment, **trial),
    }
    found = {name: measure(make, arguments.repeats) for name, make in runners.items()}
    lines = page(found, arguments.repeats)
    give(lines, arguments.markdown)
    slowest = {
        HANG_BOUND_SECONDS: max(max(figures.reusable) for figures in found.values()),
        DEATH_BOUND_SECONDS: max(max(figures.death) for figures in found.values()),
    }
    good = all(seconds <= bound for bound, seconds in slowest.items())
    print("all bounds hold" if good else "A BOUND IS MISSED")
    return 0 if good else 1


def page(found: dict[str, Figures], repeats: int) -> list[str]:
    """The page as lines of markdown."""
    lines = [
        "# After a hang, and after a death",
        "",
        METHOD.format(repeats=repeats),
        "",
        "| runner | | median | longest | bound |",
        "|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        lines += [
            _row(name, "hang: from the limit to its result", figures.hang, None),
            _row(name, "hang: from the limit to reusable devices", figures.reusable, HANG_BOUND_SECONDS),
            _row(name, "death: from SIGKILL to the trial's end", figures.death, DEATH_BOUND_SECONDS),
        ]
    lines += [
        "",
        WAITS,
    ]
    return lines


def _row(runner: str, what: str, seconds: list[float], bound: float | None) -> str:
    limit = "" if bound is None else f"{bound:g} s"
    return f"| {runner} | {what} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {limit} |"


if __name__ == "__main__":
    sys.exit(main())
