"""The command line on the device: `autotune calibrate`, then a guided sweep, and its winner against the best of the grid.

The command line needs more packages than the engine. Where they are not installed they come from a bundle of wheels
(`bundle.py`), in separate processes; without the bundle the items are recorded as not run and tried again later.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.bundle import MISSING, ROOT, unpack
from benchmarks.gpu.design import DOMAINS, base_knobs, label_of
from benchmarks.gpu.grid import FIDELITY, measured_rates
from benchmarks.gpu.lines import State
from benchmarks.gpu.models import model_of, workload_of
from benchmarks.gpu.proof import Item, Proof, Setting, ratio, request, why
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

PART = "sweep"
CALIBRATION, PREDICTIONS, SWEEP = "calibrate", "predictions after calibration", "guided sweep"
WINNER = "winner against the grid's best"
BOUND = 0.97
"""Lower bound of the winner's rate, as a share of the grid's best."""
NEEDED = ("typer", "rich", "sqlalchemy", "alembic", "platformdirs", "cryptography", "pydantic")
"""Packages that the command line imports and a GPU machine may lack."""
OPTIONS = {
    "large": ("--trials", "14", "--confirm-repeats", "1", "--trial-seconds", "2", "--max-seconds", "240"),
    "small": ("--trials", "3", "--confirm-repeats", "0", "--trial-seconds", "0.1"),
}
CALIBRATION_SECONDS = {"large": "30", "small": "2"}
ROUNDS = {"large": 5, "small": 2}
MAIN = "from autotune.cli import main; main()"
_PR_SET_PDEATHSIG = 1


class MissingError(Exception):
    """The command line's packages are not available."""


def items() -> list[Item]:
    """Items of the part sweep, in order."""
    return [
        Item(name=CALIBRATION, show=partial(_if_here, calibrate), seconds=70.0),
        Item(name=PREDICTIONS, show=partial(_if_here, predict_again), seconds=30.0),
        Item(name=SWEEP, show=partial(_if_here, sweep), seconds=380.0),
        Item(name=WINNER, show=compare, seconds=200.0),
    ]


def _if_here(show: Any, proof: Proof) -> None:
    try:
        show(proof)
    except MissingError as error:
        proof.record(State.NOT_RUN, str(error))


def calibrate(proof: Proof) -> None:
    """Run the full micro-benchmark."""
    proof.setting.close()  # ranks hold memory of the device
    seconds = CALIBRATION_SECONDS[proof.setting.size]
    place = ("--runner", "local", "--ranks", "1", "--db", _database(proof.setting))
    document = json.loads(autotune(proof.setting, "calibrate", *place, "--seconds", seconds, "--force", "--json"))
    changed = {
        name: value["calibrated"] for name, value in document["coefficients"].items() if value["calibrated"] != value["shipped"]
    }
    proof.measured(f"{len(document['rows'])} rows in {document['seconds']:.0f} s, {len(changed)} coefficients", **changed)


def predict_again(proof: Proof) -> None:
    """Predict every measured point of the grid with the calibrated coefficients, without learning from trials."""
    rates = measured_rates(proof.setting.known)
    if not rates:
        proof.record(State.NOT_RUN, "no point of the grid was measured; run the part grid first")
        return
    query = {
        "database": _database(proof.setting), "size": proof.setting.size,
        "configs": [config.values() for config, _ in rates.values()],
    }  # fmt: skip
    answer = json.loads(_python(proof.setting, "-m", "benchmarks.gpu.calibrated", text=json.dumps(query)))
    proof.measured(f"{len(rates)} points; {answer['source']}")
    proof.values["predicted"] = dict(zip(rates, answer["predicted"], strict=True))


def sweep(proof: Proof) -> None:
    """Run a real sweep with the local runner, over the grid's space. A killed sweep is resumed."""
    setting, folder = proof.setting, proof.setting.folder
    setting.close()
    best = folder / "best-config.json"
    common = ("--db", _database(setting), "--out", str(best), "--json")
    if json.loads(autotune(setting, "jobs", "--db", _database(setting), "--json")):
        autotune(setting, "sweep", "--resume", "latest", *common)
    else:
        model, space = _files(setting)
        workload = workload_of(setting.size)
        autotune(
            setting, "sweep", str(model), "--space", str(space), "--runner", "local", "--ranks", "1", "--strategy", "guided",
            "--sequence-length", str(workload.sequence_length), "--global-batch-size", str(workload.global_batch_size),
            "--trial-timeout", "120", "--control-every", "0", *OPTIONS[setting.size], *common,
        )  # fmt: skip
    document = json.loads(best.read_text(encoding="utf-8"))
    winner, rate = document["best"]["config"], document["best"]["measured"]["samples_per_second"]
    label = label_of(TrialConfig().replace(winner), setting.size)
    proof.measured(
        f"{document['job']['trials']} trials; the winner is {label}: {rate['mean']:.3f} samples/s "
        f"[{rate['low']:.3f}, {rate['high']:.3f}]",
        winner=winner, gain=document["decision"]["gain"], trials=document["job"]["trials"],
    )  # fmt: skip


