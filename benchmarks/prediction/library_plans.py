"""Modules of public libraries, planned and trained: what is planned, what is refused and why, and how near predicted memory is.

    python -m benchmarks.prediction.library_plans [--only NAME ...] [--repeats 10] [--markdown docs/results/library-plans.md]

Every module of `benchmarks.prediction.library_modules` is described without data as often as `--repeats` says, each time in a
process of its own, with glibc's checks of the heap where they exist. It then trains a micro-batch in plain torch, without and
with checkpointing of its blocks, and the peaks are compared. Exit code 1 if a process crashes, a step fails, a refusal does not
name the module, or a peak is off by more than the bound. A library that is not installed is listed. Takes about 10 minutes on
two cores for each repeat.
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import signal
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.written_page import table
from benchmarks.prediction.library_modules import ZOO
from executor.batches import FactoryData, tensors_of
from executor.dry.module_profile import POLICIES, profile_module
from executor.errors import ExecutorError
from executor.measurement.memory import account_step
from executor.parallel.checkpointing import checkpoint_blocks
from executor.user_module.survey import loss_of
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import ModuleProfile, at
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

BOUND = 0.05
SAMPLES = 4
WORKLOAD = Workload(global_batch_size=8, sequence_length=32)
HEAP_CHECKS = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
"""Environment in which glibc checks the heap."""
PROSE = f"""# Modules of public libraries

