"""What torchtitan and Megatron-LM say of a file or a script."""

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from judge_tools import Request, UnjudgedError, Values
from launched_words import launched, root_of, world_of


def judge_torchtitan(request: Request) -> Values:
    """torchtitan's own parser of that version, and its mesh of the ranks."""
    os.chdir(request.tree)
    try:
        from torchtitan.config import ConfigManager
    except ImportError:
        from torchtitan.config_manager import ConfigManager
    own_fields = (
        request.path.parents[1] / "job_config.py"
    )  # of an experiment, whose program names this module on its command line
    module = ".".join(own_fields.relative_to(request.tree).with_suffix("").parts) if own_fields.is_file() else ""
    further = []
    if module and not re.search("custom_(config|args)_module", request.path.read_text(encoding="utf-8")):
        further = [f"--job.custom_config_module={module}"]
        try:
            importlib.import_module(module)
        except Exception as error:
            raise UnjudgedError(f"{module} is not imported: {error}") from error
    config = ConfigManager().parse_args([f"--job.config_file={request.path}", *further])
    degrees = config.parallelism
    sizes = {
        "tensor_parallel_size": degrees.tensor_parallel_degree,
        "pipeline_parallel_size": degrees.pipeline_parallel_degree,
        "context_parallel_size": degrees.context_parallel_degree,
        "expert_parallel_size": getattr(degrees, "expert_parallel_degree", 1),
    }
    world = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"] * sizes["context_parallel_size"]
    world *= degrees.data_parallel_replicate_degree * (
        request.ranks if degrees.data_parallel_shard_degree < 0 else degrees.data_parallel_shard_degree
    )
    parallel_dims(degrees, sizes, world)
    training, checkpointing = config.training, config.activation_checkpoint
    micro = getattr(training, "local_batch_size", None)
    if degrees.pipeline_parallel_degree > 1:
        samples, micro = micro, getattr(degrees, "pipeline_parallel_microbatch_size", 1)
        require_micro_batches(degrees, samples // micro)
    values: Values = {**sizes, "micro_batch_size": micro, "sequence_length": training.seq_len, "world": world}
    match checkpointing.mode, getattr(checkpointing, "selective_ac_option", "op"):
        case "selective", str(option) if option.isdigit():  # whole layers, every so many
            values |= {"activation_checkpointing": "full", "checkpoint_every_k": int(option)}
        case "memory_budget", _:
            pass
        case mode, _:
            values["activation_checkpointing"] = mode
    if (batch := getattr(training, "global_batch_size", -1)) > 0:
        values["global_batch_size"] = batch
    return values


def require_micro_batches(degrees: Any, micro_batches: int) -> None:
    """The check of torch's schedules with one stage on each rank."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    schedule = get_schedule_class(degrees.pipeline_parallel_schedule)
    if issubclass(schedule, PipelineScheduleSingle) and micro_batches < degrees.pipeline_parallel_degree:
        raise ValueError(f"Number of microbatches ({micro_batches}) must be greater than or equal to the number of stages")


def parallel_dims(degrees: Any, sizes: Values, world: int) -> None:
    """The check of torchtitan's mesh of ranks."""
    from torchtitan.distributed import ParallelDims

    arguments = {
        "dp_replicate": degrees.data_parallel_replicate_degree,
        "dp_shard": degrees.data_parallel_shard_degree,
        "cp": sizes["context_parallel_size"],
        "tp": sizes["tensor_parallel_size"],
        "pp": sizes["pipeline_parallel_size"],
        "ep": sizes["expert_parallel_size"],
        "etp": getattr(degrees, "expert_tensor_parallel_degree", 1),
        "world_size": world,
        "enable_loss_parallel": not getattr(degrees, "disable_loss_parallel", False),
    }
    known = ParallelDims.__dataclass_fields__
    ParallelDims(**{name: value for name, value in arguments.items() if name in known})


def judge_megatron(request: Request) -> Values:
    """The words that bash gives to the training program, by Megatron's `parse_args` and `validate_args`."""
    words, variables = launched(request.path, root_of(request.path), [f"argument-{number}" for number in range(1, 10)])
    world = world_of(words, variables) or request.ranks
    names = [Path(word).name for word in words]
    program = next((name for name in names if name.startswith("pretrain_") and name.endswith(".py")), None)
    if program is None:
        raise UnjudgedError("the script starts no pretrain_*.py")
    options = words[names.index(program) + 1 :]
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {name: value for name, value in variables.items() if name.startswith(("CUDA_", "NVTE_", "NCCL_"))}
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in variables:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    sys.argv = [program, *options]
    from megatron.training import arguments as parser

    parsed = parser.parse_args()
    parser.validate_args(parsed, {"tokenizer_type": "GPT2BPETokenizer"} if "gpt" in program else {})
    build_groups(parsed, world)
    return {
        "micro_batch_size": parsed.micro_batch_size,
        "global_batch_size": parsed.global_batch_size,
        "sequence_length": parsed.seq_length,
        "tensor_parallel_size": parsed.tensor_model_parallel_size,
        "pipeline_parallel_size": parsed.pipeline_model_parallel_size,
        "context_parallel_size": parsed.context_parallel_size,
        "expert_parallel_size": parsed.expert_model_parallel_size,
        "sequence_parallel": bool(parsed.sequence_parallel),
        "precision": "fp8" if parsed.fp8 else "bf16" if parsed.bf16 else "fp16" if parsed.fp16 else "fp32",
        "activation_checkpointing": parsed.recompute_granularity or "none",
        "world": world,
    }


def build_groups(parsed: Any, world: int) -> None:
    """Megatron's groups of ranks, with processes that are none: it refuses sizes that do not divide each other."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(
        parsed.tensor_model_parallel_size,
        parsed.pipeline_model_parallel_size,
        parsed.virtual_pipeline_model_parallel_size,
        context_parallel_size=parsed.context_parallel_size,
        expert_model_parallel_size=parsed.expert_model_parallel_size,
        expert_tensor_parallel_size=parsed.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
