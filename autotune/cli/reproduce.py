"""`autotune reproduce`: repeat a best configuration and compare it with its interval."""

import dataclasses
from pathlib import Path
from typing import Any

from autotune.cli.documents import error_document, write_document
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import run_by
from autotune.exports.best_config_file import read_best_config, request_of, require_measured
from autotune.objective.intervals import Repeat
from autotune.outcome.job_snapshot import repeat_of
from autotune.session.resolve import prepare
from autotune.session.runners import make_runner
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from autotune.text.rows import rate_text
from executor.runners.runner import Runner
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig


def reproduce_command(path: Path, runner_name: str | None, ray_address: str | None, repeats: int, as_json: bool) -> Status:
    """Run it again. Status 0 if inside its interval; 1 if outside or not measured."""
    document = read_best_config(path)
    require_measured(document, str(path))
    session = prepare(run_by(request_of(document), runner_name, ray_address))
    config = TrialConfig().replace(document["best"]["config"])
    console = Console(stderr=True)
    with console.status(f"running {path}"), make_runner(session) as runner:
        results = [_run(runner, session, config, document, number) for number in range(repeats)]
    measured = [repeat for result in results if (repeat := repeat_of(result)) is not None]
    if len(measured) < len(results):
        failed = next(result for result in results if repeat_of(result) is None)
        message = f"{path}: did not run: {failed.outcome.value} {failed.message}; compare its provenance with this machine"
        console.print(message, highlight=False, markup=False, soft_wrap=True)
        if as_json:
            write_document(error_document(message, Status.FAILURE, "NotMeasured"))
        return Status.FAILURE
    return _print_result(document, session.prior.combined(measured), measured, as_json)


def _run(runner: Runner, session: Session, config: TrialConfig, document: dict[str, Any], number: int) -> TrialResult:
    losses = tuple(document["job"].get("reference_losses", ()))
    return runner.run(trial_request(session, f"reproduce-{number}", config, losses))


def _print_result(document: dict[str, Any], now: Interval, measured: list[Repeat], as_json: bool) -> Status:
    rate = document["best"]["measured"]["samples_per_second"]
    stated = Interval(mean=rate["mean"], low=rate["low"], high=rate["high"])
    inside = stated.low <= now.mean <= stated.high
    if as_json:
        result = {
            "inside": inside, "stated": dataclasses.asdict(stated), "measured": dataclasses.asdict(now),
            "rates": [repeat.rate for repeat in measured],
        }  # fmt: skip
        write_document(result)
    else:
        where = "inside" if inside else "OUTSIDE"
        text = f"stated {rate_text(stated)} samples/s, now {rate_text(now)}: {where} the stated interval"
        Console().print(text, highlight=False, soft_wrap=True)
    return Status.OK if inside else Status.FAILURE
