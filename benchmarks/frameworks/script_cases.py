"""Training scripts and modules that were once answered wrongly, swept again: one line for each, right or wrong.

    python -m benchmarks.frameworks.script_cases [FOLDER] [--only NAME ...] [--python PROGRAM]

The folder has a folder for each case, with `train.py` or `m.py`. The default is ../shared/cases/scripts. Each command runs on
two CPU ranks, in a copy of the case's folder and with a new database; the answer is compared with the script's own count.
`--python`: a Python that has DeepSpeed, Accelerate and Transformers, for the scripts that import them. Exit code 1 if an
answer is wrong.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from benchmarks.common.wheel_project import ROOT

SWEEP = "sweep --runner local --ranks 2 --trial-seconds 0.5"
BOTH = "--batch {micro_batch_size} --accumulate {gradient_accumulation_steps}"
REAL_CHECKPOINT = "step of the real run\nend\n"
TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a sweep printed, the best configuration that it wrote, and its trials."""

    printed: str
    document: Mapping[str, Any] | None
    """The exported best configuration; None: there is no answer."""
    trials: Sequence[Mapping[str, Any]]

    @property
    def micro_batch_size(self) -> int | None:
        """The micro-batch size of the answer."""
        return None if self.document is None else self.document["best"]["config"]["micro_batch_size"]

    @property
    def rate(self) -> float:
        """Samples/s of the answer; 0: there is no answer."""
        return 0.0 if self.document is None else self.document["decision"]["rate"]["mean"]

    def with_outcome(self, *outcomes: str) -> Iterator[Mapping[str, Any]]:
        """The trials that have one of these outcomes."""
        return (trial for trial in self.trials if trial["outcome"] in outcomes)


