"""Answers of DeepSpeed's autotuner and `autotune sweep`, each from a cold command, and rates by DeepSpeed's own engine."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.search.grid_design import MODEL, WORKLOAD
from search_spaces.knob import Value
from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

RANKS = 2
TUNER_LIMIT = 1800
"""Time limit in seconds: DeepSpeed's autotuner has none."""
BUCKETS = (50_000_000, 500_000_000)
SPACE: dict[str, tuple[Value, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 4),
    "reduce_bucket_size": BUCKETS,
    "allgather_bucket_size": BUCKETS,
    "overlap_comm": (True, False),
    "contiguous_gradients": (True, False),
}
"""Knobs that DeepSpeed's templates vary (1e9 equals 5e8 if the model has fewer parameters)."""
FIDELITY = {"min_steps": "2", "max_steps": "5", "max_seconds": "0.2", "measure_memory": "false"}
"""Fidelity of our trials, with the same work as DeepSpeed's: it times two steps after three others, without memory accounting.
Ours time two or more, after at least four others."""
_TRAIN = Path(__file__).resolve().parents[1] / "engines" / "deepspeed_train.py"
_ZERO_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients")
_LAUNCH = re.compile(r"\[([\d-]+ [\d:,]+)\].*Launching exp_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a tuner."""

    name: str
    config: TrialConfig
    seconds: float
    """Seconds of the whole command."""
    trials: int
    """Trials of the search."""
    runs: int
    """All runs, including the profile and the confirmations."""
    trial_seconds: float
    """Median seconds from one trial of the search to the next: the cost of one more."""

    @property
    def per_run(self) -> float:
        """Seconds of the whole command for each run."""
        return self.seconds / self.runs


def run_deepspeed(python: Path, folder: Path) -> Answer:
    """Run DeepSpeed's autotuner from a cold command.

    Raises:
        SystemExit: it fails, does not end, or names no optimum; the message has its last output.
    """
    (folder / "ds.json").write_text(json.dumps(_user_config()))
    _write_noop(folder / "bin" / "pdsh")
    command = [*_launcher(python), "--autotuning", "tune", "--num_nodes", "1", "--num_gpus", str(RANKS)]
    command += ["--master_addr", "127.0.0.1", "--master_port", _free_port(), str(_TRAIN)]
    command += ["--model", MODEL, "--deepspeed", "--deepspeed_config", "ds.json"]
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
            # Its launchers leave ranks behind when they are killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, output_text = time.monotonic() - began, log.read_text(errors="replace")
    best = folder / "results" / "ds_config_optimal.json"
    if code or not best.exists():
        raise SystemExit(f"DeepSpeed's autotuner ended with {code} and no optimum:\n{output_text[-3000:]}")
    # It counts experiments with an existing result but does not launch them. The first launch is the profile.
    launches = [datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() for at in _LAUNCH.findall(output_text)]
    return Answer(
        name="deepspeed", config=config_of(json.loads(best.read_text())), seconds=seconds, trials=len(launches) - 1,
        runs=len(launches), trial_seconds=between(launches[1:]),
    )  # fmt: skip


def run_ours(folder: Path, trials: int, seed: int, confirm_repeats: int) -> Answer:
    """The same with `autotune sweep`, with a cold interpreter and cold ranks; the time includes the confirmation.

    Raises:
        SystemExit: it fails; the message has its last output.
    """
    best, database, config = folder / f"best-{seed}.json", folder / f"ours-{seed}.db", folder / "sweep.toml"
    config.write_text("[fidelity]\n" + "".join(f"{name} = {value}\n" for name, value in FIDELITY.items()))
    pins = [f"{name}={','.join(_text(value) for value in values)}" for name, values in SPACE.items()]
    command = [str(Path(sys.executable).with_name("autotune")), "sweep", MODEL, "--runner", "local", "--space", "zero"]
    command += ["--ranks", str(RANKS), "--trials", str(trials), "--global-batch-size", str(WORKLOAD.global_batch_size)]
    command += [
        "--sequence-length",
        str(WORKLOAD.sequence_length),
        "--out",
        str(best),
        "--db",
        str(database),
        "--seed",
        str(seed),
    ]
    command += ["--config", str(config), "--confirm-repeats", str(confirm_repeats)]
    command += [part for pin in (*pins, "activation_checkpointing=none") for part in ("--pin", pin)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TUNER_LIMIT)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"autotune sweep ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    found = TrialConfig().replace(json.loads(best.read_text())["best"]["config"])
    with open_store(str(database)) as store:
        run = [trial for trial in store.trials.of(store.jobs.get(None).id) if trial.started is not None]
    ends = [trial.finished.timestamp() for trial in run if trial.purpose is Purpose.SEARCH and trial.finished is not None]
    return Answer(
        name="autotune", config=found, seconds=seconds, trials=trials, runs=len(run), trial_seconds=between(sorted(ends))
    )


def between(times: list[float]) -> float:
    """Median seconds from one time to the next.

    Raises:
        SystemExit: there are fewer than two.
    """
    if len(times) < 2:
        raise SystemExit("a tuner ran fewer than two trials: the cost of one more is unknown")
    return median(later - earlier for earlier, later in pairwise(times))


def rate_by_deepspeed_engine(config: TrialConfig, python: Path, folder: Path) -> float:
    """Samples/s by DeepSpeed's own engine, started by its launcher.

    Raises:
        SystemExit: it fails; the message has its last output.
    """
    out, engine = folder / "seconds.json", folder / "engine.json"
    out.unlink(missing_ok=True)
    engine.write_text(json.dumps(_engine_config(config)))
    command = [*_launcher(python), "--num_gpus", str(RANKS), "--master_addr", "127.0.0.1", "--master_port", _free_port()]
    command += [str(_TRAIN), "--model", MODEL, "--time_into", str(out)]
    command += ["--deepspeed", "--deepspeed_config", str(engine)]
    environment = _environment(python, folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if not out.exists():
        raise SystemExit(f"DeepSpeed's engine ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return WORKLOAD.global_batch_size / fmean(json.loads(out.read_text()))


def why_not(python: Path) -> str | None:
    """Why this Python cannot run DeepSpeed; None: it can."""
    code = "import deepspeed, tabulate; print(deepspeed.__version__)"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        return f"{python} does not run ({error})"
    if done.returncode or not (python.parent / "deepspeed").exists():
        output_text = (done.stderr.strip().splitlines() or ["there is no command `deepspeed` beside it"])[-1]
        return f"{python} has no DeepSpeed with its autotuner: {output_text}; give one by --deepspeed-python"
    return None


def config_of(optimum: dict[str, Any]) -> TrialConfig:
    """DeepSpeed's optimum in our knobs; omitted settings have DeepSpeed's defaults. Its global batch may be smaller than the
    requested one; it is measured at the requested one, by accumulation."""
    zero = optimum.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    # DeepSpeed overlaps by default only at stage 3.
    changes: dict[str, Value] = {"zero_stage": stage, "overlap_comm": bool(zero.get("overlap_comm", stage == 3))}
    changes |= {name: int(zero[name]) for name in ("reduce_bucket_size", "allgather_bucket_size") if name in zero}
    changes |= {name: bool(zero[name]) for name in ("contiguous_gradients",) if name in zero}
    return TrialConfig(micro_batch_size=int(optimum["train_micro_batch_size_per_gpu"])).replace(changes)


def tuned_before(folder: Path | None) -> Answer | None:
    """The stored answer of DeepSpeed's autotuner from an earlier, interrupted run; None: there is none."""
    path = None if folder is None else folder / "deepspeed.json"
    if path is None or not path.exists():
        return None
    kept = json.loads(path.read_text())
    return Answer(**kept | {"config": TrialConfig().replace(kept["config"])})


def keep(answer: Answer, folder: Path | None) -> Answer:
    """Store the answer, which takes minutes to compute."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "deepspeed.json").write_text(json.dumps(asdict(answer) | {"config": answer.config.values()}))
    return answer


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
    return {
        "train_batch_size": WORKLOAD.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": WORKLOAD.gradient_clipping,
        "zero_optimization": {"stage": config.zero_stage} | {name: getattr(config, name) for name in _ZERO_KEYS},
        "steps_per_print": 10**6,
    }


def _launcher(python: Path) -> list[str]:
    return [str(python.parent / "deepspeed")]


def _environment(python: Path, folder: Path) -> dict[str, str]:
    own = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{folder / 'bin'}:{python.parent}:{os.environ['PATH']}"
    return os.environ | own | {"PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}


def _free_port() -> str:
    """A free port: another program may use DeepSpeed's default port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _write_noop(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
