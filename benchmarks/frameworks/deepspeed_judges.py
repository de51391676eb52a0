"""What DeepSpeed and Accelerate say of a file."""

import json
import os
import re
from types import SimpleNamespace
from typing import Any

from judge_tools import Request, UnjudgedError, Values


def judge_deepspeed(request: Request) -> Values:
    """`DeepSpeedConfig`; values that are `auto` are filled by the Trainer's own integration, with its defaults."""
    import deepspeed.comm
    import hjson
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    deepspeed.comm.get_rank, deepspeed.comm.get_world_size = (lambda *_: 0), (lambda *_: request.ranks)
    with request.path.open(encoding="utf-8") as file:
        content = hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    written = json.loads(json.dumps(content))
    config = DeepSpeedConfig(without_auto(content, request.ranks))
    require_optimizer(config)
    return deepspeed_values(config, written)


def require_optimizer(config: Any) -> None:
    """The engine's own question about the optimizer: is it DeepSpeed's or torch's?"""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name = config.optimizer_name
    if name is not None and name not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, name):
        raise ValueError(f"{name} is neither an optimizer of DeepSpeed nor of torch")


def without_auto(content: Any, ranks: int) -> Any:
    """The content with values in place of `auto`, as the Trainer's integration with DeepSpeed fills them."""
    if '"auto"' not in json.dumps(content):
        return content
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    gradient_accumulation_steps = content.get("gradient_accumulation_steps", "auto")
    micro = content.get("train_micro_batch_size_per_gpu", "auto")
    trainer = SimpleNamespace(
        world_size=ranks,
        per_device_train_batch_size=8 if micro == "auto" else micro,
        max_grad_norm=1.0,
        learning_rate=5e-5,
        gradient_accumulation_steps=1 if gradient_accumulation_steps == "auto" else gradient_accumulation_steps,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=(content.get("fp16") or {}).get("enabled") is not True,
        bf16_full_eval=False,
        get_warmup_steps=lambda _: 0,
    )
    filled = HfTrainerDeepSpeedConfig(content)
    filled.fill_match = lambda key, value, *_: filled.fill_only(
        key, value
    )  # what the file states is not the Trainer's to judge
    filled.trainer_config_process(trainer)
    filled.trainer_config_finalize(trainer, SimpleNamespace(config=SimpleNamespace(hidden_size=4096)), 100)
    return filled.config


def deepspeed_values(config: Any, written: Values) -> Values:
    """Values of a `DeepSpeedConfig` that the file itself states."""
    values: Values = {"zero_stage": config.zero_optimization_stage}
    batches = [
        written.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    if "auto" not in batches and any(batches):
        values["global_batch_size"] = config.train_batch_size
    if ("auto" not in batches and any(batches[:2])) or isinstance(batches[1], int):
        values["micro_batch_size"] = config.train_micro_batch_size_per_gpu
    precisions = [(written.get(name) or {}).get("enabled", False) for name in ("fp16", "bf16")]
    if "auto" not in precisions:
        values["precision"] = "fp16" if config.float16_config.enabled else "bf16" if config.bfloat16_config.enabled else "fp32"
    return values


def judge_accelerate(request: Request) -> Values:
    """The launcher's command with the file, up to the environment of the processes and the plug-in that they build from it."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    environments.is_port_in_use, environments.is_fp8_available = (lambda *_: False), (lambda: True)
    text = request.path.read_text(encoding="utf-8")
    if "AMAZON_SAGEMAKER" in text or "mpirun" in text:
        raise UnjudgedError("is for SageMaker, or for MPI on CPUs")
    named = re.search(r"deepspeed_config_file:\s*(\S+)", text)
    os.chdir(request.path.parent if named and (request.path.parent / named[1]).exists() else request.tree)
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(request.path), "train.py"])
    arguments, defaults, precision_from_file = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        names = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(names)
        _, environment = environments.prepare_deepspeed_cmd_env(arguments)
    elif arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu:
        environment = environments.prepare_multi_gpu_env(arguments)
    elif arguments.tpu:
        raise UnjudgedError("is for TPUs")
    else:
        _, environment = environments.prepare_simple_launcher_cmd_env(arguments)
    os.environ.update({**environment, "WORLD_SIZE": str(arguments.num_processes), "RANK": "0"})
    return accelerate_values(arguments)


def accelerate_values(arguments: Any) -> Values:
    """Values of the plug-in that a process builds from its environment."""
    import accelerate.utils
    import deepspeed.comm
    import torch
    from accelerate.utils import dataclasses as plugins

    plugins.is_cuda_available, torch.cuda.current_device = (lambda: True), (lambda: 0)
    values: Values = {"precision": {"no": "fp32"}.get(arguments.mixed_precision, arguments.mixed_precision)}
    ranks = int(arguments.num_processes)
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        sizes = accelerate.utils.ParallelismConfig() if hasattr(accelerate.utils, "ParallelismConfig") else None
        if sizes is None:
            from accelerate.parallelism_config import ParallelismConfig

            sizes = ParallelismConfig()
        values |= {"tensor_parallel_size": sizes.tp_size, "context_parallel_size": sizes.cp_size * sizes.sp_size}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        plugin = accelerate.utils.DeepSpeedPlugin()
        content = json.loads(json.dumps(plugin.deepspeed_config))
        deepspeed.comm.get_rank, deepspeed.comm.get_world_size = (lambda *_: 0), (lambda *_: ranks)
        from deepspeed.runtime.config import DeepSpeedConfig

        config = DeepSpeedConfig(without_auto(plugin.deepspeed_config, ranks))
        if config.bfloat16_config.enabled or config.float16_config.enabled:
            values["precision"] = "bf16" if config.bfloat16_config.enabled else "fp16"
        values["zero_stage"] = plugin.zero_stage
        if isinstance(micro := content.get("train_micro_batch_size_per_gpu"), int):
            values["micro_batch_size"] = micro
    elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
        plugin = accelerate.utils.FullyShardedDataParallelPlugin()
        if plugin.fsdp_version == 1:
            stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
            if plugin.sharding_strategy.name in stages:
                values["zero_stage"] = stages[plugin.sharding_strategy.name]
        elif isinstance(plugin.reshard_after_forward, bool):
            values["zero_stage"] = 3 if plugin.reshard_after_forward else 2
        values["activation_checkpointing"] = "full" if plugin.activation_checkpointing else "none"
        if plugin.activation_checkpointing is False:
            del values["activation_checkpointing"]  # the program that trains may still switch it on
    elif os.environ.get("ACCELERATE_USE_MEGATRON_LM") == "true":
        values |= {
            "tensor_parallel_size": int(os.environ["MEGATRON_LM_TP_DEGREE"]),
            "pipeline_parallel_size": int(os.environ["MEGATRON_LM_PP_DEGREE"]),
        }
    return values