Written by `python -m benchmarks.prediction.library_plans`, in an environment with the libraries of the table. Each module is
small, and made as its users make it: copies by `copy.deepcopy`, parametrisations, tied and repeated layers, recurrent layers,
tables, experts, adapters. It is described without data in fresh processes with glibc's checks of the heap. A refusal names the
module and what it does. The module then trains a micro-batch of {SAMPLES} samples in plain torch on the CPU, in its own types,
without and with checkpointing of its blocks; gradients are dropped when they are complete. The columns are predicted peak by
the allocator's peak (parameters, buffers, batch and activations) minus one; the bound is {BOUND:.0%}.
[Plans for any module](module-plans.md) compares whole steps of the engine.
"""


@dataclass(slots=True)
class CheckedModule:
    """What happened with one module."""

    name: str
    crashes: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    model: FactoryModel | None = None
    errors: dict[str, float] = field(default_factory=dict)
    """Kind of checkpointing -> predicted / measured peak - 1."""
    failure: str = ""
    """The error of a step in plain torch."""

    @property
    def is_right(self) -> bool:
        """Whether nothing crashed, refusals name the module in one line, and peaks are within the bound."""
        named = all(text.startswith(reference_of(self.name)) and "\n" not in text for text in self.refusals)
        near = all(abs(error) <= BOUND for error in self.errors.values())
        return not (self.crashes or self.failure) and named and bool(self.refusals) != bool(self.model) and near

    def row(self) -> list[str]:
        """Cells of the table."""
        model = self.model
        plan = "; ".join((*(f"**{crash}**" for crash in self.crashes), *self.refusals)) or "planned"
        flops = (
            "-" if model is None else "unknown" if model.flops_per_sample is None else f"{model.flops_per_sample / 1e6:,.1f} M"
        )
        errors = (self.errors.get(policy) for policy in POLICIES)
        return [
            ZOO[self.name][0], self.name, plan.replace(f"{reference_of(self.name)}: ", ""),
            "-" if model is None else f"{model.parameter_count:,}", flops,
            *("-" if error is None else f"{error:+.2%}" if abs(error) <= BOUND else f"**{error:+.2%}**" for error in errors),
            self.failure or "trained",
        ]  # fmt: skip


def reference_of(name: str) -> str:
    """The factory of a module."""
    return f"benchmarks.prediction.library_modules:{name}"


def describe(name: str) -> FactoryModel | str:
    """The module without data, or why there is no description."""
    try:
        return profile_module(reference_of(name), WORKLOAD, ("fp32",))
    except ExecutorError as error:
        return str(error)


def train(name: str, profile: ModuleProfile | None) -> dict[str, int]:
    """Kind of checkpointing -> peak bytes of a micro-batch in plain torch; one kind for a module without a description."""
    _, make, draw = ZOO[name]
    module = make().train()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    blocks = [module.get_submodule(block) for block in (profile.block_names if profile else ())]
    forwards = [block.forward for block in blocks]
    batch = FactoryData(batch=draw, seed=0).micro_batch(0, 0, SAMPLES)

    def step() -> None:
        loss = loss_of(module(**batch))
        assert loss is not None, "its call returns no loss"
        loss.backward()  # type: ignore[no-untyped-call]

    def storages() -> Any:
        return [("parameters", value) for value in (*module.parameters(), *module.buffers(), *tensors_of(batch))]

    peaks = {}
    for policy in POLICIES if blocks else POLICIES[:1]:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        checkpoint_blocks(blocks, TrialConfig(activation_checkpointing=policy))
        step()  # what is made in the first step
        peaks[policy] = account_step(step, storages, torch.device("cpu")).peak
    return peaks


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def predicted_peak(model: FactoryModel, policy: str) -> float:
    """Bytes of parameters, buffers, batch and activations."""
    assert model.profile is not None
    precision, trace = next(iter(model.profile.traces.items()))
    trained = (model.parameter_count - model.frozen_parameter_count) * (4 if precision == "fp32" else 2)
    standing = trained + trace.frozen_bytes + trace.buffer_bytes + at(trace.batch_bytes, SAMPLES)
    return standing + max(at(moment.peak, SAMPLES) for moment in trace.moments[policy])


def in_fork(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """The result of a function in a fork of this process, or the error that it raised; and how the fork crashed, if it did."""
    fork = multiprocessing.get_context("fork")
    answers, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(sender, function, *arguments))
    process.start()
    sender.close()
    try:
        answer = answers.recv()
    except EOFError:
        answer = None
    process.join()
    code = process.exitcode or 0
    return answer, "" if not code else signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _answer(answers: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        answers.send(function(*arguments))
    except Exception as error:
        answers.send(error)


def check(name: str, repeats: int) -> CheckedModule:
    """Describe a module, and compare the predicted peaks with those of plain torch."""
    checked = CheckedModule(name)
    for _ in range(repeats):
        answer, crash = in_fork(describe, name)
        if crash or isinstance(answer, Exception):
            checked.crashes.append(crash or f"{type(answer).__name__}: {answer}")
        elif isinstance(answer, FactoryModel):
            checked.model = answer
        else:
            checked.refusals[answer] += 1
    peaks, crash = in_fork(train, name, checked.model and checked.model.profile)
    if crash or isinstance(peaks, Exception):
        checked.failure = crash or f"{type(peaks).__name__}: {peaks}".splitlines()[0]
    elif checked.model is not None:
        checked.errors = {policy: predicted_peak(checked.model, policy) / peak - 1 for policy, peak in peaks.items()}
    return checked


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
    torch.set_num_threads(1)
    missing = {library for library, *_ in ZOO.values() if importlib.util.find_spec(library) is None}
    for library in {library for library, *_ in ZOO.values()} - missing:
        importlib.import_module(library)  # before the forks
    rows = []
    for name in arguments.only:
        if ZOO[name][0] not in missing:
            rows.append(check(name, arguments.repeats))
            print(" | ".join(rows[-1].row()), flush=True)
    errors = [abs(error) for row in rows for error in row.errors.values()]
    planned = sum(row.model is not None for row in rows)
    near, crashes = sum(error <= BOUND for error in errors), sum(len(row.crashes) for row in rows)
    summary = (
        f"{len(rows)} modules: {planned} planned, {len(rows) - planned} refused by name; {crashes} crashes in "
        f"{arguments.repeats} repeats of each. {len(errors)} peaks: {near} within {BOUND:.0%}, median error "
        f"{statistics.median(errors or [0.0]):.2%}, largest {max(errors, default=0.0):.2%}."
        + (f" Not installed here: {', '.join(sorted(missing))}." if missing else "")
    )
    print(summary)
    headings = ["library", "module", "plan", "parameters", "FLOPs of a sample", *POLICIES, "plain torch"]
    if arguments.markdown:
        lines = [PROSE, summary, "", *table(headings, [row.row() for row in rows])]
        arguments.markdown.write_text("\n".join(lines) + "\n")
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
