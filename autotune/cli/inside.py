"""`autotune sweep --inside -- COMMAND`: starts the user's whole run, which tunes itself in its own steps."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.options import SweepOptions
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.frameworks.best_config import best_config_text
from autotune.inside.job import record_job, recorded_runs
from autotune.inside.memory import RunMemory
from autotune.inside.schedule import SHARE, require_share
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.output import write_whole
from autotune.session.resolve import session_of
from autotune.text.console import Console
from autotune.text.result import print_result
from executor.engines.command.launchers import python_command
from executor.engines.command.observed import install_probe
from storage.address import default_database_url
from storage.store import open_store

_STEERED = re.compile(r"\b(?:transformers|trl)\b[\s\S]*Trainer\b")
_LINE = (
    "add `tuner = autotune.InRunTuner(model, optimizer)` and `for batch in tuner.batches(loader)` to its loop "
    "(docs/tune-inside-the-run.md), or sweep it without --inside"
)


def inside_command(options: SweepOptions, fields: Mapping[str, Any], ranks: Sequence[int]) -> Status:
    """Run the command to its end. Its Trainer tunes itself; the job is recorded when its search is over, and the run goes on.

    Raises:
        RequestError: there is no command, its loop is not one that the probe can steer, or the share is none.
    """
    words = _words(fields.get("command"))
    require_steered(words)
    share = SHARE if options.share is None else options.share
    require_share(share)
    database = options.database or default_database_url()
    if len(ranks) == 1 and ranks[0] > 1:
        script = words[1:] if words[0] in ("python", "python3") else words
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks[0]}", *script]
    with tempfile.TemporaryDirectory(prefix="autotune-inside-") as folder:
        memory, kept = RunMemory(Path(folder) / "runs.json"), {run.run.key: run for run in recorded_runs(database)}
        memory.write(*kept.values())
        variables = install_probe(Path(folder), os.environ.get("PYTHONPATH"), None)
        inside = {"AUTOTUNE_INSIDE": str(Path(folder) / "runs.json"), "AUTOTUNE_INSIDE_SHARE": str(share)}
        environment = {**os.environ, **variables, **inside}
        job_id = None
        with subprocess.Popen(python_command(words), env=environment) as process:
            code = None
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(1.0)
                for key, run in memory.records().items():
                    if kept.get(key) != run:
                        job_id, kept[key] = record_job(database, run), run
                        Console(stderr=True).print(f"recorded as job {job_id}", highlight=False)
        problems = problems_of(Path(folder))
    if job_id is None:
        reason = problems[0] if problems else "it ended before its search was over"
        Console(stderr=True).print(f"nothing is recorded of the run: {reason}", highlight=False, markup=False)
        return Status.OK if code == 0 else Status.FAILURE
    with open_store(database) as store:
        snapshot = read_snapshot(store, job_id)
    job = snapshot.job
    document = build_best_config(session_of(job), snapshot)
    write_whole(options.out, best_config_text(document))
    if options.json:
        write_document(
            {"job": job.id, "state": job.state.value, "reason": job.reason, "message": job.message, "best_config": document}
        )
    else:
        print_result(document, Console())
        Console().print(f"written to {options.out} (job {job.id})", soft_wrap=True, highlight=False)
    return Status.OK if code == 0 else Status.FAILURE


def problems_of(folder: Path) -> list[str]:
    """Why the probe stopped in processes of the run."""
    lines = (line for path in folder.rglob("steps-*.jsonl") for line in path.read_text(encoding="utf-8").splitlines())
    return [row["problem"] for row in map(json.loads, lines) if "problem" in row]


def _words(command: Any) -> list[str]:
    words = command.get("arguments") if isinstance(command, Mapping) else command
    if not words:
        raise RequestError("inside", "needs the command of your run", "write it after --, as in `-- python train.py`")
    return [*words]


def require_steered(words: Sequence[str]) -> None:
    """Refuse a script whose loop is its own, or whose placeholders only a sweep fills in.

    Raises:
        RequestError: it names the line to add.
    """
    if placeholder := next((word for word in words if re.search(r"\{\w+\}", word)), None):
        raise RequestError("inside", f"{placeholder} is a placeholder", "write your own value: it is the baseline")
    script = next((Path(word) for word in words if word.endswith(".py") and Path(word).is_file()), None)
    text = script.read_text(encoding="utf-8", errors="replace") if script is not None else ""
    if script is not None and not _STEERED.search(text):
        raise RequestError("inside", f"{script} has a loop of its own, which cannot be changed from outside", _LINE)
