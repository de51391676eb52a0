"""Side by side with DeepSpeed's own autotuner: the same small model, machine, knobs and number of trials, from a cold command.

    python -m benchmarks.against_deepspeed [--deepspeed-python PATH] [--rounds 5] [--markdown docs/against-deepspeed.md]

About 7 minutes on two idle cores, of which DeepSpeed's autotuner takes 5. PATH is a Python that has DeepSpeed 0.19.8 with its
autotuning extra (`pip install "deepspeed[autotuning]==0.19.8"`); where it is not installed, this says so and measures nothing.

DeepSpeed's autotuner runs on the CPU without ssh when LOCAL_SIZE tells it how many devices there are. After each experiment it
calls `pdsh` to kill by name what is left; nothing is, since its launcher has waited, and a `pdsh` that does nothing stands in.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.validation.markdown import table
from benchmarks.grid_design import MODEL, WORKLOAD, Grid
from benchmarks.paired_statistics import Estimate, estimate, paired_gain
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig, Value
from storage.sql import open_store

RANKS = 2
HERE = Path(__file__).resolve().parent
WHOLE_BOUND, TRIAL_BOUND = 8.0, 20.0
"""Times that ours is quicker: from a cold command to the answer, and for each trial."""
TUNER_LIMIT = 1800
"""Seconds: the autotuner has no limit of its own."""
BUCKETS = (50_000_000, 500_000_000)
SPACE = {
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 4),
    "reduce_bucket_size": BUCKETS,
    "allgather_bucket_size": BUCKETS,
    "overlap_comm": (True, False),
    "contiguous_gradients": (True, False),
}
"""What DeepSpeed's templates vary (its 1e9 is as its 5e8 where the model has fewer parameters)."""
INTRODUCTION = (
    "Written by `make bench` (`benchmarks/against_deepspeed.py`). DeepSpeed 0.19.8's autotuner (`deepspeed --autotuning tune`)",
    "and `autotune sweep`, each from a cold command on the same two ranks over loopback, over ZeRO stage, micro-batch and the",
    "knobs of DeepSpeed's templates, at the same global batch and in the same number of trials. Both answers are then measured",
    "in turn by one harness: our engine's trials, and DeepSpeed's own engine in processes of its own. DeepSpeed times",
    "two steps of a trial and confirms nothing; ours times five or more in each, and the finalists once more.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tuner came to."""

    name: str
    config: TrialConfig
    seconds: float
    """From the command to its end."""
    trials: int
    """Of the search."""
    runs: int
    """All that was run: the profile and the confirmations too."""

    @property
    def per_run(self) -> float:
        """Seconds of the whole command for each run."""
        return self.seconds / self.runs


def run_deepspeed(python: Path, folder: Path) -> Answer:
    """Have DeepSpeed's autotuner tune, from a cold command.

    Raises:
        SystemExit: it fails, does not end, or names no optimum; what it said last is told.
    """
    (folder / "ds.json").write_text(json.dumps(_user_config()))
    _stand_in(folder / "bin" / "pdsh")
    command = [str(python.parent / "deepspeed"), "--autotuning", "tune", "--num_nodes", "1", "--num_gpus", str(RANKS)]
    command += ["--master_addr", "127.0.0.1", "--master_port", _free_port(), str(HERE / "deepspeed_train.py"), "--model", MODEL]
    command += ["--deepspeed", "--deepspeed_config", "ds.json"]
    began, log = time.monotonic(), folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(python, folder), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(TUNER_LIMIT)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"DeepSpeed's autotuner did not end in {TUNER_LIMIT} s") from None
        finally:
            # Its launchers leave ranks behind when they are ended from outside.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - began
    best = folder / "results" / "ds_config_optimal.json"
    if code or not best.exists():
        raise SystemExit(f"DeepSpeed's autotuner ended with {code} and no optimum:\n{log.read_text(errors='replace')[-3000:]}")
    # The launches, without the profile run: experiments whose result is there already are counted but not run.
    launched = log.read_text(errors="replace").count("Launching exp_id")
    return Answer(
        name="deepspeed", config=_config_of(json.loads(best.read_text())), seconds=seconds, trials=launched - 1, runs=launched
    )


def run_ours(folder: Path, trials: int, arguments: argparse.Namespace) -> Answer:
    """The same by `autotune sweep`, its interpreter and ranks started cold; the confirmation counts as time."""
    pins = [f"{name}={','.join(_text(value) for value in values)}" for name, values in SPACE.items()]
    command = [
        str(Path(sys.executable).with_name("autotune")),
        "sweep",
        MODEL,
        "--runner",
        "local",
        "--space",
        "zero",
    ]
    command += ["--ranks", str(RANKS), "--trials", str(trials), "--global-batch-size", str(WORKLOAD.global_batch_size)]
    command += ["--seq-len", str(WORKLOAD.sequence_length), "--out", str(folder / "best.json"), "--db", str(folder / "ours.db")]
    command += ["--trial-seconds", str(arguments.trial_seconds), "--confirm-repeats", str(arguments.confirm_repeats)]
    command += [part for pin in (*pins, "activation_checkpointing=none") for part in ("--set", pin)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TUNER_LIMIT)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"autotune sweep ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    config = TrialConfig().replace(json.loads((folder / "best.json").read_text())["best"]["config"])
    with open_store(str(folder / "ours.db")) as store:
        runs = sum(trial.started is not None for trial in store.trials(store.job(None).id))
    return Answer(name="autotune", config=config, seconds=seconds, trials=trials, runs=runs)


