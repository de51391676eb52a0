"""How far shipped predictions are from MLPerf Training's submissions, which no coefficient was fitted to.

    python -m benchmarks.prediction.mlperf CHECKOUT [CHECKOUT ...] [--markdown docs/results/mlperf.md]

CHECKOUT is a clone of mlcommons/training_results_v4.0, v5.1 or another round. Of each submission for a language model, the
first log is read with the script of its run, as by `--knowledge`. A script is that of a log if its name states the log's nodes,
devices and batch, and its device, where any does. Where one runs in 8 bits and its twin in 4, it is the faster twin. Logs are
left out for which no script or several remain, and those whose time is below what the device's peak allows.
"""

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autotune.errors import KnowledgeError
from autotune.knowledge.read import BENCHMARKS, SYSTEM, parsed, read_log
from autotune.knowledge.row import TableRow, step_seconds
from autotune.knowledge.row_cases import case_of, refusal
from autotune.knowledge.row_names import find_device
from autotune.knowledge.table import read_records
from autotune.prediction.equations.coefficients import shipped_rates
from autotune.prediction.equations.step import predict
from benchmarks.prediction.predicted_runs import PredictedRun, summary, table_of_models

SIZES = re.compile(r"_(\d+)x(\d+)x(\d+)(?:x(?:tp)?(\d+))?(?:(?:x|pp)(\d+))?(?:cp(\d+))?")
"""Nodes, devices of a node, samples of a replica, and tensor, pipeline and context size, in the name of a script."""
DEVICES = ("GB300", "GB200", "B300", "B200", "H200", "H100", "MI355X", "MI350X", "MI325X", "MI300X", "L40S", "A100")
PRODUCTS = {"fp8": 2.0, "fp4": 4.0}
"""Precision -> how much faster products are than in bf16, at the most."""
PAGE = """# Predictions against MLPerf Training

Written by `python -m benchmarks.prediction.mlperf CHECKOUT ... --markdown docs/results/mlperf.md`. Submissions of language
models to MLPerf Training ({rounds}; results: mlcommons, Apache-2.0). No coefficient was fitted to them. After a first look at
them (median error 19 %), what they showed to be wrong was mended from other sources: racks of GB200 and GB300 are link domains
of 72 devices, AMD's devices reach a smaller [share of their peak](kernel-model.md), and products, attention and messages follow
measured kernels. A log with its script is also [knowledge](../clusters.md#knowledge-of-others).

{summary}

{models}

Left out: {left_out}.

## Each submission

A submission on the same devices with the same layout as another counts by itself: they differ by machine and software.

| model | submitter | devices | layout | precision | measured (s) | predicted (s) [90 %] | error |
|---|---|--:|---|---|--:|--:|--:|
{rows}
"""


