"""What the tests run as a user's script: without torch, so that a trial takes a second. Its first argument says how it does."""
# ruff: noqa: T201  a script prints

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import autotune

STEP_SECONDS = 0.01
RANK = int(os.environ["RANK"])


def step(number: int, **told: object) -> None:
    time.sleep(STEP_SECONDS)
    autotune.report(samples=8, step=number, **{"loss": 1.0 / (1 + number), **told})


def steps(*_: str) -> None:
    for number in range(100_000):
        step(number)


def wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def folder(path: str) -> None:
    """Each rank waits for the file of the other in the trial's folder."""
    Path(path, f"of-{RANK}").touch()
    wait_for(Path(path, f"of-{1 - RANK}"))
    steps()


def saves_when_terminated(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: Path(path).touch())
    steps()


def resumes(*_: str) -> None:
    """As many scripts do: writes a checkpoint to the current folder, and has nothing to do if there is one."""
    if not Path("snapshot.pt").exists():
        if RANK == 0:
            Path("state.json").write_text("of a trial")
            Path("snapshot.pt").write_text("of a trial")
        steps()


def few(count: str) -> None:
    for number in range(int(count)):
        step(number)


def on_rank_0(*_: str) -> None:
    if RANK:
        time.sleep(600)
    steps()


def crash(*_: str) -> None:
    """Rank 1 fails; rank 0 sees what is left of it."""
    few("3")
    begun = Path(tempfile.gettempdir(), f"crash-{os.environ['MASTER_PORT']}")
    if RANK:
        part = begun.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.replace(begun)
        try:
            int("seven")
        except ValueError as error:
            raise RuntimeError("the layers are out of order") from error
    wait_for(begun)
    other = Path("/proc", begun.read_text())
    begun.unlink()
    while other.exists():  # its own error has been printed
        time.sleep(0.01)
    print("[rank0]: Traceback (most recent call last):", file=sys.stderr)
    print("[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer", file=sys.stderr)
    os._exit(1)


def hang(count: str) -> None:
    few(count)
    wait_for_ever()


def wait_for_ever(*_: str) -> None:
    time.sleep(600)


def silent(*_: str) -> None:
    while True:
        print("training", flush=True)
        time.sleep(0.01)


def compiling(*_: str) -> None:
    """Starts a process with the name of a compiler."""
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'cc1plus', 0, 0, 0); time.sleep(600)"  # 15: PR_SET_NAME
    with subprocess.Popen([sys.executable, "-c", named]):
        silent()


def mute(*_: str) -> None:
    """Works, and neither prints nor reports."""
    while True:
        sum(range(100_000))


def allocate(gibibytes: str) -> None:
    few("3")
    if RANK:
        time.sleep(600)
    whole = bytearray(int(float(gibibytes) * 2**30))
    steps(str(len(whole)))


def out_of_memory(*_: str) -> None:
    few("3")
    print("Traceback (most recent call last):\n  File 'train.py', line 3, in <module>", file=sys.stderr)
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", file=sys.stderr)
    os._exit(1)


def not_a_number(*_: str) -> None:
    few("3")
    step(3, loss=float("nan"))
    time.sleep(600)


def misused(*_: str) -> None:
    few("3")
    autotune.report(samples="many")
    time.sleep(600)


def log(*_: str) -> None:
    """The last rank logs, as Megatron's does, with a progress bar's line ends."""
    for number in range(100_000):
        time.sleep(STEP_SECONDS)
        if RANK == 1:
            print(f"\x1b[32mstep {number}\x1b[0m loss: 2.5 samples_per_second=1,600.0", end="\r", flush=True)


def waits(*_: str) -> None:
    def batches():
        while True:
            time.sleep(STEP_SECONDS)
            yield 1

    for number, _batch in enumerate(autotune.batches(batches())):
        step(number)


def own_samples(*_: str) -> None:
    for _number in range(100_000):
        time.sleep(STEP_SECONDS)
        autotune.report(samples=4)


def children(*_: str) -> None:
    """Starts a process that leaves its group and its session."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(os.environ["PIDS"], f"{os.getpid()}-{child.pid}").touch()
    hang("3")


def killed(*_: str) -> None:
    few("3")
    if RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def port_taken(marks: str) -> None:
    """As where another program has bound the port in between, the first time."""
    if not (mark := Path(marks, str(RANK))).exists():
        mark.touch()
        raise OSError("The server socket has failed to listen: EADDRINUSE")
    steps()


def show(file: str, *words: str) -> None:
    """What the script was told."""
    names = [
        name for name in os.environ if name.startswith(("RANK", "LOCAL", "WORLD", "MASTER", "CROSS", "TORCHEL", "DS_", "MY"))
    ]
    told = [f"{name}={os.environ[name]}" for name in sorted(names)]
    mine = Path(f"{file}.{RANK}")
    part = mine.with_name(mine.name + ".part")
    part.write_text("\n".join([str(Path.cwd()), sys.argv[1], *words, *told]))
    part.replace(mine)
    wait_for(*(Path(f"{file}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))))  # one that is timed ends the trial
    steps()


if __name__ == "__main__":
    how, *rest = (word for word in sys.argv[1:] if not word.startswith("--local_rank="))
    globals()[how](*rest)
