"""What Megatron-LM's parser refuses (`validate_args` at d98e8a64), beside what both frameworks' configurations refuse."""

from collections.abc import Callable
from functools import partial
from typing import Any

from autotune.frameworks.framework import Check, LintCase, Settings
from autotune.frameworks.megatron import FULLY_RECOMPUTED
from search_spaces.errors import Effect

EXCLUSIVE = (
    ("--group-query-attention", "--multi-latent-attention"), ("--mock-data", "--data-path"), ("--fp4-format", "--fp8-format"),
    ("--cpu-offloading-num-layers", "--recompute-granularity"), ("--cpu-offloading-num-layers", "--recompute-activations"),
    ("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"),
    ("--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"),
    ("--num-layers-per-virtual-pipeline-stage", "--decoder-first-pipeline-num-layers"),
    ("--num-layers-per-virtual-pipeline-stage", "--decoder-last-pipeline-num-layers"),
    *((f"--train-{unit}", f"--lr-{part}-{other}") for part in ("decay", "warmup")
      for unit, other in (("iters", "samples"), ("samples", "iters"))),
    ("--lr-warmup-fraction", "--lr-warmup-iters"), ("--lr-warmup-fraction", "--lr-warmup-samples"),
)  # fmt: skip
"""Options of which one only may be stated."""
NEEDED = (
    ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights"), ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion"),
    ("--overlap-param-gather-with-optimizer-step", "--overlap-param-gather"),
)  # fmt: skip
"""Switches, each with the one that it needs."""
GONE = (
    "--delay-param-gather", "--no-delay-grad-reduce", "--standalone-embedding-stage", "--moe-extended-tp", "--s3-cache-path",
    "--pipeline-model-parallel-split-rank", "--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size",
    "--no-async-tensor-model-parallel-allreduce", "--use-legacy-models", "--no-scatter-gather-tensors-in-pipeline",
    "--legacy-tokenizer", "--tiktoken-special-tokens", "--log-batch-size-to-tensorboard", "--enable-one-logger",
    "--use-gpu-initialization", "--retro-add-retriever", "--renormalize-blend-weights", "--muon-use-nesterov",
)  # fmt: skip
"""Options of Megatron-core 0.6 to 0.16 that the parser no longer has."""


def _check(
    option: str, problem: str, holds: Callable[[LintCase], Any], remedy: str, fix: Settings | None = None, other: str = ""
) -> Check:
    """`other`: the other option of a pair."""
    return Check(
        name=f"parser{option[1:]}{other[1:]}",
        key=option,
        effect=Effect.REFUSED,
        problem=problem,
        holds=lambda case: not case.on("--deepspeed") and holds(case),  # Megatron-DeepSpeed has a parser of its own
        remedy=remedy,
        fix=fix or {},
    )


def _states(options: tuple[str, ...], without: str, case: LintCase) -> bool:
    return all(map(case.get, options)) and not (without and case.get(without))


def _is_stated(option: str, case: LintCase) -> bool:
    return case.get(option) is not None


def _misplaced_format(case: LintCase) -> bool:
    owner = {"fsdp_dtensor": "--use-megatron-fsdp", "torch_dcp": "--use-torch-fsdp2"}.get(str(case.get("--ckpt-format")))
    return owner is not None and not case.on(owner)


def _undividable(case: LintCase) -> bool:
    """Whether saved activations are divided where they cannot be."""
    full = case.get("--recompute-granularity") == "full" and case.config.tensor_parallel_size > 1
    return case.on("--distribute-saved-activations") and (not full or case.on("--sequence-parallel"))


PARSER_CHECKS = (
    *(_check(option, f"it and {other} exclude each other", partial(_states, (option, other), ""), "leave one of them out",
             {option: None}, other) for option, other in EXCLUSIVE),
    *(_check(option, f"it needs {needed}", partial(_states, (option,), needed), "", {needed: True}, needed)
      for option, needed in NEEDED),
    *(_check(option, "the parser has no such option; earlier versions had it",
             partial(_is_stated, option), "", {option: None}) for option in GONE),
    *(_check(option, "the parser has no such option; earlier versions had it", partial(_is_stated, option), "",
             {option: None, "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1})
      for option in FULLY_RECOMPUTED),
    _check("--mtp-num-layers", "multi-token prediction needs position-embedding-type rope or none", lambda case:
           case.get("--mtp-num-layers") and case.get("--position-embedding-type") not in ("rope", "none"),
           "use rope", {"--position-embedding-type": "rope"}),
    _check("--distribute-saved-activations", "it needs tensor parallelism and full recomputation, without sequence parallelism",
           _undividable, "", {"--distribute-saved-activations": None}),
    _check("--cpu-offloading-num-layers", "offloaded activations and pipelines exclude each other", lambda case:
           case.get("--cpu-offloading-num-layers") and case.config.pipeline_parallel_size > 1, "",
           {"--cpu-offloading-num-layers": None}),
    _check("--no-position-embedding", "it is refused without rope", lambda case: case.on("--no-position-embedding")
           and case.get("--position-embedding-type") != "rope" and not case.on("--use-rotary-position-embeddings"),
           "use --position-embedding-type none"),
    _check("--min-lr", "it is more than the learning rate", lambda case: isinstance(case.get("--lr"), int | float)
           and isinstance(case.get("--min-lr"), int | float) and case.get("--min-lr") > case.get("--lr"), "give at most --lr"),
    _check("--weight-decay-incr-style", "it needs --start-weight-decay and --end-weight-decay", lambda case:
           case.get("--weight-decay-incr-style", "constant") != "constant"
           and any(case.get(f"--{end}-weight-decay") is None for end in ("start", "end")), "state both"),
    _check("--fp32-residual-connection", "it needs bf16 or fp16", lambda case: case.on("--fp32-residual-connection")
           and not (case.on("--bf16") or case.on("--fp16")), "", {"--bf16": True}),
    _check("--ckpt-format", "fsdp_dtensor is the format of Megatron-FSDP, and torch_dcp that of torch's FSDP2",
           _misplaced_format, "", {"--ckpt-format": "torch_dist"}),
    _check("--save", "checkpoints need a --save-interval", lambda case: case.get("--save") is not None
           and not any(map(case.get, ("--save-interval", "--persistent-save-interval"))), "state one"),
    _check("--hierarchical-context-parallel-sizes", "a2a+p2p needs them", lambda case: "a2a+p2p" in
           str(case.get("--cp-comm-type")) and not case.get("--hierarchical-context-parallel-sizes"), "state them"),
    _check("--cross-entropy-fusion-impl", "Transformer Engine's fused loss is disabled", lambda case:
           case.on("--cross-entropy-loss-fusion") and case.get("--cross-entropy-fusion-impl") == "te", "",
           {"--cross-entropy-fusion-impl": "native"}),
)  # fmt: skip
