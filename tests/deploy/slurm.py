#!/usr/bin/env python3
"""Stand-ins for Slurm's sbatch, srun and scontrol, whose nodes are all this machine. The name of the link to this file chooses.

sbatch reads the options of the command line and of the script, refuses those that it does not know, and starts the script in
the background as Slurm does: in the folder of the submission, with the job's variables, with its log. When the script ends, so
do its steps; a job that was requeued begins again under its number. SLURM_STAND_IN is a folder: batch.pid there has the process
of the script, ended its last status.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["SLURM_STAND_IN"])
HOST = os.uname().nodename
JOB = "4242"
BATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "open-mode", "output", "signal"}
BATCH_FLAGS = {"exclusive", "requeue"}
STEP = {"nodes", "ntasks", "ntasks-per-node", "nodelist", "exclude"}
STEP_FLAGS = {"overlap"}


def split(words: list[str], valued: set[str], flags: set[str]) -> tuple[dict[str, str], list[str]]:
    """The options before the first other word, and what follows them."""
    options: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        if name not in valued | flags or (name in valued) != bool(value):
            raise SystemExit(f"unknown option --{name} {value}")
        options[name] = value
    return options, words


def sbatch(words: list[str]) -> None:
    typed, (script, *arguments) = split(words, BATCH, BATCH_FLAGS)
    lines = Path(script).read_text("utf-8").splitlines()
    written = [word for line in lines if line.startswith("#SBATCH ") for word in line.split()[1:]]
    options = split(written, BATCH, BATCH_FLAGS)[0] | typed
    assert options["signal"].startswith("B:TERM"), "steps would get the signal too"
    os.write(1, f"Submitted batch job {JOB}\n".encode())
    if os.fork():
        return
    os.setsid()
    for stream in range(3):  # who submits does not wait for them
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    variables = os.environ | {
        "SLURM_JOB_ID": JOB,
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_JOB_NODELIST": f"{HOST}[1-{options['nodes']}]",
        "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GPUS_ON_NODE": options["gpus-per-node"],
    }
    requeued = STATE / "requeued"
    with Path(options["output"].replace("%j", JOB)).open("a") as log:
        for restart in range(9):
            requeued.unlink(missing_ok=True)
            # Slurm runs a copy of the script.
            batch = subprocess.Popen(
                ["bash", "-c", Path(script).read_text("utf-8"), script, *arguments],
                env=variables | {"SLURM_RESTART_COUNT": str(restart)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            (STATE / "batch.pid").write_text(str(batch.pid))
            status = batch.wait()
            for pid in (STATE / "steps").read_text().split() if (STATE / "steps").exists() else ():
                end_step(int(pid))
            (STATE / "steps").unlink(missing_ok=True)
            if not requeued.exists():
                break
    (STATE / "ended").write_text(str(status))


def end_step(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGTERM)
        subprocess.run(
            ["timeout", "30", "bash", "-c", f"while kill -0 -- -{pid}; do sleep 0.1; done"], stderr=subprocess.DEVNULL
        )
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def srun(words: list[str]) -> None:
    options, command = split(words, STEP, STEP_FLAGS)
    assert "exclude" in options or options["nodelist"] == HOST
    processes = []
    for _ in range(int(options["nodes"])):
        processes.append(subprocess.Popen(command, start_new_session=True))
        with (STATE / "steps").open("a") as steps:
            steps.write(f"{processes[-1].pid}\n")
    raise SystemExit(max(process.wait() for process in processes))


def scontrol(words: list[str]) -> None:
    match words:
        case ["show", "hostnames", nodes]:
            os.write(1, f"{HOST}\n".encode() * int(nodes.partition("-")[2].rstrip("]")))
        case ["requeue", job]:
            assert job == JOB
            (STATE / "requeued").touch()
        case _:
            raise SystemExit(f"scontrol: {words}")


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:])
