"""Cost of building one rank of a large model, and overhead of a trial beyond its steps, now and before.

python -m benchmarks.engines.model_build [--before FOLDER] [--results FILE [--partial]]
    [--markdown docs/results/model-build.md]

FOLDER: a checkout of commit dae9dbf, the last one that drew parameters whole on the CPU. FILE: results so far, one a line;
missing ones are run and appended, so that an interrupted run continues. With --partial they are "not run" on the page.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.written_page import give, page_parser

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("model_build_rank.py")
DRAWN_BOUND, MEMORY_BOUND = 1.02, 1.2
NOT_RUN = "not run"
DEPTHS = (1, 2)
"""Layers of each pipeline stage with which the earlier code is run."""
CASES: dict[str, dict[str, Any]] = {
    "8B (llama-3-8b): tp 2, dp 4, stage 3": {
        "model": "llama-3-8b", "world": 8, "knobs": {"tensor_parallel_size": 2, "zero_stage": 3, "precision": "bf16"},
    },
    "70B (llama-3-70b): tp 8, pp 4, dp 2, stage 1": {
        "model": "llama-3-70b", "world": 64,
        "knobs": {
            "tensor_parallel_size": 8, "pipeline_parallel_size": 4, "pipeline_schedule": "1f1b", "zero_stage": 1,
            "precision": "bf16",
        },
    },
    "47B of experts (mixtral-8x7b): ep 8, dp 64, stage 3": {
        "model": "mixtral-8x7b", "world": 64, "knobs": {"expert_parallel_size": 8, "zero_stage": 3, "precision": "bf16"},
    },
}  # fmt: skip
LAYERS = {"llama-3-8b": 32, "llama-3-70b": 80, "mixtral-8x7b": 32}
TRIALS = {
    "trials": 2, "knobs": {"precision": "bf16", "lora_rank": 8},
}  # fmt: skip
PROSE = """# Building a rank of a large model

Written by `python -m benchmarks.engines.model_build`. A model is built on the meta device. A rank draws only the elements that
it keeps, after tensor, pipeline and expert slicing and ZeRO partitioning, in their final memory. An element's initial value
depends on seed, parameter name and position in the whole parameter (`executor/parallel/initialization.py`), so every
layout starts from the same weights (`make parity`, `tests/executor/parallel/test_initialization.py`).

