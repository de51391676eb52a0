"""What the native engine honours and refuses. Imports no torch: the search reads it."""

from executor.engines.adapter_rules import PROMPT_CONTEXT, VIRTUAL_TOKENS_MUON
from executor.engines.compiling_rules import COMPILE_SELECTIVE, COMPILE_ZERO_BUBBLE
from executor.engines.expert_rules import EXPERTS_ADAPTERS, EXPERTS_COMPILED, EXPERTS_COPIES
from executor.engines.native.float8_rules import FLOAT8_COMBINATIONS
from executor.engines.native.fused_rules import FUSED
from executor.engines.native.graph_rules import GRAPHED
from executor.engines.native.overlap_rules import OVERLAPPED
from executor.engines.native.schedule_rules import RANDOM_LTD_CURRICULUM, RANDOM_LTD_DIVIDED, SCHEDULE_COMPILED
from executor.engines.onebit_rules import ONEBIT_DIMENSIONS, ONEBIT_STAGE
from search_spaces.capability import Capability, Combination
from search_spaces.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.stage_layout import marks_offloading, marks_recomputation, policies
from search_spaces.trial_config import TrialConfig


def _reshards_under_zero_bubble(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return split and config.zero_stage == 3 and config.reshard_after_forward


def _compiles_selective_stages(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and marks_recomputation(config) and "selective" in policies(config)


def _updates_another_on_host(config: TrialConfig, _: int) -> bool:
    return config.optimizer != "adamw" and (config.offload_optimizer != "none" or marks_offloading(config))


def _offloads_what_is_recalled(config: TrialConfig, _: int) -> bool:
    selective = config.activation_checkpointing == "selective"
    return config.offload_activations and (selective or (marks_recomputation(config) and "selective" in policies(config)))


def _offloads_what_is_compiled(config: TrialConfig, _: int) -> bool:
    return config.offload_activations and config.compile_blocks


NATIVE = Capability(
    engine="native",
    keeps_copy_beside_gradients=True,
    knobs={
        "zero_stage": None,
        "micro_batch_size": None,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
        "prefetch_bucket_size": None,
        "param_persistence_threshold": None,
        "max_live_parameters": None,
        "overlap_comm": None,
        "contiguous_gradients": None,
        "defer_gradient_reduction": None,
        "reduce_dtype": None,
        "hsdp_shard_size": None,
        "reshard_after_forward": None,
        "offload_optimizer": None,
        "offload_param": None,
        "offload_ratio": None,
        "tensor_parallel_size": None,
        "sequence_parallel": None,
        "pipeline_parallel_size": None,
        "virtual_stages": None,
        "pipeline_schedule": None,
        "pipeline_split": None,
        "context_parallel_size": None,
        "expert_parallel_size": None,
        "activation_checkpointing": None,
        "checkpoint_every_k": None,
        "attention_backend": None,
        "precision": None,
        "loss_chunk_size": None,
        "fused_optimizer": None,
        "rank_order": None,
        "expandable_segments": None,
        "environment": None,
        "compile_blocks": None,
        "pipeline_layout": None,
        "accumulation_dtype": None,
        "optimizer": None,
        "lora_rank": None,
        "lora_targets": None,
        "frozen_dtype": None,
        "adapter_size": None,
        "prefix_length": None,
        "prompt_length": None,
        "context_parallel_method": None,
        "attention_window": None,
        "attention_global_tokens": None,
        "gc_interval": None,
        "numa_binding": None,
        "overlap_param_gather": None,
        "offload_activations": None,
        "curriculum_start_length": None,
        "curriculum_steps": None,
        "random_ltd_start_tokens": None,
        "random_ltd_steps": None,
        "gather_dtype": None,
        "secondary_shard_size": None,
        "onebit_warmup_steps": None,
        "async_tensor_parallel": None,
        "pack_sequences": None,
        "fused_kernels": None,
        "cuda_graphs": None,
    },
    combinations=(
        COMPILE_SELECTIVE,
        Combination(
            rule="compile-selective-stages",
            reads=("compile_blocks", "pipeline_layout"),
            problem="a stage is computed again selectively, which watches single operators, and what is watched torch.compile "
            "leaves as it is",
            remedy="set compile_blocks=false, or mark stages with f in the place of s",
            holds=_compiles_selective_stages,
        ),
        COMPILE_ZERO_BUBBLE,
        EXPERTS_COPIES,
        EXPERTS_ADAPTERS,
        EXPERTS_COMPILED,
        PROMPT_CONTEXT,
        VIRTUAL_TOKENS_MUON,
        Combination(
            rule="zero-bubble-reshard",
            reads=("zero_stage", "reshard_after_forward", "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules compute the gradients of weights after the backward that gathers them, "
            "when stage 3 has released them again",
            remedy="set reshard_after_forward=false, or use another schedule or stage",
            holds=_reshards_under_zero_bubble,
        ),
        Combination(
            rule="offload-selective",
            reads=("offload_activations", "activation_checkpointing", "pipeline_layout"),
            problem="selective checkpointing holds what it keeps itself, so that it stays on the device",
            remedy="set offload_activations=false, or compute again in full or not at all",
            holds=_offloads_what_is_recalled,
        ),
        Combination(
            rule="offload-compiled",
            reads=("offload_activations", "compile_blocks"),
            problem="torch.compile takes what moves saved tensors into its graphs, and fails on it where a block falls into "
            "several",
            remedy="set compile_blocks=false or offload_activations=false",
            holds=_offloads_what_is_compiled,
        ),
        Combination(
            rule="optimizer-on-device",
            reads=("optimizer", "offload_optimizer", "pipeline_layout"),
            problem="AdamW alone is updated on the host, where torch has a kernel for it; other updates run on the device",
            remedy="set offload_optimizer=none and mark no stage with o, or set optimizer=adamw",
            holds=_updates_another_on_host,
        ),
        SCHEDULE_COMPILED,
        RANDOM_LTD_CURRICULUM,
        RANDOM_LTD_DIVIDED,
        ONEBIT_STAGE,
        ONEBIT_DIMENSIONS,
        *OVERLAPPED,
        *FUSED,
        *GRAPHED,
        *FLOAT8_COMBINATIONS,
    ),
)
