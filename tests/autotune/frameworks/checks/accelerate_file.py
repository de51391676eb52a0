"""Usage: accelerate_file.py FILE: read by Accelerate's parser of files, then by `accelerate launch` down to the environment."""

import json
import os
import sys
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser


def main() -> None:
    path = Path(sys.argv[1])
    os.chdir(path.parent)
    read = load_config_from_file(str(path))
    told = {
        "distributed_type": read.distributed_type.value, "num_processes": read.num_processes, "num_machines": read.num_machines,
    }  # fmt: skip
    words = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, defaults, _ = _validate_launch_command(words)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    told["use_fsdp"] = bool(arguments.use_fsdp)
    os.environ.update(environment_of(arguments))
    if arguments.use_fsdp:
        told["fsdp"] = fsdp()
    if arguments.use_deepspeed:
        told["deepspeed"] = deepspeed()
    if getattr(arguments, "use_parallelism_config", False):
        told["mesh"] = mesh()
    print(json.dumps(told))


def environment_of(arguments) -> dict[str, str]:
    """What the launcher hands to the processes."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    if arguments.use_deepspeed:
        return prepare_deepspeed_cmd_env(arguments)[1]
    return prepare_multi_gpu_env(arguments)


def fsdp() -> dict:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()
    return {
        "version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward,
        "checkpointing": plugin.activation_checkpointing,
        "layers": list(plugin.transformer_cls_names_to_wrap or []),
    }  # fmt: skip


def deepspeed() -> dict:
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    content = plugin.deepspeed_config
    return {"stage": plugin.zero_stage, "micro_batch": content["train_micro_batch_size_per_gpu"]}


def mesh() -> dict:
    from accelerate import ParallelismConfig

    sizes = ParallelismConfig()
    return {
        "dp_replicate": sizes.dp_replicate_size, "dp_shard": sizes.dp_shard_size, "tp": sizes.tp_size, "cp": sizes.cp_size,
    }  # fmt: skip


if __name__ == "__main__":
    main()