def by_our_engine(answers: list[Answer], rounds: int) -> dict[str, list[float]]:
    """Samples/s of each answer in every round, measured in turn by our engine's trials."""
    grid, rates = Grid(RANKS), {answer.name: list[float]() for answer in answers}
    with LocalRunner(RANKS, device="cpu") as runner:
        runner.run(grid.request("first", answers[0].config))
        for number in range(rounds):
            for answer in answers if number % 2 else reversed(answers):
                result = runner.run(grid.request(f"{answer.name}-{number}", answer.config))
                if result.outcome is not Outcome.OK or result.samples_per_second is None:
                    raise SystemExit(f"{answer.name}'s answer ended {result.outcome}: {result.message}")
                rates[answer.name].append(result.samples_per_second.mean)
                print(f"our engine, round {number}: {answer.name} {rates[answer.name][-1]:.1f} samples/s", flush=True)
    return rates


def by_deepspeed_engine(answers: list[Answer], rounds: int, python: Path, folder: Path) -> dict[str, list[float]]:
    """The same by DeepSpeed's own engine, started by its launcher for every round."""
    rates = {answer.name: list[float]() for answer in answers}
    for number in range(rounds):
        for answer in answers if number % 2 else reversed(answers):
            out = folder / f"{answer.name}-{number}.json"
            (folder / "engine.json").write_text(json.dumps(_engine_config(answer.config)))
            command = [
                str(python.parent / "deepspeed"),
                "--num_gpus",
                str(RANKS),
                "--master_addr",
                "127.0.0.1",
                "--master_port",
                _free_port(),
            ]
            command += [str(HERE / "deepspeed_train.py"), "--model", MODEL, "--time_into", str(out)]
            command += ["--deepspeed", "--deepspeed_config", str(folder / "engine.json")]
            environment = _environment(python, folder)
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
            )
            if not out.exists():
                raise SystemExit(
                    f"DeepSpeed's engine ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
                )
            rates[answer.name].append(WORKLOAD.global_batch_size / fmean(json.loads(out.read_text())))
            print(f"DeepSpeed's engine, round {number}: {answer.name} {rates[answer.name][-1]:.1f} samples/s", flush=True)
    return rates


def page(theirs: Answer, ours: Answer, measured: dict[str, dict[str, list[float]]]) -> tuple[list[str], bool]:
    """Lines of markdown, and whether every bound holds."""
    whole, trial = theirs.seconds / ours.seconds, theirs.per_run / ours.per_run
    claims = [
        (whole >= WHOLE_BOUND, f"{whole:.1f} times quicker from a cold command to the answer (bound {WHOLE_BOUND:g})"),
        (
            trial >= TRIAL_BOUND,
            f"{trial:.1f} times quicker a run, the profile and confirmations counted (bound {TRIAL_BOUND:g})",
        ),
    ]
    rows = []
    for engine, rates in measured.items():
        lead = paired_gain(rates[ours.name], rates[theirs.name])
        claims.append(_as_fast(engine, lead))
        rows.append([engine, *(f"{estimate(rates[answer.name]).mean:.1f}" for answer in (ours, theirs)), lead.signed_percent()])
    cells = [
        [
            answer.name,
            f"{answer.seconds:.1f}",
            str(answer.trials),
            str(answer.runs),
            f"{answer.per_run:.2f}",
            _name(answer.config),
        ]
        for answer in (ours, theirs)
    ]
    lines = [
        "# Side by side with DeepSpeed's autotuner", "", *INTRODUCTION, "",
        *(f"- {'holds' if holds else '**DOES NOT HOLD**'}: {claim}" for holds, claim in claims), "",
        *table(["tuner", "seconds", "trials", "runs", "seconds a run", "answer"], cells), "",
        "The answers, measured in turn, samples/s:", "",
        *table(["engine", f"{ours.name}'s", f"{theirs.name}'s", "ours ahead by"], rows),
    ]  # fmt: skip
    return lines, all(holds for holds, _ in claims)


def _as_fast(engine: str, lead: Estimate) -> tuple[bool, str]:
    """At least as fast: not slower beyond the interval of the pairs."""
    return lead.high >= 0.0, f"our answer against theirs on {engine}: {lead.signed_percent()}"


