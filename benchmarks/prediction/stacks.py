"""Memory of stacks of fine-tuners: predictions against the libraries themselves, which train small models on CPU tensors.

    python -m benchmarks.prediction.stacks --python PYTHON [--markdown docs/results/stacks.md]

PYTHON has the packages that `stacks_trainer` names. Every storage is tracked from allocation to release, for two optimizer
steps; the highest bytes of the second are compared. Nothing is fitted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.software import ADAPTED
from autotune.prediction.equations.transformers import allocated_bytes
from autotune.prediction.planning.question import with_adapters
from benchmarks.common.written_page import judge, page_parser, table
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

ROOT = Path(__file__).resolve().parents[2]
BOUND = 0.05
PACKAGES = "torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "torchao", "deepspeed", "liger-kernel"
ALL = " ".join(ADAPTED)
OPTIMIZERS = {
    "adamw_8bit": "bnb8", "paged_adamw_8bit": "bnb8", "paged_adamw_32bit": "bnb32",
    "adamw_torch_8bit": "ao8", "adamw_torch_4bit": "ao4",
}  # fmt: skip
"""`optim` of the Trainer -> `Transformers.moments`."""

PROSE = """# Predictions against the libraries themselves

Written by `python -m benchmarks.prediction.stacks --python PYTHON --markdown docs/results/stacks.md`. Transformers' Trainer,
TRL's SFTTrainer and DPOTrainer, PEFT, bitsandbytes, torchao, Liger, cut cross-entropy, DeepSpeed and torch's FSDP2 train small
Llamas on CPU tensors, two optimizer steps each. A dispatch mode tracks every storage from allocation to release; the highest
bytes of the second step are compared with the [equations of Transformers](../prediction-model.md#transformers), to which
nothing is fitted.

- Where a library has another branch on CUDA, that branch is taken: kernels of Triton are not started (torch allocates their
  results), dropout keeps a mask of bytes, TRL's head takes its tiles, Adam is torch's `foreach` implementation.
- The models are small, so a tensor that the equations leave out shows: relative to the peak of a model of 7B the same tensor
  is a tenth.
- Not compared: the context and cuBLAS' workspaces, which CPUs do not have; what the allocator adds; torchao's update, which is
  compiled on devices (run one by one, its operators add a fifth to the peak of these small models); GRPO; Liger with a trained
  table, whose gradient has another branch there; which pages of paged optimizers are on the device: device and pages are
  compared together.
"""


def variants() -> Iterator[dict[str, Any]]:
    """The cases: names of `stacks_trainer`, and `words` of `Transformers` and `knobs` beside what those imply."""
    wide = {"hidden": 512, "ffn": 1408, "layers": 4, "heads": 8, "kv": 4, "vocab": 2048}
    table_heavy = wide | {"hidden": 256, "ffn": 704, "vocab": 4096}
    common: dict[str, Any] = {"micro_batch": 2, "length": 256}
    short = common | {"micro_batch": 1, "length": 128}
    for load, autocast in (("bf16", True), ("fp32", True), ("fp32", False)):
        for checkpointing in ("none", "reentrant", "plain"):
            name = f"full, {load}{' with autocast' if autocast else ''}, checkpoints {checkpointing}"
            choice = {"load": load, "autocast": autocast, "checkpointing": checkpointing}
            yield common | choice | {"name": name, "model": table_heavy}
            yield short | choice | {"name": f"{name}, short", "model": wide}
    yield common | {"name": "full, two micro-batches", "model": table_heavy, "accumulation": 2}
    yield common | {"name": "full, tied tables", "model": table_heavy | {"tied": True}}
    yield common | {"name": "full, eager attention", "model": wide, "attention": "eager"}
    for bits in (None, "nf4", "int8"):
        for targets in ("query value", ALL):
            for dropout in (0.0, 0.1):
                for checkpointing in ("none", "reentrant"):
                    what = f"LoRA{f' on {bits}' if bits else ''}, {'all matrices' if targets == ALL else targets}"
                    name = f"{what}{', dropout' if dropout else ''}, checkpoints {checkpointing}"
                    yield common | {
                        "name": name, "model": wide, "rank": 16, "targets": targets, "bits": bits, "dropout": dropout,
                        "checkpointing": checkpointing,
                    }  # fmt: skip
    adapted = common | {"model": wide, "rank": 16, "targets": ALL, "checkpointing": "reentrant"}
    yield adapted | {"name": "LoRA on nf4, scales quantised", "bits": "nf4", "double": True}
    yield adapted | {"name": "LoRA on nf4, not prepared", "bits": "nf4", "prepared": False}
    yield adapted | {"name": "LoRA on nf4 without autocast", "bits": "nf4", "autocast": False}
    yield adapted | {"name": "LoRA on int8 without autocast", "bits": "int8", "autocast": False}
    yield adapted | {"name": "LoRA without autocast", "autocast": False}
    yield adapted | {"name": "LoRA, adapters in bf16", "wide_adapters": False}
    yield adapted | {"name": "LoRA, eager attention", "attention": "eager"}
    yield common | {"name": "full, bitsandbytes' 8-bit Adam", "model": table_heavy, "optim": "adamw_8bit"}
    few = adapted | {"model": table_heavy, "targets": "query value"}
    for trainer in ("sft", "dpo"):
        reference = {"reference": "copy"} if trainer == "dpo" else {}
        yield common | reference | {"name": f"{trainer.upper()}, full", "model": table_heavy, "trainer": trainer}
        yield few | {"name": f"{trainer.upper()}, LoRA", "trainer": trainer}
    for optim in ("paged_adamw_8bit", "paged_adamw_32bit"):
        name = f"full, bitsandbytes' {optim} (device and pages together)"
        yield common | {"name": name, "model": table_heavy, "optim": optim}
    for checkpointing in ("none", "reentrant"):
        yield common | {
            "name": f"full, frozen tower, checkpoints {checkpointing}",
            "model": table_heavy,
            "tower": 128,
            "checkpointing": checkpointing,
        }
        yield few | {"name": f"LoRA, frozen tower, checkpoints {checkpointing}", "tower": 128, "checkpointing": checkpointing}
    yield common | {"name": "cut cross-entropy, full", "model": table_heavy, "loss": "cut"}
    yield few | {"name": "cut cross-entropy, LoRA", "loss": "cut"}
    for checkpointing in ("none", "plain"):
        sharded = common | {"load": "fp32", "ranks": 4, "checkpointing": checkpointing}
        yield sharded | {"name": f"FSDP2 of 4, full, checkpoints {checkpointing}", "model": wide}
    yield short | {"name": "FSDP2 of 4, full, short", "model": wide, "load": "fp32", "ranks": 4}
    on_host = "on the host (device and host together)"
    whole = common | {"model": wide, "ranks": 4, "checkpointing": "plain", "offload": True, "offload_param": True}
    yield whole | {"name": f"FSDP2 of 4, all {on_host}", "load": "fp32"}
    lora = {"rank": 16, "targets": "query value", "wide_adapters": False, "checkpointing": "plain"}
    yield common | lora | {"name": "FSDP2 of 4, LoRA", "model": wide, "ranks": 4}
    first = common | {"model": wide, "ranks": 4, "fsdp1": True}
    for checkpointing in ("none", "plain"):
        yield first | {"name": f"FSDP1 of 4, full, checkpoints {checkpointing}", "load": "fp32", "checkpointing": checkpointing}
        for accumulation in (1, 2):
            ending = f"{'two micro-batches, ' * (accumulation > 1)}checkpoints {checkpointing}"
            adapters = first | lora | {"accumulation": accumulation, "checkpointing": checkpointing}
            yield adapters | {"name": f"FSDP1 of 4, LoRA wrapped apart, {ending}"}
            yield adapters | {"name": f"FSDP1 of 4, LoRA in its block's unit, {ending}", "mixed_units": True}
    divided = {"model": wide, "ranks": 4, "autocast": False, "bucket": 1_000_000, "live": 4_000_000}
    for stage in (2, 3):
        for offload in (False, True):
            name = f"DeepSpeed of 4, stage {stage}{f', optimizer {on_host}' if offload else ''}"
            yield common | divided | {"name": name, "stage": stage, "offload": offload, "checkpointing": "plain"}
        yield common | divided | {"name": f"DeepSpeed of 4, stage {stage}, no checkpoints", "stage": stage, "live": 10**9}
    yield whole | divided | {"name": f"DeepSpeed of 4, stage 3, all {on_host}", "stage": 3}
    # The last of its process: it replaces functions of the library.
    yield few | {"name": "Liger, LoRA", "liger": True}


def predicted_bytes(case: dict[str, Any]) -> float:
    """Bytes that torch's allocator hands out, without workspaces of CUDA."""
    sizes, ranks = case["model"], case.get("ranks", 1)
    spec = ModelSpec(
        name="small", family="llama", num_layers=sizes["layers"], hidden_size=sizes["hidden"], vocab_size=sizes["vocab"],
        num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv"], head_dim=sizes["hidden"] // sizes["heads"],
        ffn_hidden_size=sizes["ffn"], sequence_length=4096, tied_embeddings=sizes.get("tied", False),
    )  # fmt: skip
    if "rank" in case:
        bits = {"nf4": 4, "int8": 8}.get(case.get("bits") or "", 16)
        spec = with_adapters(spec, case["rank"], case["targets"].split(), bits)
    autocast, load = case.get("autocast", True), case.get("load", "bf16")
    checkpointing = case.get("checkpointing", "none")
    config = TrialConfig(
        micro_batch_size=case["micro_batch"], zero_stage=case.get("stage", 3 if ranks > 1 else 0),
        precision="bf16" if autocast else load, activation_checkpointing="none" if checkpointing == "none" else "full",
        offload_optimizer="cpu" if case.get("offload") else "none",
        offload_param="cpu" if case.get("offload_param") else "none",
    )  # fmt: skip
    if "stage" in case:
        config = config.replace({"reduce_bucket_size": case["bucket"], "max_live_parameters": case["live"]})
    workload = Workload(
        global_batch_size=case["micro_batch"] * case.get("accumulation", 1) * ranks, sequence_length=case["length"]
    )
    words = {
        "states": "true", "release": "5.24", "parameter_width": "4" if load == "fp32" else "2", "autocast": str(autocast),
        "attention": case.get("attention", "sdpa"), "adapter_width": "4" if case.get("wide_adapters", True) else "2",
        "adapter_dropout": str(bool(case.get("dropout"))), "reentrant": str(checkpointing == "reentrant"),
        "double_quantised": str(case.get("double", False)),
        "sharding": "zero" if "stage" in case else "fsdp1" if case.get("fsdp1") else "fsdp2" if ranks > 1 else "none",
        "mixed_units": str(case.get("mixed_units", False)),
        "update": "fused" if ranks > 1 else "loop" if "optim" in case else "foreach",
        "moments": OPTIMIZERS.get(case.get("optim", ""), "torch"), "loss": "chunked" if "trainer" in case else "whole",
    }  # fmt: skip
    if case.get("bits") and case.get("prepared", True):
        words |= {"whole_norms": "true", "whole_tables": "true"}
    if case.get("trainer") == "dpo":
        words |= {"sequences": "2", "reference": case.get("reference", "adapter")}
    if case.get("loss") == "cut":
        words["loss"] = "cut"
    if width := case.get("tower"):  # four layers, patches of 16 x 16 and the projector
        words["tower"] = str(4 * 12 * width**2 + 3 * 16 * 16 * width + width * sizes["hidden"] + sizes["hidden"] ** 2)
    if case.get("liger"):
        words |= {"loss": "projection", "norms": "fused", "gates": "fused"}
    cases = cases_of(spec, resolve_cluster(f"{ranks}xa100-80gb"), workload, [config], "native", words)
    terms = allocated_bytes(cases)
    # CPU tensors of the host and of the device are the same.
    tags = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "host")
    return float(sum(np.sum(terms[tag]) for tag in tags) - 2 * cases.transformers.stream_workspace[0])


