"""Training programs of others, swept unchanged: the sweep's rates beside those of an observer, and the best run by hand.

    python -m benchmarks.frameworks.real_scripts LIST.toml --results FILE.jsonl [--only NAME ...] [--python PROGRAM]
    python -m benchmarks.frameworks.real_scripts LIST.toml --results FILE.jsonl --table

The list (`benchmarks/data/real-scripts.toml`) says what its fields are. The programs are not part of this repository. Without
`--only`, those that have no row in the results yet are measured. The last row of a program counts.
For each program, in this order:

1. A sweep. `step_observer.py` writes the time of each step of each trial. The steps that a trial timed are searched among
   them, which gives the program's true rate in the same seconds.
2. Baseline, best, baseline, best by hand: the words and variables of the trials, without autotune and its probe. If the
   answer is the baseline, its fastest rival takes the place of the best.
3. The losses of a probed trial of the baseline are compared with those of the runs by hand, to the bit.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.wheel_project import ROOT
from benchmarks.common.written_page import table
from executor.engines.command.launchers import accelerate_variables
from search_spaces.models.command import CommandModel, variant_values
from search_spaces.placeholders import accelerate_accumulation, environment_of
from search_spaces.plain import from_plain
from search_spaces.trial_config import TrialConfig

SWEEP_SECONDS, START_SECONDS, HAND_SECONDS = 1500.0, 300.0, 6.0
FIRST_STEPS = 5
"""First steps that are left out of the rate of a run by hand."""
Steps = Sequence[Mapping[str, Any]]  # lines of the observer


class Program:
    """One entry of the list, in its folder."""

    def __init__(self, entry: Mapping[str, Any], codes: Mapping[str, Mapping[str, str]], programs: Path, python: str) -> None:
        self.entry, self.folder, self.ranks = entry, programs / entry["folder"], entry.get("ranks", 2)
        self.words = [python if word == "PYTHON" else word for word in shlex.split(entry["command"])]
        self.scratch = Path(tempfile.mkdtemp(prefix="real-scripts-"))
        code = self.scratch / "code"
        code.mkdir()
        shutil.copyfile(Path(__file__).with_name("step_observer.py"), code / "sitecustomize.py")
        if "data" in entry:
            subprocess.run(["bash", "-ec", codes["data"][entry["data"]].replace("PYTHON", python)], cwd=self.folder, check=True)
        variables = {
            "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "SHIM": "\n".join(codes["shims"][name] for name in entry.get("shims", ())),
            **entry.get("environment", {}),
        }  # fmt: skip
        self.passed = [word for name in (*variables, "STEP_OBSERVER") for word in ("--pass-environment", name)]
        self.environment = {
            **os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, (code, ROOT))),
            "AUTOTUNE_DB": str(self.scratch / "sweep.db"), "COLUMNS": "200",
        }  # fmt: skip

    def autotune(self, *words: str) -> str:
        """Output of an autotune command whose trials are observed."""
        observed = {**self.environment, "STEP_OBSERVER": str(self.scratch / "sweep")}
        return subprocess.run(
            [sys.executable, "-c", "import autotune.cli; autotune.cli.main()", *words], cwd=self.folder, text=True,
            env=observed, timeout=SWEEP_SECONDS, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip

    def observations(self, name: str) -> Path:
        """A new folder for the observer's files; files from which the program would resume are removed."""
        for file in self.entry.get("clean", ()):
            (self.folder / file).unlink(missing_ok=True)
        (self.scratch / name).mkdir()
        return self.scratch / name

    def samples(self, trial: Mapping[str, Any]) -> float:
        """Samples of a step of a trial over all ranks, by reading the program."""
        config = trial["config"]
        return float(eval(str(self.entry["samples"]), {}, {**config, **variant_values(config.get("script", ""))}))

    def measure(self) -> dict[str, Any]:
        """Sweep, run by hand, compare."""
        self.observations("sweep")
        options = ["--runner", "local", "--ranks", str(self.ranks), *self.passed, *shlex.split(self.entry["options"])]
        printed = self.autotune("sweep", *options, "--out", str(self.scratch / "best.json"), "--", *self.words)
        (self.scratch / "printed.txt").write_text(printed)
        result: dict[str, Any] = {"program": self.entry["name"], "folder": str(self.scratch)}
        job = re.search(r"\bjob (\d{8}-\d{6}-\w+)", printed)
        trials = json.loads(self.autotune("show", job[1], "--json"))["trials"] if job else []
        if not (self.scratch / "best.json").exists():
            return {**result, "said": trials[0]["result"]["message"] if trials else printed[-400:]}
        document = json.loads((self.scratch / "best.json").read_text())
        command = from_plain(CommandModel, document["job"]["request"]["command"])
        self.batch = document["job"]["request"]["global_batch_size"]
        baseline, measured = trials[0], [trial for trial in trials if trial["outcome"] == "OK"]
        rivals = [trial for trial in measured if trial["config"] != baseline["config"]]
        best = next((trial for trial in rivals if trial["config"] == document["best"]["config"]), None)
        rival = best or max(rivals, key=rate_of, default=None)
        changed = {k: v for k, v in (rival or baseline)["config"].items() if baseline["config"].get(k) != v}
        matched = {trial["number"]: self.matching_steps(trial) for trial in measured}
        true = {number: seconds and self.samples(trials[number]) / seconds for number, (seconds, _) in matched.items()}
        own = [trial["number"] for trial in measured if trial["config"] == baseline["config"]]
        turns = [(trial, self.by_hand(trial, command, str(turn))) for turn, trial in enumerate((baseline, rival) * 2) if trial]
        losses = [[step["losses"] for step in steps] for trial, steps in turns if trial is baseline]
        return {
            **result,
            "true": statistics.fmean(true[number] for number in own),
            "sweep": statistics.fmean(rate_of(trials[number]) for number in own),
            "largest_error": max(abs(rate_of(trial) / true[trial["number"]] - 1) for trial in measured),
            "is_baseline": best is None,
            "rival": changed,
            "gain": document["decision"]["gain"],
            "by_hand": {
                name: [self.hand_rate(steps, trial) for trial, steps in turns if trial is which]
                for name, which in (("baseline", baseline), ("rival", rival))
            },
            "losses_equal": equal_steps([step["losses"] for step in matched[own[0]][1]], losses[0]),
            "bytes": [allocated_bytes(steps) for steps in (matched[own[0]][1], turns[0][1])],
            "losses_repeat": equal_steps(*losses),
            "said": baseline["result"]["environment"]["observed_work"],
            "messages": sorted({trial["result"]["message"] for trial in trials if trial["result"]} - {""}),
        }  # fmt: skip

    def matching_steps(self, trial: Mapping[str, Any]) -> tuple[float, Steps]:
        """Mean seconds of the steps that a trial timed, as the observer saw them, and all steps of its rank 0.

        The process and the first step are those whose times fit the trial's own ones best.
        """
        scale = self.batch / self.samples(trial)
        seconds = [value / scale for value in trial["result"]["step_seconds"]]
        slow = re.search(r"1 of (\d+) steps takes", trial["result"]["message"])  # its time is spread over as many steps
        least, mean, port = math.inf, math.nan, ""
        for path in (self.scratch / "sweep").glob("steps-*.jsonl"):
            between = [after["clock"] - before["clock"] for before, after in pairwise(steps_in(path))]
            for start in range(len(between) - len(seconds) + 1):
                fitting = between[start : start + len(seconds)] if slow else fitting_steps(seconds, between[start:])
                errors = [own - observed for own, observed in zip(seconds, fitting, strict=True)]
                error = statistics.median(abs(b - a) for a, b in pairwise(errors)) if slow else sum(map(abs, errors))
                if error < least:
                    whole = len(fitting) % int(slow[1]) if slow else 0
                    least, mean, port = error, statistics.fmean(fitting[whole:]), path.name.split("-")[1]
        return mean, steps_of_rank_0(self.scratch / "sweep", port)

    def by_hand(self, trial: Mapping[str, Any], command: CommandModel, name: str) -> Steps:
        """Steps of rank 0 of the words of a trial, started as torchrun does, without autotune."""
        observations = self.observations(name)
        config = from_plain(TrialConfig, trial["config"])
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        words = [w for w in shlex.split(trial["result"]["environment"]["command"]) if not w.startswith("--local_rank")]
        launcher: dict[str, str] = {"DS_ACCELERATOR": "cpu"} if command.launcher == "deepspeed" else {}
        if command.launcher == "accelerate":
            steps = accelerate_accumulation(command, config, self.batch, self.ranks)
            launcher = accelerate_variables("", config, steps, {}, on_cpu=True)
        processes = []
        for rank in range(self.ranks):
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks, "GROUP_RANK": 0,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "STEP_OBSERVER": observations,
            }  # fmt: skip
            environment = {**self.environment, **launcher, **environment_of(command, config)}
            with (observations / f"output-{rank}").open("w") as output:
                processes.append(subprocess.Popen(
                    words, cwd=self.folder, env=environment | {key: str(value) for key, value in variables.items()},
                    stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                ))  # fmt: skip
        began, warm = time.monotonic(), math.inf
        while time.monotonic() < min(began + START_SECONDS, warm + HAND_SECONDS) and all(p.poll() is None for p in processes):
            if len(steps_of_rank_0(observations)) > FIRST_STEPS:
                warm = min(warm, time.monotonic())
            time.sleep(0.2)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return steps_of_rank_0(observations)

    def hand_rate(self, steps: Steps, trial: Mapping[str, Any]) -> float:
        """Samples/s of a run by hand, without its first steps; NaN: it had too few."""
        timed = steps[FIRST_STEPS:]
        seconds = timed[-1]["clock"] - timed[0]["clock"] if len(timed) > 1 else math.nan
        return self.samples(trial) * (len(timed) - 1) / seconds


