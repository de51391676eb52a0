"""DeepSpeed's keys of knobs, and a TrialConfig as a DeepSpeed (0.19.8) configuration, for the engine and for the export."""

from collections.abc import Mapping
from typing import Any

from search_spaces.communication import INT8
from search_spaces.optimizers import GROWTH_INTERVAL, INITIAL_SCALE_POWER, LEAST_SCALE, MUON_MOMENTUM, SGD_MOMENTUM
from search_spaces.training.states import REQUEST_BYTES, REQUEST_THREADS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

KEYS: Mapping[str, str] = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "zero_optimization.stage",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "overlap_comm": "zero_optimization.overlap_comm",
    "contiguous_gradients": "zero_optimization.contiguous_gradients",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_ratio": "zero_optimization.offload_optimizer.ratio",
    "offload_param": "zero_optimization.offload_param.device",
}
"""Knob -> the key that has the same values."""
REDUCTION = ("reduce_bucket_size", "overlap_comm", "contiguous_gradients")
"""Knobs that stage 0 does not read: it reduces after backward, in its own buckets."""
KEEP_ALL = 10**12
"""For `stage3_max_reuse_distance`: larger than any step, so that gathered parameters are kept until backward."""


def deepspeed_config(config: TrialConfig, workload: Workload, world_size: int, parameter_count: int) -> dict[str, Any]:
    """The argument of `deepspeed.initialize(config=…)`: batch, ZeRO, types, clipping and optimizer. Only keys that are read.

    Tensor and pipeline parallelism are not included: they need the module. A `parameter_count` of 0 means unknown.
    """
    sums = config.accumulation_dtype
    fp16: dict[str, Any] = {"enabled": config.precision == "fp16"}
    if config.precision == "fp16":
        # 0 selects dynamic loss scaling. Without hysteresis each overflow lowers the scale.
        fp16 |= {
            "loss_scale": 0, "initial_scale_power": INITIAL_SCALE_POWER, "loss_scale_window": GROWTH_INTERVAL, "hysteresis": 1,
            "min_loss_scale": int(LEAST_SCALE),
        }  # fmt: skip
    return {
        **_batch(config, workload, world_size),
        "zero_optimization": _zero(config, workload, parameter_count),
        # At stage 3 another key selects integers.
        "communication_data_type": "fp32" if config.reduce_dtype == INT8 else config.reduce_dtype,
        "bf16": {"enabled": config.precision in ("bf16", "fp8")},
        "fp16": fp16,
        **({"data_types": {"grad_accum_dtype": sums}} if sums != TrialConfig().accumulation_dtype else {}),
        "gradient_clipping": workload.gradient_clipping,
        **_optimizer_section(config, workload),
        **_requests(config),
    }


def torch_optimizer(config: TrialConfig, workload: Workload) -> dict[str, Any]:
    """torch's AdamW, fused or not. DeepSpeed's own Adam is compiled on first use, which takes a minute."""
    parameters = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
    return {"type": "AdamW", "params": {**parameters, "torch_adam": True, "fused": config.fused_optimizer}}


def _same(config: TrialConfig, *knobs: str) -> dict[str, Any]:
    """The keys of these knobs within their section."""
    return {KEYS[name].rpartition(".")[2]: getattr(config, name) for name in knobs}


def _batch(config: TrialConfig, workload: Workload, world_size: int) -> dict[str, Any]:
    sizes = {
        "train_batch_size": workload.global_batch_size,
        **_same(config, "micro_batch_size"),
        "gradient_accumulation_steps": config.gradient_accumulation_steps(workload.global_batch_size, world_size),
    }
    if config.tensor_parallel_size > 1:
        # With AutoTP, DeepSpeed still counts each rank as a replica when it checks the product.
        del sizes["train_batch_size"]
    return sizes


def _zero(config: TrialConfig, workload: Workload, parameter_count: int) -> dict[str, Any]:
    zero = _same(config, "zero_stage")
    if config.zero_stage > 0:
        zero |= _same(config, *REDUCTION)
        # DeepSpeed allocates the whole bucket, however few gradients there are.
        zero["reduce_bucket_size"] = min(config.reduce_bucket_size, parameter_count or config.reduce_bucket_size)
    if config.zero_stage == 3:
        zero |= _stage_3(config)
        if config.optimizer == "muon":  # which needs whole gradients there
            zero["reduce_scatter"] = False
    if config.offload_optimizer != "none":
        ratio = _same(config, "offload_ratio") if offloads_a_part(config) else {}
        zero["offload_optimizer"] = {**_place(config.offload_optimizer, workload), **ratio}
        if config.offload_optimizer == "nvme":
            zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    if config.offload_param != "none":
        zero["offload_param"] = _place(config.offload_param, workload)
    return zero


def _place(device: str, workload: Workload) -> dict[str, Any]:
    path_keys = {"nvme_path": workload.nvme_path} if device == "nvme" and workload.nvme_path is not None else {}
    return {"device": device, **path_keys}


def _requests(config: TrialConfig) -> dict[str, Any]:
    """File request sizes of the native engine; DeepSpeed's defaults are 1 MiB, one thread at a time."""
    if "nvme" not in (config.offload_optimizer, config.offload_param):
        return {}
    return {"aio": {"block_size": REQUEST_BYTES, "thread_count": REQUEST_THREADS, "overlap_events": True}}


def offloads_a_part(config: TrialConfig) -> bool:
    """Whether DeepSpeed is to leave a part of the optimizer state on the device, which it supports only at stage 3."""
    return config.offload_optimizer != "none" and config.offload_ratio < 1.0 and config.zero_stage == 3


def _stage_3(config: TrialConfig) -> dict[str, Any]:
    # A second, nearer copy of the parameters, from which backward gathers (hpZ of ZeRO++). States stay sharded over all ranks.
    size = config.secondary_shard_size or config.hsdp_shard_size
    return {
        **({"zero_hpz_partition_size": size} if size else {}),
        **({"zero_quantized_weights": True} if config.gather_dtype == INT8 else {}),
        **({"zero_quantized_gradients": True} if config.reduce_dtype == INT8 else {}),
        **_same(config, "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"),
        # DeepSpeed keeps parameters that it reuses within this distance, whatever other limits say; its default is 1e9.
        "stage3_max_reuse_distance": 0 if config.reshard_after_forward else KEEP_ALL,
    }


def _optimizer_section(config: TrialConfig, workload: Workload) -> dict[str, Any]:
    """The optimizer, if DeepSpeed can create it, and the permission to shard it if DeepSpeed has not tested that."""
    untested = config.zero_stage > 0 and config.optimizer not in ("adamw", "muon")
    permission: dict[str, Any] = {"zero_allow_untested_optimizer": True} if untested else {}
    if config.optimizer == "adamw8bit":
        return permission
    return {**permission, "optimizer": _optimizer(config, workload)}


def _optimizer(config: TrialConfig, workload: Workload) -> dict[str, Any]:
    parameters: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
    match config.optimizer:
        case "sgd":
            return {"type": "SGD", "params": {**parameters, "momentum": SGD_MOMENTUM}}
        case "lamb":
            return {"type": "Lamb", "params": parameters}
        case "muon":
            return {"type": "Muon", "params": {**parameters, "momentum": MUON_MOMENTUM}}
    if not config.fused_optimizer and not offloads_a_part(config):  # only DeepSpeed's own Adam can offload a part
        parameters["torch_adam"] = True
    return {"type": "AdamW", "params": parameters}
