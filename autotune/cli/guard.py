"""`autotune guard`: run a recipe again, and compare it with its earlier runs."""

import dataclasses
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autotune.cli.reproduce import repeat_request
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.frameworks.best_config import read_best_config, request_of, require_measured
from autotune.outcome.best_config import git_commit
from autotune.outcome.job_snapshot import repeat_of
from autotune.outcome.regression import add_run, compare, document, junit, read_history, run_of
from autotune.output import require_writable, write_whole
from autotune.ray_cluster import run_by
from autotune.session.resolve import prepare
from autotune.session.trial_requests import make_runner
from autotune.text.console import Console
from search_spaces.plain import to_plain
from search_spaces.trial_config import TrialConfig, stable_hash

PROFILED_STEPS = 3
"""Steps of each trial that are divided into parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """Parsed options of the command."""

    path: Path
    against: Path
    trials: int
    tolerance: float
    record: bool
    junit: Path | None
    runner: str | None
    ray_address: str | None
    json: bool


def guard_command(options: GuardOptions) -> Status:
    """Run it, compare, and record it if requested. Status 1: a step became slower, or was not measured."""
    best = read_best_config(options.path)
    require_measured(best, str(options.path))
    history = read_history(options.against)
    for name, path in (("against", options.against if options.record else None), ("junit", options.junit)):
        if path is not None:
            require_writable(path, name)
    session = prepare(run_by(request_of(best), options.runner, options.ray_address))
    config, progress, began = TrialConfig().replace(best["best"]["config"]), Console(stderr=True), time.monotonic()
    results = []
    with make_runner(session) as runner:
        for number in range(options.trials):
            with progress.status(f"running {options.path}: trial {number + 1} of {options.trials}"):
                request = repeat_request(session, config, best, f"guard-{number}")
                results.append(runner.run(dataclasses.replace(request, profiled_steps=PROFILED_STEPS)))
            if repeat_of(results[-1]) is None:
                problem = f"trial {number + 1} ended {results[-1].outcome.value}: {results[-1].message}"
                raise RequestError("recipe", problem, "repair what fails first; nothing was compared or recorded")
    now = run_of(
        results,
        recipe=stable_hash([
            config.values(), to_plain(session.model), to_plain(session.request.workload), session.request.engine,
        ]),
        commit=git_commit(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    comparison = compare(now, history, options.tolerance)
    if options.record:
        add_run(options.against, now)
    if options.junit is not None:
        write_whole(options.junit, junit(str(options.path), comparison, time.monotonic() - began))
    if options.json:
        write_document(document(comparison, now))
    else:
        for line in comparison.lines():
            Console().print(line, soft_wrap=True)
    return Status.FAILURE if comparison.is_regression else Status.OK