def rate_of(trial: Mapping[str, Any]) -> float:
    return float(trial["result"]["samples_per_second"]["mean"])


def steps_in(path: Path) -> Steps:
    """The observed steps of a process, of the optimizer with the most parameters."""
    steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    most = max((step["elements"] for step in steps), default=0)
    return [step for step in steps if step["elements"] == most]


def allocated_bytes(steps: Steps) -> int | None:
    return next((step["bytes"] for step in steps if "bytes" in step), None)


def steps_of_rank_0(observations: Path, port: str = "*") -> Steps:
    return max((steps_in(path) for path in observations.glob(f"steps-{port}-0-*.jsonl")), key=len, default=[])


def fitting_steps(seconds: Sequence[float], between: Sequence[float]) -> list[float]:
    """The observed times that fit those of a trial, which leaves out steps with an evaluation or a checkpoint."""
    fitting, at = [], 0
    for index, value in enumerate(seconds):
        last = min(at + 3, len(between) - len(seconds) + index)
        at = min(range(at, last + 1), key=lambda near: abs(between[near] / value - 1)) + 1
        fitting.append(between[at - 1])
    return fitting


def equal_steps(first: Sequence[Any], second: Sequence[Any]) -> str:
    """`N of M`: the first N of the M steps that both have are equal to the bit."""
    count = min(len(first), len(second))
    return f"{next((index for index in range(count) if first[index] != second[index]), count)} of {count}"


