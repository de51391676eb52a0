"""What Megatron-LM's parser refuses (`validate_args` at d98e8a64), beside what both frameworks' configurations refuse."""

from collections.abc import Callable
from functools import partial
from typing import Any

from autotune.frameworks.framework import Check, LintCase, Settings
from search_spaces.finding import Effect

GONE = (
    "--delay-param-gather", "--no-delay-grad-reduce", "--standalone-embedding-stage", "--moe-extended-tp", "--s3-cache-path",
    "--pipeline-model-parallel-split-rank", "--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size",
    "--no-async-tensor-model-parallel-allreduce", "--use-legacy-models", "--no-scatter-gather-tensors-in-pipeline",
    "--legacy-tokenizer", "--tiktoken-special-tokens", "--log-batch-size-to-tensorboard", "--enable-one-logger",
    "--use-gpu-initialization", "--retro-add-retriever", "--renormalize-blend-weights", "--muon-use-nesterov",
)  # fmt: skip
"""Options of Megatron-core 0.6 to 0.16 that the parser no longer has."""
UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def _check(option: str, problem: str, holds: Callable[[LintCase], Any], remedy: str, **fix: Any) -> Check:
    """A row of the table; `fix`: option, with _ for -, -> the value that mends it."""
    changes: Settings = {f"--{name.replace('_', '-')}": value for name, value in fix.items()}
    return Check(
        name=f"parser-{option.lstrip('-')}", key=option, effect=Effect.REFUSED, problem=problem, holds=holds, remedy=remedy,
        fix=changes,
    )  # fmt: skip


def _recomputes(case: LintCase) -> bool:
    return case.get("--recompute-granularity") is not None or case.on("--recompute-activations")


def _mixed_lengths(case: LintCase) -> bool:
    """Whether training by iterations has a schedule by samples, or the other way round."""
    return any(
        case.get(f"--train-{unit}") and any(case.get(f"--lr-{part}-{other}") for part in ("decay", "warmup"))
        for unit, other in (("iters", "samples"), ("samples", "iters"))
    )


def _is_stated(option: str, case: LintCase) -> bool:
    return case.get(option) is not None


