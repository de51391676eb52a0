"""Every engine at its best settings: native, DDP, FSDP2 and DeepSpeed, each swept over its own, then its best ones in turns.

    python -m benchmarks.engines.best_settings [--settings small large] [--stages 0 1 2 3] [--rounds 10] [--rate 500mbit]
                                [--markdown docs/results/engine-best-settings.md]

About 50 minutes on two idle cores. `benchmarks/engines/engine.py` compares the engines at equal settings; here each has what
suits it: bucket and prefetch sizes, compiled blocks, how gradients are reduced and parameters kept. Each variant trains
alone first, its fastest step counts; the fastest variants of each engine then train in turns, so that a busy moment of the
machine affects all of them. The link is that of `engine.py`.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.shaped_link import why_not
from benchmarks.engines.engine import LOSS_BOUND, LOSS_STEPS, RANKS, SETTINGS, Estimate, Setting, run_ranks
from benchmarks.engines.engine_contestants import BYTES
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain

FINALISTS = 2
SWEPT_STEPS = 3
TARGET = 0.98
"""Of the best peer's samples/s, in every contest; in half of them at least 1."""


def variants(stage: int, model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Every setting of every engine at a stage. At stage 3 no engine may keep more than three blocks whole.

    Yields `name`, `engine`, `knobs` (the changes of a configuration) and `settings` (what no knob of ours has).
    """
    block = -(-(model.parameter_count - 2 * model.vocab_size * model.hidden_size) // model.num_layers)
    for compiled in (False, True):
        for engine, words, knobs, settings in _variants(stage, block):
            name = f"{engine}: {', '.join([*words, *(['compiled'] if compiled else [])]) or 'as it comes'}"
            yield {
                "name": name,
                "engine": engine,
                "knobs": knobs | {"zero_stage": stage, "compile_blocks": compiled},
                "settings": settings,
            }


def _variants(stage: int, block: int) -> Iterator[tuple[str, list[str], dict[str, Any], dict[str, Any]]]:
    """Engine, words, knobs and settings."""
    buckets = {
        "buckets of a block": block, "buckets of 25 MiB": 25 * 2**20 // BYTES, "one bucket": 500_000_000,
    }  # fmt: skip
    ahead = {"half a block ahead": 0.5, "a block ahead": 1, "two blocks ahead": 2} if stage == 3 else {"": 0}
    for (bucket, size), (prefetch, blocks) in itertools.product(buckets.items(), ahead.items()):
        knobs: dict[str, Any] = {"reduce_bucket_size": size}
        if stage == 3:
            gathered = int(blocks * block)
            knobs |= {"prefetch_bucket_size": gathered, "max_live_parameters": block + gathered}
            knobs |= {"param_persistence_threshold": 0, "reshard_after_forward": True}
            if bucket == "one bucket":  # of the sizes tried, only those that keep gradients of few blocks whole
                continue
        words = [word for word in (bucket, prefetch) if word]
        yield "native", words, knobs, {}
        if stage in (1, 2):
            yield "native", [*words, "gathered in forward"], knobs | {"overlap_param_gather": True}, {}
        if stage == 0:
            yield "native", [*words, "gradients in place"], knobs | {"contiguous_gradients": False}, {}
            yield "ddp", words, knobs, {}
        if stage > 0 or bucket == "one bucket":  # its size is fixed at stage 0
            yield "deepspeed", words, knobs, {}
        if stage in (1, 2):
            yield "deepspeed", [*words, "a rank's reduces"], knobs, {"multi_rank_bucket": False}
    if stage in (2, 3):
        resharded = {"reshard_after_forward": stage == 3}
        yield "fsdp2", [], resharded, {}
        yield "fsdp2", ["root kept"], resharded, {"keeps_root": True}
        for blocks, beside in itertools.product((1, 2), (False, True)):
            words = ["root kept", f"{blocks} ahead", *(["beside"] if beside else [])]
            yield "fsdp2", words, resharded, {"keeps_root": True, "prefetches": blocks, "beside": beside}


def run(setting: Setting, stage: int, swept: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Sweep every engine of which `swept`, of an earlier run, lacks a variant; then train the finalists in turns."""
    name = f"stage {stage}"
    plan = {
        "model": to_plain(setting.model),
        "workload": to_plain(setting.workload),
        "config": to_plain(setting.config),
        "ranks": RANKS,
        "sweeps": {name: chosen_variants(setting, stage, arguments)},
        "swept": swept,
        "finalists": FINALISTS,
        "swept_steps": SWEPT_STEPS,
        "rounds": arguments.rounds,
        "steps": 2,
    }
    return run_ranks(plan, arguments.rate)[name]


def chosen_variants(setting: Setting, stage: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The variants of the engines that are installed."""
    return [one for one in variants(stage, setting.model) if arguments.deepspeed or one["engine"] != "deepspeed"]


def contest(name: str, found: dict[str, Any], samples: int) -> tuple[list[str], Estimate]:
    """Markdown of a contest, and native's samples/s over the best peer's, by the finals' rounds.

    Raises:
        SystemExit: the engines do not train the same.
    """
    final = found["final"]
    losses = {engine: result["losses"][:LOSS_STEPS] for engine, result in final.items()}
    reference = next(iter(losses.values()))
    for engine, steps in losses.items():
        if any(abs(mine - theirs) > LOSS_BOUND * abs(mine) for mine, theirs in zip(reference, steps, strict=True)):
            raise SystemExit(f"{name}: losses {reference} and, of {engine}, {steps}: no comparison")
    rounds = {engine: [statistics.fmean(part) for part in result["seconds"]] for engine, result in final.items()}
    fastest = sorted(rounds, key=lambda engine: statistics.fmean(rounds[engine]))
    native = next(engine for engine in fastest if engine.startswith("native"))
    peer = next(engine for engine in fastest if not engine.startswith("native"))
    ratio = Estimate.of([theirs / ours for theirs, ours in zip(rounds[peer], rounds[native], strict=True)])
    lines = ["", f"### {name}", "", "| finalist | samples/s | native's best over it |", "|---|--:|--:|"]
    for engine in fastest:
        speed = Estimate.of([samples / seconds for seconds in rounds[engine]])
        over = Estimate.of([theirs / ours for theirs, ours in zip(rounds[engine], rounds[native], strict=True)])
        lines.append(f"| {engine} | {speed} | {'' if engine == native else over} |")
    swept = found["swept"]
    timed = {engine: seconds for engine, seconds in swept.items() if isinstance(seconds, float)}
    lines += ["", f"Swept, seconds of the fastest of {SWEPT_STEPS} steps: "]
    for engine in dict.fromkeys(one.partition(":")[0] for one in swept):
        mine = sorted((seconds, one.partition(": ")[2]) for one, seconds in timed.items() if one.partition(":")[0] == engine)
        lines[-1] += f"*{engine}* " + "; ".join(f"{words} {seconds:.3f}" for seconds, words in mine) + ". "
    if refused := {engine: reason for engine, reason in swept.items() if isinstance(reason, str)}:
        lines += ["", "Refused: " + "; ".join(f"{engine} ({reason})" for engine, reason in refused.items()) + "."]
    return lines, ratio


def introduction(arguments: argparse.Namespace, ratios: dict[str, Estimate], *, shaped: bool) -> list[str]:
    link = f"a link shaped to {arguments.rate} between two network namespaces" if shaped else "loopback"
    deepspeed = f"DeepSpeed {importlib.metadata.version('deepspeed')}" if arguments.deepspeed else "without DeepSpeed"
    ahead = sum(ratio.mean >= 1 for ratio in ratios.values())
    reached = sum(ratio.mean >= TARGET for ratio in ratios.values())
    return [
        "# Every engine at its best settings",
        "",
        (f"Written by `benchmarks/engines/best_settings.py`: torch {torch.__version__}, {deepspeed}, {RANKS} ranks of one "
        f"thread on {os.cpu_count()} cores, gloo over {link}. Each engine is swept over its own settings (bucket and prefetch "
        "sizes, compiled blocks, how gradients are reduced and parameters gathered and kept; at stage 3 no more than three "
        f"blocks whole); its {FINALISTS} fastest then train in turns with those of the others, {arguments.rounds} rounds of 2 "
        "steps, 95 % intervals over the rounds. Same model class, weights, data, fused AdamW and clipping; losses agree to "
        f"{LOSS_BOUND:g}. gloo executes FSDP2's reductions while nothing computes; see [equal settings](engine-benchmark.md)."),
        "",
        (f"Native's samples/s over the best peer's: at least {TARGET} in {reached} of {len(ratios)} contests, at least 1 in "
        f"{ahead}."),
        "",
        "| contest | native over the best peer |",
        "|---|--:|",
        *(f"| {name} | {ratio} |" for name, ratio in ratios.items()),
        "",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=["small", "large"])
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=list(range(4)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", default="500mbit", help="rate of the link, as tc writes it; none: loopback")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument(
        "--json", type=Path, help="raw figures; what is in it is not run again, unless an engine has new variants"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.deepspeed = importlib.util.find_spec("deepspeed") is not None
    if arguments.rate != "none" and (reason := why_not()):
        print(f"skipped: {reason}; --rate none runs over loopback")
        return 0
    raw = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    lines, ratios = list[str](), dict[str, Estimate]()
    for name, setting in SETTINGS.items():
        if name not in arguments.settings and not any(key.startswith(f"{name}, ") for key in raw):
            continue
        lines += [f"## {name}", "", f"{setting}."]
        for stage in range(4):
            key = f"{name}, stage {stage}"
            swept = raw.get(key, {}).get("swept", {})
            is_whole = all(one["name"] in swept for one in chosen_variants(setting, stage, arguments))
            if name in arguments.settings and stage in arguments.stages and not is_whole:
                raw[key] = run(setting, stage, swept, arguments)
                if arguments.json:
                    arguments.json.write_text(json.dumps(raw))
            if key in raw:
                more, ratios[key] = contest(key, raw[key], setting.workload.global_batch_size)
                lines += more
        lines.append("")
    lines = introduction(arguments, ratios, shaped=arguments.rate != "none") + lines
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines).rstrip() + "\n")
    short = {name: ratio for name, ratio in ratios.items() if ratio.mean < TARGET}
    ahead = 2 * sum(ratio.mean >= 1 for ratio in ratios.values()) >= len(ratios)
    print(f"DOES NOT HOLD: {', '.join(short) or 'ahead in fewer than half'}" if short or not ahead else "holds")
    return 1 if short or not ahead else 0


if __name__ == "__main__":
    sys.exit(main())
