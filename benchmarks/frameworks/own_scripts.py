"""Scripts for the Hugging Face Trainer and DeepSpeed, tuned as they are, and the outcomes of failing variants.

    python -m benchmarks.frameworks.own_scripts [--only NAME ...] [--trials 4] [--markdown docs/results/own-scripts.md]

Each example is swept by `autotune sweep … -- python train.py …` on two ranks; then one line is added that makes it
fail, hang, end without a measurement, or exceed the memory. Exit code 1 if an outcome differs from the stated one.
Needs the extras `transformers` and `deepspeed`; takes about 8 minutes on two cores.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.wheel_project import ROOT
from benchmarks.common.written_page import table
from search_spaces.outcome import Outcome
from storage.store import open_store

HUNGRY = 'globals().setdefault("kept", []).append(torch.ones(25_000_000))'
"""Allocates 100 MB more at each call."""
SHARED = "--runner local --ranks 2 --trial-seconds 2"
INTRODUCTION = """# Your own script: what was run

Written by `make extras` (`benchmarks/frameworks/own_scripts.py`): the examples for the Hugging Face Trainer and DeepSpeed, on
two ranks of two CPU cores, by the commands shown here. Two lines of each script are autotune's. Outcomes are explained in
[your own training script](../bring-your-own-script.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A script made to fail by one added line."""

    kind: str
    before: str
    """The line is added before the one that begins with this, with the same indentation."""
    line: str
    outcome: Outcome
    """Expected outcome of its trial."""
    limits: tuple[str, ...] = ()
    """Options of its sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """An example and how it is swept."""

    path: str
    options: str
    words: str
    """The script's arguments."""
    variants: tuple[Wrong, ...]

    def command(self, path: str, *further: str) -> list[str]:
        """Arguments of the sweep, without the program."""
        return ["sweep", *shlex.split(f"{SHARED} {self.options}"), *further, "--", "python", path, *shlex.split(self.words)]

    def added(self) -> list[str]:
        """The script's lines that call autotune."""
        return [line for line in (ROOT / self.path).read_text().splitlines() if "# (" in line]

    def changed(self, variant: Wrong) -> str:
        """The script with the line of a variant."""
        lines = (ROOT / self.path).read_text().splitlines()
        (at,) = (number for number, line in enumerate(lines) if line.lstrip().startswith(variant.before))
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        return "\n".join([*lines[:at], f"{indent}{variant.line}", *lines[at:]]) + "\n"


def _variants(step: str, third: str, start: str) -> tuple[Wrong, ...]:
    """Variants with a line before `step`, active where `third` is true, and one with a line before `start`."""
    return (
        Wrong(kind="fails", before=step, line=f'if {third}: raise ValueError("the data is damaged")', outcome=Outcome.FAILED),
        Wrong(
            kind="hangs",
            before=step,
            line=f"if {third}: import time; time.sleep(600)",
            outcome=Outcome.TIMEOUT,
            limits=("--trial-timeout", "90", "--report-seconds", "80"),
        ),
        Wrong(kind="measures nothing", before=start, line="return", outcome=Outcome.FAILED),
        Wrong(
            kind="needs too much memory",
            before=step,
            line=HUNGRY,
            outcome=Outcome.INFEASIBLE,
            limits=("--memory-limit", "2GB"),
        ),
    )


SCRIPTS: Mapping[str, Script] = {
    "Hugging Face Trainer": Script(
        path="examples/hf_trainer/train.py",
        options="--global-batch-size 16 --sequence-length 64 --trial-timeout 240 --script-knob num_workers=0,1",
        words="--output_dir out --report_to none --use_cpu true --per_device_train_batch_size {micro_batch_size} "
        "--gradient_accumulation_steps {gradient_accumulation_steps} --gradient_checkpointing {gradient_checkpointing} "
        "--dataloader_num_workers {num_workers}",
        variants=_variants("tokens = torch.randint", "index % 7 == 3", "trainer.train()"),
    ),
    "DeepSpeed": Script(
        path="examples/deepspeed_script/train.py",
        options="--global-batch-size 32 --launcher deepspeed --report-seconds 600 --trial-timeout 900",  # it may compile, once
        words="--deepspeed --deepspeed_config {config}",
        variants=_variants("last = engine", "engine.global_steps == 3", "while engine.global_steps"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A sweep's terminal output, and the outcome of its first trial."""

    printed: str
    outcome: Outcome | None
    message: str


def sweep(words: list[str], folder: Path) -> Seen:
    """Run a sweep in `folder`, with its own database."""
    with tempfile.TemporaryDirectory() as place:
        database = f"{place}/jobs.db"
        environment = {**os.environ, "AUTOTUNE_DB": database, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "160"}
        program = str(Path(sys.executable).with_name("autotune"))
        answer = subprocess.run([program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
        with open_store(database) as store:
            first = next((trial for job in store.jobs.newest() for trial in store.trials.of(job.id)), None)
    message = first.result.message if first is not None and first.result is not None else ""
    return Seen(printed=answer.stderr + answer.stdout, outcome=first.outcome if first else None, message=message)


def part(name: str, script: Script, arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Lines of markdown for one script, and whether every outcome is as expected."""
    lines = [
        "",
        f"## {name}",
        "",
        f"[{script.path}](../../{script.path}); autotune's lines:",
        "",
        "```python",
        *script.added(),
        "```",
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / script.path).parent.mkdir(parents=True)
        (folder / script.path).write_text((ROOT / script.path).read_text())
        words = script.command(script.path, "--trials", str(arguments.trials), "--confirm-repeats", "1")
        seen = sweep(words, folder)
        lines += ["", "```", f"$ autotune {_typed(words)}", *seen.printed.strip().splitlines(), "```", ""]
        print("\n".join(lines), flush=True)
        rows = list(_wrong(script, folder))
    headings = ["added line", "effect", "options", "outcome", "message"]
    right = seen.outcome is Outcome.OK and [row[3] for row in rows] == [f"{variant.outcome}" for variant in script.variants]
    return [*lines, *table(headings, rows)], right


def _wrong(script: Script, folder: Path) -> Iterator[list[str]]:
    for variant in script.variants:
        (folder / "train.py").write_text(script.changed(variant))
        pins = (
            "--pin",
            "zero_stage=0",
            "--pin",
            "micro_batch_size=4",
            "--trials",
            "1",
            "--confirm-repeats",
            "0",
            *variant.limits,
        )
        seen = sweep(script.command("train.py", *pins), folder)
        with_ = f"`{shlex.join(variant.limits)}`" if variant.limits else ""
        row = [f"`{variant.line}`", variant.kind, with_, f"{seen.outcome}", seen.message.replace("|", "\\|")]
        print(" | ".join(row), flush=True)
        yield row


def _typed(words: list[str]) -> str:
    """The command as typed; braces need no quoting here."""
    return " ".join(word if set(word) & set("{}") else shlex.quote(word) for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SCRIPTS], default=[*SCRIPTS], metavar="NAME")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    parts = [part(name, SCRIPTS[name], arguments) for name in arguments.only]
    if arguments.markdown:
        lines = [INTRODUCTION, *(line for lines, _ in parts for line in lines)]
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(right for _, right in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
