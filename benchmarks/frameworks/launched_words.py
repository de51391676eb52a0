"""The words that a launch script gives to its training program, as bash runs it with launchers that only write them down.

Imports only the standard library, because it runs beside the frameworks.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path


class NotLaunchedError(Exception):
    """The script starts no training program."""


STUB = """#!/bin/bash
# Writes the words that a launcher gets, and its variables; goes on with the program that srun and the like start.
case "$(basename "$0")" in
  srun|numactl|env|nsys|uv|timeout|nohup)
    while (($#)); do
      case "$(basename "$1")" in bash|sh|torchrun|python|python3|deepspeed|accelerate|numactl|nsys) exec "$@";; esac
      shift
    done
    exit 0;;
esac
{ printf '%s\\0' "$(basename "$0")" "$@"; printf '\\0'; } >> "$JUDGE_CALLS"
/usr/bin/env > "$JUDGE_CALLS.env"
"""
HARMLESS = (
    "bash",
    "sh",
    "basename",
    "dirname",
    "realpath",
    "readlink",
    "date",
    "cat",
    "echo",
    "printf",
    "seq",
    "tr",
    "cut",
    "sed",
    "awk",
    "grep",
    "head",
    "tail",
    "wc",
    "sort",
    "uniq",
    "tee",
    "true",
    "false",
    "expr",
    "ls",
    "sleep",
    "env",
    "hostname",
    "whoami",
)
STUBBED = (
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "accelerate",
    "trl",
    "srun",
    "numactl",
    "env",
    "nsys",
    "uv",
    "timeout",
    "nohup",
)
SILENT = (
    "mkdir",
    "rm",
    "cp",
    "mv",
    "ln",
    "chmod",
    "touch",
    "pip",
    "wget",
    "curl",
    "git",
    "scontrol",
    "nvidia-smi",
    "sleep",
    "sbatch",
    "module",
)


def launched(path: Path, root: Path, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Run a script with bash: the words of the training program, and its variables.

    The script runs as a user without rights, with harmless programs alone.
    """
    with tempfile.TemporaryDirectory() as place:
        programs, calls = Path(place) / "bin", Path(place) / "calls"
        programs.mkdir()
        for name in HARMLESS:
            target = next((f"{folder}/{name}" for folder in ("/usr/bin", "/bin") if Path(folder, name).exists()), None)
            if target and name not in STUBBED:
                (programs / name).symlink_to(target)
        for name in STUBBED:
            (programs / name).write_text(STUB, encoding="utf-8")
            (programs / name).chmod(0o755)
        for name in SILENT:
            (programs / name).unlink(missing_ok=True)
            (programs / name).write_text("#!/bin/bash\nexit 0\n", encoding="utf-8")
            (programs / name).chmod(0o755)
        (programs / "nproc").write_text("#!/bin/bash\necho 8\n", encoding="utf-8")
        (programs / "nproc").chmod(0o755)
        Path(place).chmod(0o777)
        environment = {
            "PATH": str(programs),
            "HOME": place,
            "JUDGE_CALLS": str(calls),
            **slurm_variables(path.read_text(errors="replace")),
        }
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
        subprocess.run(
            ["/bin/bash", str(path), *words], cwd=root, env=environment, capture_output=True, timeout=60, check=False, **nobody
        )
        if not calls.exists():
            raise NotLaunchedError("bash starts no training program")
        variables = dict(line.split("=", 1) for line in Path(f"{calls}.env").read_text().splitlines() if "=" in line)
        programs_called = [call.split("\0") for call in calls.read_text(encoding="utf-8").split("\0\0") if call.strip("\0")]
    return max(programs_called, key=len), variables


def root_of(path: Path) -> Path:
    """The root of the file's repository, whose folders are named `OWNER+NAME@COMMIT`."""
    return next((folder for folder in path.parents if "@" in folder.name), path.parent)


def slurm_variables(text: str) -> dict[str, str]:
    """Variables that Slurm sets from the lines `#SBATCH` of a script: sbatch(1), output environment variables."""
    options = dict(re.findall(r"^#SBATCH\s+--([\w-]+)[= ]+([^\s#]+)", text, re.MULTILINE))
    variables = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "node0",
    }
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    }
    return variables | {name: value for key, value in options.items() for name in names.get(key, ())}


def world_of(words: list[str], variables: dict[str, str]) -> int | None:
    """Processes of torchrun's words."""
    sizes = {}
    for index, word in enumerate(words):
        name, _, value = word.lstrip("-").replace("-", "_").partition("=")
        name = {"num_gpus": "nproc_per_node", "num_nodes": "nnodes"}.get(name, name)
        if name in ("nproc_per_node", "nnodes"):
            sizes[name] = value or (words[index + 1] if index + 1 < len(words) else "")
    if words[0] in ("torchrun", "deepspeed") or sizes:
        counts = [sizes.get(name, "1") for name in ("nproc_per_node", "nnodes")]
        return int(counts[0]) * int(counts[1]) if all(count.isdigit() for count in counts) else None
    tasks = variables.get("SLURM_NTASKS") or str(
        int(variables.get("SLURM_NNODES", 0)) * int(variables.get("SLURM_NTASKS_PER_NODE", 0) or 0)
    )
    return int(tasks) or None
