"""A stand-in for Megatron-LM's pretrain_gpt.py: its argument names, what it asserts of them, its log line. Nothing is trained.

Every rank sleeps for as long as a formula says that its step takes, so that the recipe beside it (README.md) runs in seconds on
any machine. The names are those of megatron/training/arguments.py at commit 000c4ac24f61.
"""

import argparse
import os
import time
from datetime import datetime


def main() -> None:
    arguments = parsed()
    world = int(os.environ["WORLD_SIZE"])
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    assert world % (tensor * pipeline) == 0, f"world size ({world}) is not divisible by {tensor * pipeline}"
    replicas = world // (tensor * pipeline)
    at_once = arguments.micro_batch_size * replicas
    assert arguments.global_batch_size % at_once == 0, f"global batch size is not divisible by {at_once}"
    assert arguments.num_layers % pipeline == 0, f"{arguments.num_layers} layers are not divisible by {pipeline} stages"
    assert arguments.num_attention_heads % tensor == 0, f"{arguments.num_attention_heads} heads are not divisible by {tensor}"
    assert not (arguments.recompute_granularity == "full" and arguments.recompute_method is None), "choose --recompute-method"
    micro_batches = arguments.global_batch_size // at_once
    seconds = step_seconds(arguments, micro_batches, replicas)
    for iteration in range(1, arguments.train_iters + 1):
        began = time.perf_counter()
        time.sleep(seconds)
        if int(os.environ["RANK"]) == world - 1 and iteration % arguments.log_interval == 0:
            log(arguments, iteration, time.perf_counter() - began)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments (stand-in)", allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--num-attention-heads", type=int, required=True)
    parser.add_argument("--max-position-embeddings", type=int, required=True)
    parser.add_argument("--train-iters", type=int, default=1000)
    parser.add_argument("--log-interval", type=int, default=100)
    return parser.parse_args()


def step_seconds(arguments: argparse.Namespace, micro_batches: int, replicas: int) -> float:
    """Invented, but for its signs: larger micro-batches and fewer stages are faster, recomputation and reductions cost."""
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    again = {"full": 4 / 3, "selective": 1.05}.get(arguments.recompute_granularity, 1.0)
    layers = 0.001 + 0.0004 * arguments.micro_batch_size / tensor * again
    within = 0.0 if tensor == 1 else 0.0004 * arguments.micro_batch_size / (2 if arguments.sequence_parallel else 1)
    between = 0.0 if replicas == 1 else 0.002 if arguments.overlap_grad_reduce else 0.004
    optimizer = 0.002 / (replicas if arguments.use_distributed_optimizer else 1)
    return (micro_batches + pipeline - 1) * (layers + within) / pipeline + between + optimizer


def log(arguments: argparse.Namespace, iteration: int, seconds: float) -> None:
    told = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{arguments.train_iters:8d}",
        f"consumed samples: {iteration * arguments.global_batch_size:12d}",
        f"elapsed time per iteration (ms): {1e3 * seconds:.1f}", "learning rate: 1.000000E-04",
        f"global batch size: {arguments.global_batch_size:5d}", f"lm loss: {10.8 / iteration**0.1:.6E}", "loss scale: 1.0",
        "grad norm: 1.000", "number of skipped iterations:   0", "number of nan iterations:   0",
    ]  # fmt: skip
    print(" | ".join(told) + " |", flush=True)


if __name__ == "__main__":
    main()
