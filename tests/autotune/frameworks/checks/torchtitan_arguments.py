"""Usage: torchtitan_arguments.py SCRIPT: the words after `torchtitan.train` built by torchtitan's own configuration manager."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import MagicMock

# Kernels of one kind of expert parallelism, which are made where they are imported; torch for CPUs comes without Triton.
if importlib.util.find_spec("triton") is None:
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.config import ConfigManager


def checkpointing(policy) -> str:
    return "none" if policy is None else type(policy).__qualname__.split(".")[0].removesuffix("AC").lower()


def main() -> None:
    text = Path(sys.argv[1]).read_text().replace("\\\n", " ")
    (line,) = re.findall(r"-m torchtitan\.train (.*)$", text, re.MULTILINE)
    words = [word for word in shlex.split(line) if word != "$@"]
    config = ConfigManager().parse_args(words)
    parallel, training = config.parallelism, config.training
    print(json.dumps({
        "replicate": parallel.data_parallel_replicate_degree, "shard": parallel.data_parallel_shard_degree,
        "tensor": parallel.tensor_parallel_degree, "pipeline": parallel.pipeline_parallel_degree,
        "schedule": parallel.pipeline_parallel_schedule, "micro_batch": parallel.pipeline_parallel_microbatch_size,
        "parts": parallel.module_fqns_per_model_part, "local_batch": training.local_batch_size,
        "checkpointing": checkpointing(config.activation_checkpoint), "precision": training.mixed_precision_param,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
