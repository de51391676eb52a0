"""Modules of public libraries, planned, predicted and trained: what is planned, what is refused and why, and how near the peaks are.

    python -m benchmarks.prediction.library_plans [--only NAME ...] [--repeats 10] [--markdown docs/results/library-plans.md]

Every module of `benchmarks.prediction.library_modules` first runs a step in plain torch. It is then described without data as
often as `--repeats` says, each time in a process of its own, with glibc's checks of the heap where they exist; its predicted peaks
are compared with those of trials on one rank. Exit code 1 if a process crashes, a refusal does not name the module, or a peak is
off by more than the bound. A library that is not installed is listed. Takes about 40 minutes on two cores with ten repeats.
"""

import argparse
import dataclasses
import importlib.util
import multiprocessing
import os
import signal
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.memory import memory
from benchmarks.common.written_page import table
from benchmarks.prediction.library_modules import ZOO
from executor.dry.module_profile import profile_module
from executor.errors import ExecutorError
from executor.runners.local import LocalRunner
from executor.user_module.factory import load_factory
from executor.user_module.survey import loss_of
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

BOUND = 0.05
WORKLOAD = Workload(global_batch_size=8, sequence_length=32)
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "stage 0": {"micro_batch_size": 4},
    "stage 3": {"micro_batch_size": 4, "zero_stage": 3},
    "selective": {"micro_batch_size": 4, "activation_checkpointing": "selective"},
    "full": {"micro_batch_size": 4, "activation_checkpointing": "full"},
}
HEAP_CHECKS = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
"""Environment in which glibc checks the heap."""
PROSE = f"""# Modules of public libraries

Written by `python -m benchmarks.prediction.library_plans`, in an environment with the libraries of the table. Each module is
small, and made as its users make it: copies by `copy.deepcopy`, parametrisations, tied and repeated layers, recurrent layers,
sparse tables, experts, adapters. It trains a step in plain torch, and is described without data in fresh processes with glibc's
checks of the heap. A refusal names the module and what it does. Predicted peaks are compared with the allocator's events of a
trial on one rank with micro-batches of 4 samples; the bound is {BOUND:.0%}. `-`: refused, or the engine refuses it.
"""


@dataclass(slots=True)
class Checked:
    """What happened with one module."""

    name: str
    plain: str = ""
    """Empty: a step ran in plain torch; else its error."""
    crashes: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    model: FactoryModel | None = None
    errors: dict[str, float | None] = field(default_factory=dict)
    """Configuration -> predicted / measured peak - 1."""
    failures: list[str] = field(default_factory=list)
    """Trials that ended otherwise than OK or INVALID."""

    @property
    def verdict(self) -> str:
        """What became of its plan."""
        if self.crashes:
            return f"**crashed {self.crashes} times**"
        return "; ".join(self.refusals) or "planned"

    @property
    def is_right(self) -> bool:
        """Whether nothing crashed, refusals name the module, and peaks are within the bound."""
        named = all(text.startswith(reference_of(self.name)) and "\n" not in text for text in self.refusals)
        near = all(error is None or abs(error) <= BOUND for error in self.errors.values())
        return not (self.crashes or self.plain or self.failures) and named and len(self.refusals) <= 1 and near

    def row(self) -> list[str]:
        """Cells of the table."""
        model = self.model
        flops = (
            "-" if model is None else "unknown" if model.flops_per_sample is None else f"{model.flops_per_sample / 1e6:,.1f} M"
        )
        errors = (self.errors.get(name) for name in CONFIGS)
        return [
            ZOO[self.name][0], self.name, self.verdict.removeprefix(reference_of(self.name)).lstrip(": "),
            "" if model is None else f"{model.parameter_count:,}", flops,
            *("-" if error is None else f"{error:+.2%}" if abs(error) <= BOUND else f"**{error:+.2%}**" for error in errors),
        ]  # fmt: skip


def reference_of(name: str) -> str:
    """The factory of a module."""
    return f"benchmarks.prediction.library_modules:{name}"


