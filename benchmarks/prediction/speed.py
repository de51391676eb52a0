"""How fast is `autotune plan`, compared with the planners that can be installed?

    python -m benchmarks.prediction.speed [--repeats N] [--planner-python PATH] [--markdown docs/results/prediction-speed.md]

The task: Llama 3.1 405B on 2,048 H100 (256 nodes), 2,048 samples of 8,192 tokens a step. Each contestant is a separate process,
timed from start to end, in turns, on this machine. PATH is a Python that has llm-analysis, which evaluates configurations one
by one: it is given all configurations of the same space that it can express.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NODES, BATCH, LENGTH = 256, 2048, 8192
TARGET_SECONDS = 6.0
OTHERS = """## Planners that are not compared

| planner | why |
|---|---|
| Galvatron (hetu-galvatron 2.4.0) | installs; searches from measurements on the devices |
| Alpa (alpa 0.2.3) | needs its own build of jaxlib and GPUs to compile for |
| SimuMax | no distribution of that name in the package index |
| Calculon, Aceso | the package index has other projects under these names |
| Vidur (vidur 0.0.26) | simulates inference, not training |
"""
"""Other planners, with their state when this page was first written."""
OURS = [
    sys.executable, "-c", "from autotune.cli import main; main()", "plan", "llama-3.1-405b", "--cluster", f"dgx-h100:{NODES}",
    "--global-batch-size", str(BATCH), "--sequence-length", str(LENGTH), "--space", "parallel", "--top", "10", "--json",
]  # fmt: skip
THEIRS = """
import itertools, json, logging, sys, time
began = time.perf_counter()
from llm_analysis.analysis import LLMAnalysis, ActivationRecomputation, DSZeRO
from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name
from llm_analysis.analysis import logger
logger.setLevel(logging.CRITICAL)
model = ModelConfig(
    name="llama-3.1-405b", num_layers=126, n_head=128, hidden_dim=16384, vocab_size=128256, max_seq_len=8192,
    num_key_value_heads=8, ffn_embed_dim=49152,
)
gpu, dtype = get_gpu_config_by_name("h100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
world, batch = 2048, 2048
tried = fitted = failed = 0
best = None
deadline = began + float(sys.argv[1])
for tp, pp, zero, recompute in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), range(4), range(3)):
    dp = world // (tp * pp)
    for micro in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        if batch % (micro * dp):
            continue
        if time.perf_counter() > deadline:
            break
        tried += 1
        try:
            analysis = LLMAnalysis(
                model, gpu, dtype, ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp, sp_size=tp), flops_efficiency=0.5
            )
            found = analysis.training(
                batch_size_per_gpu=micro, gradient_accumulation_steps=batch // (micro * dp), global_batch_size=batch,
                seq_len=8192, activation_recomputation=ActivationRecomputation(recompute), ds_zero=DSZeRO(zero),
                flash_attn=True, mlp_gated_linear_units=True,
            )
        except (AssertionError, ValueError):  # mostly: it does not fit
            failed += 1
            continue
        fitted += 1
        latency = found.get("latency_per_iter") or found.get("total_latency_per_iter") or 0
        if best is None or latency < best:
            best = latency
print(json.dumps({"tried": tried, "answered": fitted, "refused": failed, "seconds": time.perf_counter() - began, "best": best}))
"""


def main() -> None:
    """Run the contestants in turns and write the page."""
    options = _options()
    contestants = {"autotune plan": OURS}
    if options.planner_python:
        contestants["llm-analysis"] = [options.planner_python, "-c", THEIRS, str(options.limit)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for turn in range(options.repeats):
        for name, command in contestants.items():
            runs[name].append(_run(command))
            print(f"{turn + 1}/{options.repeats} {name}: {runs[name][-1]['wall']:.2f} s", file=sys.stderr)
    page = _page(runs, options.repeats)
    if options.markdown:
        Path(options.markdown).write_text(page, encoding="utf-8")
    print(page)
    if statistics.median(run["wall"] for run in runs["autotune plan"]) > TARGET_SECONDS:
        sys.exit(f"autotune plan took more than {TARGET_SECONDS:g} s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--planner-python", help="a Python that has llm-analysis")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which llm-analysis starts no configuration")
    parser.add_argument("--markdown", help="where the page is written")
    return parser.parse_args()


def _run(command: list[str]) -> dict[str, Any]:
    began, before = time.perf_counter(), os.times()
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    wall, after = time.perf_counter() - began, os.times()
    if answer.returncode:
        sys.exit(f"{command[0]} failed: {answer.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    text = answer.stdout if command is OURS else answer.stdout.strip().splitlines()[-1]
    return {"wall": wall, "cpu": cpu, "document": json.loads(text)}


def _page(runs: dict[str, list[dict[str, Any]]], repeats: int) -> str:
    ours = runs["autotune plan"][-1]["document"]
    rows = [_row(name, found) for name, found in runs.items()]
    other = runs.get("llm-analysis")
    return f"""# How fast a plan is

Generated by `benchmarks/prediction/speed.py`: {repeats} turns on {os.cpu_count()} cores ({platform.machine()}), Python
{platform.python_version()}; other work may have run at the same time.

Llama 3.1 405B on 2,048 H100 in 256 nodes, {BATCH:,} samples of {LENGTH:,} tokens a step. Every process from start to end.

| planner | configurations | wall seconds: median (least to most) | CPU seconds | CPU microseconds a configuration |
|---|---|---|---|---|
{chr(10).join(rows)}

`autotune plan`: {ours["configurations"]:,} legal configurations of degrees, ZeRO stage, deferred reduction, schedule, virtual
stages, micro-batch, sequence parallelism, recomputation and offloading, of which at least {ours["fitting"]:,} fit
with a probability of 95 %; then {ours["bucket_settings"]:,} bucket settings for the best 1,000, and the
reasons. Target: {TARGET_SECONDS:g} s.
{_comparison(other[-1]["document"]) if other else ""}
{OTHERS}"""


def _row(name: str, found: list[dict[str, Any]]) -> str:
    document = found[-1]["document"]
    count = document["configurations"] + document["bucket_settings"] if name == "autotune plan" else document["tried"]
    walls, cpu = [run["wall"] for run in found], statistics.median(run["cpu"] for run in found)
    wall = f"{statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
    return f"| {name} | {count:,} | {wall} | {cpu:.2f} | {cpu / max(count, 1) * 1e6:,.1f} |"


def _comparison(document: dict[str, Any]) -> str:
    return f"""
`llm-analysis` evaluates one configuration a call: it was given every combination of tensor and pipeline degree, ZeRO stage,
its three recomputations and micro-batch that divides the batch ({document["tried"]:,}), the part of the space that it can
express; it has no schedules, virtual stages, context parallelism or offloading. It evaluated {document["answered"]:,},
including some that do not fit, and refused {document["refused"]:,}. Its MLP width is an integer multiple of the hidden width:
49,152 instead of 53,248.
"""


if __name__ == "__main__":
    main()
