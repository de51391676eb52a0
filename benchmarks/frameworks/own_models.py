"""Third-party and user models: swept by real trials, and every measured layout compared with the plain model.

    python -m benchmarks.frameworks.own_models [--only TITLE ...] [--trials 6] [--markdown docs/results/own-models.md]

Each model is swept by `autotune sweep` on two ranks. The last one is swept with the installed wheel, in a project
whose packages have our names. Every measured configuration then trains three steps in float64, and losses, gradient norms and
weights are compared with those of the module in one process (`benchmarks.correctness.parity`). Exit code 1 if one is off, or a
trial of a sweep is neither OK nor PRUNED. Needs the extra `transformers`; takes about 5 minutes on two cores.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.session.resolve import session_of
from benchmarks.common.gang import Gang
from benchmarks.common.wheel_project import ROOT, build_wheel, install, printed, write_project
from benchmarks.common.written_page import table
from benchmarks.correctness.parity import run
from benchmarks.correctness.parity_cases import (
    FLOAT64_BOUND,
    GLOBAL_BATCH,
    HUGGING_FACE_BOUND,
    PROJECT,
    SEQUENCE,
    USER,
    Case,
    make_model,
)
from benchmarks.correctness.parity_rank import compare
from search_spaces.knob_values import value_text
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord, TrialRecord
from storage.store import open_store

RANKS = 2
MODELS = {
    "Hugging Face Llama": "hf-llama", "Hugging Face OPT": "hf-opt", "Hugging Face BERT": "hf-bert",
    "Hugging Face Mixtral": "hf-mixtral", "PEFT LoRA on Llama": "hf-lora", "hand-written, with a plan": USER,
    "project with `api`, `storage`, `executor`; the wheel": PROJECT,
}  # fmt: skip
"""Title -> the model of the parity matrix."""
SHARDED = {"param_persistence_threshold": 100}
"""Makes stage 3 shard the parameters of such small models."""
INTRODUCTION = f"""# Third-party models and your own

Written by `make extras` (`benchmarks/frameworks/own_models.py`). Each model is swept by `autotune sweep MODEL --space 3d` on
{RANKS} ranks of two CPU cores: ZeRO stage, micro-batch, checkpointing, and tensor and pipeline parallelism where the
model can be cut. The trials are drawn at random, so that layouts differ. The models are tiny, so that gains come
from fewer and larger micro-batches, with wide intervals when the cores have other work. `legal` counts the space's
configurations.

Every measured configuration then trains three steps of AdamW with clipped gradients in float64. The difference is the largest
of any loss, gradient norm or weight from the plain module in one process, on the whole batch. Bounds:
{HUGGING_FACE_BOUND:g} for the Hugging Face models (norms and softmaxes compute in fp32), {FLOAT64_BOUND:g} for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A model's sweep, and the distance of its configurations from the plain module."""

    title: str
    job: JobRecord
    trials: list[TrialRecord]
    best: dict[str, Any]
    """The best-config document."""
    bound: float
    off: list[float]
    """Largest difference of each measured configuration."""

    @property
    def right(self) -> bool:
        """Whether every trial succeeded and every difference is within the bound."""
        return {trial.outcome for trial in self.trials} <= {Outcome.OK, Outcome.PRUNED} and max(self.off) <= self.bound

    def row(self) -> list[str]:
        """Cells of the table."""
        space = session_of(self.job).space
        turned = [f"{name} {', '.join(map(value_text, values))}" for name, values in _values(space.enumerate()).items()]
        searched = [trial for trial in self.trials if trial.counted]
        outcomes = Counter(str(trial.outcome) for trial in searched)
        cut = {
            "in tensor slices": sum(trial.config.tensor_parallel_size > 1 for trial in searched),
            "in pipeline stages": sum(trial.config.pipeline_parallel_size > 1 for trial in searched),
        }
        changed = TrialConfig(**self.best["best"]["config"]).differences(TrialConfig())
        gain = self.best["baseline"]["gain"]
        return [
            self.title,
            f"{space.count()}",
            "; ".join(turned),
            ", ".join(f"{count} {what}" for what, count in (outcomes + Counter(cut)).items()),
            " ".join(f"`{name}={value_text(value)}`" for name, value in changed.items()) or "all defaults",
            f"{gain['mean']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]",
            f"{max(self.off):.1e} of {len(self.off)}{'' if self.right else ' **WRONG**'}",
        ]


