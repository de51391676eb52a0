"""Every key that DeepSpeed 0.19.8 reads from its configuration, by section, and the keys that it has removed."""

from collections.abc import Mapping

TOP_LEVEL = frozenset({
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_parallel_size", "data_types",
    "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel",
    "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "optimizer", "pipeline", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "sequence_parallel_size", "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
})  # fmt: skip

FORBIDS_OTHERS: Mapping[str, frozenset[str]] = {
    "zero_optimization": frozenset({
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
        "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "cpu_offload", "prefetch_bucket_size", "stage3_prefetch_bucket_size",
        "param_persistence_threshold", "stage3_param_persistence_threshold", "model_persistence_threshold",
        "stage3_model_persistence_threshold", "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance",
        "stage3_max_reuse_distance", "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold", "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params",
        "stage3_use_all_reduce_for_fetch_params", "allgather_sequential", "stage3_allgather_sequential",
        "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
        "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    }),
    "zero_optimization.offload_param": frozenset({
        "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
    }),
    "zero_optimization.offload_optimizer": frozenset({
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "super_offload", "cpuadam_cores_perc",
    }),
    "bf16": frozenset({
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states",
    }),
    "fp16": frozenset({
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
    }),
    "tensor_parallel": frozenset({
        "dtype", "autotp_size", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "tp",
        "tensor_parallel", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host",
        "replace_with_kernel_inject", "kernel_inject",
    }),
    "comms_logger": frozenset({"enabled", "prof_all", "prof_ops", "verbose", "debug"}),
}  # fmt: skip
"""Sections in which an unlisted key stops DeepSpeed."""

IGNORES_OTHERS: Mapping[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "activation_checkpointing": frozenset({
        "partition_activations", "number_checkpoints", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
        "profile", "cpu_checkpointing",
    }),
    "pipeline": frozenset({
        "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
        "use_reentrant",
    }),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
    "flops_profiler": frozenset({
        "enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
    }),
    "aio": frozenset({
        "block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds",
    }),
    "timers": frozenset({"throughput"}),
}  # fmt: skip
"""Sections in which DeepSpeed ignores an unlisted key."""

REMOVED_VERSION = "0.19.8"
REMOVED: Mapping[str, str] = {
    "nebula": "checkpoints are written by torch.save",
    "compression_training": "use a library for compression",
    "amp": "use bf16, fp16 or torch_autocast",
    "quantize_training": "use a library for quantization",
    "sparse_gradients": "gradients of embeddings made with sparse=True stay sparse without it",
    "eigenvalue": "only quantize_training used it",
    "sparse_attention": "use torch's flex_attention",
    "elasticity": "set the three batch sizes",
    "graph_harvesting": "use torch.compile",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "drop layers in the model",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it",
}
"""Key that stops DeepSpeed from `REMOVED_VERSION` on -> its replacement."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizer types removed in the same version, in lower case."""

STAGE_3_KEYS = frozenset({
    "stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_param_persistence_threshold", "param_persistence_threshold",
    "stage3_model_persistence_threshold", "model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters",
    "stage3_max_reuse_distance", "max_reuse_distance", "stage3_module_granularity_threshold", "module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    "allgather_sequential", "sub_group_size", "zero_quantized_weights", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "memory_efficient_linear",
})  # fmt: skip
"""Keys of `zero_optimization` that are accepted at every stage but read only at stage 3."""
NEVER_READ: Mapping[str, str] = {
    "zero_optimization.allgather_bucket_size": "updated parameters are gathered in one message per group",
    "zero_optimization.allgather_partitions": "updated parameters are always gathered",
    "disable_allgather": "updated parameters are always gathered",
}
"""Key that is accepted but never read on any torch that DeepSpeed supports -> what happens instead."""
