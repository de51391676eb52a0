"""`autotune reproduce`: repeat a best configuration and compare it with its interval."""

import dataclasses
from pathlib import Path
from typing import Any

from autotune.cli.documents import error_document, write_document
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import run_by
from autotune.errors import OutputError, RequestError
from autotune.frameworks.best_config import read_best_config, request_of, require_measured
from autotune.objective.intervals import Repeat
from autotune.ops.output import require_writable
from autotune.outcome.job_snapshot import repeat_of
from autotune.session.resolve import prepare
from autotune.session.runners import make_runner
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from autotune.text.rows import rate_text
from executor.engines.capabilities import COMMAND
from search_spaces.trial import TRACE_FILE, Interval, TrialRequest
from search_spaces.trial_config import TrialConfig


def reproduce_command(
    path: Path, runner_name: str | None, ray_address: str | None, repeats: int, trace: Path | None, as_json: bool
) -> Status:
    """Run it again. Status 0 if inside its interval; 1 if outside or not measured."""
    document = read_best_config(path)
    require_measured(document, str(path))
    session = prepare(run_by(request_of(document), runner_name, ray_address))
    if trace is not None:
        _require_trace(session, trace)
    config = TrialConfig().replace(document["best"]["config"])
    console = Console(stderr=True)
    with console.status(f"running {path}"), make_runner(session) as runner:
        requests = [_request(session, config, document, number) for number in range(repeats)]
        if trace is not None:  # in the last one: its profiler disturbs no later trial
            requests[-1] = dataclasses.replace(requests[-1], trace_path=str(trace.absolute()))
        results = [runner.run(request) for request in requests]
    measured = [repeat for result in results if (repeat := repeat_of(result)) is not None]
    if len(measured) < len(results):
        failed = next(result for result in results if repeat_of(result) is None)
        message = f"{path}: did not run: {failed.outcome.value} {failed.message}; compare its provenance with this machine"
        console.print(message, highlight=False, markup=False, soft_wrap=True)
        if as_json:
            write_document(error_document(message, Status.FAILURE, "NotMeasured"))
        return Status.FAILURE
    if trace is not None:
        text = f"traces of one step: {trace / TRACE_FILE.format(rank='*')}; open them in Perfetto (ui.perfetto.dev)"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return _print_result(document, session.prior.combined(measured), measured, as_json)


def _require_trace(session: Session, folder: Path) -> None:
    if session.request.engine == COMMAND:
        raise RequestError("trace", "a step of your own script cannot be traced from outside", "start a profiler in the script")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("trace", f"{folder} is no folder ({error.strerror})", "give a folder that can be written") from error
    require_writable(folder / TRACE_FILE.format(rank=0), "trace")


def _request(session: Session, config: TrialConfig, document: dict[str, Any], number: int) -> TrialRequest:
    losses = tuple(document["job"].get("reference_losses", ()))
    return trial_request(session, f"reproduce-{number}", config, losses)


def _print_result(document: dict[str, Any], now: Interval, measured: list[Repeat], as_json: bool) -> Status:
    rate = document["best"]["measured"]["samples_per_second"]
    stated_interval = Interval(mean=rate["mean"], low=rate["low"], high=rate["high"])
    inside = stated_interval.low <= now.mean <= stated_interval.high
    if as_json:
        result = {
            "inside": inside, "stated": dataclasses.asdict(stated_interval), "measured": dataclasses.asdict(now),
            "rates": [repeat.rate for repeat in measured],
        }  # fmt: skip
        write_document(result)
    else:
        position = "inside" if inside else "OUTSIDE"
        text = f"stated {rate_text(stated_interval)} samples/s, now {rate_text(now)}: {position} the stated interval"
        Console().print(text, highlight=False, soft_wrap=True)
    return Status.OK if inside else Status.FAILURE