PARSER_CHECKS = (
    _check(
        "--group-query-attention", "grouped queries and latent attention exclude each other",
        lambda case: case.on("--multi-latent-attention") and case.on("--group-query-attention"), "leave one of them out",
        group_query_attention=None, num_query_groups=None,
    ),
    _check(
        "--mtp-num-layers", "multi-token prediction needs position-embedding-type rope or none",
        lambda case: case.get("--mtp-num-layers") and case.get("--position-embedding-type") not in ("rope", "none"), "use rope",
        position_embedding_type="rope",
    ),
    _check(
        "--num-layers-per-virtual-pipeline-stage", "uneven stages take a number of virtual stages, not of layers",
        lambda case: case.get("--num-layers-per-virtual-pipeline-stage") and any(map(case.get, UNEVEN)),
        "use --num-virtual-stages-per-pipeline-rank",
    ),
    _check(
        "--pipeline-model-parallel-layout", "a layout states the virtual stages too",
        lambda case: case.get("--pipeline-model-parallel-layout") is not None
        and any(map(case.get, ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"))),
        "state one of them", num_layers_per_virtual_pipeline_stage=None, num_virtual_stages_per_pipeline_rank=None,
    ),
    _check(
        "--distribute-saved-activations", "it needs tensor parallelism and full recomputation, without sequence parallelism",
        lambda case: case.on("--distribute-saved-activations")
        and (case.config.tensor_parallel_size == 1 or case.get("--recompute-granularity") != "full"
             or case.on("--sequence-parallel")), "leave it out", distribute_saved_activations=None,
    ),
    _check(
        "--cpu-offloading-num-layers", "offloaded activations and recomputation exclude each other",
        lambda case: case.get("--cpu-offloading-num-layers") and _recomputes(case), "leave one of them out",
        cpu_offloading_num_layers=None,
    ),
    _check(
        "--cpu-offloading-num-layers", "offloaded activations and pipelines exclude each other",
        lambda case: case.get("--cpu-offloading-num-layers") and case.config.pipeline_parallel_size > 1, "leave it out",
        cpu_offloading_num_layers=None,
    ),
    _check(
        "--no-position-embedding", "it is refused without rope", lambda case: case.on("--no-position-embedding")
        and case.get("--position-embedding-type") != "rope" and not case.on("--use-rotary-position-embeddings"),
        "use --position-embedding-type none", no_position_embedding=None,
    ),
    _check(
        "--fp4-format", "fp4 and fp8 exclude each other", lambda case: case.get("--fp4-format") and case.get("--fp8-format"),
        "leave one of them out", fp4_format=None,
    ),
    _check(
        "--min-lr", "it is more than the learning rate", lambda case: isinstance(case.get("--lr"), int | float)
        and isinstance(case.get("--min-lr"), int | float) and case.get("--min-lr") > case.get("--lr"), "give at most --lr",
    ),
    _check(
        "--weight-decay-incr-style", "it needs --start-weight-decay and --end-weight-decay",
        lambda case: case.get("--weight-decay-incr-style", "constant") != "constant"
        and any(case.get(f"--{end}-weight-decay") is None for end in ("start", "end")), "state both",
    ),
    _check(
        "--overlap-param-gather-with-optimizer-step", "it needs interleaved stages and --overlap-param-gather",
        lambda case: case.on("--overlap-param-gather-with-optimizer-step")
        and (case.config.virtual_stages == 1 or not case.on("--overlap-param-gather")), "leave it out",
        overlap_param_gather_with_optimizer_step=None,
    ),
    _check(
        "--fp32-residual-connection", "it needs bf16 or fp16",
        lambda case: case.on("--fp32-residual-connection") and not (case.on("--bf16") or case.on("--fp16")), "state bf16",
        bf16=True,
    ),
    _check(
        "--ckpt-format", "fsdp_dtensor is the format of Megatron-FSDP, and torch_dcp that of torch's FSDP2",
        lambda case: (case.get("--ckpt-format") == "fsdp_dtensor" and not case.on("--use-megatron-fsdp"))
        or (case.get("--ckpt-format") == "torch_dcp" and not case.on("--use-torch-fsdp2")), "use torch_dist",
        ckpt_format="torch_dist",
    ),
    _check(
        "--untie-embeddings-and-output-weights", "torch's FSDP2 needs it",
        lambda case: case.on("--use-torch-fsdp2") and not case.on("--untie-embeddings-and-output-weights"), "switch it on",
        untie_embeddings_and_output_weights=True,
    ),
    _check(
        "--no-gradient-accumulation-fusion", "torch's FSDP2 needs it",
        lambda case: case.on("--use-torch-fsdp2") and not case.on("--no-gradient-accumulation-fusion"), "switch it on",
        no_gradient_accumulation_fusion=True,
    ),
    _check(
        "--save", "checkpoints need a --save-interval",
        lambda case: case.get("--save") is not None
        and not any(case.get(f"--{name}") for name in ("save-interval", "persistent-save-interval")), "state one",
    ),
    _check("--train-iters", "iterations and samples exclude each other in the schedule", _mixed_lengths, "state one of them"),
    _check(
        "--lr-warmup-fraction", "it excludes a number of iterations or samples",
        lambda case: case.get("--lr-warmup-fraction") is not None
        and any(case.get(f"--lr-warmup-{unit}") for unit in ("iters", "samples")), "state one of them", lr_warmup_fraction=None,
    ),
    _check(
        "--mock-data", "mock data and a data path exclude each other",
        lambda case: case.on("--mock-data") and case.get("--data-path") is not None, "leave one of them out", mock_data=None,
    ),
    _check(
        "--hierarchical-context-parallel-sizes", "cp-comm-type a2a+p2p needs them",
        lambda case: "a2a+p2p" in str(case.get("--cp-comm-type", ""))
        and not case.get("--hierarchical-context-parallel-sizes"), "state them",
    ),
    _check(
        "--cross-entropy-fusion-impl", "Transformer Engine's fused loss is disabled",
        lambda case: case.on("--cross-entropy-loss-fusion") and case.get("--cross-entropy-fusion-impl") == "te", "use native",
        cross_entropy_fusion_impl="native",
    ),
    *(
        _check(
            option, "the parser has no such option; earlier versions had it", partial(_is_stated, option), "leave it out",
            **{option.lstrip("-").replace("-", "_"): None},
        )
        for option in GONE
    ),
)  # fmt: skip
