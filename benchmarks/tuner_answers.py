"""What DeepSpeed's autotuner and `autotune sweep` come to, each from a cold command, and rates by DeepSpeed's own engine."""

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

from benchmarks.grid_design import MODEL, WORKLOAD
from search_spaces.knob import Value
from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.sql import open_store

RANKS = 2
TUNER_LIMIT = 1800
"""Seconds: DeepSpeed's autotuner has no limit of its own."""
BUCKETS = (50_000_000, 500_000_000)
SPACE: dict[str, tuple[Value, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 4),
    "reduce_bucket_size": BUCKETS,
    "allgather_bucket_size": BUCKETS,
    "overlap_comm": (True, False),
    "contiguous_gradients": (True, False),
}
"""What DeepSpeed's templates vary (its 1e9 is as its 5e8 where the model has fewer parameters)."""
FIDELITY = {"min_steps": "2", "max_steps": "5", "max_seconds": "0.2", "measure_memory": "false"}
"""Of our trials, as much as DeepSpeed does in one: it times two steps of each, after three others, and accounts for no memory.
Ours are two or more, after four others at least."""
_HERE = Path(__file__).resolve().parent
_ZERO_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients")
_LAUNCH = re.compile(r"\[([\d-]+ [\d:,]+)\].*Launching exp_id")


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
    trial_seconds: float
    """From one trial of the search to the next, the median: what one more costs."""

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
    command = [*_launcher(python), "--autotuning", "tune", "--num_nodes", "1", "--num_gpus", str(RANKS)]
    command += ["--master_addr", "127.0.0.1", "--master_port", _free_port(), str(_HERE / "deepspeed_train.py")]
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
            # Its launchers leave ranks behind when they are ended from outside.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, said = time.monotonic() - began, log.read_text(errors="replace")
    best = folder / "results" / "ds_config_optimal.json"
    if code or not best.exists():
        raise SystemExit(f"DeepSpeed's autotuner ended with {code} and no optimum:\n{said[-3000:]}")
    # Experiments whose result is there already are counted by it but not launched. The first launch is the profile.
    launches = [datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() for at in _LAUNCH.findall(said)]
    return Answer(
        name="deepspeed", config=config_of(json.loads(best.read_text())), seconds=seconds, trials=len(launches) - 1,
        runs=len(launches), trial_seconds=between(launches[1:]),
    )  # fmt: skip


def run_ours(folder: Path, trials: int, seed: int, confirm_repeats: int) -> Answer:
    """The same by `autotune sweep`, its interpreter and ranks started cold; the confirmation counts as time.

    Raises:
        SystemExit: it fails; what it said last is told.
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
        run = [trial for trial in store.trials(store.job(None).id) if trial.started is not None]
    ends = [trial.finished.timestamp() for trial in run if trial.purpose is Purpose.SEARCH and trial.finished is not None]
    return Answer(
        name="autotune", config=found, seconds=seconds, trials=trials, runs=len(run), trial_seconds=between(sorted(ends))
    )


def between(times: list[float]) -> float:
    """Seconds from one to the next, the median.

    Raises:
        SystemExit: there are fewer than two.
    """
    if len(times) < 2:
        raise SystemExit("a tuner ran fewer than two trials: what one more costs is not known")
    return median(later - earlier for earlier, later in pairwise(times))


def rate_by_deepspeed_engine(config: TrialConfig, python: Path, folder: Path) -> float:
    """Samples/s by DeepSpeed's own engine, started by its launcher.

    Raises:
        SystemExit: it fails; what it said last is told.
    """
    out, engine = folder / "seconds.json", folder / "engine.json"
    out.unlink(missing_ok=True)
    engine.write_text(json.dumps(_engine_config(config)))
    command = [*_launcher(python), "--num_gpus", str(RANKS), "--master_addr", "127.0.0.1", "--master_port", _free_port()]
    command += [str(_HERE / "deepspeed_train.py"), "--model", MODEL, "--time_into", str(out)]
    command += ["--deepspeed", "--deepspeed_config", str(engine)]
    environment = _environment(python, folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if not out.exists():
        raise SystemExit(f"DeepSpeed's engine ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return WORKLOAD.global_batch_size / fmean(json.loads(out.read_text()))


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


def config_of(optimum: dict[str, Any]) -> TrialConfig:
    """DeepSpeed's optimum in our knobs; what it leaves out stands at DeepSpeed's default. Its global batch may be smaller than
    the one that it was told: it is measured at that one, by accumulation."""
    zero = optimum.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    # DeepSpeed overlaps by default at stage 3 alone.
    changes: dict[str, Value] = {"zero_stage": stage, "overlap_comm": bool(zero.get("overlap_comm", stage == 3))}
    changes |= {name: int(zero[name]) for name in ("reduce_bucket_size", "allgather_bucket_size") if name in zero}
    changes |= {name: bool(zero[name]) for name in ("contiguous_gradients",) if name in zero}
    return TrialConfig(micro_batch_size=int(optimum["train_micro_batch_size_per_gpu"])).replace(changes)


def tuned_before(folder: Path | None) -> Answer | None:
    """What DeepSpeed's autotuner came to in a run that was cut off after it."""
    path = None if folder is None else folder / "deepspeed.json"
    if path is None or not path.exists():
        return None
    kept = json.loads(path.read_text())
    return Answer(**kept | {"config": TrialConfig().replace(kept["config"])})


def keep(answer: Answer, folder: Path | None) -> Answer:
    """Write it down, so that five minutes are not spent twice."""
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
    """Another program may have DeepSpeed's own port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def _stand_in(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