def _values(configs: Sequence[TrialConfig]) -> dict[str, list[Any]]:
    """Knob -> its values, for knobs that differ among the configurations."""
    found: dict[str, set[Any]] = {}
    for config in configs:
        for name, value in config.values().items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def sweep(title: str, program: Path, place: Path, folder: Path, arguments: argparse.Namespace) -> Swept:
    """Sweep a model by the command line in the folder `place`, and compare the measured configurations."""
    name = MODELS[title]
    database, out = folder / f"{name}.db", folder / f"{name}.json"
    reference = getattr(make_model(name, 3), "reference")  # noqa: B009 - the matrix has models of other kinds too
    words = (
        "sweep", reference, "--runner", "local", "--ranks", RANKS, "--space", "3d", "--strategy", "random", "--seed", 2,
        "--global-batch-size", GLOBAL_BATCH, "--sequence-length", SEQUENCE, "--trials", arguments.trials, "--trial-seconds", 1,
        "--confirm-repeats", 2, "--out", out, "--db", database, "--json",
    )  # fmt: skip
    printed(str(program), *map(str, words), folder=place, environment={**os.environ, "PYTHONPATH": str(place)})
    with open_store(str(database)) as store:
        (job,) = store.jobs.newest()
        trials = store.trials.of(job.id)
    configs = list(dict.fromkeys(trial.config for trial in trials if trial.outcome in (Outcome.OK, Outcome.PRUNED)))
    exact = [config.replace({**SHARDED, "precision": "fp64"}) for config in configs]
    off = in_project(program, place, exact) if name == PROJECT else in_repository(name, exact)
    bound = HUGGING_FACE_BOUND if name.startswith("hf-") else FLOAT64_BOUND
    return Swept(title=title, job=job, trials=trials, best=json.loads(out.read_text()), bound=bound, off=off)


def in_repository(name: str, configs: Sequence[TrialConfig]) -> list[float]:
    """The differences, computed by the parity matrix's harness."""
    cases = [Case(engine="native", ranks=RANKS, model=name, config=config) for config in configs]
    with Gang(RANKS, compare) as gang:
        rows = list(run(gang, cases))
    for row in rows:
        if row.error:
            print(f"{row.case.label()}: {row.error}", flush=True)
    return [row.off for row in rows]


def in_project(program: Path, place: Path, configs: Sequence[TrialConfig]) -> list[float]:
    """The differences with the installed wheel, in ranks where the project's packages have our names."""
    with tempfile.TemporaryDirectory() as isolated:
        (Path(isolated) / "benchmarks").symlink_to(ROOT / "benchmarks")
        knobs = json.dumps([dict(config.values()) for config in configs])
        command = (str(program.with_name("python")), "-P", "-m", "benchmarks.correctness.project_ranks", str(place), knobs)
        found = printed(*command, folder=Path(isolated), environment={**os.environ, "PYTHONPATH": isolated})
    differences: list[float] = json.loads(found.splitlines()[-1])
    return differences


def sweep_all(titles: Sequence[str], arguments: argparse.Namespace) -> list[Swept]:
    """Sweep every model in turn."""
    own = Path(sys.executable).with_name("autotune")
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title in titles:
            program, place = own, ROOT
            if MODELS[title] == PROJECT:
                (folder / "source").mkdir()
                (folder / "project").mkdir()
                program = install(build_wheel(folder / "source"), folder / "environment") / "autotune"
                place = write_project(folder / "project")
            found.append(sweep(title, program, place, folder, arguments))
            print(" | ".join(found[-1].row()), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="TITLE")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    found = sweep_all(arguments.only, arguments)
    headings = ["model", "legal", "knobs that differ", "trials", "best", "gain over the baseline", "largest difference"]
    if arguments.markdown:
        lines = [INTRODUCTION, "", *table(headings, [swept.row() for swept in found])]
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(swept.right for swept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
