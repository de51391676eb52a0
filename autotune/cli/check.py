"""`autotune check -- python train.py`: run a script's baseline for some steps, and say what was understood."""

import dataclasses
from pathlib import Path
from typing import Any

from autotune.cli.fields import request_fields, with_import_folders
from autotune.cli.foreground import print_line
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.ray_cluster import with_address
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import make_runner, notes_of, trial_request
from autotune.text.console import Console
from autotune.text.rows import first_text
from executor.engines.command.launchers import MOST_FILES, file_states
from search_spaces.knob_values import value_text
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.placeholders import names_in
from search_spaces.trial import Fidelity, TrialResult


def check_command(fields: dict[str, Any], config: Path | None, json: bool) -> Status:
    """Run ten steps of trial 0. Nothing is stored.

    Raises:
        RequestError: there is no command.
    """
    session = prepare(request_from_fields(with_import_folders(with_address(request_fields(fields, config)))))
    command = session.model
    if not isinstance(command, CommandModel):
        raise RequestError("command", "is missing", "write your script's command after --, as in -- python train.py")
    console = Console(stderr=True)
    for note in () if json else notes_of(session):
        print_line(console, f"note: {note}")
    before = file_states(Path(command.folder))
    with make_runner(session) as runner, console.status("running trial 0"):
        request = trial_request(session, "check", session.baselines[0], ())
        brief = Fidelity(min_steps=10, max_steps=10, max_seconds=session.request.fidelity.max_seconds)
        result = runner.run(dataclasses.replace(request, fidelity=brief))
    after = file_states(Path(command.folder))
    written = sorted(name for name, state in after.items() if before.get(name) != state)
    compared = f" ({MOST_FILES:,} of its files were compared)" if MOST_FILES in (len(before), len(after)) else ""
    own = [name for name in result.environment.get("written", "").split(", ") if name]
    document = _document(session, command, result, written, compared, own)
    if json:
        write_document(document)
    else:
        for text in document.values():
            print_line(Console(), text)
    return Status.OK if result.outcome is Outcome.OK else Status.FAILURE


def _document(
    session: Session, command: CommandModel, result: TrialResult, written: list[str], compared: str, temporary: list[str]
) -> dict[str, str]:
    """The lines: the step, what the command reads and what is searched, and what a trial writes.

    `compared`: that not all files were compared; empty: all were. `temporary`: what it writes into the trial's own folder.
    """
    loss = f"loss {result.losses[0]:.4g}" if result.losses else ""
    step = "; ".join(filter(None, (result.environment.get("observed_work", ""), loss, result.message)))
    space = session.space
    carried = space.capability.knobs if space.capability else {}
    searched = [
        f"{name}={','.join(map(value_text, values))}"
        for name, values in space.domains.items()
        if len(values) > 1 and (name in carried or not carried)
    ]
    in_trial = f"; in the trial's folder, which is removed: {first_text(temporary, 5)}" if temporary else ""
    return {
        "step": f"step: {result.outcome.value}  {step}",
        "reads": f"reads: {', '.join(names_in(command)) or 'no placeholder'}",
        "searched": f"searched: {' '.join(searched) or 'nothing'}",
        "writes": f"writes in {command.folder}: {first_text(written, 5) or 'nothing'}{compared}{in_trial}",
    }
