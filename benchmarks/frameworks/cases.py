"""Recipes that were once answered wrongly, asked again: one line for each, right or wrong, with what was printed.

    python -m benchmarks.frameworks.cases [FOLDER]

The folder has a text file for each recipe, whose line `command: autotune …` says what is asked; the recipes lie beside it. The
default is ../shared/cases/recipes. Each command runs in this process, in a copy of the folder and with a new database. Exit
code 1 if an answer is wrong.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.wheel_project import ROOT

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What an answer must be."""

    status: int
    """Exit status."""
    has: tuple[str, ...] = ()
    """Patterns that the answer must have."""
    lacks: tuple[str, ...] = ()
    """Patterns that it must not have."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Path in the document of `--json` -> its value, or its least and greatest one."""
    written: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """File that the command writes -> patterns that it must have, and those that it must not have."""


NOTHING = r"nothing that .* would refuse, ignore or change"
UNDECIDED_DEGREES = ("sequence parallelism needs", r"\bdoes not fit", "refused", r"\bpredicted \d")
EXPECTATIONS: Mapping[str, Expectation] = {
    "accelerate-ddp": Expectation(
        status=1,
        has=("does not fit", r"distributed_type=(FSDP|DEEPSPEED)", r"\d+ GiB"),
        lacks=("use more devices", "smaller model"),
    ),
    "accelerate-ds-file-without-zero": Expectation(status=1, has=("refused", "zero_optimization")),
    "accelerate-ds-nested-keys": Expectation(
        status=1,
        has=tuple(
            rf"{key}\b.*ignored"
            for key in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "overlap_comm",
                "stage3_max_live_parameters",
                "stage3_prefetch_bucket_size",
                "fp16",
            )
        ),
        lacks=("zero_stage: ignored", "gradient_clipping: ignored"),
    ),
    "accelerate-fp8": Expectation(status=0, has=(NOTHING,), lacks=("refused", "is not known")),
    "accelerate-multi-machine": Expectation(status=1, has=("compute_environment: refused", "LOCAL_MACHINE")),
    "accelerate-ram-efficient-loading": Expectation(
        status=1,
        has=("fsdp_cpu_ram_efficient_loading.*refused|refused.*fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states=true"),
    ),
    "accelerate-sequence-parallel": Expectation(
        status=0, values={"files.0.global_batch_size": 4, "files.0.ranks": 4}, lacks=("sp_size=4: is not a knob",)
    ),
    "accelerate-zero3": Expectation(
        status=0,
        has=(r"sequence_length=\d+ \(--sequence-length\)|not predicted.*--sequence-length",),
        lacks=(r"957 GiB", r"yaml:\d+: .*does not fit"),
    ),
    "axolotl": Expectation(
        status=0, has=(r"nothing that Axolotl|Axolotl.*not read",), lacks=("Accelerate has no such setting", "refused")
    ),
    "carry-sbatch-nodes": Expectation(
        status=0,
        written={
            "carried.sh": (
                (r"#SBATCH --nodes=16\b", r"#SBATCH --ntasks-per-node=4\b", r"#SBATCH --gpus-per-node=4\b", r"(?m)^srun\b"),
                (r"--nodes=32", r"(?m)^torchrun\b"),
            )
        },
    ),
    "deepspeed-closed-sections": Expectation(
        status=1,
        has=tuple(
            rf"{re.escape(key)}: refused"
            for key in (
                "compile.disable",
                "compile.backend",
                "tensorboard.dir",
                "wandb.entity",
                "csv_monitor.path",
                "hybrid_engine.tp",
                "timers.throughput.on",
                "leaf_module.class",
                "zenflow.ratio",
            )
        ),
    ),
    "deepspeed-comment-key": Expectation(status=1, has=("_comment: ignored",), lacks=("did you mean",)),
    "deepspeed-communication-type": Expectation(
        status=1, has=("communication_data_type: refused", "fp16", "bf16", "fp32"), lacks=("bfp16",)
    ),
    "deepspeed-duplicate-keys": Expectation(status=1, has=("train_micro_batch_size_per_gpu.*(twice|duplicate|2 times)",)),
    "deepspeed-sequence-parallel": Expectation(status=0, has=(NOTHING,), lacks=("refused",)),
    "deepspeed-suffix": Expectation(status=0, has=(NOTHING,)),
    "megatron-array-parens": Expectation(status=0, has=(NOTHING,), lacks=("is not a whole number",)),
    "megatron-empty-variable": Expectation(
        status=0, has=(NOTHING, "recompute-granularity"), lacks=("is not a boolean", "refused")
    ),
    "megatron-mla-gqa": Expectation(status=1, has=("refused", "group-query-attention|num-query-groups", "latent")),
    # The described model is deepseek-v2-lite, of which `predict` says 57 GiB: 51 GiB with the fused kernels that Megatron-LM
    # always runs, as `lint --model deepseek-v2-lite` says too.
    "megatron-mla": Expectation(
        status=0,
        values={"files.0.predicted.peak_memory_band.mean": (50.9 * GIB, 60 * GIB), "files.0.ranks": 16},
        lacks=(r"(multi-latent-attention|kv-lora-rank)=\w+: is not a knob",),
    ),
    "megatron-open-degrees": Expectation(
        status=0,
        has=("not predicted", "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "num-layers"),
        lacks=UNDECIDED_DEGREES,
    ),
    "megatron-sbatch-variables": Expectation(
        status=0, has=(NOTHING,), lacks=("sequence parallelism needs", r"sh:\d+: .*does not fit")
    ),
    "megatron-sourced-env": Expectation(
        status=0, has=(r"env\.sh", "CUDA_DEVICE_MAX_CONNECTIONS"), lacks=("CUDA_DEVICE_MAX_CONNECTIONS: refused",)
    ),
    "model-bnb4": Expectation(status=0, has=(r"4[- ]bits?|frozen[_-]bits[ =]4",)),
    "model-gemma3-text": Expectation(status=0, has=(r"3[,.]88",), lacks=("is missing",)),
    "model-gemma3-wrapper": Expectation(status=0, has=(r"3[,.]88", "vision"), lacks=("not a supported family",)),
    "nemo-1": Expectation(status=2, has=(r"NeMo 1",), lacks=("Megatron-Bridge \\w+ would refuse",)),
    "titan-0.1-compile": Expectation(
        status=0, has=(NOTHING,), lacks=("needs a compiled model", "training.compile=true: is not a knob")
    ),
}
"""Name of a case -> what its answer must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed and wrote."""

    status: int
    text: str
    files: Mapping[str, str]


