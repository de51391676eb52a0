"""The families of models: real sweeps of a tiny model of each, plans at the published sizes, and dry runs beside real ranks.

    python -m benchmarks.prediction.families [--markdown docs/results/families.md]

1. Sweep: `autotune.tune` of a tiny model of each family on four local ranks, over the space `3d`.
2. Dry run: its peak of each of these ranks beside the allocator's, without and with checkpointing, at stages 1 and 3.
3. Plan: the largest preset of each family on two clusters, in a process of its own that is timed from start to end.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.tuning import TuneResult, tune
from benchmarks.common.tiny_models import tiny
from benchmarks.common.written_page import judge, page_parser, table
from executor.dry.dry_run import dry_run_places
from executor.runners.local import LocalRunner
from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.models.huggingface import FAMILIES, model_preset_names, model_spec_from_config, resolve_model
from search_spaces.models.model import HeadNorm, ModelSpec, NormPlace
from search_spaces.outcome import Outcome
from search_spaces.preset_files import preset_tables
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

RANKS, TRIALS, SEQUENCE, BATCH = 4, 4, 64, 16
CLUSTERS = ("dgx-h100:8", "gb200-nvl72:16")
LARGE, LARGE_CLUSTERS = 300e9, ("dgx-h100:64", "gb200-nvl72:64")
"""Models of more parameters are planned on these."""
PLAN_BATCH, PLAN_LENGTH = 1024, 2048
"""Of a plan; models of shorter sequences are planned for theirs."""
ENDS = "trials: to the end, stopped as slower, out of memory"
PLAN_SECONDS, MEMORY_BOUND = 10.0, 0.01
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)
DRY: tuple[Mapping[str, Any], ...] = (
    {"zero_stage": 1, "micro_batch_size": 4},
    {"zero_stage": 3, "micro_batch_size": 4, "activation_checkpointing": "full"},
)


def spec_of(family: str) -> ModelSpec:
    """Its shape."""
    return model_spec_from_config(tiny(family), family)


def parts(spec: ModelSpec) -> str:
    """What the family does besides Llama."""
    found = {
        "LayerNorm": spec.norm.value == "layernorm",
        "learned positions": spec.position.value == "learned",
        "parallel residuals": spec.parallel_residual,
        "norms of outputs": spec.norm_place in (NormPlace.OUTPUT, NormPlace.BOTH),
        "zero-centred norms": spec.zero_centered_norms,
        "norms of heads": spec.head_norm is HeadNorm.HEAD,
        "norms over all heads": spec.head_norm is HeadNorm.WIDTH,
        "norms of rotated heads": spec.head_norm is HeadNorm.ROTATED,
        "limited scores": spec.attention_softcap > 0,
        "sinks": spec.attention_sinks,
        "window": spec.sliding_window > 0 and not any(spec.whole_layers),
        "window in some layers": any(spec.whole_layers) and not spec.chunked_attention,
        "chunks in some layers": any(spec.whole_layers) and spec.chunked_attention,
        "layers without positions": not all(spec.rotated_layers),
        "factors of queries by position": spec.query_temperature > 0,
        "factors of embeddings or residuals": spec.embedding_scale != 1 or spec.residual_scale != 1,
        "latent attention": spec.latent is not None,
        "experts": spec.num_experts > 0,
        "shared experts": spec.shared_expert_size > 0,
        "dense layers": any(spec.dense_layers),
        "sigmoid routing": spec.sigmoid_routing,
        "weights of experts' inputs": spec.weighted_inputs,
        "groups of experts": spec.router_groups > 1,
    }
    return ", ".join(name for name, has in found.items() if has)


def shown(config: TrialConfig) -> str:
    """The knobs that lay out ranks and memory, where they differ from their defaults."""
    left_out = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "precision")
    changed = config.differences(TrialConfig())
    return " ".join(f"{name}={value}" for name, value in changed.items() if name not in left_out) or "defaults"


def sweep(family: str, folder: Path) -> TuneResult:
    """A sweep with real trials on four ranks."""
    path = folder / family / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(tiny(family)), encoding="utf-8")
    return tune(
        str(path), ranks=RANKS, space="3d", trials=TRIALS, runner="local", global_batch_size=BATCH, sequence_length=SEQUENCE,
        database=str(folder / "jobs.db"), confirm_repeats=0, progress=False,
        control_every=0, fidelity={"max_seconds": 1.0},
    )  # fmt: skip


def off(runner: LocalRunner, family: str) -> float:
    """The largest relative difference between the dry run's peak of a rank and the allocator's."""
    found, workload = [], Workload(global_batch_size=BATCH, sequence_length=SEQUENCE)
    # Tokens of experts differ from step to step; with a capacity their number is fixed.
    spec = spec_of(family)
    spec = dataclasses.replace(spec, capacity_factor=1.25) if spec.num_experts else spec
    for knobs in DRY:
        config = TrialConfig().replace(knobs)
        measured = runner.run(
            TrialRequest(
                attempt=config.hash, model=spec, config=config, workload=workload, world_size=RANKS, fidelity=QUICK,
                timeout_seconds=120,
            )
        )  # fmt: skip
        if measured.outcome is not Outcome.OK:
            raise RuntimeError(f"{family}: {measured.message}")
        mesh = make_mesh(config, RANKS)
        dry = {rank.coordinates[PIPELINE]: rank for rank in dry_run_places(spec, config, workload, RANKS).ranks}
        for rank in measured.ranks:
            peak = dry[mesh.coordinates(rank.rank)[PIPELINE]].peak_memory_bytes
            found.append(abs(peak / rank.peak_memory_bytes - 1))
    return max(found)


def plan(preset: str, cluster: str) -> tuple[dict[str, Any], float]:
    """The best plan of a preset, and the seconds of the command."""
    began = time.monotonic()
    length = min(PLAN_LENGTH, resolve_model(preset).sequence_length)
    command = [
        str(Path(sys.executable).with_name("autotune")), "plan", preset, "--cluster", cluster, "--json",
        "--global-batch-size", str(PLAN_BATCH), "--sequence-length", str(length),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document, time.monotonic() - began


def sweep_rows(problems: list[str]) -> Iterator[list[str]]:
    """A row of each family."""
    with tempfile.TemporaryDirectory() as name, LocalRunner(RANKS, device="cpu") as runner:
        for family in FAMILIES:
            result, spec, difference = sweep(family, Path(name)), spec_of(family), off(runner, family)
            ended = [trial for trial in result.trials if trial.outcome is Outcome.OK]
            pruned = [trial for trial in result.trials if trial.outcome is Outcome.PRUNED]
            wrong = [trial for trial in result.trials if trial.outcome in (Outcome.WRONG, Outcome.FAILED, Outcome.INVALID)]
            if result.best is None or wrong:
                problems.append(f"{family}: {wrong[0].result.message if wrong and wrong[0].result else result.message}")
            if difference > MEMORY_BOUND:
                problems.append(f"{family}: the dry run is off by {difference:.2%}")
            presets = sum(preset["model_type"] == family for preset in preset_tables("models").values())
            best = "" if result.best is None else shown(result.best)
            print(f"{family}: {len(ended)} of {len(result.trials)} trials, {difference:.2%}", flush=True)
            ends = f"{len(ended)}, {len(pruned)}, {len(result.trials) - len(ended) - len(pruned)}"
            yield [
                f"`{family}`", parts(spec), str(presets), ends, f"`{best}`",
                f"{difference:.2%}",
            ]  # fmt: skip


def plan_rows(problems: list[str]) -> Iterator[list[str]]:
    """A row of the largest preset of each family and cluster."""
    for family in FAMILIES:
        model = max(
            (resolve_model(name) for name in model_preset_names()), key=lambda it: (it.family == family, it.parameter_count)
        )
        preset = model.name
        for cluster in LARGE_CLUSTERS if model.parameter_count > LARGE else CLUSTERS:
            document, seconds = plan(preset, cluster)
            best = document["plans"][0] if document["plans"] else None
            if seconds > PLAN_SECONDS:
                problems.append(f"{preset} on {cluster}: planned in {seconds:.1f} s")
            size = f"{model.parameter_count / 1e9:.3g} B"
            size += f", {model.active_parameter_count / 1e9:.3g} B active" if model.num_experts else ""
            layout = "nothing fits" if best is None else shown(TrialConfig().replace(best["config"]))
            rate = "" if best is None else f"{best['predicted']['samples_per_second']['mean']:.3g}"
            print(f"{preset} on {cluster}: {seconds:.1f} s", flush=True)
            yield [f"`{preset}`", size, cluster, f"`{layout}`", rate, f"{seconds:.1f}"]


def main() -> int:
    """Run all parts, and write the page."""
    options = page_parser(__doc__).parse_args()
    os.environ["AUTOTUNE_QUICK_CALIBRATION"] = "off"
    problems: list[str] = []
    sweeps, plans = list(sweep_rows(problems)), list(plan_rows(problems))
    lines = [
        "# Families of models",
        "",
        "Written by `python -m benchmarks.prediction.families`. Families are read from a Hugging Face `config.json`",
        "(`model_type`), counted, predicted, built by the native engine and trained. `make extras` compares each with Hugging",
        "Face's own module in float64: logits, gradients and three training steps from the same weights are within 1e-9, and",
        "weights convert both ways",
        "(`tests/executor/files/test_huggingface_weights.py`). The numbers of parameters of all presets equal those of Hugging",
        "Face's classes (`tests/search_spaces/models/test_published.py`). `make parity` has their layouts on 2 and 4 ranks.",
        "",
        f"## Tiny models on {RANKS} CPU ranks",
        "",
        f"{TRIALS} search trials of the space `3d` beside the baseline, and the largest difference between the dry run's peak",
        "of a rank and the allocator's, at stage 1 and at stage 3 with full checkpointing.",
        "",
        *table(["family", "besides Llama", "presets", ENDS, "best", "dry run"], sweeps),
        "",
        "## Plans at the published sizes",
        "",
        "`autotune plan PRESET --cluster CLUSTER --global-batch-size 1024 --sequence-length 2048`, seconds from start to end",
        "of the command, on two CPU cores.",
        "",
        *table(["preset", "parameters", "cluster", "best layout", "samples/s", "s"], plans),
    ]  # fmt: skip
    return judge("\n".join(lines) + "\n", problems, options.markdown)


if __name__ == "__main__":
    sys.exit(main())
