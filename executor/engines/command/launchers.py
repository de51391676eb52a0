"""Starts a rank's script as torchrun, deepspeed and accelerate do: its variables, its words, its folder, and its process."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from executor.errors import EngineRefusalError
from search_spaces.models.command import CommandModel, program_at
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Position of a rank's script among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    """Address of rank 0."""
    port: int
    """Port that was free on rank 0's host when it was chosen; the script's rank 0 binds it."""
    folder: Path = Path("run")
    """A folder of the trial, the same for all ranks, for what the script writes."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES for every rank of this host, so that LOCAL_RANK indexes into them; None: unchanged."""


def launcher_environment(
    command: CommandModel,
    placement: RankPlacement,
    config: TrialConfig,
    accumulation: int,
    files: Mapping[str, Path],
    on_cpu: bool,
) -> dict[str, str]:
    """The variables that the command's launcher sets on this rank.

    `files`: placeholder -> the rendered file. `accumulation`: micro-batches in a step.
    """
    devices = {} if placement.visible_devices is None else {"CUDA_VISIBLE_DEVICES": placement.visible_devices}
    launcher_variables = {
        "torchrun": lambda: _torchrun(placement),
        "deepspeed": lambda: _deepspeed(placement, on_cpu),
        "accelerate": lambda: _torchrun(placement) | accelerate_variables(command.plugin, config, accumulation, files, on_cpu),
    }
    return {**_common_variables(placement), **devices, **launcher_variables[command.launcher]()}


def launcher_command(launcher: str, words: Sequence[str], placement: RankPlacement) -> list[str]:
    """The command as the launcher passes it on: deepspeed inserts `--local_rank` directly after the script's name."""
    program = program_at(words) if launcher == "deepspeed" else None
    if program is None:
        return list(words)
    return [*words[: program + 1], f"--local_rank={placement.local_rank}", *words[program + 1 :]]


def _common_variables(placement: RankPlacement) -> dict[str, str]:
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "MASTER_ADDR": placement.address,
        "MASTER_PORT": str(placement.port),
    }