def _train_plainly(name: str) -> str:
    """One forward and backward; the error, if any, in one line."""
    try:
        user = load_factory(reference_of(name), WORKLOAD)
        loss = loss_of(user.module.train()(**user.batch(2, torch.Generator().manual_seed(0))))
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _describe(name: str, answers: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        answers.send(profile_module(reference_of(name), WORKLOAD, ("fp32",)))
    except ExecutorError as error:
        answers.send(str(error))


def describe(checked: Checked, repeats: int) -> None:
    """Describe the module, in a fork of this process each time: libraries are imported once."""
    fork = multiprocessing.get_context("fork")
    for _ in range(repeats):
        answers, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_describe, args=(checked.name, sender))
        process.start()
        sender.close()
        try:
            answer = answers.recv()
        except EOFError:
            answer = None
        process.join()
        if process.exitcode:
            crash = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
            print(f"{checked.name}: {crash}", flush=True)
            checked.crashes += 1
        elif isinstance(answer, FactoryModel):
            checked.model = answer
        else:
            checked.refusals[str(answer)] += 1


def measure(checked: Checked, model: FactoryModel, runner: LocalRunner) -> None:
    """Predicted and measured peaks of the configurations, in the types that the module has."""
    cluster = local_cluster(1)
    for title, knobs in CONFIGS.items():
        config = TrialConfig().replace({**knobs, "precision": model.default_precision or "fp32"})
        request = TrialRequest(
            attempt=config.hash, model=dataclasses.replace(model, profile=None), config=config, workload=WORKLOAD, world_size=1,
            fidelity=QUICK, timeout_seconds=120,
        )  # fmt: skip
        result = runner.run(request)
        if result.outcome is not Outcome.OK:
            checked.errors[title] = None
            if result.outcome is not Outcome.INVALID:
                checked.failures.append(f"{title}: {result.outcome} {result.message}")
                print(f"{checked.name} {checked.failures[-1]}", flush=True)
            continue
        cases = cases_of(model, cluster, WORKLOAD, [config], "native")
        predicted = float(memory(cases, rates_for(cluster, "native")).allocated[0])
        assert result.peak_memory_bytes is not None
        checked.errors[title] = predicted / result.peak_memory_bytes - 1


def check_all(names: Sequence[str], repeats: int) -> list[Checked]:
    """Check every module whose library is installed."""
    rows = []
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **dict.fromkeys(HEAP_CHECKS, "")}
    with LocalRunner(1, device="cpu", environment=environment) as runner:
        for name in names:
            checked = Checked(name, plain=_train_plainly(name))
            describe(checked, repeats)
            if checked.model is not None and not checked.crashes:
                measure(checked, checked.model, runner)
            rows.append(checked)
            print(" | ".join(checked.row()), checked.plain, flush=True)
    return rows


def _with_heap_checks() -> None:
    """Start this program again with glibc's checks of the heap, unless they are on or the library does not exist."""
    if any(Path("/lib").glob(f"*/{HEAP_CHECKS['LD_PRELOAD']}")) and "MALLOC_CHECK_" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **HEAP_CHECKS})


def main() -> int:
    """Check and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ZOO], default=[*ZOO], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    _with_heap_checks()
    warnings.simplefilter("ignore")
    missing = {library for library, *_ in ZOO.values() if importlib.util.find_spec(library) is None}
    rows = check_all([name for name in arguments.only if ZOO[name][0] not in missing], arguments.repeats)
    errors = [abs(error) for row in rows for error in row.errors.values() if error is not None]
    planned = sum(row.model is not None for row in rows)
    summary = (
        f"{len(rows)} modules: {planned} planned, {len(rows) - planned} refused by name, "
        f"{sum(bool(row.crashes) for row in rows)} crashed in {arguments.repeats} repeats. {len(errors)} peaks: "
        f"{sum(error <= BOUND for error in errors)} within {BOUND:.0%}, median {statistics.median(errors or [0.0]):.2%}, "
        f"largest {max(errors, default=0.0):.2%}. Trials that failed: {sum(len(row.failures) for row in rows)}."
        + (f" Not installed here: {', '.join(sorted(missing))}." if missing else "")
    )
    print(summary)
    headings = ["library", "module", "plan", "parameters", "FLOPs of a sample", *CONFIGS]
    failures = [f"- {row.name}, {failure}" for row in rows for failure in row.failures]
    if arguments.markdown:
        lines = [PROSE, summary, "", *table(headings, [row.row() for row in rows]), "", *failures]
        arguments.markdown.write_text("\n".join(lines).rstrip() + "\n")
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
