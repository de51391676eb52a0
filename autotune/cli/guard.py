"""`autotune guard`: run a recipe again, and compare it with its earlier runs or with another folder's."""

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
from autotune.outcome.regression import add_run, compare, compare_in_turn, document, junit, read_history, run_of
from autotune.output import require_writable, write_whole
from autotune.ray_cluster import run_by
from autotune.session.resolve import prepare
from autotune.session.trial_requests import make_runner
from autotune.text.console import Console
from search_spaces.models.command import CommandModel
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig, stable_hash

PROFILED_STEPS = 8
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
    is_in_turn = options.against.is_dir()
    history = [] if is_in_turn else read_history(options.against)
    if is_in_turn and options.record:
        raise RequestError("record", f"{options.against} is a folder, which has no history", "leave --record out")
    for name, path in (("against", options.against if options.record else None), ("junit", options.junit)):
        if path is not None:
            require_writable(path, name)
    session = prepare(run_by(request_of(best), options.runner, options.ray_address))
    config, progress, began = TrialConfig().replace(best["best"]["config"]), Console(stderr=True), time.monotonic()
    checkouts = [(".", session.model)]
    if is_in_turn:
        checkouts.append((str(options.against), model_in(session.model, options.against)))
    results: list[list[TrialResult]] = [[] for _ in checkouts]
    with make_runner(session) as runner:
        for number in range(options.trials):
            turns = [*enumerate(checkouts)]
            for which, (folder, model) in turns[::-1] if number % 2 else turns:  # each is as often first as second
                request = repeat_request(session, config, best, f"guard-{number}-{which}")
                with progress.status(f"running {options.path} in {folder}: trial {number + 1} of {options.trials}"):
                    result = runner.run(dataclasses.replace(request, model=model, profiled_steps=PROFILED_STEPS))
                results[which].append(result)
                if repeat_of(result) is None:
                    problem = f"trial {number + 1} in {folder} ended {result.outcome.value}: {result.message}"
                    raise RequestError("recipe", problem, "repair what fails first; nothing was compared or recorded")
    recipe = stable_hash([
        config.values(), to_plain(session.model), to_plain(session.request.workload), session.request.engine,
    ])  # fmt: skip
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    now, *others = (
        run_of(measured, recipe=recipe, commit=git_commit(folder), time=ended)
        for (folder, _), measured in zip(checkouts, results, strict=True)
    )
    other = others[0] if others else None
    if other is None:
        comparison = compare(now, history, options.tolerance)
    else:
        comparison = compare_in_turn(now, other, str(options.against), options.tolerance)
    if options.record:
        add_run(options.against, now)
    if options.junit is not None:
        write_whole(options.junit, junit(str(options.path), comparison, time.monotonic() - began))
    if options.json:
        write_document(document(comparison, now, other))
    else:
        for line in comparison.lines():
            Console().print(line, soft_wrap=True)
    return Status.FAILURE if comparison.is_regression else Status.OK


def model_in(model: object, folder: Path) -> CommandModel:
    """The script as it is in another folder.

    Raises:
        RequestError: it is no script, or its command would run the same file from each folder.
    """
    if not isinstance(model, CommandModel):
        raise RequestError("against", f"{folder} is a folder, and the recipe is no script", "name a file with its earlier runs")
    own, (_, *words) = model.folder or str(Path.cwd()), model.arguments  # the first word may be Python in a folder of it
    if fixed := next((word for word in words if own in word or (word.startswith("/") and word.endswith(".py"))), None):
        problem = f"{fixed} is the same file from each folder, so both would run the same"
        raise RequestError("against", problem, f"sweep in {own} with paths relative to it")
    return dataclasses.replace(model, folder=str(folder.resolve()))