def row_of(entry: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    name = entry["name"] + (f" ({entry['note']})" if "note" in entry else "")
    first = [name, entry["commit"], str(entry.get("ranks", 2))]
    said = "; ".join([result["said"], *result.get("messages", ())]).replace("|", "/")
    if "true" not in result:
        return [*first, *"------", said]
    gain, hand = result["gain"], result["by_hand"]
    knobs = " ".join(str(value) if name == "script" else f"{name}={value}" for name, value in result["rival"].items())
    interval = f"{gain['mean']:.3g}x [{gain['low']:.3g}, {gain['high']:.3g}]"
    answer = "the baseline" if result["is_baseline"] else f"{knobs}: {interval}"
    ratios = [b / a for a, b in zip(hand["baseline"], hand["rival"], strict=False) if math.isfinite(b / a)]
    confirmed = ", ".join(f"{ratio:.3g}x" for ratio in ratios) + f" ({knobs})" * bool(result["is_baseline"] and ratios)
    rates = [f"{result['true']:.4g}", f"{result['sweep']:.4g}", f"{result['largest_error']:.2%}"]
    return [*first, *rates, answer, confirmed or "-", result["losses_equal"], said]


def main() -> None:
    """Measure the programs of a list, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--programs", type=Path, default=Path())
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    programs = tomllib.loads(options.list.read_text())
    if options.table:
        results = {result["program"]: result for result in map(json.loads, options.results.read_text().splitlines())}
        headings = ["program", "commit", "ranks", "true", "sweep", "most differs", "best", "by hand", "losses equal", "said"]
        rows = (row_of(entry, results[entry["name"]]) for entry in programs["program"] if entry["name"] in results)
        print("\n".join(table(headings, rows)))
        return
    measured = options.results.read_text() if options.results.exists() else ""
    missing = [entry["name"] for entry in programs["program"] if json.dumps(entry["name"]) not in measured]
    for entry in (entry for entry in programs["program"] if entry["name"] in (options.only or missing)):
        result = Program(entry, programs, options.programs.resolve(), options.python).measure()
        print(json.dumps(result, indent=1), flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