class Compared(NamedTuple):
    """A case with what was counted."""

    name: str
    counted: float
    """Bytes; NaN: a library refused it."""
    predicted: float
    refused: str = ""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.counted - 1


def compared(python: str, cases: Sequence[dict[str, Any]]) -> list[Compared]:
    """Train and predict."""
    answers: dict[str, dict[str, Any]] = {}
    # Two processes: Accelerate takes what DeepSpeed leaves in the environment for ranks of its own.
    for sharded in (False, True):
        group = [case for case in cases if ("ranks" in case) is sharded]
        done = subprocess.run(
            [python, "-m", "benchmarks.prediction.stacks_trainer"], input=json.dumps(group), capture_output=True, text=True,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        answers |= {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    if missing := [case["name"] for case in cases if case["name"] not in answers]:
        raise SystemExit(f"{python} did not answer {missing}: {done.stderr[-2000:]}")
    return [
        Compared(case["name"], answers[case["name"]].get("peak", float("nan")), predicted_bytes(case),
                 answers[case["name"]].get("refused", ""))
        for case in cases
    ]  # fmt: skip


def page(runs: Iterable[Compared], versions: str) -> list[str]:
    """The page."""
    runs = list(runs)
    errors = [abs(run.error) for run in runs if not run.refused]
    rows = [
        (run.name, run.refused or f"{run.counted / 1e6:.2f}", f"{run.predicted / 1e6:.2f}",
         "–" if run.refused else f"{100 * run.error:+.1f} %")
        for run in runs
    ]  # fmt: skip
    summary = (
        f"{len(errors)} of {len(runs)} stacks trained: median error {100 * np.median(errors):.1f} %, "
        f"95th percentile {100 * np.quantile(errors, 0.95):.1f} %, largest {100 * max(errors):.1f} %."
    )
    return [
        *PROSE.splitlines(), "", f"Packages: {versions}.", "", summary, "",
        *table(["stack", "counted, MB", "predicted, MB", "error"], rows),
    ]  # fmt: skip


def main() -> int:
    """Train, predict, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--only", default="", help="Cases whose names contain this text.")
    options = parser.parse_args()
    script = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {PACKAGES!r}))"
    versions = subprocess.run([options.python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    runs = compared(options.python, [case for case in variants() if options.only in case["name"]])
    problems = [f"{run.name}: {run.refused or f'{100 * run.error:+.1f} %'}" for run in runs if not abs(run.error) <= BOUND]
    return judge("\n".join(page(runs, versions)) + "\n", problems, options.markdown)


if __name__ == "__main__":
    sys.exit(main())