def _torchrun(placement: RankPlacement) -> dict[str, str]:
    """As torch.distributed.elastic.agent.server.local_elastic_agent (2.13), without an agent's store: rank 0 creates it."""
    return {
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "ROLE_RANK": str(placement.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "autotune",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _deepspeed(placement: RankPlacement, on_cpu: bool) -> dict[str, str]:
    """As deepspeed.launcher.launch (0.19.8)."""
    accelerator = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    return {
        "CROSS_RANK": str(placement.node),
        "CROSS_SIZE": str(placement.nodes),
        "LOCAL_SIZE": str(placement.local_world_size),
        **accelerator,
    }


def accelerate_variables(
    plugin: str, config: TrialConfig, accumulation: int, files: Mapping[str, Path | str], on_cpu: bool
) -> dict[str, str]:
    """The variables that `accelerate launch` sets on a rank (1.15.0), as `prepare_multi_gpu_env` of accelerate.utils.launch.

    On CPUs that command starts one process with any options: its ranks are started by torchrun, with these variables.
    """
    variables = {
        "ACCELERATE_MIXED_PRECISION": {"bf16": "bf16", "fp16": "fp16"}.get(config.precision, "no"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(accumulation),
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    if on_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    if plugin == "deepspeed":
        variables |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(files["config"]),
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(config.zero_stage),
        }
    if plugin == "fsdp" and config.zero_stage > 0:
        variables |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": _text(config.zero_stage == 3 and config.reshard_after_forward),
            "FSDP_OFFLOAD_PARAMS": _text(config.offload_param == "cpu"),
            "FSDP_ACTIVATION_CHECKPOINTING": _text(config.activation_checkpointing != "none"),
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }
    return variables


def _text(value: bool) -> str:
    return str(value).lower()


MOST_COPIED_BYTES = 2 * 2**30
"""Size up to which a folder is copied for every trial."""
MOST_ENTRIES = 1_000
"""Entries that are made at most, because each takes up to milliseconds on a busy disk; links stand for further folders."""
MOST_BESIDE = 200
"""Entries beside the user's folder, and beside its parent, that are linked."""
MOST_FILES = 20_000
"""Files of a folder of which changes are looked for."""
SMALL_BYTES = 2**20
"""Size up to which a file is copied instead of linked, because a script may open it for writing (logs, states, indices)."""
MOST_SMALL_BYTES = 64 * 2**20
"""Size of all small files together up to which they are copied."""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".pkl", ".h5")
"""Endings of files that runs write and resume from."""

FileStates = dict[str, tuple[int, int]]
"""Path in a folder -> size and time of change [ns]."""


def folder_kind(command: CommandModel, nodes: int) -> str:
    """Where a trial runs, one of `TRIAL_FOLDERS`; `auto` is decided: `link`, unless hosts may share the folder."""
    if not Path(command.folder).is_dir():
        return "none"  # which is refused when the script is started
    auto = "link" if nodes == 1 and command.folder else "none"
    return auto if command.trial_folder == "auto" else command.trial_folder


def working_path(source: Path, root: Path) -> Path:
    """Where a trial runs instead of in the user's folder: `root` stands for the folder two levels above that."""
    return root.joinpath(*source.absolute().parts[1:][-2:])


def make_working_folder(source: Path, root: Path, way: str, left_out: Sequence[str] = ()) -> None:
    """Fill `working_path` from the user's folder. What is beside that and its parent is linked, so that `../data` exists.

    Args:
        source: the user's folder.
        root: a new folder.
        way: `copy`: everything is copied. `link`: up to a number of entries, directories are made anew and small files are
            copied. Links stand for large files, other directories, virtual environments, what is hidden or of another disk.
        left_out: paths in the user's folder of files and directories that it does not get.

    Raises:
        EngineRefusalError: it is too large to copy.
    """
    source, folder = source.absolute(), working_path(source, root)
    folder.parent.mkdir(parents=True)
    if way == "link":
        _link(source, folder)
    else:
        _require_few_bytes(source)
        shutil.copytree(source, folder, symlinks=True)
    for path in (folder / name for name in left_out):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    while folder != root:
        with contextlib.suppress(OSError):  # a folder above may not be readable
            for entry in islice(source.parent.iterdir(), MOST_BESIDE):
                if entry != source:
                    (folder.parent / entry.name).symlink_to(entry)
        source, folder = source.parent, folder.parent


def _require_few_bytes(source: Path) -> None:
    folders, size = [source], 0
    while folders:
        for entry in folders.pop().iterdir():
            size += entry.lstat().st_size
            folders += [entry] if entry.is_dir() and not entry.is_symlink() else []
        if size > MOST_COPIED_BYTES:
            problem = f"{source} holds more than {MOST_COPIED_BYTES >> 30} GiB, too much to copy for every trial"
            raise EngineRefusalError("trial-folder", f"{problem}; use --trial-folder link")


def _link(source: Path, folder: Path) -> None:
    """Fill a folder, the upper levels first, with copies up to the limits and then with links."""
    folder.mkdir()
    device = source.stat().st_dev
    waiting = deque([[*source.iterdir()]])
    entries, copied = len(waiting[0]), 0
    while waiting:
        for entry in waiting.popleft():
            target = folder / entry.relative_to(source)
            with contextlib.suppress(OSError):  # what cannot be read is linked
                if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                    below = [*islice(entry.iterdir(), MOST_ENTRIES)]
                    is_environment = (entry / "pyvenv.cfg").exists()
                    if entries + len(below) < MOST_ENTRIES and not is_environment and entry.stat().st_dev == device:
                        target.mkdir()
                        waiting.append(below)
                        entries += len(below)
                        continue
                elif entry.is_file() and entry.stat().st_size <= min(SMALL_BYTES, MOST_SMALL_BYTES - copied):
                    shutil.copy2(entry, target)
                    copied += entry.stat().st_size
                    continue
            target.symlink_to(entry)


def checkpoints_in(folder: Path) -> list[str]:
    """Paths in a folder of the files and directories from which a run may resume; those in linked ones are left out."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.name.lower().endswith(CHECKPOINTS))
    return sorted(str(path) for path in paths if not any(above.name.lower().endswith(CHECKPOINTS) for above in path.parents))


def file_states(folder: Path) -> FileStates:
    """The states of at most `MOST_FILES` files of a folder; links, hidden ones and compiled Python are left out."""
    states: FileStates = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if len(states) < MOST_FILES and not path.is_symlink():
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    states[str(path.relative_to(folder))] = (path.stat().st_size, path.stat().st_mtime_ns)
    return states


START_SECONDS = 30.0
"""Time limit for the supervisor, a Python without packages, to start the script."""
END_SECONDS = 10.0
"""Time limit for killed processes to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command to run and its surroundings."""

    words: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str]
    folder: str
    """Working folder; empty: the rank's."""
    data_limit: int | None = None
    """Limit on the private memory of each of its processes [bytes]; None: no limit."""
    shared_memory: str = ""
    """Pattern of the shared-memory files that it may leave; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a script ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    peak_bytes: int = 0
    """Peak resident set of its own process."""
    problem: str = ""
    """Why the script could not be started; empty: it ran."""


class ScriptProcess:
    """One script under its supervisor (`supervisor.py`). Used from one thread.

    However this process ends, the script and all its child processes end with it.
    """

    def __init__(self, launch: Launch, folder: Path, output: Path) -> None:
        plan = folder / "launch.json"
        plan.write_text(
            json.dumps({
                "words": launch.words, "environment": dict(launch.environment), "folder": launch.folder,
                "data_limit": launch.data_limit, "output": str(output), "shared_memory": launch.shared_memory,
            }),
            encoding="utf-8",
        )  # fmt: skip
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        assert self._supervisor.stdout is not None
        os.set_blocking(self._supervisor.stdout.fileno(), False)
        self._received = b""
        self.exit: Exit | None = None
        """How the script ended; None: it was running at the last `poll`."""
        self.pid = 0
        """Process ID of the script's own process; 0: it could not be started."""
        self._wait_for(lambda: self.pid != 0, START_SECONDS)

    @property
    def supervisor_pid(self) -> int:
        """The process that all processes of the script descend from."""
        return self._supervisor.pid

    def poll(self) -> Exit | None:
        """How the script ended; None: it is running."""
        if self.exit is None:
            gone = self._supervisor.poll() is not None  # before reading its messages, so that the last ones are read
            self._read_messages()
            if self.exit is None and gone:
                self.exit = Exit(code=-9, problem="the supervisor of the script was killed")
        return self.exit

    def signal(self, letter: bytes) -> None:
        """Send a signal, by its letter in `supervisor.SIGNALS`. Ignored if the script has ended."""
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was closed
            self._supervisor.stdin.write(letter)
            self._supervisor.stdin.flush()

    def end(self) -> None:
        """Kill the script; return when all its processes are gone. May be called twice.

        Not by SIGTERM: a script that handles it may save a checkpoint then, over that of the user's own run.
        """
        if self.poll() is None:
            self.signal(b"k")
            self._wait_for(lambda: False, END_SECONDS)
        self._close()

    def _wait_for(self, condition: Any, seconds: float) -> None:
        """Wait until the condition holds, the script has ended or the time is over."""
        until = time.monotonic() + seconds
        while self.poll() is None and not condition() and time.monotonic() < until:
            time.sleep(0.01)

    def _read_messages(self) -> None:
        assert self._supervisor.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._supervisor.stdout.fileno(), 65_536):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            if "failed" in message:
                self.exit = Exit(code=127, problem=message["failed"])
            elif "exit" in message:
                self.exit = Exit(code=message["exit"], peak_bytes=message["peak_bytes"])

    def _close(self) -> None:
        for stream in (self._supervisor.stdin, self._supervisor.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()  # at the end of its input the supervisor kills all remaining processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(END_SECONDS)


def python_command(words: Sequence[str]) -> list[str]:
    """The command with the ranks' Python in place of `python`, and before a bare script, as torchrun does."""
    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    return [sys.executable, *words] if words[0].endswith(".py") else list(words)
