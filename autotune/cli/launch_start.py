"""Starts the launch line of a script's answer once, until its first step, and says what it started."""

import contextlib
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.frameworks.best_config import Winner, winner_of
from autotune.frameworks.exporters import EXPORTERS
from autotune.frameworks.launch import FILE_FORMATS, files_of
from autotune.text.rows import first_text
from executor.engines.command.launchers import (
    Launch,
    ScriptProcess,
    checkpoints_in,
    folder_kind,
    make_working_folder,
    working_path,
)
from executor.engines.command.observed import PROBE_FOLDER, ObservedWork, install_probe
from executor.engines.command.readings import ReportFile
from executor.errors import EngineRefusalError
from executor.process_tree import descendants
from search_spaces.models.command import CommandModel
from search_spaces.patterns import compiled
from search_spaces.placeholders import FILES, TEMPLATE, TRIAL_FOLDER, launch_paths, template_of, words_of

WAIT_SECONDS = 120.0
"""Longest wait for the first step, unless the trials were given longer (`--report-seconds`)."""
OTHER_RANKS_SECONDS = 5.0
"""Longest wait for the other ranks after the first step of one."""
NO_STEP = "WRONG: the line ended without an error, and reported no step"


def start_once(document: dict[str, Any]) -> str:
    """Start the line of a best-config document with the files that it reads; return one line about it.

    It runs on this machine, in the folder of the trials or as they did in one of its own. All its processes are killed.
    """
    winner = winner_of(document)
    command = winner.model
    assert isinstance(command, CommandModel)
    if document["cluster"]["name"] != "local" or winner.nodes > 1:
        return "not started here: its devices are not those of this machine alone"
    try:
        line, checkpoints = _start(document, winner, command, [])
        if line == NO_STEP and checkpoints:  # as a trial does
            line, _ = _start(document, winner, command, checkpoints)
            line += f", without {first_text(checkpoints, 3)} of its folder: with them the line ends at once"
        return line
    except (OSError, EngineRefusalError) as error:
        return f"not started: {error}"


def _start(document: dict[str, Any], winner: Winner, command: CommandModel, left_out: list[str]) -> tuple[str, list[str]]:
    """Start the line once; return what is said about it, and the checkpoints in the folder in which it ran."""
    work, way, checkpoints = Path(command.folder or Path.cwd()), folder_kind(command, 1), list[str]()
    with tempfile.TemporaryDirectory(prefix="autotune-launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if way != "none":
            make_working_folder(work, folder / "work", way, left_out)
            work = working_path(work, folder / "work")
            checkpoints = checkpoints_in(work)
        words = _words(document, winner, command, folder)
        return _started(words, winner, command, folder, work, way != "none"), checkpoints


def _words(document: dict[str, Any], winner: Winner, command: CommandModel, folder: Path) -> list[str]:
    """The line's words with the paths of the files, which are written."""
    paths = {TRIAL_FOLDER: str(folder / "run")}
    for name in files_of(winner):
        paths[name] = str(folder / FILES[name])
        Path(paths[name]).write_text(EXPORTERS[FILE_FORMATS[name]](document).text, encoding="utf-8")
    if command.template:
        paths[TEMPLATE] = str(folder / f"filled-{command.template_name}")
        text = template_of(command, winner.config, winner.workload, winner.world_size, paths)
        Path(paths[TEMPLATE]).write_text(text, encoding="utf-8")
    (folder / "run").mkdir()
    words = [*words_of(command, winner.config, winner.workload, winner.world_size, paths)]
    printed = words_of(command, winner.config, winner.workload, winner.world_size, launch_paths(command))
    line = shlex.split(winner.launch)
    # The launcher may take the place of the command's Python.
    words = words[0 if line[-len(printed) :] == [*printed] else 1 :]
    launcher = line[: -len(words)]
    for name in files_of(winner):
        launcher = [word.replace(f"={FILES[name]}", f"={paths[name]}") for word in launcher]
    return [*launcher, *words]


def _started(words: list[str], winner: Winner, command: CommandModel, folder: Path, work: Path, linked: bool) -> str:
    log, report, plan = folder / "output.log", folder / "report.jsonl", folder / "plan"
    plan.mkdir()
    variables = {"PYTHONUNBUFFERED": "1", "AUTOTUNE_REPORT": str(report), **winner.env}
    variables |= install_probe(folder, variables.get("PYTHONPATH", os.environ.get("PYTHONPATH")), work if linked else None)
    reports, observed = ReportFile(report), ObservedWork(folder / PROBE_FOLDER, None)
    began, most = time.monotonic(), max(command.report_seconds or 0.0, WAIT_SECONDS)
    script = ScriptProcess(Launch(words=tuple(words), environment={**os.environ, **variables}, folder=str(work)), plan, log)
    ranks: set[str] = set()
    first: float | None = None
    try:
        while (seconds := time.monotonic() - began) < most and script.poll() is None:
            ranks |= _ranks_below(script.supervisor_pid)
            output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            by_pattern = command.pattern is not None and compiled(command.pattern).found_in(output)
            if first is None and (by_pattern or observed.read() or any("samples" in row for row in reports.rows())):
                first = seconds
            if first is not None and (len(ranks) >= winner.world_size or seconds > first + OTHER_RANKS_SECONDS):
                break
            time.sleep(0.2)
        ended = script.exit
    finally:
        script.end()
    if ended is not None and ended.problem:
        return f"not started: {ended.problem}"
    if ended is not None and ended.code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"WRONG: the line ended with code {ended.code}: {last[-160:]}"
    if len(ranks) != winner.world_size > 1:
        return f"WRONG: the line starts {len(ranks)} ranks, and the trials had {winner.world_size}"
    if first is None and seconds >= most:
        return f"started once: it ran for {most:.0f} s without an error, and reported no step"
    if first is None:
        return NO_STEP
    counted = f"{len(ranks)} ranks, " if ranks else ""
    return f"started once: {counted}the first step after {first:.0f} s"


def _ranks_below(root: int) -> set[str]:
    """The values of RANK in the environments of a process's descendants."""
    ranks = set()
    for process in descendants(root):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            ranks |= {variable[5:].decode() for variable in variables if variable.startswith(b"RANK=")}
    return ranks