Rank 0 of each world is built in a fresh process on one core, on a process group that sends nothing (torch's `fake` backend).

- **drawn / kept**: initial values drawn, over elements of parameters that the rank holds.
- **tensors**: peak bytes of tensors during the build, over bytes of tensors that stay. The temporary bytes do not grow with the
  depth: they are taken from allocator events with one layer in each pipeline stage.
- **resident**: peak growth of the resident set (`VmHWM`), over bytes of tensors that stay.
- **seconds**: CPU seconds of one core, since the machine was shared with other work.
- **before**: the code of commit dae9dbf, which draws each parameter whole on the CPU. It is run with {depths} layers in each
  pipeline stage, and seconds and elements are extrapolated linearly to the full depth: at full depth some of the models need
  more memory than this machine has.
"""
TRIAL_PROSE = """
## A trial beyond its steps

Low-rank adapters (rank 8) on a model of 1.1 billion parameters, on two CPU ranks at stage 0 in bf16, two samples of 16 tokens
a step, through the runner `local`: CPU seconds of rank 0. The first trial starts the processes (cold), the second reuses
them (warm). Adapters are trained, since both ranks' states of full training would not fit into this machine's free memory.

- **setup**: imports and joining, or the time between two trials.
- **account**: the memory step under its profiler, which is an additional step.
- **close**: time outside all phases, mostly freeing the model.
- **steps**: warm-up and timed steps, for comparison.
"""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs the script, or reads its answer from earlier results."""

    before: Path | None
    results: Path | None
    partial: bool = False
    """Whether missing results are left out instead of run."""

    def answer(self, asked: dict[str, Any], before: bool = False) -> Any:
        """The script's answer, with the earlier or the present code; None: not run."""
        key = {"code": "before" if before else "now", **asked}
        lines = self.results.read_text().splitlines() if self.results and self.results.exists() else []
        for line in map(json.loads, lines):
            if line["asked"] == key:
                return line["found"]
        root = self.before if before else ROOT
        if self.partial or root is None:
            return None
        command = [sys.executable, str(SCRIPT), json.dumps(asked)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{key}: {done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        if self.results:
            with self.results.open("a") as stream:
                stream.write(json.dumps({"asked": key, "found": found}) + "\n")
        print(key, found, flush=True)
        return found

    def at_full_depth(self, asked: dict[str, Any]) -> dict[str, float] | None:
        """Cost of the full model with the earlier code, extrapolated from two depths."""
        stages = asked["knobs"].get("pipeline_parallel_size", 1)
        first, second = (self.answer({**asked, "layers": depth * stages}, before=True) for depth in DEPTHS)
        if first is None or second is None:
            return None
        depth = LAYERS[asked["model"]] / stages
        return {key: first[key] + (second[key] - first[key]) * (depth - DEPTHS[0]) for key in first}


def rows(runs: Runs) -> tuple[list[str], bool]:
    """The table of builds, and whether all bounds hold."""
    lines = [
        "| one rank of | kept | drawn / kept | tensors | resident | seconds | before: drawn / kept | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    holds = True
    for name, asked in CASES.items():
        shallow = {**asked, "layers": DEPTHS[0] * asked["knobs"].get("pipeline_parallel_size", 1)}
        now, followed, old = runs.answer(asked), runs.answer({**shallow, "follow": True}), runs.at_full_depth(asked)
        cells = [name, *[NOT_RUN] * 7]
        if now is not None:
            kept = now["kept_bytes"]
            ratios = now["drawn"] / now["kept"], now["resident_peak"] / kept
            cells[1] = f"{now['kept'] / 1e9:.2f}e9 elements, {kept / 1e9:.2f} GB"
            cells[2], cells[4], cells[5] = f"{ratios[0]:.3f}", f"{ratios[1]:.3f}", f"{now['seconds']:.1f}"
            holds = holds and ratios[0] <= DRAWN_BOUND and ratios[1] <= MEMORY_BOUND
        if now is not None and followed is not None:
            ratio = 1 + (followed["tensor_peak"] - followed["kept_bytes"]) / now["kept_bytes"]
            cells[3], holds = f"{ratio:.3f}", holds and ratio <= MEMORY_BOUND
        if old is not None:
            cells[6:] = [f"{old['drawn'] / old['kept']:.1f}", f"{old['seconds']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Bounds: drawn / kept {DRAWN_BOUND}, tensors and resident {MEMORY_BOUND}: {'hold' if holds else 'MISSED'}."]
    return lines, holds


def trial_rows(runs: Runs) -> list[str]:
    """The table of a trial's overhead beyond its steps."""
    lines = [*TRIAL_PROSE.splitlines(), "", "| code | trial | setup | build | account | close | together | steps |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for code in ("before", "now"):
        found = runs.answer(TRIALS, before=code == "before")
        for index, phases in enumerate(found or ()):
            cells = [phases["own"], phases["build"], phases["memory"], phases["close"]]
            cells += [sum(cells), phases["warmup"] + phases["measure"]]
            kind = "warm" if index else "cold"
            lines.append(f"| {code} | {kind} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
        if found is None:
            lines.append(f"| {code} | " + " | ".join([NOT_RUN] * 7) + " |")
    return lines


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--partial", action="store_true")
    arguments = parser.parse_args()
    runs = Runs(arguments.before, arguments.results, arguments.partial)
    builds, holds = rows(runs)
    lines = [*PROSE.format(depths=" and ".join(map(str, DEPTHS))).splitlines(), "", *builds, *trial_rows(runs)]
    give(lines, arguments.markdown)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