def main() -> int:
    """Read, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    left_out: dict[str, int] = defaultdict(int)
    every = [submission for checkout in options.checkouts for submission in submissions(checkout, left_out)]
    found = [*{(one.row.model_name, one.row.num_gpus, one.measured): one for one in reversed(every)}.values()][::-1]
    left_out["the log of another submission again"] = len(every) - len(found)
    if not found:
        print("no log of a language model could be read; give clones of mlcommons/training_results_v5.1", file=sys.stderr)
        return 2
    text = page(found, left_out, [checkout.name for checkout in options.checkouts])
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return 0


def submissions(checkout: Path, left_out: dict[str, int]) -> Iterator[PredictedRun]:
    """Those of a round that can be read; the reasons for others are counted."""
    for folder in sorted(path for name in BENCHMARKS for path in checkout.glob(f"*/results/*/{name}")):
        logs = sorted(folder.glob("result_*.txt"))
        if not logs:
            continue
        with tempfile.TemporaryDirectory() as together:
            try:
                row = _row(logs[0], checkout, Path(together))
            except (KnowledgeError, ValueError) as error:
                left_out[re.sub(r"^\S+: ", "", str(error)).partition(";")[0]] += 1
                continue
        if (why := refusal(row)) is not None:
            left_out[re.sub(r"'.*'", "…", why)] += 1
            continue
        case, measured = case_of(row), step_seconds(row)
        assert measured is not None
        if _least_seconds(row) > measured:
            left_out["the time is below what the peak allows"] += 1
            continue
        made = predict(case, shipped_rates())
        low, high = made.seconds_band()
        yield PredictedRun(
            row=row, measured=measured, predicted=float(made.seconds[0]), low=float(low[0]), high=float(high[0])
        )  # fmt: skip


def _row(log: Path, checkout: Path, together: Path) -> TableRow:
    """The log as a row, with its script beside it in a folder of their own.

    Raises:
        ValueError: not exactly one script is that of the log.
        KnowledgeError: the log cannot be read.
    """
    organisation, system, benchmark = log.parts[-5], log.parts[-3], log.parts[-2]
    described = checkout / organisation / "systems" / f"{system}.json"
    text = log.read_text(encoding="utf-8", errors="replace")
    machine = json.loads(described.read_text("utf-8")) if described.is_file() else {}
    if SYSTEM not in text:
        text = f"{SYSTEM} {json.dumps(machine)}\n{text}"
    scripts = _scripts(checkout / organisation / "benchmarks", benchmark, text)
    if len(scripts) != 1:
        raise ValueError("several scripts may be that of the run" if scripts else "no script states the run's sizes")
    for other in scripts[0].parent.rglob("config_*.sh"):
        if not SIZES.search(other.name):
            shutil.copy(other, together)
    shutil.copy(scripts[0], together)
    copy = together / log.name
    copy.write_text(text, encoding="utf-8")
    rows, problems = read_records([read_log(copy)])
    if not rows:
        raise ValueError("; ".join(problems) or "cannot be read as a row")
    return replace(rows[0], source=organisation)


def _scripts(folder: Path, benchmark: str, text: str) -> list[Path]:
    """The scripts that may be that of the log, one of each name."""
    system, events = parsed(text)
    batch = next((event["value"] for event in events if event.get("key") == "global_batch_size"), 0)
    stated = tuple(str(system.get(name) or "") for name in ("number_of_nodes", "accelerators_per_node"))
    named: dict[str, Path] = {}
    for script in sorted(folder.rglob("config_*.sh")):
        sizes = SIZES.search(script.name)
        own = script.relative_to(folder).parts[0]
        if sizes is None or own.replace("3_", "31_") not in (benchmark, benchmark.replace("405b", "8b")):
            continue
        nodes, devices, samples, *degrees = (int(size or 1) for size in sizes.groups())
        ranks, replica = nodes * devices, int(np.prod(degrees))
        fits = all(size in ("", str(own_size)) for size, own_size in zip(stated, (nodes, devices), strict=True))
        if fits and ranks % replica == 0 and ranks // replica * samples == batch:
            named.setdefault(script.name, script)
    device = next((word for word in DEVICES if word in str(system.get("accelerator_model_name")).upper()), "")
    for word in (device, "8B" if benchmark.endswith("_8b") else "", "FP4"):
        named = {name: script for name, script in named.items() if word in name.upper()} or named
    return [*named.values()]


def _least_seconds(row: TableRow) -> float:
    """Seconds of a step at the device's peak: six FLOPs for each parameter and token."""
    device = find_device(row.gpu_type or "")
    peak = device[1].peak_flops["bf16"] if device else math.inf
    tokens = (row.global_batch or 0) * (row.seq_len or 0)
    trained = 4.0 if "lora" in row.notes else 6.0
    return (
        trained * 1e9 * (row.params_b or 0.0) * tokens / ((row.num_gpus or 1) * peak * PRODUCTS.get(row.precision or "", 1.0))
    )


def page(found: Sequence[PredictedRun], left_out: Mapping[str, int], rounds: Sequence[str]) -> str:
    """Markdown."""
    reasons = [f"{count} ({reason})" for reason, count in sorted(left_out.items(), key=lambda item: -item[1])]
    return PAGE.format(
        rounds=", ".join(rounds), summary=summary(found, "submissions"), left_out=", ".join(reasons) or "none",
        models=table_of_models(sorted(found, key=lambda one: str(one.row.model_name)), "submissions"),
        rows="\n".join(_line(one) for one in sorted(found, key=lambda one: (str(one.row.model_name), one.row.num_gpus or 0))),
    )  # fmt: skip


def _line(one: PredictedRun) -> str:
    row = one.row
    layout = " ".join(f"{name} {size}" for name in ("tp", "pp", "vpp", "cp", "micro_batch") if (size := getattr(row, name)))
    return (
        f"| {row.model_name} | {row.source} | {row.num_gpus:,} {row.gpu_type} | {layout} | {row.precision} "
        f"| {one.measured:.3g} | {one.predicted:.3g} [{one.low:.3g}, {one.high:.3g}] | {one.error:+.0%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
