"""`autotune reproduce` and `autotune verify`: run a best configuration again, here or on another engine, and compare."""

import dataclasses
from pathlib import Path
from typing import Any

from autotune.cli.status import Status, error_document, write_document
from autotune.errors import OutputError, RequestError
from autotune.frameworks.best_config import best_config_text, read_best_config, request_of, require_measured
from autotune.objective.intervals import Repeat
from autotune.outcome.job_snapshot import repeat_of
from autotune.outcome.verification import Verification, target_session, verified, verify
from autotune.output import require_writable, write_whole
from autotune.ray_cluster import run_by
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import make_runner, notes_of, trial_request
from autotune.text.console import Console
from autotune.text.rows import rate_text
from executor.engines.capabilities import COMMAND
from search_spaces.quantities import ratio_text
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
        requests = [repeat_request(session, config, document, f"reproduce-{number}") for number in range(repeats)]
        if trace is not None:  # in the last one: its profiler disturbs no later trial
            requests[-1] = dataclasses.replace(requests[-1], trace_path=str(trace.absolute()))
        results = [runner.run(request) for request in requests]
    measured = [repeat for result in results if (repeat := repeat_of(result)) is not None]
    if len(measured) < len(results):
        failed = next(result for result in results if repeat_of(result) is None)
        message = f"{path}: did not run: {failed.outcome.value} {failed.message}; compare its provenance with this machine"
        console.print(message, soft_wrap=True)
        if as_json:
            write_document(error_document(message, Status.FAILURE, "NotMeasured"))
        return Status.FAILURE
    if trace is not None:
        text = f"traces of one step: {trace / TRACE_FILE.format(rank='*')}; open them in Perfetto (ui.perfetto.dev)"
        console.print(text, soft_wrap=True)
    return _print_result(document, session.prior.combined(measured), measured, as_json)


def _require_trace(session: Session, folder: Path) -> None:
    if session.request.engine == COMMAND:
        raise RequestError("trace", "a step of your own script cannot be traced from outside", "start a profiler in the script")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("trace", f"{folder} is no folder ({error.strerror})", "give a folder that can be written") from error
    require_writable(folder / TRACE_FILE.format(rank=0), "trace")


def repeat_request(session: Session, config: TrialConfig, document: dict[str, Any], attempt: str) -> TrialRequest:
    """The request to run a best configuration again; its first losses must be those of the document."""
    return trial_request(session, attempt, config, tuple(document["job"].get("reference_losses", ())))


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
        Console().print(text, soft_wrap=True)
    return Status.OK if inside else Status.FAILURE


def verify_command(
    path: Path,
    engine: str,
    command: dict[str, Any] | None,
    runner_name: str | None,
    ray_address: str | None,
    rounds: int,
    write: bool,
    as_json: bool,
) -> Status:
    """Run the verification. Status 0 if the best is not slower than the baseline on that engine."""
    document = read_best_config(path)
    require_measured(document, str(path))
    if write:
        require_writable(path)
    session, best = target_session(document, engine, runner_name, command, ray_address)
    progress = Console(stderr=True)
    for note in () if as_json else notes_of(session):
        progress.print(f"note: {note}", soft_wrap=True)
    with progress.status(f"running {path} on {engine}"), make_runner(session) as runner:
        result = verify(document, session, best, runner, rounds)
    if write:
        write_whole(path, best_config_text(verified(document, result)))
    if as_json:
        write_document(result.document())
    else:
        _print_verification(result, Console())
    return Status.OK if result.holds else Status.FAILURE


def _print_verification(result: Verification, console: Console) -> None:
    share = result.delivered.mean / result.promised.mean
    lines = [
        f"promised  {rate_text(result.promised)} samples/s{_gain(result.promised_gain)}",
        (
            f"delivered {rate_text(result.delivered)} samples/s{_gain(result.delivered_gain)} on {result.engine}: "
            f"{share:.0%} of it"
        ),
        *(f"note: {item} is not supported by {result.engine} and was left out" for item in result.left_out),
        *([f"note: {result.message}"] if result.message else []),
        *(
            []
            if result.holds
            else [f"the best is SLOWER than the baseline on {result.engine}; sweep with --engine {result.engine}"]
        ),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _gain(gain: Interval | None) -> str:
    return "" if gain is None else f", {ratio_text(gain.mean, gain.low, gain.high)} the baseline"