def commands(case: Path) -> list[list[str]]:
    """Our commands in a case's line `command: …`; programs that show a difference are left out."""
    line = next(line for line in case.read_text(encoding="utf-8").splitlines() if line.startswith("command:"))
    parts = (shlex.split(part) for part in line.removeprefix("command:").split(";"))
    return [words[1:] for words in parts if words and words[0] == "autotune"]


def ask(words: list[str], folder: Path) -> Answer:
    """Run one of our commands in this process, in `folder`, with a new database."""
    from autotune.cli.app import app
    from autotune.cli.question_options import without_command
    from autotune.cli.status import exit_status

    printed, previous = io.StringIO(), Path.cwd()
    names = {path.name for path in folder.iterdir()}
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {"AUTOTUNE_DB": f"{data}/jobs.db", "XDG_DATA_HOME": data, "NO_COLOR": "1", "COLUMNS": "200"}
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        os.chdir(folder)
        try:
            status = int(exit_status(app, *without_command(words)))
        except Exception as error:
            printed.write(f"Traceback: {type(error).__name__}: {error}\n")
            status = -1
        finally:
            os.chdir(previous)
    written = [path for path in folder.iterdir() if path.name not in names and path.is_file()]
    return Answer(
        status=status, text=printed.getvalue(), files={path.name: path.read_text(encoding="utf-8") for path in written}
    )


def problems(expected: Expectation, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer."""
    if answer.status != expected.status:
        yield f"exit {answer.status}, not {expected.status}"
    yield from (f"lacks /{pattern}/" for pattern in expected.has if not re.search(pattern, answer.text))
    yield from (f"says {match[0]!r}" for pattern in expected.lacks if (match := re.search(pattern, answer.text)))
    for path, wanted in expected.values.items():
        value = value_at(answer.text, path)
        right = wanted[0] <= value <= wanted[1] if isinstance(wanted, tuple) and value is not None else value == wanted
        if not right:
            yield f"{path} is {value}, not {wanted}"
    for name, (has, lacks) in expected.written.items():
        text = answer.files.get(name, "")
        yield from (f"{name} lacks /{pattern}/" for pattern in has if not re.search(pattern, text))
        yield from (f"{name} says {match[0]!r}" for pattern in lacks if (match := re.search(pattern, text)))


def value_at(text: str, path: str) -> Any:
    """A value of the JSON document; None: there is none."""
    try:
        value: Any = json.loads(text)
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return value


def deciding_line(expected: Expectation | None, text: str) -> str:
    """The first line that an expectation is about, else the first one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(nothing)"]
    patterns = (*expected.lacks, *expected.has) if expected else ()
    return next((line for pattern in patterns for line in lines if re.search(pattern, line)), lines[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT.parent / "shared" / "cases" / "recipes", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--whole", action="store_true", help="print whole answers too")
    arguments = parser.parse_args()
    cases = [path for path in sorted(arguments.folder.glob("*.txt")) if not arguments.only or path.stem in arguments.only]
    if not cases:
        print(f"{arguments.folder} has no cases; name a folder with text files that have a line `command: autotune …`")
        return 0
    wrong = 0
    for case in cases:
        expected = EXPECTATIONS.get(case.stem)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(shutil.copytree(arguments.folder, Path(place) / "recipes"))
            *_, answer = (ask(words, folder) for words in commands(case))
        faults = list(problems(expected, answer)) if expected else []
        wrong += bool(faults)
        word = "wrong" if faults else "right" if expected else "asked"
        print(f"{case.stem:34} {word}  exit {answer.status}: {deciding_line(expected, answer.text)[:160]}", flush=True)
        for fault in faults:
            print(f"{'':34}        {fault}")
        if arguments.whole:
            print(answer.text)
    print(f"{len(cases)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
