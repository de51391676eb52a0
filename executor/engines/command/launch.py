"""What is started on this rank for one trial: where it stands, its words, its variables, the files that it reads."""

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
from executor.engines.command.launchers import REPORT_VARIABLE, Place, inherited, launcher_environment, launcher_words
from executor.engines.command.process import Launch, python_words
from executor.measurement.agreement import gather_plain
from executor.measurement.limits import SLACK_BYTES
from executor.measurement.trial_state import Trial
from search_spaces.command import CommandModel
from search_spaces.placeholders import environment_of, words_of


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A folder of this rank's own, for as long as the trial runs."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-trial-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launch_of(trial: Trial, command: CommandModel, place: Place, folder: Path, on_cpu: bool) -> Launch:
    """What this rank runs."""
    request = trial.request
    config, work = request.config, request.workload
    files = _written(request.files, folder)
    words = words_of(command, config, work, request.world_size, {name: str(path) for name, path in files.items()})
    accumulation = config.gradient_accumulation_steps(work.global_batch_size, request.world_size)
    variables = {
        **launcher_environment(command, place, config, accumulation, files, on_cpu),
        **_extensions(command, files),
        REPORT_VARIABLE: str(folder / "report.jsonl"),
        **environment_of(command, config),
    }
    limit = request.memory_limit_bytes
    return Launch(
        words=tuple(launcher_words(command.launcher, python_words(words), place)),
        environment=inherited(variables),
        folder=command.folder,
        # The verdict is the resident set's; this is for a process that would bring down the host before it is looked at.
        data_limit=2 * limit + SLACK_BYTES if on_cpu and limit is not None else None,
        shared_memory=leftovers.shared_memory(place.address, place.port),
    )


def _written(files: tuple[tuple[str, str], ...], folder: Path) -> dict[str, Path]:
    """Placeholder -> path of each file."""
    written: dict[str, Path] = {}
    for name, content in files:
        path = folder / name
        path.write_text(content, encoding="utf-8")
        written[path.stem] = path
    return written


def _extensions(command: CommandModel, files: Mapping[str, Path]) -> dict[str, str]:
    """For a script that may be DeepSpeed's. A folder that the user has set is the user's affair."""
    compiles = command.launcher == "deepspeed" or "config" in files
    if not compiles or leftovers.VARIABLE in os.environ:
        return {}
    return {leftovers.VARIABLE: str(leftovers.extensions_folder())}


def agreed_place(context: RankContext) -> Place:
    """Where this rank's script stands, from what every rank tells of itself."""
    rows: list[dict[str, Any]] = gather_plain(
        context,
        {
            "host": socket.gethostname(),
            "address": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "port": _free_port() if context.rank == 0 else 0,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        },
    )
    hosts = list(dict.fromkeys(row["host"] for row in rows))
    mine = rows[context.rank]["host"]
    beside = [rank for rank, row in enumerate(rows) if row["host"] == mine]
    return Place(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=beside.index(context.rank),
        local_world_size=len(beside),
        node=hosts.index(mine),
        nodes=len(hosts),
        address=rows[0]["address"],
        port=rows[0]["port"],
        visible_devices=devices_of_host([rows[rank]["visible"] for rank in beside]),
    )


def devices_of_host(visible: list[str | None]) -> str | None:
    """Where each rank sees a device of its own (as under Ray), all of them together, in the order of the ranks."""
    if len(set(visible)) < 2:
        return None
    devices = [device for shown in visible for device in (shown or "").split(",") if device]
    return ",".join(dict.fromkeys(devices))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
