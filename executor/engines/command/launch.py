"""Prepares the launch of a script on this rank: placement, command, environment variables and rendered files."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from executor.engine import RankContext
from executor.engines import leftovers
from executor.engines.command.launchers import RankPlacement, inherited, launcher_command, launcher_environment
from executor.engines.command.process import Launch, python_command
from executor.measurement.agreement import gather_plain
from executor.measurement.memory import SLACK_BYTES
from executor.measurement.trial_state import Trial
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import TRIAL_FOLDER, environment_of, names_in, words_of


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A temporary folder of this rank, removed when the trial ends."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-trial-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_launch(trial: Trial, command: CommandModel, placement: RankPlacement, folder: Path, on_cpu: bool) -> Launch:
    """Build the launch of this rank's script."""
    request = trial.request
    config, work = request.config, request.workload
    files = _write_files(request.files, folder)
    paths = {TRIAL_FOLDER: str(placement.folder), **{name: str(path) for name, path in files.items()}}
    words = words_of(command, config, work, request.world_size, paths)
    if TRIAL_FOLDER in names_in(command.arguments):
        placement.folder.mkdir(parents=True, exist_ok=True)
    accumulation = config.gradient_accumulation_steps(work.global_batch_size, request.world_size)
    variables = {
        **launcher_environment(command, placement, config, accumulation, files, on_cpu),
        **_extensions_variable(command, files),
        "AUTOTUNE_REPORT": str(folder / "report.jsonl"),
        **environment_of(command, config),
    }
    limit = request.memory_limit_bytes
    return Launch(
        words=tuple(launcher_command(command.launcher, python_command(words), placement)),
        environment=inherited(variables),
        folder=command.folder,
        # The resident set decides the outcome; this limit stops a process that would exhaust the host before the next look.
        data_limit=2 * limit + SLACK_BYTES if on_cpu and limit is not None else None,
        shared_memory=leftovers.shared_memory(placement.address, placement.port),
    )


def _write_files(files: tuple[tuple[str, str], ...], folder: Path) -> dict[str, Path]:
    """Write the files; return placeholder -> path of each."""
    written: dict[str, Path] = {}
    for name, content in files:
        path = folder / name
        path.write_text(content, encoding="utf-8")
        written[path.stem] = path
    return written


def _extensions_variable(command: CommandModel, files: Mapping[str, Path]) -> dict[str, str]:
    """The folder of compiled extensions, for a script that may use DeepSpeed. A folder that the user has set is kept."""
    compiles = command.launcher == "deepspeed" or "config" in files
    if not compiles or leftovers.VARIABLE in os.environ:
        return {}
    return {leftovers.VARIABLE: str(leftovers.extensions_folder())}


def gather_placement(context: RankContext, folder: Path) -> RankPlacement:
    """Gather the hosts, port, folders and devices of all ranks; return the placement of this rank's script.

    `folder`: this rank's temporary folder; that of rank 0 holds the folder of the trial.
    """
    rows: list[dict[str, Any]] = gather_plain(
        context,
        {
            "host": socket.gethostname(),
            "address": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "port": _free_port() if context.rank == 0 else 0,
            "folder": str(folder / "run"),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        },
    )
    hosts = list(dict.fromkeys(row["host"] for row in rows))
    mine = rows[context.rank]["host"]
    same_host = [rank for rank, row in enumerate(rows) if row["host"] == mine]
    return RankPlacement(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=same_host.index(context.rank),
        local_world_size=len(same_host),
        node=hosts.index(mine),
        nodes=len(hosts),
        address=rows[0]["address"],
        port=rows[0]["port"],
        folder=Path(rows[0]["folder"]),
        visible_devices=devices_of_host([rows[rank]["visible"] for rank in same_host]),
    )


def devices_of_host(visible: list[str | None]) -> str | None:
    """All devices of the host in rank order, if each rank sees a different one (as under Ray); else None."""
    if len(set(visible)) < 2:
        return None
    devices = [device for shown in visible for device in (shown or "").split(",") if device]
    return ",".join(dict.fromkeys(devices))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