class Workplace:
    """A copy of a case's folder, and the commands that run in it."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        programs = os.pathsep.join([str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        database = {"AUTOTUNE_DB": str(folder.parent / "cases.db"), "PYTHONPATH": str(ROOT)}
        self._environment = {**os.environ, **database, "PATH": programs, "COLUMNS": "160", "DS_ACCELERATOR": "cpu"}

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a program in the folder; its standard error is in its output."""
        return subprocess.run(
            words, cwd=self.folder, env=self._environment, text=True, timeout=TIMEOUT_SECONDS, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def autotune(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run `autotune TEXT`."""
        return self.run([sys.executable, "-c", "import autotune.cli; autotune.cli.main()", *shlex.split(text)])

    def sweep(self, options: str, command: str = "") -> Answer:
        """Sweep a command or a module."""
        printed = self.autotune(f"{SWEEP} {options} {command and f'-- {command}'}").stdout
        job = re.search(r"\bjob (\d{8}-\d{6}-\w+)", printed)
        trials = json.loads(self.autotune(f"show {job[1]} --json").stdout)["trials"] if job else []
        written = self.folder / "best-config.json"
        document = json.loads(written.read_text()) if written.exists() else None
        return Answer(printed=printed, document=document, trials=trials)

    def launch(self, answer: Answer) -> str:
        """Run the first launch line that the answer prints; return its output."""
        line = re.search(r"^launch:\n  (.+)$", answer.printed, re.MULTILINE)
        return self.run(["bash", "-c", line[1]]).stdout if line else "no launch line is printed"


Problems = Iterator[str]


def _largest_is_best(answer: Answer, micro_batch_size: int) -> Problems:
    if answer.micro_batch_size != micro_batch_size:
        yield f"answers micro_batch_size={answer.micro_batch_size}, and {micro_batch_size} is faster by far"


def accelerate_launch_line(place: Workplace) -> Problems:
    answer = place.sweep(
        "--launcher accelerate --trials 1 --confirm-repeats 0", f"{place.python} train.py --batch {{micro_batch_size}}"
    )
    output = place.launch(answer)
    if "PROCESSES 2" not in output:
        yield f"the printed line does not start two processes: {output.strip()[-200:]!r}"


def deepspeed_file(place: Workplace) -> Problems:
    command = f"{place.python} train.py --deepspeed --deepspeed_config {{config}}"
    answer = place.sweep(
        "--trials 2 --confirm-repeats 0 --global-batch-size 16 --launcher deepspeed --pin zero_stage=0,2", command
    )
    exported = place.autotune("export --format deepspeed --out config.json")
    if exported.returncode or answer.document is None:
        yield f"nothing was exported: {exported.stdout.strip()[-200:]}"
        return
    script = "train.py --deepspeed --deepspeed_config config.json --steps 3"
    output = place.run([place.python, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script.split()]).stdout
    optimizer = re.search(r"OPTIMIZER (\S+)", output)
    if optimizer is None or optimizer[1] in ("NoneType", "DeepSpeedOptimizerCallable"):
        yield f"the exported file makes no optimizer: {optimizer[1] if optimizer else output.strip()[-200:]}"


def regular_evaluation(place: Workplace) -> Problems:
    answer = place.sweep(
        "--trials 4 --confirm-repeats 1 --global-batch-size 32 --pin micro_batch_size=1,16", f"python train.py {BOTH}"
    )
    if not re.search(r"1 of \d+ steps takes .* longer", answer.printed):
        yield from _largest_is_best(answer, 16)


def batch_halved_by_script(place: Workplace) -> Problems:
    words = (
        "--per_device_train_batch_size {micro_batch_size} --gradient_accumulation_steps {gradient_accumulation_steps} "
        "--output_dir out --report_to none --use_cpu true --max_steps 400 --save_strategy no --disable_tqdm true"
    )
    answer = place.sweep(
        "--confirm-repeats 0 --global-batch-size 32 --trials 3 --pin micro_batch_size=4,16", f"{place.python} train.py {words}"
    )
    rates = {
        trial["config"]["micro_batch_size"]: trial["result"]["samples_per_second"]["mean"]
        for trial in answer.with_outcome("OK")
    }
    if not rates:
        yield f"nothing was measured: {answer.printed.strip()[-200:]}"
    if rates.get(16, 0.0) > 1.5 * rates.get(4, float("inf")):
        yield f"{rates[16]:.0f} samples/s of micro_batch_size=16, which trains micro-batches of 4 as {rates[4]:.0f}"


def loss_by_division(place: Workplace) -> Problems:
    for factory in ("ignore_index", "sum_loss", "contrastive", "noise_in_forward"):
        answer = place.sweep(f"m:{factory} --trials 4 --trial-seconds 0.3 --confirm-repeats 0 --global-batch-size 16")
        for trial in answer.with_outcome("WRONG", "FAILED"):
            yield f"{factory}: {trial['outcome']} {trial['result']['message'][:160]}"
        before, _, _ = answer.printed.partition("trial 0")
        if not re.search(r"loss:? depends on|random numbers", before):
            yield f"{factory}: nothing is said before the first trial"


def total_accumulation(place: Workplace) -> Problems:
    pattern = r"iter \d+: loss (?P<loss>[\d.]+), time (?P<step_milliseconds>[\d.]+)ms"
    answer = place.sweep(
        f"--confirm-repeats 0 --global-batch-size 64 --trials 3 --pin micro_batch_size=4,16 --pattern '{pattern}'",
        f"python train.py {BOTH}",
    )
    for trial in answer.with_outcome("OK"):
        if "{total_gradient_accumulation_steps}" not in trial["result"]["message"]:
            yield "the script trains half of the global batch, and nothing says so"
    if "{total_gradient_accumulation_steps}" not in answer.printed:
        yield "the placeholder for its accumulation is not named"


def time_of_one_micro_batch(place: Workplace) -> Problems:
    answer = place.sweep(
        r"--confirm-repeats 1 --global-batch-size 64 --trials 4 --pin micro_batch_size=1,32 "
        r"--pattern 'Time (?P<step_seconds>[\d.]+).*Loss (?P<loss>\S+)'",
        "python train.py -b {micro_batch_size}",
    )
    yield from _largest_is_best(answer, 32)
    true = re.search(r"TRUE samples/s ([\d.]+)", place.launch(answer))
    if true is None or not 0.5 < answer.rate / float(true[1]) < 2.0:  # other programs may run beside it
        yield f"{answer.rate:.0f} samples/s, and the script counts {true[1] if true else 'none'}"


def deep_copies(place: Workplace) -> Problems:
    for factory in ("plain", "deep", "mha", "ema", "encoder", "transformer"):
        for command in ("plan --global-batch-size 16", "predict --global-batch-size 16", "capacity"):
            answer = place.autotune(f"{command} m:{factory} --cluster 2x24GB")
            if answer.returncode:
                yield f"{command} m:{factory}: {answer.stdout.strip()[-200:]}"


def emergency_checkpoint(place: Workplace) -> Problems:
    checkpoint = place.folder / "out" / "last.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_text(REAL_CHECKPOINT)
    answer = place.sweep("--trials 2 --confirm-repeats 0 --global-batch-size 16", f"python train.py {BOTH}")
    if not answer.rate:
        yield f"nothing was measured: {answer.printed.strip()[-200:]}"
    if checkpoint.read_text() != REAL_CHECKPOINT:
        yield f"a trial wrote the checkpoint of the real run: {checkpoint.read_text()!r}"


def slow_first_steps(place: Workplace) -> Problems:
    answer = place.sweep(
        "--trials 5 --trial-seconds 1 --confirm-repeats 1 --global-batch-size 64 --pin micro_batch_size=1,4,32",
        f"python train.py {BOTH}",
    )
    yield from _largest_is_best(answer, 32)


def resumed_snapshot(place: Workplace) -> Problems:
    answer = place.sweep(
        "--confirm-repeats 1 --global-batch-size 32 --trials 4 --pin micro_batch_size=1,16", f"python train.py {BOTH}"
    )
    yield from _largest_is_best(answer, 16)
    for trial in answer.with_outcome("FAILED"):
        if "call autotune.report" in trial["result"]["message"]:
            yield f"trial {trial['number']}: {trial['result']['message'][:160]}"
    if re.search(r"probability that nothing tried is better: > 99", answer.printed) and answer.micro_batch_size != 16:
        yield "a probability although the rival could not be confirmed"


def progress_bar(place: Workplace) -> Problems:
    options = "--trials 2 --confirm-repeats 0 --report-seconds 10 --global-batch-size 16 --pin micro_batch_size=1,8"
    silent = place.sweep(rf"{options} --pattern '(?P<step_seconds>[\d.]+)s/it'", f"python train.py {BOTH}")
    if not any("it/s" in trial["result"]["message"] for trial in silent.with_outcome("FAILED")):
        yield "a pattern matches nothing, and the message does not show the last line of the log"
    answer = place.sweep(rf"{options} --pattern '(?P<steps_per_second>[\d.]+)it/s'", f"python train.py {BOTH}")
    yield from _largest_is_best(answer, 8)


def uncalled_blocks(place: Workplace) -> Problems:
    pins = "--pin zero_stage=0,1,2,3 --pin micro_batch_size=8 --pin activation_checkpointing=none,full"
    for factory in ("build", "attribute"):
        answer = place.sweep(
            f"m:{factory} --trials 8 --trial-seconds 0.3 --confirm-repeats 0 --control-every 0 --global-batch-size 16 "
            f"--no-racing --strategy grid {pins}"
        )
        for trial in answer.with_outcome("FAILED", "WRONG", "LOST"):
            yield f"{factory} {trial['config']['zero_stage']}: {trial['outcome']} {trial['result']['message'][:160]}"
        if not answer.trials:
            yield f"{factory}: {answer.printed.strip()[-200:]}"


CASES: Mapping[str, Callable[[Workplace], Problems]] = {
    "accelerate_launch_line_cpu": accelerate_launch_line,
    "deepspeed_export_without_optimizer": deepspeed_file,
    "eval_every_10": regular_evaluation,
    "halves_batch_itself": batch_halved_by_script,
    "loss_depends_on_micro_batch": loss_by_division,
    "nanogpt_total_accumulation": total_accumulation,
    "pattern_step_time_no_accumulation": time_of_one_micro_batch,
    "plan_deepcopy": deep_copies,
    "sigterm_checkpoint": emergency_checkpoint,
    "slow_first_steps": slow_first_steps,
    "snapshot_resume": resumed_snapshot,
    "tqdm_rate": progress_bar,
    "uncalled_blocks": uncalled_blocks,
}
"""Name of a case's folder -> what is asked there, with what is wrong in the answers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT.parent / "shared" / "cases" / "scripts", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--python", default=sys.executable, metavar="PROGRAM")
    arguments = parser.parse_args()
    names = [path.name for path in sorted(arguments.folder.glob("*/")) if not arguments.only or path.name in arguments.only]
    wrong = 0
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            place = Workplace(Path(copytree(arguments.folder / name, Path(folder) / "case")), arguments.python)
            problems = list(CASES[name](place)) if name in CASES else ["it is not known what is right"]
        wrong += bool(problems)
        seconds = time.monotonic() - began
        print(f"{name:36} {'wrong' if problems else 'right'} {seconds:4.0f} s  {'; '.join(problems)}", flush=True)
    print(f"{len(names)} cases, {wrong} wrong" if names else f"{arguments.folder} has no cases")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
