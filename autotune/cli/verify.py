"""`autotune verify`: run a best configuration on its target engine, and compare delivered with promised rates."""

from pathlib import Path
from typing import Any

from autotune.cli.documents import write_document
from autotune.cli.status import Status
from autotune.frameworks.best_config import best_config_text, read_best_config, require_measured
from autotune.ops.output import require_writable, write_whole
from autotune.outcome.verification import Verification, target_session, verified, verify
from autotune.session.runners import make_runner
from autotune.session.trial_requests import notes_of
from autotune.text.console import Console
from autotune.text.rows import rate_text
from search_spaces.trial import Interval


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
        progress.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    with progress.status(f"running {path} on {engine}"), make_runner(session) as runner:
        result = verify(document, session, best, runner, rounds)
    if write:
        write_whole(path, best_config_text(verified(document, result)))
    if as_json:
        write_document(result.document())
    else:
        _print_result(result, Console())
    return Status.OK if result.holds else Status.FAILURE


def _print_result(result: Verification, console: Console) -> None:
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
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _gain(gain: Interval | None) -> str:
    return "" if gain is None else f", {gain.mean:.2f}x the baseline [{gain.low:.2f}, {gain.high:.2f}]"