def _user_config() -> dict[str, Any]:
    tuning = {"enabled": True, "fast": False, "metric": "throughput", "overwrite": True, "exps_dir": "exps"}
    tuning |= {"results_dir": "results", "max_train_batch_size": WORKLOAD.global_batch_size, "arg_mappings": {}}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": WORKLOAD.gradient_clipping,
        "zero_optimization": {"stage": "all"},
        "steps_per_print": 10**6,
        "autotuning": tuning,
    }


def _engine_config(config: TrialConfig) -> dict[str, Any]:
    accumulation = config.gradient_accumulation_steps(WORKLOAD.global_batch_size, RANKS)
    zero = {"stage": config.zero_stage} | {name: getattr(config, name) for name in SPACE if name in _ZERO_KEYS}
    return {
        "train_batch_size": WORKLOAD.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": WORKLOAD.gradient_clipping,
        "zero_optimization": zero,
        "steps_per_print": 10**6,
    }


_ZERO_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients")


def _config_of(optimum: dict[str, Any]) -> TrialConfig:
    """DeepSpeed's optimum in our knobs; what it leaves out stands at DeepSpeed's default. Its global batch may be smaller than
    the one that it was told: it is measured at that one, by accumulation."""
    zero = optimum.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    # DeepSpeed overlaps by default at stage 3 alone.
    changes: dict[str, Value] = {"zero_stage": stage, "overlap_comm": bool(zero.get("overlap_comm", stage == 3))}
    changes |= {name: int(zero[name]) for name in ("reduce_bucket_size", "allgather_bucket_size") if name in zero}
    changes |= {name: bool(zero[name]) for name in ("contiguous_gradients",) if name in zero}
    return TrialConfig(micro_batch_size=int(optimum["train_micro_batch_size_per_gpu"])).replace(changes)


def _environment(python: Path, folder: Path) -> dict[str, str]:
    own = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{folder / 'bin'}:{python.parent}:{os.environ['PATH']}"
    return os.environ | own | {"PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}


def _free_port() -> str:
    """Another program may have DeepSpeed's own port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _stand_in(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(config: TrialConfig) -> str:
    return ", ".join(f"{name} {getattr(config, name)}" for name in SPACE)


def why_not(python: Path) -> str | None:
    """Why DeepSpeed cannot be run by this Python; None: it can."""
    code = "import deepspeed, tabulate; print(deepspeed.__version__)"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        return f"{python} does not run ({error})"
    if done.returncode or not (python.parent / "deepspeed").exists():
        said = (done.stderr.strip().splitlines() or ["there is no command `deepspeed` beside it"])[-1]
        return f"{python} has no DeepSpeed with its autotuner: {said}; give one by --deepspeed-python"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trial-seconds", type=float, default=0.5, help="timed steps of ours; DeepSpeed times two steps")
    parser.add_argument("--confirm-repeats", type=int, default=1, help="rounds of confirmation of ours; DeepSpeed has none")
    parser.add_argument("--keep", type=Path, help="folder for what DeepSpeed writes; what is there already is not tuned again")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    python = arguments.deepspeed_python.absolute()
    if missing := why_not(python):
        print(f"nothing is measured: {missing}")
        return 0
    print("DeepSpeed's autotuner takes about 5 minutes, ours half a minute, the answers in turn 2 minutes", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        theirs = tuned_before(arguments.keep) or keep(run_deepspeed(python, folder), arguments.keep)
        print(f"{theirs.name}: {theirs.seconds:.1f} s, {theirs.trials} trials, {_name(theirs.config)}", flush=True)
        ours = run_ours(folder, theirs.trials, arguments)
        print(f"{ours.name}: {ours.seconds:.1f} s, {ours.trials} trials, {_name(ours.config)}", flush=True)
        measured = {"our engine": by_our_engine([ours, theirs], arguments.rounds)}
        measured["DeepSpeed's engine"] = by_deepspeed_engine([ours, theirs], arguments.rounds, python, folder)
    lines, good = page(theirs, ours, measured)
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if good else 1


def tuned_before(folder: Path | None) -> Answer | None:
    """What DeepSpeed's autotuner came to in a run that was cut off after it."""
    path = None if folder is None else folder / "deepspeed.json"
    if path is None or not path.exists():
        return None
    kept = json.loads(path.read_text())
    return Answer(
        name="deepspeed",
        config=TrialConfig().replace(kept["config"]),
        seconds=kept["seconds"],
        trials=kept["trials"],
        runs=kept["runs"],
    )


def keep(answer: Answer, folder: Path | None) -> Answer:
    """Write it down, so that five minutes are not spent twice."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"config": answer.config.values(), "seconds": answer.seconds, "trials": answer.trials, "runs": answer.runs}
        (folder / "deepspeed.json").write_text(json.dumps(kept))
    return answer


if __name__ == "__main__":
    sys.exit(main())