def compare(proof: Proof) -> None:
    """Measure the sweep's winner and the grid's best again, in turns."""
    setting = proof.setting
    line, rates = setting.known.get((PART, SWEEP)), measured_rates(setting.known)
    if line is None or "winner" not in line.values or not rates:
        proof.record(State.NOT_RUN, "the winner of a sweep or the points of the grid are missing; run both first")
        return
    winner, (best, _) = TrialConfig().replace(line.values["winner"]), next(iter(rates.values()))
    if label_of(winner, setting.size) == label_of(best, setting.size):
        proof.claim(True, f"the sweep's winner is the best of {len(rates)} points of the grid: {label_of(best, setting.size)}")
        return
    measured: dict[str, list[float]] = {"winner": [], "best": []}
    for number in range(ROUNDS[setting.size]):
        for name, config in (("winner", winner), ("best", best))[:: 1 if number % 2 else -1]:
            trial_request = request(
                name, model_of(setting.size), workload_of(setting.size), 1, FIDELITY[setting.size], **config.values()
            )
            result = setting.ranks(1).run(trial_request)
            if result.outcome is not Outcome.OK or result.samples_per_second is None:
                proof.claim(False, f"{name} ran again: {why(result)}")
                return
            measured[name].append(result.samples_per_second.mean)
    faster = ratio(measured["winner"], measured["best"])
    text = f"the winner's samples/s as a multiple of the best of {len(rates)} points ({label_of(best, setting.size)})"
    proof.values["ratio"] = [faster.mean, faster.low, faster.high]
    proof.at_least(faster, BOUND, text)


def autotune(setting: Setting, *arguments: str) -> str:
    """Run the command line; return its standard output.

    Raises:
        MissingError: its packages are not available.
        RuntimeError: the command fails.
    """
    return _python(setting, "-c", MAIN, *arguments)


def _python(setting: Setting, *arguments: str, text: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_packages(setting)])}
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, env=environment, cwd=setting.folder,
        preexec_fn=_end_with_parent,
    )  # fmt: skip
    if done.returncode:
        last = " ".join(done.stderr.split())[-400:]
        raise RuntimeError(f"{' '.join(arguments[:4])} ended with status {done.returncode}: {last}")
    return done.stdout


def _packages(setting: Setting) -> list[str]:
    """Entries of the command line's path besides this checkout; none if its packages are installed."""
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return []
    if sys.version_info[:2] != (3, 12):
        raise MissingError(
            f"the command line's packages are not installed, and the bundle is for Python 3.12, not {sys.version[:4]}"
        )
    if not any(setting.bundle.glob("*.whl")):
        raise MissingError(f"the bundle of the command line's packages is {MISSING}")
    target = setting.folder / "packages"
    if not target.exists():
        unpack(setting.bundle, target)
    return [str(target)]


def _files(setting: Setting) -> tuple[Path, Path]:
    """Write the files of the model and of the space, as a user would."""
    model, space = setting.folder / "config.json", setting.folder / "space.toml"
    model.write_text(json.dumps(hugging_face(model_of(setting.size))), encoding="utf-8")
    domains = {**{name: [value] for name, value in base_knobs(setting.size).items()}, **DOMAINS[setting.size]}
    lines = ["[domains]", *(f"{name} = {json.dumps(list(values))}" for name, values in domains.items())]
    space.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return model, space


def hugging_face(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a llama of this shape."""
    return {
        "model_type": "llama", "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads, "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim, "intermediate_size": spec.ffn_hidden_size, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.sequence_length, "tie_word_embeddings": spec.tied_embeddings,
        "rms_norm_eps": spec.norm_epsilon,
    }  # fmt: skip


def _database(setting: Setting) -> str:
    return str(setting.folder / "autotune.db")


def _end_with_parent() -> None:
    """In the child: it and its ranks end with the parent, and free the device. The next run resumes the job."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
